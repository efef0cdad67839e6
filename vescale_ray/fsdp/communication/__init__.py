"""Collectives on side streams, the check of their order, and labels for profiles and logs."""
