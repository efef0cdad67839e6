"""Full state dicts into and out of ragged models and optimizers; checkpoints to and from FSDP2; asynchronous saves."""

from __future__ import annotations

import copy
import ctypes
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.dtensor.layouts import values, whole
from tests.ranks import on_threads, run_gloo
from tests.resident import peak_growth
from vescale_ray.dtensor import distribute_tensor
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.fsdp import MixedPrecisionPolicy, fully_shard
from vescale_ray.geometry import Block
from vescale_ray.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)
OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """A matrix, a vector, a replicated parameter, and buffers: float, bool, an integer without dimensions."""

    inner: nn.Linear
    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(seed))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(values(tuple(p.shape), seed=seed * 10 + i) + 0.25)
            self.mean.fill_(float(seed))
            self.seen[seed % 5] = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * self.scale.sum()


def shard(net: Net, mesh: DeviceMesh, placements: list[Placement]) -> Net:
    net.inner.weight = nn.Parameter(distribute_tensor(net.inner.weight.detach(), mesh, placements))
    net.inner.bias = nn.Parameter(distribute_tensor(net.inner.bias.detach(), mesh, placements))
    net.scale = nn.Parameter(distribute_tensor(net.scale.detach(), mesh, [Replicate()] * mesh.ndim))
    return net


def give_gradients(net: nn.Module, seed: int) -> None:
    for i, p in enumerate(net.parameters()):
        full = values(tuple(p.shape), seed=seed + i)
        p.grad = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else full


def trained(net: nn.Module, steps: int = 2, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(net.parameters(), lr=0.05)
    for step in range(steps):
        give_gradients(net, 50 + step)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def same(net: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(whole(a), whole(b)) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


def _round_trip(rank: int, world: int, mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    plain = Net(3)
    reference = trained(plain)
    source = shard(Net(3), mesh, placements)
    optimizer = trained(source)
    assert same(source, plain)
    full, state = get_model_state_dict(source, options=FULL), get_optimizer_state_dict(source, optimizer, options=FULL)
    assert not any(isinstance(v, DTensor) for v in full.values()) and set(full) == set(plain.state_dict())
    offloaded = get_model_state_dict(source, options=OFFLOADED)
    offloaded_state = get_optimizer_state_dict(source, optimizer, options=OFFLOADED)
    assert bool(offloaded) == bool(offloaded_state) == (rank == 0)
    for given, given_state, options in ((full, state, FULL), (offloaded, offloaded_state, SENT)):
        target = shard(Net(5), mesh, placements)
        result = set_model_state_dict(target, given, options=options)
        assert not result.missing_keys and not result.unexpected_keys
        assert same(target, plain)
        new = torch.optim.AdamW(target.parameters(), lr=0.9)
        set_optimizer_state_dict(target, new, given_state, options=options)
        assert new.param_groups[0]["lr"] == 0.05
        ours = get_optimizer_state_dict(target, new, options=FULL)["state"]
        theirs = get_optimizer_state_dict(plain, reference)["state"]
        for name, entries in theirs.items():
            assert all(torch.equal(ours[name][key], value) for key, value in entries.items()), name
        again = copy.deepcopy(plain)
        after = torch.optim.AdamW(again.parameters(), lr=0.05)
        after.load_state_dict(copy.deepcopy(reference.state_dict()))
        for n, o in ((target, new), (again, after)):
            give_gradients(n, 70)
            o.step()
        assert same(target, again), "the next step is that of the undisturbed run"


@on_threads(4, timeout=100)
def test_full_state_dicts_round_trip_through_every_layout(rank: int, world: int) -> None:
    _round_trip(rank, world, (4,), [RaggedShard((0,), (1, 0, 2, 3))])
    _round_trip(rank, world, (2, 2), [RaggedShard((0,), (1, 2)), Shard(0)])
    _round_trip(rank, world, (2, 2), [Replicate(), RaggedShard((), (0, 1))])


MIB = 1 << 20
_M_MMAP_THRESHOLD = -3
"""The constant of glibc's malloc.h."""


def _memory(rank: int, world: int, mesh_shape: tuple[int, ...], placements: list[Placement]) -> list[int]:
    """Send a model of 6 matrices of 8 MiB, and its moments, from rank 0. Returns the growths of memory."""
    # Make glibc return each matrix to the system when it is freed. By default it learns to keep blocks of that size, more or fewer from run
    # to run. The count would then include free memory, or miss memory that reuses it.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB) == 1
    mesh, names = init_device_mesh("cpu", mesh_shape), [f"w{i}" for i in range(6)]

    def matrix(i: int) -> torch.Tensor:
        return torch.arange(2 * MIB, dtype=torch.float32).view(1024, 2048).add_(i)

    net: Any = nn.ParameterDict({n: nn.Parameter(distribute_tensor(torch.zeros(1024, 2048), mesh, placements)) for n in names})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    full = {n: matrix(i) for i, n in enumerate(names)} if rank == 0 else {}
    moments = {"state": {n: {"momentum_buffer": full[n]} for n in full}, "param_groups": [{**optimizer.param_groups[0], "params": names}]}
    set_model_state_dict(net, full, options=SENT)  # first once without counting, to allocate the back end's buffers
    peaks = [
        peak_growth(lambda: set_model_state_dict(net, full, options=SENT)),
        peak_growth(lambda: set_optimizer_state_dict(net, optimizer, moments, options=SENT)),
    ]
    for i, n in enumerate(names):
        for loaded in (net[n], optimizer.state[net[n]]["momentum_buffer"]):
            assert torch.equal(whole(loaded), matrix(i))
    return peaks


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs Linux's /proc and glibc"
)
@pytest.mark.parametrize("replicated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_broadcast_state_dict_is_held_once(replicated: bool) -> None:
    """Of 48 MiB, one tensor of 8 MiB is held, and one more that gloo's thread has not released yet.

    A second state dict would be 48 MiB, and the second rank's parts 36 MiB.
    """
    cut = RaggedShard((0,), (1, 3))
    shape, placements = ((1, 2), [Replicate(), cut]) if replicated else ((2,), [cut])
    found = run_gloo(2, _memory, shape, placements)
    assert all(peak < 20 * MIB for peaks in found for peak in peaks), found


def _scattered(rank: int, world: int) -> list[int]:
    """Elements that each collective gives this rank, for parts over all ranks."""
    mesh = init_device_mesh("cpu", (world,))
    target = shard(Net(5), mesh, [RaggedShard((0,), (1, 2))])
    full = Net(3).state_dict() if rank == 0 else {}
    received: list[int] = []
    real = dist.all_to_all_single

    def counted(out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(out.numel())
        return real(out, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        set_model_state_dict(target, full, options=SENT)
    assert same(target, Net(3))
    return received


def test_a_rank_is_sent_its_part_and_no_more() -> None:
    assert run_gloo(2, _scattered) == [[8, 2], [16, 4]]


@on_threads(2)
def test_unfit_state_dict_is_refused_on_all_ranks_before_writes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    net = shard(Net(5), mesh, [RaggedShard((0,), (1, 2))])
    before = {k: whole(v).clone() for k, v in net.state_dict().items()}
    good = Net(3).state_dict()
    wrong = {**good, "inner.weight": torch.ones(4, 6)}
    lacking = {k: v for k, v in good.items() if k != "scale"}
    for options in (FULL, SENT):
        more = {**good, "more": 1}
        bad = {r"inner.weight has shape \(4, 6\)": wrong, r"lacks \['scale'\]; load": lacking, r"dict has \['more'\] that": more}
        for says, state in bad.items():
            with pytest.raises(ValueError, match=says):
                set_model_state_dict(net, state if rank == 0 or options is FULL else {}, options=options)
        with pytest.raises(ValueError, match="full_state_dict=True"):
            set_model_state_dict(net, good, options=StateDictOptions(broadcast_from_rank0=True))
    assert all(torch.equal(whole(v), before[k]) for k, v in net.state_dict().items()), "what raised changed nothing"
    result = set_model_state_dict(net, {**lacking, "more": 1}, options=StateDictOptions(full_state_dict=True, strict=False))
    assert result.missing_keys == ["scale"] and result.unexpected_keys == ["more"]
    assert torch.equal(whole(net.inner.weight), good["inner.weight"])


@on_threads(4)
def test_state_dicts_that_differ_by_rank_are_refused_on_all(rank: int, world: int) -> None:
    """A full state dict with ``cpu_offload`` is on rank 0 only. The other ranks would keep their old values, or rank 0 would wait."""
    mesh = init_device_mesh("cpu", (2, 2))
    net = shard(Net(5), mesh, [Replicate(), RaggedShard((0,), (1, 2))])
    optimizer = trained(net)
    before = {k: whole(v).clone() for k, v in net.state_dict().items()}
    good, moments = Net(3).state_dict(), get_optimizer_state_dict(net, optimizer, options=FULL)
    wrong = {**good, "inner.weight": torch.ones(4, 6)}
    lacking = {k: v for k, v in good.items() if k != "scale"}
    for strict in (True, False):
        options = StateDictOptions(full_state_dict=True, strict=strict)
        for odd in ({}, wrong, lacking, "not a dict", {"inner.weight": net.inner.weight}):
            for other in (0, 3):
                with pytest.raises(ValueError, match="have different full model|lacks|has shape|can't be loaded"):
                    set_model_state_dict(net, odd if rank == other else good, options=options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="have different full optimizer|lacks"):
            set_optimizer_state_dict(net, optimizer, moments if rank else {}, options=options)
    assert all(torch.equal(whole(v), before[k]) for k, v in net.state_dict().items()), "what raised changed nothing"
    # The remedy.
    set_model_state_dict(net, {} if rank else good, options=SENT)
    assert all(torch.equal(whole(v), good[k]) for k, v in net.state_dict().items())


def _with_fsdp2(rank: int, world: int, folder: str) -> None:
    one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    def fsdp2() -> Net:
        net = Net(5)
        torch_fully_shard(net, mesh=one)
        return net

    def ragged() -> Net:
        return shard(Net(5), one, [RaggedShard((0,), (0, 1, 2, 3))])

    def strided() -> Net:
        return shard(Net(5), two, [RaggedShard((0,), (1, 2)), Shard(0)])

    def columns() -> Net:
        net = Net(5)
        net.inner.weight = nn.Parameter(distribute_tensor(net.inner.weight.detach(), two, [RaggedShard((0, 1), (5, 7)), Shard(1)]))
        net.inner.bias = nn.Parameter(distribute_tensor(net.inner.bias.detach(), two, [Replicate(), RaggedShard((0,), (1, 2))]))
        return net

    plain = Net(5)
    reference = trained(plain)
    makers = {"fsdp2": fsdp2, "ragged": ragged, "strided": strided, "columns": columns}
    for name, make in makers.items():
        net = make()
        optimizer = trained(net)
        state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
        saving: Any = dcp.async_save(state, checkpoint_id=str(Path(folder) / name), process_group=dist.new_group())
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()  # the save uses a copy
        saving.result()
    for source in makers:
        for name, make in makers.items():
            if "fsdp2" in (source, name) or source != name:
                net = make()
                new = torch.optim.AdamW(net.parameters(), lr=0.9)
                state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, new)}
                dcp.load(state, checkpoint_id=str(Path(folder) / source))
                set_model_state_dict(net, state["model"])
                set_optimizer_state_dict(net, new, state["optimizer"])
                assert same(net, plain), (source, name)
                ours = get_optimizer_state_dict(net, new)["state"]
                for key, entries in get_optimizer_state_dict(plain, reference)["state"].items():
                    assert all(torch.equal(whole(ours[key][k]), v) for k, v in entries.items()), (source, name, key)


def test_asynchronous_checkpoints_load_across_layouts_and_fsdp2() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_gloo(4, _with_fsdp2, folder, timeout=120)
        for name in ("strided", "columns"):
            metadata: Any = dcp.FileSystemReader(str(Path(folder) / name)).read_metadata().state_dict_metadata["model.inner.weight"]
            assert sum(c.sizes.numel() for c in metadata.chunks) == 24, "each element once, however many replicas hold it"


@on_threads(2)
def test_full_state_dicts_load_into_a_fully_sharded_module(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    net, x = Net(5), values((2, 4)) * 0.1
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), block_policy=lambda name, p: Block.rows(1))
    trained_optimizer = torch.optim.AdamW(net.parameters(), lr=0.9)
    net(x)  # makes the low-precision copy of the old values
    plain = Net(3)
    state = get_optimizer_state_dict(plain, trained(plain))
    set_model_state_dict(net, plain.state_dict() if rank == 0 else {}, options=SENT)
    set_optimizer_state_dict(net, trained_optimizer, state if rank == 0 else {}, options=SENT)
    assert same(net, plain)
    assert torch.equal(net(x), plain.to(torch.bfloat16)(x.bfloat16())), "the forward pass sees what was loaded"
    found = get_optimizer_state_dict(net, trained_optimizer, options=FULL)["state"]
    assert all(torch.equal(found[n][k], v) for n, entries in state["state"].items() for k, v in entries.items())


@pytest.mark.parametrize("options", [FULL, StateDictOptions()])
@on_threads(2)
def test_both_state_dicts_go_back_in_one_call(rank: int, world: int, options: StateDictOptions) -> None:
    """As in the AppState of torch's tutorial, whole or sharded. With whole ones, a plain model's go into a sharded model."""
    nets = [Net(3), Net(5)]
    for net in nets[options is FULL :]:
        fully_shard(net)
    optimizers = [trained(nets[0]), torch.optim.AdamW(nets[1].parameters(), lr=0.9)]
    weights, states = get_state_dict(nets[0], optimizers[0], options=options)
    result = set_state_dict(nets[1], [optimizers[1]], model_state_dict=weights, optim_state_dict=states, options=options)
    assert result.missing_keys == result.unexpected_keys == []
    assert same(nets[1], nets[0])
    before, after = (get_state_dict(net, optimizer, options=FULL)[1]["state"] for net, optimizer in zip(nets, optimizers, strict=True))
    assert all(torch.equal(after[n][k], v) for n, entries in before.items() for k, v in entries.items())


@on_threads(2)
def test_names_that_load_hooks_change_load_by_the_remedy(rank: int, world: int) -> None:
    """``parametrizations.weight_norm`` has a hook for state dicts of the older ``weight_norm``."""
    layer = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)))
    fully_shard(layer)
    old = {"0.bias": torch.ones(6), "0.weight_g": torch.full((6, 1), 2.0), "0.weight_v": values((6, 4), seed=3) + 0.25}
    with pytest.raises(ValueError, match=r"rename its entries, call model\.load_state_dict\(\) on all ranks if hooks"):
        set_model_state_dict(layer, old, options=FULL)
    layer.load_state_dict(dict(old))
    state = get_model_state_dict(layer, options=FULL)
    torch.testing.assert_close(state["0.parametrizations.weight.original1"], old["0.weight_v"])
