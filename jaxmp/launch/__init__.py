"""What starts the processes of a run and ends them: commands, launchers' variables, signals."""
