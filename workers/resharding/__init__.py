"""In-memory snapshots of shards, the assignment of ranks, and the moves of shards from one generation to the next, without Ray."""
