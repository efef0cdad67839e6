"""Care for existing checkpoints: which ones stay, deletion of the others, pins, reading back, and the way back to an older one."""
