"""Two generations of one rank, of a model of some ten thousand elements, before a worker's first order comes.

Much of torch is made ready when it is first used: the dispatch of each operation, autograd's thread, a device's libraries. Who joins a
world would do that while all others wait for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from vescale_ray import gloo
from vescale_ray.data.corpus import Corpus
from vescale_ray.workers import groups
from vescale_ray.workers.reshard import execute
from vescale_ray.workers.snapshot import Snapshots
from vescale_ray.workers.trainer import Trainer

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

_log = logging.getLogger(__name__)

_SEQ_LEN = 8


def rehearse(config: RunConfig, device: torch.device) -> None:
    """Build, take a step and copy it, and build again from what is held: leaves nothing behind but what torch has made ready.

    The model is always a small Llama: what a run's own model needs is known to its factory alone. Never raises: what can't be done in
    this process is told by the first order, which has somebody who hears of it.
    """
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _rehearse(_small(config), device)
    except Exception as error:
        _log.info("the rehearsal came to nothing: %s", groups.describe(error))
    finally:
        groups.dissolve()


def _small(config: RunConfig) -> RunConfig:
    sizes = {"factory": None, "dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 128, "units": ["layers.*"]}
    # Nothing is checked anew: what a person has to be told of the whole configuration has been told.
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=sizes),
            "data": config.data.model_copy(update={"seq_len": _SEQ_LEN, "eval_samples": 0}),
            "train": config.train.model_copy(update={"slots": 1, "slot_batch": 1}),
        }
    )


def _rehearse(config: RunConfig, device: torch.device) -> None:
    # A store of this process, and gloo, which has nothing to set up on a device.
    gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = np.arange(4 * _SEQ_LEN, dtype=np.uint8)
    corpus = Corpus(text, text[:0], _SEQ_LEN, "rehearsal", 1, len(text), "", 0)
    copies = Snapshots(1)
    first = Trainer(config, 0, 1, 0, device, corpus)
    first.initialize()
    copies.begin(first)
    first.step(settle=copies.settle)
    copies.after_step(first)
    copies.park(first)
    second = Trainer(config, 0, 1, 1, device, corpus, filled=True)
    execute(copies.shards(0, first.completed), second)
    copies.clear()
    for trainer in (first, second):
        trainer.close()
