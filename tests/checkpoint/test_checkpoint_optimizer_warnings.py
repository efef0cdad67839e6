"""Warnings of a save about optimizers: numbers that differ between ranks, and code that a checkpoint does not call."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_checkpoint_nested_states import common_folder, net, train
from tests.ranks import on_processes
from vescale_ray import checkpoint as ckpt
from vescale_ray.optim import CombinedOptimizer, Flat


class Heard(logging.Handler):
    """Collects what this package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@on_processes(2)
def test_numbers_that_differ_by_rank_are_told_once(rank: int, world: int) -> None:
    heard = Heard()
    logging.getLogger("vescale_ray").addHandler(heard)
    model = net(0, "ours")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    root = common_folder()
    ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
    assert not heard.lines
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    ckpt.save({"model": model, "optimizer": optimizer}, root, 2)
    optimizer.state[model.a.weight]["step"] += rank
    for step in (3, 4):
        ckpt.save({"model": model, "optimizer": optimizer}, root, step)
    expected = [
        f"the {what} of optimizer 'optimizer' differ between ranks 0 and 1, and rank 0's are stored for all ranks"
        for what in ("hyperparameters", "scalar states")
    ]
    assert [line.partition(";")[0] for line in heard.lines] == (expected if rank == 0 else [])


class Adds(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "extra": 1}


def test_hooks_of_state_dicts_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net(0, "no")
    hooked = torch.optim.SGD(model.parameters(), 0.1)
    hooked.register_state_dict_post_hook(lambda optimizer, found: {**found, "extra": 1})
    hooked.register_load_state_dict_pre_hook(lambda optimizer, given: {k: v for k, v in given.items() if k != "extra"})
    for key, optimizer, lost in (
        ("hooked", hooked, ["state_dict", "load_state_dict"]),
        ("adds", Adds(model.parameters(), 0.1), ["state_dict"]),
        ("flat", Flat(model.parameters(), torch.optim.SGD, lr=0.1), []),
        ("built", CombinedOptimizer([torch.optim.SGD([p], 0.1) for p in model.parameters()]), []),
        ("stock", torch.optim.AdamW(model.parameters()), []),
    ):
        caplog.clear()
        for step in (1, 2):
            ckpt.save({"model": model, key: optimizer}, tmp_path / key, step)
            ckpt.load({"model": model, key: optimizer}, tmp_path / key)
        found = [record.getMessage() for record in caplog.records if "hooks" in record.getMessage()]
        assert [text.partition("(")[0].rpartition(" ")[2] for text in found] == lost
        assert all(f"optimizer {key!r} ({type(optimizer).__name__}) has some: " in text for text in found)
    ckpt.save({"model": model, "hooked": hooked, "extra": 7}, tmp_path / "remedy", 1)
    assert ckpt.load({"model": model, "hooked": hooked, "extra": None}, tmp_path / "remedy").values["extra"] == 7
