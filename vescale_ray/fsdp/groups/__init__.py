"""Groups of parameters with one buffer: master shard, gathered parameters, gradients and their reduction."""
