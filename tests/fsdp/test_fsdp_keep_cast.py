"""``keep_cast``: the copy of a shard that all-gathers send is made once per optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from tests.fsdp.towers import seeded
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads
from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp import Sharding, explain, fully_shard, held_bytes
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner.cost import Policy, plan_model, predict_memory
from vescale_ray.planner.models.model_shapes import model_shapes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CONFIG = LlamaConfig(dim=32, layers=2, heads=2, kv_heads=2, ffn=48, vocab=64, max_seq=16)


def build(**options: Any) -> Any:
    model = seeded(lambda: Llama(CONFIG))
    for unit in (*model.layers, model):
        fully_shard(unit, **{"mp_policy": BF16, **options})
    return model


def by_rows(parameter: Any) -> Shard:
    return Shard(0)


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def forward(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(tokens(rank, step)).float().logsumexp(-1).mean()


def groups(model: Any) -> list[Any]:
    return [g for unit in (*model.layers, model) for g in unit_of(unit).groups]


@pytest.mark.parametrize(
    "options",
    [{}, {"shard_placement_fn": by_rows}, {"reshard_after_forward": False}, {"sharding": Sharding.zero3()}],
    ids=["ragged", "chunks", "kept after forward", "zero3"],
)
@on_processes(2)
def test_training_has_the_bits_of_a_cast_per_all_gather(rank: int, world: int, options: Any) -> None:
    ours, plain = build(keep_cast=True, **options), build(**options)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True) for model in (ours, plain)]
    for step in range(4):
        for model in (ours, plain):
            if step == 2:
                with torch.inference_mode():
                    forward(model, rank, step)
            for micro in range(2):
                forward(model, rank, step + 4 * micro).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())


@on_processes(2)
def test_a_shard_is_cast_once_per_optimizer_step(rank: int, world: int) -> None:
    casts, spread = [0], KeptShard.spread

    def counted(self: Any, *args: Any, **named: Any) -> None:
        casts[0] += 1
        spread(self, *args, **named)

    setattr(KeptShard, "spread", counted)  # noqa: B010 # only in this rank's process
    for keeps, expected in ((True, 3 * 3), (False, 3 * (5 + 5 + 3))):  # two layers and the root, which backward does not gather again
        model = build(keep_cast=keeps)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        casts[0] = 0
        for step in range(3):
            for micro in range(2):
                forward(model, rank, step + micro).backward()
            with torch.no_grad():
                forward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        assert casts[0] == expected


@pytest.mark.parametrize("how", ["parameter", "data", "assigned", "local", "load", "dtype"])
@on_threads(2)
def test_each_write_to_a_shard_reaches_the_next_gather(rank: int, world: int, how: str) -> None:
    model, plain = build(keep_cast=True), build()
    for one in (model, plain):
        forward(one, rank, 0).backward()
        weight = one.layers[0].attention.q_proj.weight
        with torch.no_grad():
            if how == "parameter":
                weight.mul_(3)
            elif how == "data":
                weight.data.mul_(3)
            elif how == "assigned":
                weight.data = weight.data * 3
            elif how == "local":
                weight.to_local().mul_(3)
            elif how == "load":
                one.load_state_dict({name: value * 3 for name, value in one.state_dict().items()})
            else:
                one.double()
    before = build()
    with torch.no_grad():
        assert torch.equal(forward(model, rank, 1), forward(plain, rank, 1))
        assert how == "dtype" or not torch.equal(forward(model, rank, 1), forward(before, rank, 1))


@on_threads(3)
def test_explain_and_the_plan_count_the_bytes_that_are_kept(rank: int, world: int) -> None:
    model = build(keep_cast=True)
    told, kept = explain(model).memory, sum(2 * g.division.part_numel for g in groups(model))
    assert told["casts"] == held_bytes(model)["casts"] == kept > 0
    policy = Policy(keep_cast=True)
    assert predict_memory(plan_model(model_shapes(Llama(CONFIG)), world), policy).casts == kept
    assert explain(build()).memory["casts"] == 0
    forward(model, rank, 0).backward()
    assert sum(g.master._cast.nbytes for g in groups(model)) == kept


@pytest.mark.parametrize(
    "options",
    [{"mp_policy": MixedPrecisionPolicy()}, {"sharding": Sharding.zero2()}, {"sharding": Sharding.ddp()}],
    ids=["fp32", "zero2", "ddp"],
)
@on_threads(2)
def test_nothing_is_kept_where_steps_make_at_most_one_cast(rank: int, world: int, options: Any) -> None:
    model = build(keep_cast=True, **options)
    forward(model, rank, 0).backward()
    assert explain(model).memory["casts"] == 0 and all(g.master._cast is None for g in groups(model))


@on_threads(1)
def test_one_rank_keeps_nothing_and_bad_values_are_refused(rank: int, world: int) -> None:
    model = build(keep_cast=True)
    forward(model, rank, 0).backward()
    assert explain(model).memory["casts"] == 0
    with pytest.raises(TypeError, match="keep_cast = 'yes' says neither yes nor no: give True or False"):
        build(keep_cast="yes")
