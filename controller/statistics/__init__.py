"""Statistics of a run, reduced from its events and steps, and those that the workers report of themselves."""
