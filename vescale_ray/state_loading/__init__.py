"""Helpers of state dicts: whole tensors as sharded ones, states by the names of their parameters, and states that are not yet made."""
