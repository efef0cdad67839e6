"""A training script's state as named tensors and JSON: its parts on this rank, and its entries compared with those of a checkpoint."""
