"""Completions of fixed prompts at intervals (``train.completions``), so that a person sees what the model has learned.

Each prompt is completed by one rank, token by token, in a batch of its own. All ranks run equally many forwards, since each one gathers the
sharded parameters; a rank without a prompt computes on a minimal input. Nothing is kept between forwards. So a completion depends on the
parameters, the step and the prompt, and not on the number of ranks; and its time is bounded by ``tokens`` forwards a prompt.

No generator of torch's is used but one that is made for each token. Training goes on as without completions, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.communication import wait_notes
from vescale_ray.data.text.prompts import encoded_prompts
from vescale_ray.errors import BadInput
from vescale_ray.models.hf import is_hf, open_folder
from vescale_ray.workers.building.initial_values import seed_of

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.data.dataset import Dataset
    from vescale_ray.workers.trainer import Trainer


class Completer:
    """Completes the prompts of a run. It outlives generations.

    Raises:
        BadInput: the prompts can't be encoded as the data is.
    """

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        self._settings, self._steps, self._seed, self._context = (
            config.train.completions,
            config.train.steps,
            config.run.seed,
            config.data.seq_len,
        )
        self._ends = set() if dataset.end_token is None else {dataset.end_token}
        """Tokens that end a completion: the one that ends a document, and those of a transformers model."""
        if self._settings is not None and config.model.hf is not None:
            self._ends |= open_folder(config.model.hf).end_tokens
        if self._settings is not None:
            self._codec, self._prompts = encoded_prompts(self._settings.prompts, config.data.tokenizer, dataset.unit, dataset.vocab)

    def is_due(self, step: int) -> bool:
        """Return whether completions follow step ``step``, the last one included."""
        return self._settings is not None and (step % self._settings.every == 0 or step == self._steps)

    def complete(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Return prompt, text and number of tokens of each completion, the same on all ranks. Collective."""
        settings = self._settings
        assert settings is not None
        made = torch.zeros(len(self._prompts), settings.tokens, dtype=torch.int64)
        shortest = 1 if is_hf(trainer.model) else int(getattr(trainer.model, "shortest_input", self._context))
        with trainer.evaluating():
            for first in range(0, len(self._prompts), trainer.world):
                number = first + trainer.rank
                ids = list(self._prompts[number]) if number < len(self._prompts) else []
                for place in range(settings.tokens):
                    if not ids:
                        trainer.logits(None)
                    else:
                        window = ids[-self._context :]
                        # A causal model does not look at what follows; some take no shorter input.
                        padded = window + [0] * (shortest - len(window))
                        given = trainer.logits(torch.tensor([padded]))
                        ids.append(self._next(given, len(window) - 1, (trainer.completed, number, place)))
                        made[number, place] = ids[-1]
                    trainer.beat()
        with wait_notes.counted("all_reduce"):
            dist.all_reduce(made)
        return [self._told(prompt, row) for prompt, row in zip(settings.prompts, made.tolist(), strict=True)]

    def _next(self, logits: Tensor, place: int, of: tuple[int, ...]) -> int:
        """Return the token that follows position ``place``: the most likely token, or one drawn at the temperature."""
        if logits.dim() != 3:
            raise BadInput(
                f"train.completions: the model returns {logits.dim()} dimensions; it must return logits (batch, seq_len, vocab), or leave "
                "train.completions out"
            )
        row = logits[0, place].double().cpu()
        temperature = self._settings.temperature if self._settings is not None else 0.0
        if not temperature or not bool(torch.isfinite(row).all()):
            return int(row.argmax())
        generator = torch.Generator().manual_seed(seed_of(self._seed, "completion", *of))
        return int(torch.multinomial(torch.softmax(row / temperature, -1), 1, generator=generator))

    def _told(self, prompt: str, ids: Sequence[int]) -> dict[str, Any]:
        """Return the prompt, the decoded text up to the first end-of-text token, and its number of tokens."""
        kept = list(itertools.takewhile(lambda one: one not in self._ends, ids))
        return {"prompt": prompt, "text": self._codec.decode(kept), "tokens": len(kept)}
