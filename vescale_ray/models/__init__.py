"""Models in plain PyTorch, without distributed code.

Nothing here imports Ray, ``fully_shard`` or the trainer. A model is a module with ``forward(tokens) -> logits`` and a method
``init_parameter`` that fills one full parameter from a seeded generator. If it has buffers, ``init_buffer`` fills one. The trainer
shards it from outside, so any module with these methods can take its place.
"""
