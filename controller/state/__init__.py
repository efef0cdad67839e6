"""State of a run: what a restarted controller needs, events and the statistics reduced from them, and the snapshot for other threads."""
