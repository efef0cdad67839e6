"""A trainer that imports FSDP2 itself runs unchanged with our fully_shard.

It shards, loads whole state dicts, trains and saves as with torch's.
"""

from __future__ import annotations

import copy
import sys
import types
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import vescale_ray
from tests.fsdp.towers import Tower, filled, shard_tower
from tests.ranks import on_processes
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.fsdp import FSDPModule, stand_in_for_torch
from vescale_ray.fsdp.surface import torch_state

WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Language(nn.Module):
    """A language model with tied embeddings, a buffer, and sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.tie()
        if not self.embed.weight.is_meta:
            with torch.no_grad():
                for p in self.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator))

    def tie(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h) * self.scale


def on_meta_and_sharded(**options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model: Any = Language()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def load_by_distribute_tensor(whole: dict[str, torch.Tensor]) -> Any:
    """Load from rank 0 into a model on the meta device, tensor by tensor, then tie again, as FSDP2's tutorial and accelerate do."""
    from torch.distributed.tensor import distribute_tensor

    model = on_meta_and_sharded()
    parts: dict[str, Any] = {}
    for name, sharded in model.state_dict().items():
        full = whole[name].clone() if dist.get_rank() == 0 else torch.full_like(whole[name], torch.nan)
        if isinstance(sharded, DTensor):
            parts[name] = nn.Parameter(distribute_tensor(full, sharded.device_mesh, sharded.placements))
        else:
            dist.broadcast(full, src=0)
            parts[name] = full
    model.load_state_dict(parts, assign=True)
    model.tie()
    return model


def load_by_placements(whole: dict[str, torch.Tensor]) -> Any:
    """Load as transformers 5 does: every rank cuts its part of each tensor by the placements, and makes the DTensor itself."""
    model = on_meta_and_sharded()
    parts: dict[str, Any] = {}
    for name, sharded in model.state_dict().items():
        if isinstance(sharded, DTensor):
            shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
            local = whole[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].clone()
            how: dict[str, Any] = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
            parts[name] = nn.Parameter(DTensor.from_local(local, sharded.device_mesh, sharded.placements, **how))
        else:
            parts[name] = whole[name].clone()
    model.load_state_dict(parts, assign=True)
    model.tie()
    return model


def load_by_set_model_state_dict(whole: dict[str, torch.Tensor], options: StateDictOptions, **how: Any) -> Any:
    model = on_meta_and_sharded(**how).to_empty(device="cpu")
    set_model_state_dict(model, dict(whole) if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}, options=options)
    return model


def straight_onto_meta(whole: dict[str, torch.Tensor]) -> Any:
    model = on_meta_and_sharded()
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False))
    model.tie()
    return model


def train(model: Any) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(6).view(2, 3) + dist.get_rank()
    for _ in range(2):
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # A new optimizer loads the whole state of the old one, from rank 0.
    states = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, again, states if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    model(x).square().mean().backward()
    again.step()
    again.zero_grad()
    return get_model_state_dict(model, options=WHOLE), get_optimizer_state_dict(model, again, options=WHOLE), model(x).sum().detach()


def whole_state() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Language().state_dict().items()}


def trainer(_rank: int, _world: int) -> dict[str, Any]:
    whole = whole_state()
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "distribute_tensor": train(load_by_distribute_tensor(whole)),
        "all ranks": train(load_by_set_model_state_dict(whole, WHOLE)),
        "from rank 0": train(load_by_set_model_state_dict(whole, FROM_RANK_0)),
        "replicas": train(load_by_set_model_state_dict(whole, FROM_RANK_0, mesh=replicas)),
        "meta": train(straight_onto_meta(whole)),
    }


@on_processes(2)
def test_fsdp2_trainer_loads_trains_and_saves_alike_on_stand_in(rank: int, world: int) -> None:
    names = [(torch_fsdp, "fully_shard"), (torch_fsdp, "share_comm_ctx"), (torch_tensor, "distribute_tensor")]
    own = [getattr(module, name) for module, name in names] + [_state_dict_utils._distribute_tensors]
    theirs = trainer(rank, world)
    with stand_in_for_torch():
        ours = trainer(rank, world)
        model = on_meta_and_sharded()
        assert isinstance(model, FSDPModule) and all(isinstance(p, RaggedDTensor) for p in model.parameters())
        linear: Any = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())  # torch's other uses of it
        assert linear.weight.to_local().shape == (2, 4)
    with stand_in_for_torch(plain_shards=True):
        theirs["by placements"], ours["by placements"] = theirs["distribute_tensor"], train(load_by_placements(whole_state()))
    assert [getattr(module, name) for module, name in names] + [_state_dict_utils._distribute_tensors] == own
    for way, (parameters, states, loss) in theirs.items():
        our_parameters, our_states, our_loss = ours[way]
        assert our_states["param_groups"] == states["param_groups"]
        found, expected = (our_parameters, our_states["state"], our_loss), (parameters, states["state"], loss)
        torch.testing.assert_close(found, expected, msg=lambda message, way=way: f"{way}: {message}")  # type: ignore[misc]


def test_names_of_earlier_imports_are_replaced_and_restored() -> None:
    """``from .. import x as y`` before the call; vescale_ray itself keeps torch's functions."""
    script = types.ModuleType("earlier_script")
    exec("from torch.distributed.fsdp import fully_shard, fully_shard as shard", script.__dict__)
    exec("from torch.distributed.tensor import distribute_tensor as cut", script.__dict__)
    before, kept = dict(script.__dict__), torch_state.torch_fully_shard
    with patch.dict(sys.modules, {"earlier_script": script}):
        with stand_in_for_torch():
            assert script.shard is script.fully_shard is vescale_ray.fully_shard and script.cut is vescale_ray.distribute_tensor
            assert torch_state.torch_fully_shard is kept
        assert script.__dict__ == before


def test_other_modules_are_not_asked_for_their_names() -> None:
    """A lazy module would load itself. A library of cffi would build all of its functions, and abort if two threads ask it."""

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} loads the module")

    class Library:
        __getattribute__ = Lazy.__getattribute__

    others: dict[str, Any] = {"a_lazy_module": Lazy("a_lazy_module"), "a_library": Library()}
    with patch.dict(sys.modules, others), stand_in_for_torch():
        assert torch.distributed.fsdp.fully_shard is vescale_ray.fully_shard


@on_processes(2)
def test_dim_of_a_ragged_placement_names_how_to_get_shards(rank: int, world: int) -> None:
    """The remedies of the error give placements that code for FSDP2 can read, such as peft's set_peft_model_state_dict."""
    ragged: Any = vescale_ray.fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"stand_in_for_torch\(plain_shards=True\), or .* shard_placement_fn=lambda param: Shard\(0\)"):
        ragged.weight.placements[0].dim  # noqa: B018
    chosen: Any = vescale_ray.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda param: torch_tensor.Shard(0))
    with stand_in_for_torch(plain_shards=True):
        stood_in: Any = torch_fsdp.fully_shard(nn.Linear(4, 4))
    assert chosen.weight.placements[0].dim == stood_in.weight.placements[0].dim == 0


@on_processes(3)
def test_torchs_local_shape_and_offset_are_those_of_ragged_rows(rank: int, world: int) -> None:
    from torch.distributed.tensor import _utils

    mesh, rows = init_device_mesh("cpu", (world,)), [vescale_ray.RaggedShard((0,), (2, 0, 3))]
    with stand_in_for_torch():
        found = _utils.compute_local_shape_and_global_offset((10, 4), mesh, rows)
        shape, nothing = _utils.compute_local_shape_and_global_offset((10, 4), mesh, rows, skip_offset=True)
        assert found == [((4, 4), (0, 0)), ((0, 4), (10, 0)), ((6, 4), (4, 0))][rank] and (shape, nothing) == (found[0], ())
        inner = [vescale_ray.RaggedShard((0, 1), (7, 1, 2))]
        with pytest.raises(ValueError, match=r"is not a box: use local_boxes\(\) .*, or stand_in_for_torch\(plain_shards=True\)"):
            _utils.compute_local_shape_and_global_offset((2, 5), mesh, inner)
        assert _utils.compute_local_shape_and_global_offset((6, 4), mesh, [torch_tensor.Shard(0)]) == ((2, 4), (2 * rank, 0))


@on_processes(2)
def test_torchs_setters_load_the_states_of_rank_0(rank: int, world: int) -> None:
    """Torch cuts whole tensors by placements, and knows no ragged ones: some ranks raised, and the others waited."""
    replicas = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    for mesh, on in ((None, "cpu"), (replicas, "cpu"), (None, "meta")):
        trained = filled(Tower(layers=3, width=6))
        with torch.device(on):
            loaded: Any = Tower(layers=3, width=6)
        shard_tower(loaded, vescale_ray.fully_shard, mesh=mesh)
        first = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for _ in range(2):
            trained(torch.ones(2, 6)).square().sum().backward()
            first.step()
        parameters, states = copy.deepcopy(get_state_dict(trained, first))  # torch loads a state's counter without a copy
        set_model_state_dict(loaded, parameters if rank == 0 else {}, options=FROM_RANK_0)
        second = torch.optim.AdamW(loaded.parameters(), lr=0.1)
        set_optimizer_state_dict(loaded, second, states if rank == 0 else {}, options=FROM_RANK_0)
        for model, optimizer in ((trained, first), (loaded, second)):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
        for name, param in loaded.named_parameters():
            torch.testing.assert_close(param.full_tensor(), trained.get_parameter(name), msg=name)


@on_processes(2)
def test_tensors_that_torch_makes_with_ragged_placements(rank: int, world: int) -> None:
    """Torch gives each rank the whole tensor, which broadcasts with a part of one row: the ranks then waited for different sizes."""
    mesh, rows = init_device_mesh("cpu", (world,)), [vescale_ray.RaggedShard((0,), (1, 3))]
    full = torch.arange(8.0).reshape(4, 2)
    x: Any = vescale_ray.distribute_tensor(full, mesh, rows)
    theirs: Any = torch_tensor.zeros(4, 2, device_mesh=mesh, placements=rows)
    for meeting in (lambda: x + theirs, lambda: theirs.add_(x), lambda: x.copy_(theirs), lambda: torch._foreach_lerp_([theirs], [x], 0.5)):
        with pytest.raises(ValueError, match=r"holds \(4, 2\) on this rank, whose part is \(., 2\): .* use torch\.zeros_like\(parameter\)"):
            meeting()
    part = DTensor.from_local(x.to_local(), mesh, rows, shape=x.shape, stride=x.stride())
    assert torch.equal((x + part).full_tensor(), full * 2)
    with pytest.raises(RuntimeError, match=r"use distribute_tensor or state_dict of vescale_ray, or call stand_in_for_torch\(\) first"):
        torch_tensor.distribute_tensor(full, mesh, rows)
    assert torch.equal(torch.zeros_like(x).add_(x).full_tensor(), full)  # the remedy
    with stand_in_for_torch():
        for make in (torch_tensor.zeros, torch_tensor.ones, torch_tensor.empty):
            made: Any = make(4, 2, device_mesh=mesh, placements=rows, requires_grad=True)
            assert type(made) is RaggedDTensor and made.requires_grad and made.to_local().shape == x.to_local().shape, make
        total = x + torch_tensor.full((4, 2), 3.0, device_mesh=mesh, placements=rows)
        assert torch.equal(total.full_tensor(), full + 3) and type(torch_tensor.zeros(2, device_mesh=mesh)) is DTensor
