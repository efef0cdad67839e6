"""AdamW with block-wise 8-bit states: the optimizer, its codes, and its GPU kernel."""
