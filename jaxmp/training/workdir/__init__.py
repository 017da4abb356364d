"""Files of a run: locks, records, the points at which they are written, progress, trackers."""
