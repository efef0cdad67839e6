"""Models in plain PyTorch: what is trained, not how.

No distributed code lives here and nothing here imports Ray, ``fully_shard`` or the trainer: a model is a module with
``forward(tokens) -> logits`` and a method ``init_parameter`` that fills one full parameter from a seeded generator (and if it has
buffers ``init_buffer``, which fills one). The trainer shards it from outside, so any module with these methods can take its place.
"""
