"""Plans of published models, against another program's tables, other systems' rules, and time limits."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.baselines import algorithm1, deepspeed, fsdp1, fsdp2, megatron_fsdp  # type: ignore[import-not-found]
from tests.planner.oracle import check
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.models.shapes import UnitShape
from vescale_ray.planner.placement.search import _plan

GROUPS = (8, 64, 128, 256, 512, 1024, 2048, 4096, 16384)


def layer(model: str, experts: str = "fused") -> UnitShape:
    return max(model_shapes(model, experts=experts).units, key=lambda u: u.numel * u.count)  # type: ignore[arg-type]


def specs(unit: UnitShape, rows: int | None, on: str = "matrices", *, stacks: bool = False) -> list[TensorSpec]:
    """Specs with blocks of ``rows`` on all matrices or on experts. Stacks of experts become one matrix unless ``stacks``."""
    found = []
    for p in unit.params:
        block = Block.rows(rows) if rows and p.kind != "vector" and (on == "matrices" or p.kind == "expert") else None
        shape = p.shape if stacks or len(p.shape) < 3 else (math.prod(p.shape[:-1]), p.shape[-1])
        found.append(TensorSpec(p.name, shape, block, torch.bfloat16))
    return found


def transposed(unit: UnitShape) -> UnitShape:
    """GPT-OSS with gate_up transposed: ``[E, 5760, 2880]``."""
    turned = (replace(p, shape=(128, 5760, 2880)) if p.name == "experts.gate_up_proj" else p for p in unit.params)
    return replace(unit, params=tuple(turned))


# Padding in percent at the GROUPS, found by a planner that shares no code with this one.
FIGURES = {
    ("llama-3-70b", "fused", "matrices", 1): (0.04, 0.37, 0.37, 1.22, 2.94, 2.94, 9.80, 9.80, 9.80),
    ("llama-3-70b", "fused", "matrices", 16): (0.37, 2.94, 9.80, 9.80, 9.80, 9.80, 120, 339, 1657),
    ("llama-3-70b", "fused", "matrices", 32): (1.22, 9.80, 9.80, 9.80, 9.80, 120, 339, 778, 3414),
    ("llama-3-70b", "fused", "matrices", 128): (2.94, 9.80, 9.80, 120, 339, 778, 1657, 3414, 13955),
    ("gpt-oss-120b", "fused", "matrices", 1): (0.00, 0.01, 0.01, 0.02, 0.05, 5.74, 5.74, 17.5, 88),
    ("gpt-oss-120b", "fused", "matrices", 16): (0.01, 0.05, 0.05, 0.23, 0.60, 88, 88, 276, 1404),
    ("gpt-oss-120b", "fused", "matrices", 128): (0.05, 0.60, 1.33, 2.80, 5.74, 100, 299, 699, 3096),
    ("gpt-oss-120b", "fused", "experts", 128): (0.05, 0.6, 1.33, 2.8, 5.74, 5.74, 17.5, 41, 88),
    ("deepseek-v3", "fused", "matrices", 1): (0.00, 0.00, 0.00, 0.02, 0.02, 1.04, 4.10, 10.3, 47),
    ("deepseek-v3", "fused", "matrices", 16): (0.00, 0.02, 0.02, 2.06, 6.14, 47, 96, 96, 684),
    ("deepseek-v3", "fused", "matrices", 128): (0.02, 0.02, 0.02, 31, 31, 161.3, 423, 945.1, 4080.3),
    ("deepseek-v3", "separate", "matrices", 1): (0.00, 0.00, 0.00, 0.02, 0.02, 1.04, 4.10, 10.3, 47),
    ("deepseek-v3", "separate", "matrices", 16): (0.00, 0.02, 0.02, 0.31, 0.31, 4.97, 40, 96, 684),
    ("deepseek-v3", "separate", "matrices", 32): (0.00, 0.02, 0.02, 0.31, 0.31, 12, 40, 180, 1020),
    ("deepseek-v3", "separate", "matrices", 128): (0.02, 0.02, 0.31, 2.64, 2.64, 12, 124, 348, 1692),
    ("deepseek-v3", "separate", "experts", 128): (0.02, 0.02, 0.02, 0.31, 2.07, 5.0, 31, 96, 684),
}


@pytest.mark.parametrize(("case", "percents"), FIGURES.items(), ids=["-".join(map(str, case)) for case in FIGURES])
def test_padding_is_at_most_that_of_the_research_tables(case: tuple[str, str, str, int], percents: tuple[float, ...]) -> None:
    model, experts, on, rows = case
    unit = layer(model, experts)
    tensors = specs(transposed(unit) if model == "gpt-oss-120b" else unit, rows, on)
    for group, percent in zip(GROUPS, percents, strict=True):
        layout = plan_layout(tensors, group)
        assert layout.padding_ratio * 100 <= percent + max(0.006, percent * 0.004), (group, layout.padding_ratio, percent)


# Largest allowed gap of the search above the proven bound, in percent. It occurs only if experts are separate tensors.
WIDEST_GAP = 2.2


@pytest.mark.parametrize("experts", ["fused", "separate"])
@pytest.mark.parametrize("model", ["llama-3-70b", "gpt-oss-120b", "deepseek-v3"])
def test_plans_never_exceed_the_papers_or_megatrons_shard_size(model: str, experts: str) -> None:
    unit = layer(model, experts)
    gaps = []
    for rows, on in [(1, "matrices"), (16, "matrices"), (32, "experts"), (128, "matrices"), (128, "experts")]:
        tensors = specs(unit, rows, on)
        for group in GROUPS:
            layout = plan_layout(tensors, group)
            assert layout.shard_numel <= algorithm1(tensors, group), (rows, group)
            assert layout.shard_numel <= megatron_fsdp(tensors, group), (rows, group)
            cuts = [s.block.row_count * s.shape[1] if s.block else 1 for s in tensors]
            cuts = [min(cut, s.numel) for cut, s in zip(cuts, tensors, strict=True)]
            offsets = [layout.offsets[s.name] for s in tensors]
            check([s.numel for s in tensors], cuts, offsets, group, layout.shard_numel, quantum=64, start=32)
            gaps.append((layout.gap * 100, rows, on, group))
            if experts == "fused":
                assert layout.optimal, (rows, on, group)
    assert max(gaps)[0] < WIDEST_GAP, max(gaps)


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "llama-3-405b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v3", "kimi-k2"])
def test_default_blocks_meet_the_bound_and_cut_at_rows_if_free(model: str) -> None:
    for unit in model_shapes(model, experts="separate" if model == "deepseek-v3" else "fused").units:
        for group in (8, 96, 512, 4096, 100_000):
            layout = plan_layout(specs(unit, None, stacks=True), group)
            assert layout.optimal and layout.gap == 0
            assert layout.numel - layout.tensor_numel < group * 64 + 32 * len(layout.specs), (
                "no more than the alignment of parts and starts"
            )
    at_512 = plan_layout(specs(layer("llama-3-70b"), None), 512)
    assert at_512.padding_ratio < 0.0001
    assert {at_512.cut(n) for n in at_512.order} == {"rows", "aligned elements"}, "decided tensor by tensor"


def test_padding_of_other_systems_follows_their_published_rules() -> None:
    """FSDP2 doubles the experts at 256 ranks; Megatron's row of a fused tensor is a whole expert."""
    unit = layer("gpt-oss-120b")
    stacks = specs(unit, None, stacks=True)
    total = sum(s.numel for s in stacks)

    def percent(shard: int, group: int) -> float:
        return round((shard * group / total - 1) * 100, 1)

    assert percent(fsdp1(stacks, 1024), 1024) == percent(deepspeed(stacks, 64), 64) == 0
    assert [percent(fsdp2(stacks, n), n) for n in (64, 256, 512)] == pytest.approx([0, 99, 298], abs=0.6)
    flat = specs(transposed(unit), 1)
    assert [percent(megatron_fsdp(flat, n), n) for n in (64, 256, 1024, 4096)] == [0.2, 1.3, 5.7, 17.5]
    dense = specs(layer("llama-3-70b"), 16)
    total = sum(s.numel for s in dense)
    assert [percent(fsdp2(dense, n, blocks=True), n) for n in (128, 512, 2048)] == [2.0, 21.6, 198.0]
    assert [percent(megatron_fsdp(dense, n), n) for n in (8, 64, 4096)] == [0.4, 2.9, 339.2]
    assert [percent(algorithm1(dense, n), n) for n in (8, 64, 4096)] == [0.4, 2.9, 339.2]


def test_a_plan_takes_milliseconds() -> None:
    """The worst plan took 39 ms on one core of the development machine. The best of two runs is taken, with slack for a busy machine."""
    worst: tuple[float, object] = (0.0, None)
    for model, experts in [("llama-3-70b", "fused"), ("gpt-oss-120b", "separate"), ("deepseek-v3", "separate")]:
        for rows, on in [(1, "matrices"), (128, "experts"), (None, "matrices")]:
            tensors = specs(layer(model, experts), rows, on)
            for group in (8, 512, 1024, 16384):
                spent = min(_clock(lambda t=tensors, g=group: plan_layout(t, g)) for _ in range(2))
                worst = max(worst, (spent, (model, experts, rows, on, group)), key=lambda w: w[0])
    print(f"worst plan: {worst[0] * 1e3:.1f} ms, {worst[1]}")
    assert worst[0] < 0.2, worst


def test_deepseek_v3_or_100_000_ranks_plan_in_under_a_second() -> None:
    units = [specs(u, 128, "experts") for u in model_shapes("deepseek-v3", experts="separate").units for _ in range(u.count)]
    assert len(units) == 63
    spent = _clock(lambda: [plan_layout(unit, 1024) for unit in units])
    print(f"all 63 units of DeepSeek-V3: {spent * 1e3:.0f} ms")
    assert spent < 1
    for rows in (None, 1, 128):
        assert _clock(lambda r=rows: plan_layout(specs(layer("deepseek-v3", "separate"), r), 100_000)) < 1


def _clock(work: object) -> float:
    _plan.cache_clear()
    gc.disable()  # a full collection of torch's objects takes longer than a plan
    began = time.process_time()
    work()  # type: ignore[operator]
    spent = time.process_time() - began
    gc.enable()
    return spent
