"""The model that a worker trains: built, filled with initial values, compiled, and rehearsed."""
