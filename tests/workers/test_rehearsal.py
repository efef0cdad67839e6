"""Work that a worker does before its first order, so that no other rank waits for it later."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.tiny import tiny
from vescale_ray.config import RunConfig
from vescale_ray.workers.building.model_building import NextModel
from vescale_ray.workers.building.rehearsal import rehearse


def warm_up(config: RunConfig) -> None:
    rehearse(config, torch.device("cpu"), NextModel(config))


EXPERTS = {"model_factory": "tests.workers.tiny_models:ExpertsModel", "model_units": ["body"]}


def _sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue
    return found


SHARED = {"model_factory": "vescale_ray.models.moe:build", "train_expert_parallel": 2, "elastic_workers": 2}
"""A run that shares experts. The small model of the rehearsal has none."""


@pytest.mark.parametrize(
    "changes",
    [
        *({"train_optimizer": optimizer} for optimizer in ("adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd")),
        {"elastic_deterministic": True},
        SHARED,
    ],
    ids=["adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd", "deterministic", "shared experts"],
)
def test_every_optimizer_is_rehearsed_to_the_end(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vescale_ray")
    warm_up(tiny("stdlib", **changes))
    assert not caplog.records


def test_rehearsal_leaves_no_thread_socket_or_rng_change() -> None:
    config = tiny("stdlib", train_optimizer="adamw")
    warm_up(config)  # starts torch's own threads, and opens the files that torch opens once
    state, threads, sockets = torch.get_rng_state(), threading.active_count(), _sockets()
    for _ in range(3):
        warm_up(config)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert threading.active_count() <= threads and _sockets() <= sockets


def test_failed_rehearsal_is_logged_and_leaves_no_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vescale_ray")
    warm_up(tiny("stdlib", train_optimizer="adamw", train_optimizer_options={"no_such_option": 1}))
    assert "the warm-up before the first order failed" in caplog.text and not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "says"), [({}, "kinds of units compiled: 1"), (EXPERTS, "the compilation before the first order failed")], ids=["", "experts"]
)
def test_warm_up_compiles_units_that_run_on_meta_tensors(
    model: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts read their tokens' values. Such units are compiled in the first step."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: lambda *args: compiled.append(how) or forward(*args))
    caplog.set_level(logging.INFO, "vescale_ray")
    warm_up(tiny("stdlib", train_compile=True, **model))
    assert says in caplog.text and len(caplog.records) == 1 and not dist.is_initialized()
    assert [how["fullgraph"] for how in compiled] == ([] if model else [True])


def test_a_model_of_the_users_own_is_not_touched() -> None:
    warm_up(tiny("stdlib", model_factory="no.such_module:model", model_units=["blocks.*"]))
    assert not dist.is_initialized()
