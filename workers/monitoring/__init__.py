"""Heartbeats, positions, speed and utilisation of a worker's training thread, for its reports to the controller, without Ray."""
