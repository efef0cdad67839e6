"""The model that a worker trains: planned, built, filled with initial values, and compiled; and the rehearsal of a small one."""
