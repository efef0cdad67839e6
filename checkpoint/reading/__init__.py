"""Reads of a checkpoint: planned and verified ranges, a training script's state, and the comparison of two checkpoints."""
