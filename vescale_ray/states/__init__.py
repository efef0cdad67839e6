"""States of optimizers by the names of their parameters: sharded or whole, known or not yet made."""
