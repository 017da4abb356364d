"""A study: every row of a table for every seed, resumable and shared between processes."""
