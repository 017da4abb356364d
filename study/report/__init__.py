"""Tables and pictures from result files, for the paper's studies and for other runs."""
