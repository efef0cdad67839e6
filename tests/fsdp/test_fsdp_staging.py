"""The size of the buffers in which a reduction casts gradients: any size gives the bits of gradients that are cast as a whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.test_fsdp_gaps import gaps_of, samples, shard
from tests.fsdp.test_fsdp_gaps import seeded as experts
from tests.fsdp.test_fsdp_streams import Uneven, a_buffer_for_each_matrix
from tests.fsdp.towers import Tower, inputs, seeded, shard_tower
from tests.fsdp.units import unit_of
from tests.ranks import on_threads
from vescale_ray.compat.fsdp import ReduceScatter
from vescale_ray.fsdp import FSDPModule, MixedPrecisionPolicy, PhaseError, explain, fully_shard
from vescale_ray.fsdp.groups import reduction
from vescale_ray.fsdp.surface import overview
from vescale_ray.geometry import Block
from vescale_ray.planner import plan_buffers, unit_plan
from vescale_ray.planner.step_buffers import device_buffers

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIZES = (512, 1100, 4096, 1 << 16, 1 << 30)


class Whole(ReduceScatter):
    """A reduce-scatter of the user's, which gets all gradients in FP32."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        assert input_tensor.dtype == torch.float32
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def plain(world: int) -> Any:
    return shard_tower(seeded(Tower), mp_policy=BF16)


def with_replicas(world: int) -> Any:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    return shard_tower(seeded(Tower), mp_policy=BF16, mesh=mesh)


def with_gaps(world: int) -> Any:
    model = shard(experts(2, 30, 24), Block.rows(7), allow_gaps=lambda name, p: not name.endswith("bias"), mp_policy=BF16)
    assert any(gaps_of(model).values())
    return model


def several_buffers(world: int) -> Any:
    model = seeded(Uneven)
    for layer in model.layers:
        fully_shard(layer, mp_policy=BF16, block_policy=lambda name, p: Block.rows(4) if p.dim() == 2 else None)
    fully_shard(model, mp_policy=BF16)
    assert len(unit_of(model.layers[0]).groups) == 2
    return model


def gradients(model: Any, data: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(data).float().square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rank and bytes of each call that reduces cast gradients."""
    seen: list[tuple[int, int]] = []

    def scatter_many(pairs: Any, *, op: Any, group: Any, async_op: bool = False) -> list[Any]:
        seen.append((dist.get_rank(), sum(full.nbytes for _, full in pairs)))
        works = [dist.reduce_scatter_single(out, full, op=op, group=group, async_op=async_op) for out, full in pairs]
        return [work for work in works if work is not None]

    monkeypatch.setattr(reduction, "reduce_scatter_many", scatter_many)
    return seen


@pytest.mark.parametrize(("make", "world"), [(plain, 2), (several_buffers, 4), (with_replicas, 4), (with_gaps, 4)])
def test_every_size_gives_the_bits_of_a_whole_cast(make: Any, world: int, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if make is several_buffers:
        monkeypatch.setattr(unit_plan, "plan_buffers", a_buffer_for_each_matrix)
    else:
        monkeypatch.setattr(unit_plan, "plan_buffers", functools.partial(plan_buffers, padding_bytes=0))
    reduces_alike(world, make, calls)


@on_threads()
def reduces_alike(rank: int, world: int, make: Any, calls: list[tuple[int, int]]) -> None:
    """One model takes another size in each step. Another model reduces gradients that have been cast as a whole."""
    ours, other = make(world), make(world)
    for module in other.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Whole())
    width = other.layers[0].up.shape[1] if make is with_gaps else 20
    counts = []
    for step, nbytes in enumerate((None, *SIZES, None)):
        ours.set_reduce_scatter_staging(nbytes)
        data = samples(rank, world, step, width) if make is with_gaps else inputs(rank, world, step)
        before = [size for of, size in calls if of == rank]
        got = gradients(ours, data)
        sent = [size for of, size in calls if of == rank][len(before) :]
        assert max(sent) <= (nbytes or 1 << 30)
        counts.append(len(sent))
        assert all(torch.equal(a, b) for a, b in zip(got, gradients(other, data), strict=True)), nbytes
    assert counts[1] > counts[2] >= counts[3] >= counts[4] == counts[5] == counts[0] == counts[6], "smaller buffers make more calls"


@on_threads(2)
def test_a_size_that_cannot_be_used_changes_no_unit(rank: int, world: int) -> None:
    model = plain(world)
    model.layers[0].set_reduce_scatter_staging(1 << 20)
    for wrong, kind, words in (
        (0, ValueError, "the size of a staging buffer in bytes must be a positive int, got 0"),
        (-5, ValueError, "got -5"),
        (2.0, TypeError, "must be an int, got float"),
        ("64MiB", TypeError, "must be an int, got str"),
        (True, TypeError, "must be an int, got bool"),
        (255, ValueError, "a staging buffer of 255 bytes is less than 128 bytes for each of 2 ranks: give at least 256"),
    ):
        with pytest.raises(kind) as error:
            model.set_reduce_scatter_staging(wrong)
        assert words in str(error.value) and "\n" not in str(error.value)
    given = [unit_of(m).groups[0].grads.staging for m in (model, *model.layers)]
    assert given == [None, 1 << 20, None, None, None, None]
    model.set_reduce_scatter_staging(256, recurse=False)
    assert [unit_of(m).groups[0].grads.staging for m in (model, *model.layers)][:3] == [256, 1 << 20, None]


@on_threads(2)
def test_the_size_changes_between_steps_only(rank: int, world: int) -> None:
    model = plain(world)
    hook = model.layers[2].register_forward_hook(lambda *_: model.set_reduce_scatter_staging(1 << 20))
    with pytest.raises(PhaseError, match="is in phase forward: set its staging buffers between steps"):
        model(inputs(rank, world))
    hook.remove()
    model.reset_iter_state()
    assert unit_of(model).groups[0].grads.staging is None


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``explain`` count an accelerator's buffers. The patch is made once, not by each rank's thread."""
    monkeypatch.setattr(overview, "host_buffers", device_buffers)


@pytest.mark.usefixtures("as_on_an_accelerator")
@on_threads(2)
def test_explain_counts_the_staging_buffers(rank: int, world: int) -> None:
    model: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    cast = 64 * 64 * 4

    def staged() -> int:
        return explain(model).memory["gradient_buffers"] - cast // 2  # without the gradients of one unit

    assert staged() == cast, "one chunk by default"
    model.set_reduce_scatter_staging(1024)
    assert staged() == 2 * 1024
    model[1].set_reduce_scatter_staging(4096)
    assert staged() == 2 * 4096, "the unit with the largest buffers"
    model.set_reduce_scatter_staging(cast - 128)
    assert staged() == 2 * (cast - 128), "two chunks"
    model.set_reduce_scatter_staging(1 << 40)
    assert staged() == cast, "more than a unit has"


@on_threads(2)
def test_ranks_with_different_staging_sizes_are_told(rank: int, world: int) -> None:
    model: Any = fully_shard(nn.Linear(8, 8), mp_policy=BF16)
    model.set_reduce_scatter_staging(512 + 512 * rank)
    with pytest.raises(RuntimeError, match=r"staging buffers of 512 bytes.*staging buffers of 1024 bytes"):
        model(torch.ones(2, 8))
