"""Pictures and tables of runs: curves, comparisons, their style."""
