"""Parts of a training step: batches of slots, losses, gradient clipping, the exchange of results, completions of prompts."""
