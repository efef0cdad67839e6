"""If ranks have planned different layouts, all get an error before the first collective, with the first difference on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.ranks import run_gloo, run_threads
from vescale_ray.fsdp import Sharding, fully_shard
from vescale_ray.geometry import Block


def model(widths: tuple[int, ...] = (6, 8, 6), **options: Any) -> Any:
    whole = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))
    for layer in whole:
        fully_shard(layer, **options)
    return fully_shard(whole, **options)


def rows(name: str, param: nn.Parameter) -> Block | None:
    return Block.rows(2) if name == "weight" and param.shape[0] == 6 else None


def both(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)


CASES: dict[str, tuple[Callable[[bool], Any], list[str]]] = {
    "a size": (lambda odd: model((6, 9, 6) if odd else (6, 8, 6)), ["bias: [8]", "bias: [9]"]),
    "a block": (lambda odd: model(block_policy=rows if odd else None), ["weight: [6, 8] None", "weight: [6, 8] Block.rows(2)"]),
    "a dtype": (
        lambda odd: model(mp_policy=both(torch.bfloat16 if odd else torch.float16)),
        ["torch.float16/torch.float16", "torch.bfloat16/torch.bfloat16"],
    ),
    "more units": (lambda odd: model((6, 8, 6, 6) if odd else (6, 8, 6)), ["(no such unit)", "2[0]: 2 parameters"]),
}


def refused(rank: int, world: int, case: str, odd: int) -> str:
    build, _ = CASES[case]
    module = build(rank == odd)
    with pytest.raises(RuntimeError, match="the ranks planned different layouts") as raised:
        module(torch.ones(2, 6))
    return str(raised.value)


@pytest.mark.parametrize(("case", "odd"), [*((case, 2) for case in CASES), ("more units", 0)])
def test_every_rank_names_the_first_difference_on_both_sides(case: str, odd: int) -> None:
    texts = run_threads(4, refused, case, odd)
    assert len(set(texts)) == 1
    usual, other = CASES[case][1]
    zero, one = (other, usual) if odd == 0 else (usual, other)
    where = texts[0].index(f"rank {2 if odd == 2 else 1} has")
    assert zero in texts[0][:where] and one in texts[0][where:], texts[0]
    assert "build the same model with the same arguments" in texts[0]


def test_every_rank_names_the_first_difference_on_gloo() -> None:
    assert all("bias: [9]" in text for text in run_gloo(3, refused, "a size", 1))


def replicas(rank: int, world: int, odd: tuple[int, ...], sharding: Sharding | None) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = model((6, 9, 6) if rank in odd else (6, 8, 6), mesh=mesh, sharding=sharding)
    with pytest.raises(RuntimeError, match="the ranks planned different layouts") as raised:
        module(torch.ones(2, 6))
    return str(raised.value)


@pytest.mark.parametrize(("odd", "sharding"), [((2, 3), None), ((3,), None), ((1,), Sharding.ddp())], ids=["a replica", "a rank", "ddp"])
def test_every_rank_names_differing_layouts_of_replicas(odd: tuple[int, ...], sharding: Sharding | None) -> None:
    texts = run_threads(4, replicas, odd, sharding, timeout=30.0)
    sizes = ("shards of 32", "shards of 64") if sharding is None else ("shards of 64", "shards of 96")
    assert any(all(size in text for size in sizes) for text in texts), texts
    if len(odd) == 2:
        assert all("replica 0 has" in text and "replica 1 has" in text for text in texts)
