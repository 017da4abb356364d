"""From log files to tables and pictures; of the rest it imports only how studies compare runs."""
