"""Checkpoints of a run: when one is due, its votes and its commit, and the state that a generation resumes from."""
