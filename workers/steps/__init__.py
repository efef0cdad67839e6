"""Parts of a training step: batches of slots, losses, the exchange of results, completions of prompts."""
