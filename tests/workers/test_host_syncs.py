"""A step does not wait for the device before the one copy that its last collective needs, nor after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.fleet import Fleet, State
from tests.workers.tiny import Run, tiny, use, write_text
from vescale_ray.workers import trainer as trainer_module
from vescale_ray.workers.trainer import Trainer

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that wait until its value is known."""


class Reads(TorchDispatchMode):
    """Collects the operations that give a tensor's value to the host."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default):
            self._note(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def replaced(owner: Any, **functions: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


def reads_of_a_step(state: State) -> dict[str, list[str]]:
    """The reads of tensors in the second step, by its part: until the copy, in it, and after the exchange. The exchange itself reads the
    host's tensors only."""
    trainer: Trainer = state["trainer"]
    trainer._proves = True  # as on NCCL
    trainer.step()
    found: dict[str, list[str]] = {"before": [], "copy": [], "exchange": [], "after": []}
    part = "before"

    def noted(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def note(tensor: Tensor, *args: Any) -> Any:
            found[part].append(name)
            return read(tensor, *args)

        return note

    def within(inner: Callable[..., Any], this: str, following: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal part
            part = this
            try:
                return inner(*args)
            finally:
                part = following

        return run

    fetch, exchange = trainer._fetch, trainer_module.exchange
    with (
        replaced(Tensor, **{name: noted(name) for name in READS}),
        replaced(trainer, _fetch=within(fetch, "copy", "exchange")),
        replaced(trainer_module, exchange=within(exchange, "exchange", "after")),
        Reads(lambda name: found[part].append(name)),
    ):
        trainer.step()
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"train_param_dtype": "bfloat16"}, {"train_activation_checkpointing": "selective"}, {"train_reshard_after_forward": False}],
    ids=["", "bfloat16", "selective", "kept"],
)
def test_step_reads_the_devices_values_once(changes: dict[str, Any], tmp_path: Any) -> None:
    # The fused kernel's step counters lie on the device, as on an accelerator.
    config = tiny(write_text(tmp_path), train_optimizer_options={"fused": True}, **changes)
    with Fleet(2) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        for found in fleet.run([0, 1], reads_of_a_step).values():
            assert found["before"] == found["after"] == [] and found["copy"] == ["tolist"], found
            assert found["exchange"], "the test sees no reads at all"
        run.end()


def step_without_a_wait(state: State) -> list[str]:
    """Take steps in which CUDA refuses each wait for the device, but in the copy and in the exchange."""
    trainer: Trainer = state["trainer"]
    trainer.step()
    trainer.step()

    def allowed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return inner(*args)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        return run

    with (
        replaced(trainer, _fetch=allowed(trainer._fetch)),
        replaced(trainer_module, exchange=allowed(trainer_module.exchange)),
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.step()
            trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [group["fused"] for group in trainer.optimizer.param_groups]


@pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_step_on_a_gpu_waits_once_and_is_fused(compiled: bool, tmp_path: Any) -> None:
    config = tiny(write_text(tmp_path), train_param_dtype="bfloat16", train_compile=compiled)
    with Fleet(1, spawn=True) as fleet:
        fleet.run([0], use, "cuda")
        run = Run(fleet, config)
        run.fresh([0])
        assert fleet.run([0], step_without_a_wait)[0] == [True]
        run.end()
