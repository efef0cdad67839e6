"""The commands of ``vescale-ray ckpt``: inspection, comparison, pins and deletion, conversions, and a rollback; their output and paths."""
