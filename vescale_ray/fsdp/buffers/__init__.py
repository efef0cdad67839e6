"""Memory of gathered parameters and gradients: the pool, address ranges, and storages that torch refuses to read."""
