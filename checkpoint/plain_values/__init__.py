"""Plain values of a state, which are no sharded tensors, as JSON and bytes, and back; random generators, too."""
