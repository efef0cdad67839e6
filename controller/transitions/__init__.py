"""Transitions of the control loop: how a run begins, how a generation is formed and ends, how the run goes on, and how it ends."""
