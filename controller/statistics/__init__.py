"""Statistics of a run, each reduced from the lines of events.jsonl and metrics.jsonl as they come."""
