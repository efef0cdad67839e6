"""The predicted memory of a step, by kind, against the tensors that running gloo ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.ranks import on_threads, run_gloo
from vescale_ray import explain, fully_shard
from vescale_ray.fsdp import LowPrecisionReduceScatter
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner import plan_layout, unit_plan
from vescale_ray.planner.cost import Policy, plan_model, predict_memory
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.step_buffers import exchange_bytes
from vescale_ray.planner.unit_plan import Blocks

CONFIG = LlamaConfig(dim=192, layers=4, heads=6, kv_heads=2, ffn=512, vocab=384)
EXACT = ("master", "gathered", "gradients", "gradient_buffers", "optimizer")


class Tower(nn.Module):
    """Layers of different sizes, of which two are equal."""

    def __init__(self) -> None:
        super().__init__()
        widths = [700, 700, 700, 100, 900]
        self.embed = nn.Embedding(CONFIG.vocab, widths[0])
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(widths, widths[1:], strict=False))
        self.head = nn.Linear(widths[-1], 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(kind: str) -> nn.Module:
    if kind == "tower":
        return Tower()
    model = Llama(CONFIG)
    if kind == "frozen":
        for layer in model.layers:
            for parameter in layer.attention.parameters():
                parameter.requires_grad_(False)
    return model


def a_buffer_for_each_width(specs: Any, num_shards: int, **_: Any) -> Any:
    widths = dict.fromkeys(spec.shape[-1] for spec in specs)
    return tuple(plan_layout([spec for spec in specs if spec.shape[-1] == width], num_shards) for width in widths)


def measure(rank: int, world: int, compute: str, optimizer: str, kind: str, rows: int | None) -> dict[str, int]:
    """Train three steps. Returns the bytes of the engine's tensors by kind, as maximum for temporary ones."""
    from vescale_ray import Block
    from vescale_ray.fsdp.buffers.memory import Pool
    from vescale_ray.fsdp.units.schedule import unit_of

    most = {"gathered": 0, "gradient_buffers": 0}
    noted = Pool._note_peak

    def note(pool: Any, *args: Any) -> None:
        noted(pool, *args)
        count = pool.count()
        most["gathered"] = max(most["gathered"], sum(n * kept for n, (kept, _) in count.items()))
        most["gradient_buffers"] = max(most["gradient_buffers"], sum(n * lent for n, (_, lent) in count.items()))

    setattr(Pool, "_note_peak", note)  # noqa: B010 # only in this rank's process
    if kind == "several buffers":
        setattr(unit_plan, "plan_buffers", a_buffer_for_each_width)  # noqa: B010 # only in this rank's process
    model = build(kind)
    dtype = getattr(torch, compute)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else MixedPrecisionPolicy()
    policy = (lambda name, p: Block.rows(rows) if p.dim() == 2 else None) if rows else None
    for layer in model.layers:
        fully_shard(layer, mp_policy=precision, block_policy=policy)
    fully_shard(model, mp_policy=precision, block_policy=policy)
    parameters = [p for p in model.parameters() if p.requires_grad]
    steps = {"adamw": lambda: torch.optim.AdamW(parameters), "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}
    step = steps[optimizer]()
    for _ in range(3):
        step.zero_grad()
        tokens = torch.randint(0, CONFIG.vocab, (2, 16))
        model(tokens).float().logsumexp(-1).mean().backward()
        step.step()
    sharded = {id(u): u for m in model.modules() if (u := unit_of(m)) is not None}
    groups = [group for unit in sharded.values() for group in unit.groups]
    assert (max(len(unit.groups) for unit in sharded.values()) > 1) == (kind in ("frozen", "several buffers"))

    def storages(tensors: list[torch.Tensor]) -> int:
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    states = [s.to_local() for state in step.state.values() for s in state.values() if isinstance(s, torch.Tensor) and s.dim()]
    told = explain(model, state_bytes={"adamw": 8.0, "sgd": 4.0}[optimizer]).memory
    held = {
        "master": storages([g.master.flat for g in groups]),
        "gradients": storages([p.grad.to_local() for p in parameters if p.grad is not None and p.grad.to_local().numel()]),
        "optimizer": sum(s.numel() * s.element_size() for s in states),
        **most,
    }
    for what, nbytes in held.items():
        assert abs(told[what] - nbytes) <= 0.05 * nbytes, ("explain", what, told[what], nbytes)
    return held


@pytest.mark.parametrize(
    ("world", "compute", "optimizer", "kind", "rows"),
    [
        (3, "bfloat16", "adamw", "llama", None),
        (4, "float32", "sgd", "llama", 32),
        (2, "bfloat16", "adamw", "frozen", None),
        (3, "float32", "adamw", "tower", None),
    ],
)
def test_each_kind_of_memory_is_predicted_within_5_percent(world, compute, optimizer, kind, rows) -> None:
    shapes = model_shapes(build(kind))
    dtype = getattr(torch, compute)
    policy = Policy(optimizer=optimizer, tokens=32, compute_dtype=dtype)
    plan = plan_model(shapes, world, Blocks(rows), dtype=dtype)
    measured = run_gloo(world, measure, compute, optimizer, kind, rows, timeout=60)
    for rank, held in enumerate(measured):
        predicted = predict_memory(plan, policy, backend="gloo", rank=rank).by_kind()
        for what in EXACT:
            assert abs(predicted[what] - held[what]) <= 0.05 * held[what], (rank, what, predicted[what], held[what])


@pytest.mark.parametrize(("world", "compute"), [(2, "bfloat16"), (3, "float32"), pytest.param(4, "bfloat16", marks=pytest.mark.slow)])
def test_memory_of_units_with_several_buffers_is_predicted(world: int, compute: str) -> None:
    run_gloo(world, measure, compute, "adamw", "several buffers", None, timeout=60)  # compares with explain


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@on_threads(3)
def test_gradients_in_fp8_are_planned_as_they_are_explained(rank: int, world: int, compute: str) -> None:
    model, dtype = Llama(CONFIG), getattr(torch, compute)
    for unit in (*model.layers, model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        unit.set_custom_reduce_scatter(LowPrecisionReduceScatter())
    told = explain(model).memory["gradient_buffers"]
    policy = Policy(compute_dtype=dtype, fp8_gradients=True)
    predicted = predict_memory(plan_model(model_shapes(Llama(CONFIG)), world, Blocks(None), dtype=dtype), policy, backend="gloo", rank=rank)
    exchange = exchange_bytes(sum(p.numel() for p in model.layers[0].parameters()) // 3, world)  # type: ignore[union-attr]
    assert predicted.gradient_buffers == told > exchange > 0
