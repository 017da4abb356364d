"""The trainer: from a config to a finished run."""
