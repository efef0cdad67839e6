"""``Sharding``: every way trains like one process, and sends and keeps what its description says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp.towers import Tower, grads, inputs, same, seeded
from tests.fsdp.transformer import full
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_gloo, run_threads
from vescale_ray.fsdp import Sharding, explain, fully_shard

WAYS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Sharding]] = {
    "ddp": ((4,), ("shard",), Sharding.ddp()),
    "zero1": ((4,), ("shard",), Sharding.zero1()),
    "zero2": ((4,), ("shard",), Sharding.zero2()),
    "zero3": ((4,), ("shard",), Sharding.zero3()),
    "hsdp": ((2, 2), ("replicate", "shard"), Sharding.zero3()),
    "hsdp, shards first": ((2, 2), ("shard", "replicate"), Sharding.zero3()),
    "hsdp, zero1": ((2, 2), ("replicate", "shard"), Sharding.zero1()),
    "hsdp, sharded optimizer": (
        (2, 2),
        ("replicate", "shard"),
        Sharding("shard", ("replicate", "shard"), ("replicate", "shard")),
    ),
    "three dimensions": ((2, 2, 2), ("pods", "hosts", "devices"), Sharding("devices", ("hosts", "devices"), ("hosts", "devices"))),
}


def shard(model: Any, way: str, **options: Any) -> Any:
    shape, names, sharding = WAYS[way]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, sharding=sharding, **options)
    return fully_shard(model, mesh=mesh, sharding=sharding, **options)


def trains(rank: int, world: int, way: str, dtype: str) -> list[tuple[int, int]]:
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    ours, alone = shard(seeded(Tower), way, mp_policy=precision), seeded(Tower)
    bound = 1e-5 if dtype == "float32" else 5e-2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, alone)]
    lanes, sent = None, []
    for step in range(3):
        for micro in range(2):
            ours.set_requires_gradient_sync(micro == 1)
            before = (0, 0) if lanes is None else (lanes.gather.issued, lanes.reduce.issued)
            for model, r, w in ((ours, rank, world), (alone, 0, 1)):
                model(inputs(r, w, 2 * step + micro, rows=24)).float().square().mean().backward()
            lanes = unit_of(ours).lanes
            sent.append((lanes.gather.issued - before[0], lanes.reduce.issued - before[1]))
            assert all(hasattr(p, "full_tensor") for p in ours.parameters()), "between passes the modules have the sharded parameters"
        same(grads(ours), grads(alone), bound)
        with torch.no_grad():
            ours(inputs(rank, world, 9, rows=24))  # sees the same parameters and changes nothing
        ours.reshard()  # the root stays gathered after a forward, as with FSDP2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same({n: full(p) for n, p in ours.named_parameters()}, dict(alone.named_parameters()), 1e-4 if dtype == "float32" else 5e-2)
    return sent


UNITS = 6  # five layers and the root, which stays gathered from forward to backward

EXPECTED = {
    # Gathers and reductions of a step's first and second micro-batch.
    "zero1": [(UNITS, 0), (0, UNITS)],
    "zero2": [(UNITS, UNITS), (0, UNITS)],
    "zero3": [(2 * UNITS - 1, UNITS), (2 * UNITS - 1, UNITS)],
    "hsdp, zero1": [(UNITS, 0), (0, UNITS)],
    "hsdp": [(2 * UNITS - 1, UNITS), (2 * UNITS - 1, UNITS)],
    "hsdp, sharded optimizer": [(2 * UNITS - 1, UNITS), (2 * UNITS - 1, UNITS)],
}


IN_HALF = ("zero1", "zero3", "hsdp, sharded optimizer")  # the fewest ways that include each kind of exchange


@pytest.mark.parametrize(("way", "dtype"), [*((way, "float32") for way in WAYS), *((way, "bfloat16") for way in IN_HALF)])
def test_training_is_that_of_one_process(way: str, dtype: str) -> None:
    world = 8 if way == "three dimensions" else 4
    for sent in run_threads(world, trains, way, dtype):
        if way in EXPECTED:
            assert sent[2:4] == EXPECTED[way] and sent[4:] == EXPECTED[way], sent


def test_training_on_gloo_is_that_of_one_process() -> None:
    for way in ("zero1", "hsdp, sharded optimizer"):
        run_gloo(4, trains, way, "float32")


def kept(rank: int, world: int, way: str) -> tuple[int, list[int], int]:
    """Elements of a layer's master shard, sizes of the groups in which it was gathered, and bytes held between passes."""
    model = shard(seeded(Tower), way)
    layer = unit_of(model.layers[2]).groups[0]
    sizes: list[int] = []
    own = layer.unshard

    def unshard(lane: Any, together: Any, *, fresh: bool = False) -> None:
        whole = layer._whole
        own(lane, together, fresh=fresh)
        if not whole:
            part = layer._part is not None and layer._gathered_of == layer.spmd_version()
            sizes.append(layer.subgroup.size if part else layer.place.world)

    layer.unshard = unshard
    for step in range(2):
        model(inputs(rank, world, step, rows=24)).square().mean().backward()
    pool = unit_of(model).lanes.pool
    return layer.division.part_numel, sizes, pool.bytes_held()


def test_sharding_sets_kept_memory_and_gather_group_size() -> None:
    numel = 20 * 20 + 20
    for master, sizes, _ in run_threads(4, kept, "hsdp, sharded optimizer"):
        assert master < numel / 3, "a quarter of a layer, and padding"
        assert set(sizes[2:]) == {2}, "after the first gather of a step, from the neighbour alone"
    for master, _, held in run_threads(4, kept, "zero2"):
        assert master < numel / 3 and held >= 5 * numel * 4, "all layers are kept"
    for master, _, held in run_threads(4, kept, "zero3"):
        assert master < numel / 3 and held < 3 * numel * 4
    for master, _, _ in run_threads(4, kept, "ddp"):
        assert master >= numel


@on_threads(4)
def test_kept_parameters_follow_writes_loads_and_casts(rank: int, world: int) -> None:
    """Kept parameters follow every way of writing them."""
    model = shard(seeded(Tower), "zero2")
    x = inputs(rank, world, 0, rows=24)

    def expect() -> None:
        model.reshard()
        whole = {n: full(p) for n, p in model.named_parameters()}
        plain = Tower()
        plain.load_state_dict(whole)
        assert torch.allclose(model(x), plain(x), atol=1e-6)

    expect()
    model.reshard()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    expect()
    model.load_state_dict({n: p * 3 for n, p in model.state_dict().items()})
    expect()
    model.layers[1].reshard()
    expect()
    assert sum(explain(model).memory.values()) > 0
    model.double()
    x = x.double()
    model.reshard()
    whole = {n: full(p) for n, p in model.named_parameters()}
    plain = Tower().double()
    plain.load_state_dict(whole)
    assert torch.allclose(model(x), plain(x))
    model.layers[0].unshard()
    assert type(model.layers[0][0].weight) is nn.Parameter
    model.layers[0].reshard()
    model(x).sum().backward()


@pytest.mark.parametrize("way", ["zero1", "hsdp, sharded optimizer"])
@on_threads(4)
def test_write_to_the_local_tensor_of_kept_parameters_is_refused(rank: int, world: int, way: str) -> None:
    """One rank may write its local tensors alone, so such writes can't make all ranks gather again."""
    model = shard(seeded(Tower), way)
    x = inputs(rank, world, 0, rows=24)
    model(x).sum().backward()
    with torch.no_grad():
        model.layers[1][0].weight.to_local().mul_(2)
    with pytest.raises(RuntimeError, match=r"layers\.1.* were written through their local tensors .* call reshard\(\)"):
        model(x)
    model.reset_iter_state()
    model.layers[1].reshard()
    model.reshard()
    plain = Tower()
    plain.load_state_dict({n: full(p) for n, p in model.named_parameters()})
    assert torch.allclose(model(x), plain(x), atol=1e-6)


SUBMESHES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((4, 2), {"sharding": Sharding.ddp()}),
    ((2, 2, 2), {"sharding": Sharding("s", ("r", "s"), ("r", "s"))}),
    ((4, 2), {"reshard_after_forward": 2}),
]


@on_processes(8)
def test_training_on_a_submesh_is_that_of_one_process(rank: int, world: int) -> None:
    """Train on a part of a larger mesh while the other ranks do the same."""
    for shape, options in SUBMESHES:
        names = ("r", "s", "tp") if len(shape) == 3 else ("s", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)[names[:-1]]
        ours, alone = seeded(Tower), seeded(Tower)
        for layer in ours.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(ours, mesh=mesh, **options)
        position, size = rank // 2, world // 2
        for step in range(2):
            ours(inputs(position, size, step, rows=24)).square().mean().backward()
            alone(inputs(0, 1, step, rows=24)).square().mean().backward()
        same(grads(ours), grads(alone), 1e-5)
