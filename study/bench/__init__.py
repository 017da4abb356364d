"""`python -m study bench`: any channels scored on one small task, beside those of others."""
