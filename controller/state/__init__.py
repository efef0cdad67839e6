"""State of a run: what a restarted controller needs, the writers of events and figures, and the snapshot for other threads."""
