"""Fused experts that are gathered with a gap behind each expert: the same training, with less padding.

The reference is one process, in the same test.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.fsdp.towers import filled, grads, same
from tests.fsdp.transformer import apart, full, part, values
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import checkpoint as ckpt
from vescale_ray.fsdp import explain, fully_shard
from vescale_ray.geometry import Block
from vescale_ray.planner import plan_buffers, unit_plan


class Experts(nn.Module):
    """Every token goes through all experts of a stack. The model also has a frozen stack."""

    def __init__(self, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(rows))
        self.up = nn.Parameter(torch.zeros(count, rows, columns))
        self.down = nn.Parameter(torch.zeros(count, columns, rows))
        self.bias = nn.Parameter(torch.zeros(count, 1, rows))
        self.fixed = nn.Parameter(torch.zeros(count, rows, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,eij->ebj", x * (1 + self.norm), self.up).tanh()
        out = torch.bmm(hidden, self.down) + self.bias
        return out.sum(0) + torch.einsum("bi,eij->bj", x, self.fixed).sum(-1, keepdim=True)


class Stack(nn.Module):
    def __init__(self, layers: int, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(*sizes) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def seeded(*sizes: int, layers: int = 2) -> Stack:
    return filled(Stack(layers, *sizes), 1, 0.1)


def shard(model: Stack, block: Block, **options: Any) -> Stack:
    def policy(name: str, param: nn.Parameter) -> Block | None:
        return block if name.endswith(("up", "down")) else None

    for layer in model.layers:
        fully_shard(layer, block_policy=policy, **options)
    fully_shard(model, block_policy=policy, **options)
    return model


def samples(rank: int, world: int, step: int, width: int) -> torch.Tensor:
    return part(torch.randn(840, width, generator=torch.Generator().manual_seed(5 + step)), rank, world)


@pytest.fixture(autouse=True)
def small_groups_are_worth_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_plan, "plan_buffers", functools.partial(plan_buffers, padding_bytes=0))


def gaps_of(model: Stack) -> dict[str, int]:
    return {p.name: p.gap for unit in explain(model).units for g in unit.groups for p in g.parameters}


def padding_of(model: Any) -> int:
    return sum(g.layout.numel - g.layout.tensor_numel for u in model.layers for g in unit_of(u).groups)


def trains_alike(
    rank: int, world: int, sizes: tuple[int, int, int], block: Block, dtype: str, accumulate: int, bound: float
) -> tuple[dict[str, int], int, int, bool]:
    rows = sizes[1]
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    ours: Any = shard(seeded(*sizes), block, allow_gaps=lambda name, p: not name.endswith("bias"), mp_policy=precision)
    alone: Any = seeded(*sizes)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (ours, alone)]
    for step in range(3):
        for micro in range(accumulate):
            ours.set_requires_gradient_sync(micro == accumulate - 1)
            for model, r, w in ((ours, rank, world), (alone, 0, 1)):
                data = samples(r, w, 10 * step + micro, rows)
                if model is ours:
                    model(data).float().square().mean().backward()
                else:
                    (model(data).square().mean()).backward()
        same(grads(ours), grads(alone), bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(values(ours), values(alone), 1e-4 if dtype == "float32" else 0.1)
    layer: Any = ours.layers[0]
    whole = full(layer.up)
    layer.unshard()
    assert torch.equal(layer.up.detach(), whole.to(layer.up.dtype)) and layer.up.shape == alone.layers[0].up.shape
    strided = not layer.up.is_contiguous() and layer.up[0].is_contiguous()
    layer.reshard()
    plain = shard(seeded(*sizes), block) if sizes[1] % max(block.row_count, 1) == 0 and sizes[2] % max(block.row_count, 1) == 0 else None
    return gaps_of(ours), padding_of(ours), padding_of(plain) if plain is not None else 1 << 60, strided


CASES = [
    # world, (experts, rows, columns), block: experts off the boundaries, whole experts, blocks that do not divide the rows
    (3, (4, 20, 28), Block.rows(20)),
    (6, (5, 30, 6), Block.rows(39)),
    (8, (2, 18, 9), Block.rows(42)),
    (2, (6, 22, 10), Block.rows(4)),
    (8, (3, 40, 24), Block.rows(8)),
    (5, (7, 18, 50), Block.rows(16)),
]


FULL, HALF = ("float32", 1, 1e-5), ("bfloat16", 2, 0.08)


@pytest.mark.parametrize(
    ("world", "sizes", "block", "dtype", "accumulate", "bound"),
    [
        *((*case, *FULL) for case in CASES),
        *(pytest.param(*case, *HALF, marks=[] if case in (CASES[1], CASES[3]) else [pytest.mark.slow]) for case in CASES),
    ],
)
def test_gaps_keep_gradients_and_never_add_padding(world, sizes, block, dtype, accumulate, bound) -> None:
    for gaps, padding, without, strided in run_threads(world, trains_alike, sizes, block, dtype, accumulate, bound):
        assert padding <= without, "gaps are only for less padding"
        assert strided == any(gap for name, gap in gaps.items() if name.endswith("up"))
        assert not gaps.get("bias"), "not allowed there"
        if dtype == "float32" and (world, sizes, block) in CASES[1:3]:  # experts off the boundaries
            assert strided and padding < 0.7 * without, (gaps, padding, without)


def random_case(seed: int) -> tuple[int, tuple[int, int, int], Block]:
    chance = random.Random(seed)
    rows, columns = chance.randint(2, 40), chance.randint(1, 40)
    return chance.randint(2, 8), (chance.randint(1, 9), rows, columns), Block.rows(chance.randint(1, 48))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in (*range(3, 6), *range(100, 200)))])
def test_random_stacks_and_blocks_train_alike_with_gaps(seed) -> None:
    world, sizes, block = random_case(seed)
    run_threads(world, trains_alike, sizes, block, "float32", 1, 1e-5)


@on_threads(8)
def test_gaps_keep_gradients_with_replicas_and_cpu_offload(rank: int, world: int) -> None:
    sizes, block = (3, 24, 24), Block.rows(7)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    offload = CPUOffloadPolicy(pin_memory=False)
    ours, alone = shard(seeded(*sizes), block, allow_gaps=True, mesh=mesh, offload_policy=offload), seeded(*sizes)
    for r, w, model in ((rank, world, ours), (0, 1, alone)):
        model(samples(r, w, 0, 24)).square().mean().backward()
    same(grads(ours), grads(alone))
    assert gaps_of(ours)["up"]


@on_processes(4)
def test_checkpoints_and_casts_keep_gaps(rank: int, world: int, tmp_path) -> None:
    """A checkpoint does not contain the gaps. ``to`` and ``load_state_dict`` keep them."""
    unit_plan.plan_buffers = functools.partial(plan_buffers, padding_bytes=0)  # this process is the rank's own
    sizes = (3, 24, 24)
    gapped, plain = shard(seeded(*sizes), Block.rows(7), allow_gaps=True), shard(Stack(2, *sizes), Block.rows(4))
    ckpt.save({"model": gapped}, str(tmp_path), 1, timeout_s=20)
    ckpt.load({"model": plain}, str(tmp_path))
    for a, b in zip(gapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(a), full(b))
    kept = [full(p) for p in gapped.parameters()]
    before = gapped(samples(rank, world, 0, 24))
    with torch.no_grad():
        for p in gapped.parameters():
            p.zero_()
    ckpt.load({"model": gapped}, str(tmp_path))
    assert all(torch.equal(full(p), k) for p, k in zip(gapped.parameters(), kept, strict=True))
    assert torch.equal(gapped(samples(rank, world, 0, 24)), before)
    gapped.double()
    assert apart(gapped(samples(rank, world, 0, 24).double()).float(), before) <= 1e-5
    assert any(gaps_of(gapped).values())


@on_threads(1)
def test_one_rank_needs_no_gaps_if_blocks_do_not_divide_rows(rank: int, world: int) -> None:
    model = shard(seeded(3, 10, 7), Block.rows(4), allow_gaps=True)
    assert not any(gaps_of(model).values())
    model(samples(0, 1, 0, 10)).square().mean().backward()


@on_threads(3)
def test_stacks_with_short_last_blocks_train_alike_without_gaps(rank: int, world: int) -> None:
    model = seeded(5, 10, 32)
    ours: Any = shard(seeded(5, 10, 32), Block.tile(4, 16))
    assert not any(gaps_of(ours).values())
    cut = 0
    for unit in explain(ours).units:
        for param in (p for g in unit.groups for p in g.parameters if p.name.endswith(("up", "down"))):
            rows, columns = param.shape[1:]
            edges = {start for start, end in param.ranges if end > start}
            assert all(edge % (rows * columns) % (4 * columns) == 0 for edge in edges)
            cut += len(edges - {0})
    assert cut
    for step in range(2):
        ours(samples(rank, world, step, 10)).square().mean().backward()
        model(samples(0, 1, step, 10)).square().mean().backward()
    same(grads(ours), grads(model), 1e-5)
