"""Memory of the engine in a step: on a simulated accelerator, and on the host while activations are at their peak."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from tests.fsdp.simulated_streams import simulate
from tests.fsdp.towers import Tower, inputs, seeded, shard_tower
from tests.ranks import run_gloo, run_threads
from vescale_ray.fsdp import MixedPrecisionPolicy, explain, fully_shard
from vescale_ray.fsdp.buffers.memory import Pool, may_stay
from vescale_ray.fsdp.surface import overview
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.planner.step_buffers import device_buffers

SIDE = 256
Q = SIDE * SIDE * 4
"""Bytes of one weight. On two ranks, gathering two weights adds as much, since a rank's own half stays."""


class Quarters(nn.Module):
    """Layers of four equal weights, and a root of two. One of the root's gradients comes first in backward, the other last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIDE, SIDE)
        self.layers = nn.ModuleList(nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4))) for _ in range(4))
        self.head = nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def held_in_quarters(rank: int, world: int) -> tuple[dict[str, float], float, dict[str, float]]:
    """Memory of the pool at several events of the third step, its peak, and the prediction, all in units of one weight."""
    torch.manual_seed(0)
    model = Quarters()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pool, held = Pool(torch.device("cpu")), dict[str, float]()

    def note(where: str) -> None:
        held[where] = pool.bytes_held() / Q

    def note_gradients(where: str, tensor: torch.Tensor) -> None:
        tensor.register_hook(lambda _: note(where))  # runs after the products for this gradient and for the weight's gradient

    for number, layer in enumerate(model.layers):
        for quarter, linear in enumerate(layer.children()):
            name = f"{number}.{quarter}"

            def before(_: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                note(f"forward {name}")
                note_gradients(f"backward {name}", args[0])

            linear.register_forward_pre_hook(before)
    for _ in range(3):
        unit = unit_of(model)
        if unit is not None and unit.lanes is not None:
            pool = unit.lanes.pool
            pool.peak_bytes = 0
        logits = model(torch.arange(8)[None])
        note("after forward")
        logits.square().mean().backward()
        note("after backward")
        optimizer.step()
        optimizer.zero_grad()
    return held, pool.peak_bytes / Q, {kind: nbytes / Q for kind, nbytes in explain(model).memory.items()}


def held_where_memory_is_kept(rank: int, world: int) -> dict[str, float]:
    os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 40)
    return held_in_quarters(rank, world)[0]


def held_both_ways(rank: int, world: int) -> tuple[tuple[dict[str, float], float, dict[str, float]], dict[str, float]]:
    return held_in_quarters(rank, world), held_where_memory_is_kept(rank, world)


def test_engine_holds_only_buffers_in_use_at_the_activation_peak() -> None:
    assert may_stay(Q, torch.device("cpu")), "needs Linux"
    root, layer, head, layers = 1, 2, 1, 4
    """Gathered memory of the root and of a layer; the root's first gradient; a layer's gradients."""
    for (held, peak, predicted), kept in run_gloo(2, held_both_ways):
        assert held["forward 1.0"] == root + 2 * layer, "the next one is gathered"
        assert held["forward 3.0"] == root + layer, "the one before will have no successor"
        assert held["after forward"] == root, "which stays for the loss"
        assert held["backward 3.3"] == root + layer + head + 1, "gradients take what has been written"
        assert held["backward 3.2"] == root + layer + head + 2
        assert held["backward 3.1"] == root + layer + head + 3
        assert held["backward 3.0"] == root + 2 * layer + head + layers, "five sixths are there: the next one is gathered"
        assert held["backward 2.3"] == root + 2 * layer + head + layers, "the next at the first gradient; the buffer is at hand, and whole"
        assert held["backward 0.3"] == root + layer + head + layers, "nothing is to come but gradients: what was gathered is given back"
        assert held["after backward"] == 0
        assert peak == root + 2 * layer + head + layers
        assert predicted["gathered"] == root + 2 * layer
        assert predicted["gradient_buffers"] == 2 * head + layers, "the root's last gradient comes while the first layer's are reduced"
        # If a process is told to keep memory, nothing waits, and buffers that several groups use stay whole.
        stays = 2 * layer + layers
        assert kept["forward 1.0"] == kept["after forward"] == stays + root and kept["after backward"] == stays
        assert kept["backward 3.3"] == kept["backward 0.3"] == stays + root + 2 * head


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_allocates_the_device_memory_that_explain_counts(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "host_buffers", device_buffers)
    for peak, told, more in run_threads(2, most_allocated, simulate(monkeypatch), mixed):
        assert peak == told
        assert more > told, "a third gathered unit is seen"


def most_allocated(rank: int, world: int, streams: Any, mixed: bool) -> tuple[int, int, int]:
    """Return the most bytes of buffers in a step, those that ``explain`` counts, and the most if two units are gathered ahead."""
    here, dtype = streams(), torch.bfloat16 if mixed else torch.float32
    model: Any = shard_tower(seeded(Tower), mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    peaks = []
    for ahead in (False, True):
        here.peak = 0
        for one, *following in zip(model.layers[2:], model.layers[1:], model.layers, strict=False):
            if ahead:
                one.set_modules_to_backward_prefetch(following)
        for step in range(3):
            model(inputs(rank, world, step)).float().square().mean().backward()
        peaks.append(here.peak)
    told = explain(model).memory
    chunk = 4 * max(g.layout.numel for m in (model, *model.layers) for g in unit_of(m).groups) if mixed else 0
    return peaks[0], told["gathered"] + told["gradient_buffers"] - chunk, peaks[1]
