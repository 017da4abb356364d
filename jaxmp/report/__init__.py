"""From log files to tables and pictures; imports nothing else of jaxmp."""
