"""Warm up torch before a worker's first order: two generations of one rank, with a model of about ten thousand elements.

torch initialises much on first use: operator dispatch, autograd's thread, device libraries. Without this warm-up a joining worker would do
that while all others wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from vescale_ray import gloo
from vescale_ray.config.model_section import ModelSection
from vescale_ray.data.sources.corpus import Corpus
from vescale_ray.workers.building.compile_ahead import compile_units
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.resharding.memory_snapshots import Snapshots
from vescale_ray.workers.resharding.reshard import execute
from vescale_ray.workers.trainer import Trainer

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.workers.building.model_building import NextModel

_log = logging.getLogger(__name__)

_SEQ_LEN = 8


def rehearse(config: RunConfig, device: torch.device, next_model: NextModel) -> None:
    """Build a trainer, take a step, copy it, and build another trainer from the copy. Only torch's initialised state remains.

    The model is always a small Llama, since only the run's factory knows the needs of its own model. With ``train.compile``, the units of
    ``next_model`` are compiled as well. Never raises: the first order meets the same error and reports it.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _attempt("the warm-up", lambda: _rehearse(_small(config), device))
        if config.train.compile and (blank := next_model.prepare()) is not None:
            _attempt("the compilation", lambda: compile_units(config, device, blank))


def _attempt(what: str, work: Callable[[], None]) -> None:
    """Do ``work`` in a group of one rank. The group has a store in this process, and gloo, which needs no device setup."""
    try:
        gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        work()
    except Exception as error:
        _log.info("%s before the first order failed: %s", what, process_groups.describe(error))
    finally:
        process_groups.dissolve()


def _small(config: RunConfig) -> RunConfig:
    model = ModelSection(dim=64, layers=2, heads=2, kv_heads=2, ffn=128)
    # Skip validation: the full configuration is already validated.
    return config.model_copy(
        update={
            "model": model,
            "data": config.data.model_copy(update={"seq_len": _SEQ_LEN, "eval_samples": 0, "vocab": None}),
            "train": config.train.model_copy(update={"slots": 1, "slot_batch": 1, "compile": False, "expert_parallel": 1}),
        }
    )


def _rehearse(config: RunConfig, device: torch.device) -> None:
    text = np.arange(4 * _SEQ_LEN, dtype=np.uint8)
    dataset = Corpus(text, text[:0], _SEQ_LEN, "rehearsal", 1, len(text), "", 0)
    copies = Snapshots(1)
    first = Trainer(config, 0, 1, 0, device, dataset)
    first.initialize()
    copies.begin(first)
    first.step(settle=copies.settle)
    copies.after_step(first)
    copies.park(first)
    second = Trainer(config, 0, 1, 1, device, dataset, filled=True)
    execute(copies.shards(0, first.completed), second)
    copies.clear()
    for trainer in (first, second):
        trainer.close()
