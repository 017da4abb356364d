"""Studies: every row of a table for every seed, and the benchmark of codecs."""
