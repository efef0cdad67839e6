"""Behaviour beyond training that suites and tools for FSDP2 rely on, found by running torch's own FSDP2 tests on our fully_shard."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.fsdp.alike import Net, averaged, batch, sharded
from tests.fsdp.transformer import full
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads
from vescale_ray.fsdp import FSDPModule, PhaseError, fully_shard, share_comm_ctx

# -- a mesh of its own for some parameters -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each rank multiplies its own rows by all experts. Expert parallelism keeps a part of the experts on this rank."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.dense = nn.Parameter(torch.randn(8, 8, generator=generator))
        experts = torch.randn(4, 8, 8, generator=generator)
        self.experts = nn.Parameter(experts if mesh is None else distribute_tensor(experts, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stack = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return torch.einsum("bi,eij->bej", x @ self.dense, stack).square().sum()


def expert_meshes(replicas: int) -> tuple[DeviceMesh, DeviceMesh, Any, Any]:
    """The dense mesh, the mesh of expert parallelism, and torch's mesh infos of dense parameters and of experts."""
    if replicas == 1:
        dense = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))._unflatten(0, (4,), ("dp",))["dp"]
        sparse = dense._unflatten(0, (2, 2), ("efsdp", "ep"))
        return dense, sparse["ep"], FSDPMeshInfo(dense, shard_mesh_dim=0), FSDPMeshInfo(sparse["efsdp"], shard_mesh_dim=0)
    dense = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    sparse = dense._unflatten(1, (2, 2), ("efsdp", "ep"))
    experts = HSDPMeshInfo(sparse["replicate", "efsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    return dense, sparse["ep"], HSDPMeshInfo(dense, shard_mesh_dim=1, replicate_mesh_dim=0), experts


@pytest.mark.parametrize(("world", "replicas"), [(4, 1), (8, 2)])
@on_threads()
def test_one_unit_may_shard_parameters_over_different_ranks(rank: int, world: int, replicas: int) -> None:
    dense, ep, of_dense, of_experts = expert_meshes(replicas)
    built = {}
    for how in (fully_shard, torch_fully_shard):
        model = Experts(ep)
        mine = model.experts

        def place(param: nn.Parameter, mine: Any = mine) -> ShardPlacementResult:
            return ShardPlacementResult(Shard(0), of_experts if param is mine else of_dense)

        built[how] = how(model, mesh=dense, shard_placement_fn=place)
        for step in range(2):
            model(batch(rank + world * step, 8)).backward()
    ours, theirs = built[fully_shard], built[torch_fully_shard]
    assert len(unit_of(ours).groups) == 2
    for name, p in theirs.named_parameters():
        mine = ours.get_parameter(name)
        torch.testing.assert_close(full(mine), full(p))
        torch.testing.assert_close(full(mine.grad), full(p.grad), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_plainly_placed_state_dict_saves_copies_and_stages(rank: int, world: int) -> None:
    ours = sharded(shard_placement_fn=lambda param: Shard(0))
    ours(batch(rank)).sum().backward()
    values = {name: full(p).detach() for name, p in ours.named_parameters()}
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    ways = {
        "saved": torch.load(buffer, weights_only=True),
        "copied": copy.deepcopy(ours.state_dict()),
        "staged": StateDictStager().stage(ours.state_dict()),
        "got": get_model_state_dict(ours),
    }
    for what, state in ways.items():
        assert state.keys() == values.keys()
        for name, value in state.items():
            assert type(value) is DTensor and value.placements == (Shard(0),), (what, name)
            assert torch.equal(value.full_tensor(), values[name]), (what, name)
    # The state dict holds the shards themselves.
    with torch.no_grad():
        for value in ours.state_dict().values():
            value.to_local().mul_(2)
    assert all(torch.equal(full(p), 2 * values[name]) for name, p in ours.named_parameters())
    whole: dict[str, Any] = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(ours, {name: value / 2 for name, value in whole.items()}, options=StateDictOptions(full_state_dict=True))
    ours.load_state_dict(ways["saved"])
    assert all(torch.equal(full(p), values[name]) for name, p in ours.named_parameters())
    ours(batch(rank)).sum().backward()


@on_threads(4)
def test_meshes_that_do_not_fit_are_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    turned = HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
    with pytest.raises(ValueError, match=r"the mesh must be \(shard,\) or \(replicate, shard\)"):
        fully_shard(Net(), mesh=mesh, shard_placement_fn=lambda p: ShardPlacementResult(None, turned))
    small = FSDPMeshInfo(mesh["b"], shard_mesh_dim=0)
    with pytest.raises(ValueError, match="should be a factor of 2, not"):
        here = ShardPlacementResult(None, small)
        fully_shard(Net(), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=4, shard_placement_fn=lambda p: here)


# -- second derivatives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_a_gradient_penalty_is_that_of_a_plain_module(rank: int, world: int, options: dict[str, Any]) -> None:
    """The gradient of |d loss / d input|, against a plain module. torch's own fully_shard can't compute it."""
    ours, alone = sharded(Net(272, 2), **options), Net(272, 2)
    for _ in range(2):  # the second step finds no leftovers of the first
        for model in (ours, alone):
            model.zero_grad()
            x = batch(rank, 272).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            assert all(isinstance(p, DTensor) for p in ours.parameters())
            slope.norm().backward()
        for (name, p), q in zip(alone.named_parameters(), ours.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(full(q.grad), averaged(p.grad), rtol=1e-4, atol=1e-5, msg=name)
    pool = unit_of(ours).lanes.pool
    assert not options.get("reshard_after_forward", True) or sum(gathered for gathered, _ in pool.count().values()) == 0


@pytest.mark.parametrize("between", ["forward", "forward and backward", "evaluation", "two penalties"])
@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_a_gradient_penalty_may_wait_for_other_passes(rank: int, world: int, between: str) -> None:
    """Between the first gradient and the second, the same units run again and reshard."""
    ours, alone = sharded(Net(272, 2)), Net(272, 2)
    for model in (ours, alone):
        x, other = batch(rank, 272).requires_grad_(), 0.5 * batch(rank, 272)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = slope.norm()
        if between == "forward":
            loss = loss + model(other).square().mean()
        elif between == "forward and backward":
            model(other).square().mean().backward()
        elif between == "evaluation":
            with torch.no_grad():
                model(other)
        else:
            (second,) = torch.autograd.grad(model(x * 2).sin().sum(), x, create_graph=True)
            loss = loss + second.norm()
        loss.backward()
    for (name, p), q in zip(alone.named_parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(full(q.grad), averaged(p.grad), rtol=1e-4, atol=1e-5, msg=name)
    assert sum(gathered for gathered, _ in unit_of(ours).lanes.pool.count().values()) == 0


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_create_graph_gradients_carry_no_graph_as_with_torch(rank: int, world: int) -> None:
    built = {how: sharded(how=how) for how in (fully_shard, torch_fully_shard)}
    for model in built.values():
        model(batch(rank)).square().sum().backward(create_graph=True)
    for p, q in zip(built[fully_shard].parameters(), built[torch_fully_shard].parameters(), strict=True):
        assert isinstance(p, DTensor) and p.grad is not None and not p.grad.requires_grad
        torch.testing.assert_close(full(p.grad), full(q.grad))


# -- loading in the middle of a step ---------------------------------------------------------------------------------------------


@on_threads(2)
def test_a_state_dict_is_loaded_between_steps_only(rank: int, world: int) -> None:
    model = sharded()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    handle = model.layers[1].register_forward_hook(lambda *_: model.load_state_dict(state))
    with pytest.raises(PhaseError, match="its state can't be loaded in the middle of a step"):
        model(batch(rank))
    handle.remove()
    model.reset_iter_state()
    loss = model(batch(rank)).sum()
    model.load_state_dict(state)
    with pytest.raises(PhaseError, match="a state dict was loaded into it since the forward"):
        loss.backward()
    model.reset_iter_state()
    model(batch(rank)).sum().backward()
    model.load_state_dict(state)
    model(batch(rank)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- several roots ---------------------------------------------------------------------------------------------------------------


@on_processes(2)
def test_pool_counts_are_right_after_one_of_several_roots_goes(rank: int, world: int) -> None:
    stages: list[Any] = [sharded(Net(272, 2)) for _ in range(3)]
    stages[0](batch(rank, 272)).sum().backward()  # this stage has a schedule already
    share_comm_ctx(stages)
    units = [unit_of(m) for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
    assert len({id(unit.lanes) for unit in units if unit.lanes is not None}) == 1
    del units
    pool = unit_of(stages[0]).lanes.pool
    for _ in range(2):
        for stage in stages:
            stage(batch(rank, 272)).sum().backward()
    group = unit_of(stages[0].layers[0]).groups[0]
    size = group.gathered.nbytes - (group.gathered.stays[1] - group.gathered.stays[0])
    del group
    stages[1].layers[0].unshard()
    loss = stages[2](batch(rank, 272)).sum()
    assert pool.count()[size][0] >= 1
    with pytest.raises(PhaseError, match="in the middle of a step"):
        handle = stages[0].layers[0].register_forward_hook(lambda *_: share_comm_ctx(stages[:1]))
        stages[0](batch(rank, 272))
    handle.remove()
    loss.backward()
    del stages[1], loss  # one root with gathered parameters
    for stage in stages:
        stage(batch(rank, 272)).sum().backward()
    assert pool.count()[size] == (0, 0), "what is left uses nothing between steps, and nothing is counted for those that are gone"
    stages.clear()
    assert pool.bytes_held() == 0


@on_threads(2)
def test_flags_may_be_set_before_the_first_forward(rank: int, world: int) -> None:
    """Setting a flag on an inner unit does not make that unit a root."""
    model = sharded()
    model.layers[0].set_is_last_backward(True)
    model.layers[0].set_post_optim_event(None)
    model.set_is_last_backward(False)
    model(batch(rank)).sum().backward()
    assert unit_of(model).is_root and not unit_of(model).schedule.ending.is_last
