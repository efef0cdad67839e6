"""Hooks, transforms, other composable functions and the state of a unit, which suites and tools for FSDP2 rely on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import vescale_ray.fsdp
from tests.fsdp.alike import Net, averaged, batch, sharded
from tests.fsdp.transformer import full
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray.fsdp import MixedPrecisionPolicy, fully_shard

# -- hooks, transforms, other composable functions -------------------------------------------------------------------------------


@on_processes(2)
def test_an_all_reduce_hook_runs_on_its_stream(rank: int, world: int) -> None:
    model, seen = fully_shard(nn.Linear(24, 24)), []
    stream = torch.cpu.Stream()
    model.set_all_reduce_hook(lambda flat: seen.append((torch.cpu.current_stream(), flat.numel() > 0)), stream=stream)
    model(batch(rank)).sum().backward()
    assert seen == [(stream, True)] and torch.cpu.current_stream() is not stream
    hybrid = fully_shard(nn.Linear(24, 24), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(ValueError, match="native HSDP"):
        hybrid.set_all_reduce_hook(lambda flat: None, stream=stream)


@on_processes(2)
def test_forward_mode_derivatives_are_those_of_a_plain_module(rank: int, world: int) -> None:
    plain, policy = Net(), MixedPrecisionPolicy(param_dtype=torch.float64)
    ours = sharded(copy.deepcopy(plain), mp_policy=policy, reshard_after_forward=False)
    plain = plain.double()
    x, direction = batch(rank).double(), batch(rank + 7).double()
    for _ in range(2):
        for model in (ours, ours.layers[0]):  # the very first forward is inside a transform
            alone = plain if model is ours else plain.layers[0]
            got, expected = (torch.func.jvp(m, (x,), (direction,)) for m in (model, alone))
            torch.testing.assert_close(got, expected)
    ours(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(full(q.grad), averaged(p.grad).float())


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_reverse_mode_derivatives_are_those_of_a_plain_module(rank: int, world: int, reshard: bool | None) -> None:
    plain = Net()
    ours = sharded(copy.deepcopy(plain), reshard_after_forward=reshard)

    def of_input(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(lambda x: model(x).square().sum())(x)
        return found

    for turn in range(2):
        got, expected = of_input(ours, batch(rank)), of_input(plain, batch(rank))
        torch.testing.assert_close(got, expected)
        assert turn or all(p.grad is None for p in ours.parameters())
        for found, model in ((got, ours), (expected, plain)):
            found.square().mean().backward()  # through the gradient, to the parameters
            model(batch(rank)).sum().backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(full(q.grad), averaged(p.grad))


@on_processes(2)
def test_fully_shard_and_torchs_replicate_leave_each_other_alone(rank: int, world: int) -> None:
    ours, alone = Net(), Net()
    replicate(ours.layers[0])
    fully_shard(ours.layers[1])
    fully_shard(ours)
    assert not isinstance(ours.layers[0].weight, DTensor) and isinstance(ours.layers[2].weight, DTensor)
    outer = Net()
    sharded_part = fully_shard(outer.layers[0])
    replicate(outer)  # leaves the sharded part alone
    for model in (ours, outer, alone):
        model(batch(rank)).square().sum().backward()
    for model in (ours, outer):
        for p, q in zip(alone.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(full(q.grad), averaged(p.grad))
    assert isinstance(sharded_part.weight, DTensor)


@on_threads(2)
def test_all_gather_hooks_added_after_fully_shard_raise(rank: int, world: int) -> None:
    model = fully_shard(nn.Linear(24, 24))
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = lambda *_: None
    with pytest.raises(RuntimeError, match="'weight' got all-gather hooks after fully_shard"):
        model(batch(rank))


@on_processes(2)
def test_setting_up_is_not_counted_as_a_part_of_the_first_step(rank: int, world: int) -> None:
    """By torch's own counter, the first step has the same collectives as later steps."""
    for how in (fully_shard, torch_fully_shard):
        model, counts = sharded(how=how), []
        for _ in range(2):
            with CommDebugMode() as mode:
                model(batch(rank)).sum().backward()
            counts.append(dict(mode.get_comm_counts()))
        assert counts[0] == counts[1]


# -- what code reads from the state of a unit --------------------------------------------------------------------------------------


def states(rank: int, world: int, how: Any) -> list[Any]:
    model: Any = Net()
    how([model.layers[1], model.layers[2]])
    how(model)
    root = how.state(model)
    before = root._is_root
    root._lazy_init()
    inner = how.state(model.layers[1])
    seen: list[Any] = [
        before,
        root._is_root,
        inner._is_root,
        inner is how.state(model.layers[2]),
        how.state(model.layers[0]),
        root is model._get_fsdp_state(),
        root._state_ctx.all_states == [root, inner],
        [g._module_fqn for g in (root._fsdp_param_group, inner._fsdp_param_group)],
        [sorted(p._param_fqn for p in g.fsdp_params) for g in (root._fsdp_param_group, inner._fsdp_param_group)],
    ]
    group = root._fsdp_param_group
    seen.append([(p._orig_size, p.orig_dtype, p._module_info.param_name, type(p._module_info.module).__name__) for p in group.fsdp_params])
    seen.append((group._reduce_dtype, group._reshard_after_forward, inner._fsdp_param_group._reshard_after_forward))
    seen.append(getattr(group, "_orig_dtype", torch.float32))  # torch 2.15 has none, because dtypes within a group may differ
    model.set_is_last_backward(False)
    seen.append((root._state_ctx.is_last_backward, root._modules_to_run_forward, inner._modules_to_run_forward))
    root._state_ctx.is_last_backward = True
    inner._states_to_backward_prefetch = [root]
    seen.append(inner._states_to_backward_prefetch == [root])
    inner._states_to_backward_prefetch = []  # an empty list; trainers disable prefetching this way
    seen.append(inner._states_to_backward_prefetch)
    model.layers[1].unshard()
    seen.append((inner._fsdp_param_group.is_unsharded, root._fsdp_param_group.is_unsharded))
    model.layers[2].reshard()
    seen.append(inner._fsdp_param_group.is_unsharded)
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got"):
        lonely = Net()
        how([lonely.layers[0], lonely.layers[1]])
        how.state(lonely.layers[0])._lazy_init()
    with pytest.raises(RuntimeError, match="already been lazily initialized for layers.0\nFSDP requires running forward through the root"):
        early = Net()
        how(early.layers[0])
        how(early)
        how.state(early.layers[0])._lazy_init()
        how.state(early)._lazy_init()
    return seen


def test_the_state_of_a_unit_reads_as_that_of_torch() -> None:
    ours, theirs = (run_threads(2, states, how)[0] for how in (fully_shard, torch_fully_shard))
    assert ours == theirs


class Turned(nn.Module):
    """Each unit's output is a view, which the next operation changes in place. FSDP2 warns of it, and its backward fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1.0
            x.mul_(0.5)
        return x


class Part(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).transpose(-1, -2)


@on_threads(2)
def test_outputs_that_are_views_may_be_changed_in_place(rank: int, world: int) -> None:
    ours, alone = sharded(Turned()), Turned()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    for model in (ours, alone):
        model(x).square().sum().backward()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(full(p.grad), averaged(q.grad))


@on_threads(2)
def test_state_dict_can_be_staged_for_asynchronous_checkpoints(rank: int, world: int) -> None:
    """torch's asynchronous checkpoints first copy state dicts this way."""
    model = sharded()
    state = model.state_dict()
    assert any(p.to_local().storage_offset() for p in state.values()), "parameters lie behind each other in one buffer"
    copied = StateDictStager().stage(state)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for name, tensor in Net().state_dict().items():
        torch.testing.assert_close(copied[name].full_tensor(), tensor)
        assert not state[name].full_tensor().any()


@pytest.mark.parametrize("how", [fully_shard, torch_fully_shard], ids=["ours", "torch's"])
@on_threads(2)
def test_first_forward_refuses_parameters_tied_across_units(rank: int, world: int, how: Any) -> None:
    """The first forward refuses modules in separate units that share a parameter, unless one has got its own parameter since."""

    def tied() -> Any:
        model = Net(layers=2)
        model.layers[1].weight = model.layers[0].weight
        return sharded(model, how)

    with pytest.raises(ValueError, match="layers.1.weight.* is shared with a parameter already managed by another FSDP group"):
        tied()(batch(rank))
    if how is fully_shard:
        model = tied()
        model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().clone())
        model(batch(rank)).sum().backward()
        assert model.layers[1].weight.grad is not None and model.layers[1].weight is not model.layers[0].weight
        for model in (tied(), sharded(Net(layers=2), how), how(Net(layers=2))):
            model.layers[1].weight = model.layers[0].weight  # like a tie_weights() after loading
            with pytest.raises(ValueError, match="'layers.1.weight' is shared .* it was tied to 'layers.0.weight' after fully_shard"):
                model(batch(rank))


class Again(nn.Module):
    """A model that calls its first unit twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Net(300).layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, between, last = self.layers
        return torch.tanh(last(torch.tanh(first(torch.tanh(between(torch.tanh(first(x))))))))


def steps_in_backward(rank: int, world: int, how: Any, reshard: bool) -> tuple[list[float], int]:
    model, calls = sharded(Again(), how, reshard_after_forward=reshard), 0

    @torch.no_grad()
    def step(p: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        assert p.grad is not None
        p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses = []
    for k in range(4):
        loss = model(batch(rank + 10 * k, 300)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, calls


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_in_backward_optimizer_steps_once_per_twice_called_unit(rank: int, world: int) -> None:
    for reshard in (True, False):
        theirs = steps_in_backward(rank, world, torch_fully_shard, reshard)
        assert theirs[1] == 4 * 6 and len(set(theirs[0])) == 4
        assert steps_in_backward(rank, world, fully_shard, reshard) == theirs


class OwnAllGather:
    """A user's collective that is never called."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *_: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("how", [fully_shard, torch_fully_shard], ids=["ours", "torch's"])
@on_threads(2)
def test_refusals_match_those_of_torch(rank: int, world: int, how: Any) -> None:
    """The exceptions raised, and the words that scripts look for."""
    flat, named = init_device_mesh("cpu", (2, 1)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    meta: Any = Net()
    with torch.device("meta"):
        meta.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
    done: Any = how(nn.Linear(4, 4))
    own: Any = how(nn.Linear(4, 4))
    own.set_custom_all_gather(OwnAllGather())
    flat1, dims, nowhere = init_device_mesh("cpu", (2,), mesh_dim_names=("s",)), DataParallelMeshDims("s"), DataParallelMeshDims("nowhere")
    names = vars(torch.distributed.fsdp if how is torch_fully_shard else vescale_ray.fsdp)

    def on(mesh: DeviceMesh, placement: Any) -> nn.Module:
        linear = nn.Linear(4, 4, bias=False)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [placement]))
        return linear

    cases: list[tuple[Any, type[BaseException], str]] = [
        (lambda: how(Net(), mesh=init_device_mesh("cpu", (2, 1, 1))), ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got"),
        (lambda: how(Net(), mesh=flat), AssertionError, "Please init the 2D mesh for HSDP with mesh_dim_names specified"),
        (lambda: how(Net(), mesh=named, shard_placement_fn=lambda p: Shard(p.dim())), AssertionError, "Shard dim"),
        (lambda: how(Net(25), shard_placement_fn=lambda p: Shard(p.dim() - 1)), NotImplementedError, "uneven sharding on dim 1"),
        (lambda: how(Net(), shard_placement_fn=lambda p: Replicate()), ValueError, "shard_placement_fn"),
        (lambda: how(done), AssertionError, "Each distinct composable distributed API can only be applied to a module once"),
        (lambda: how(Net().layers), ValueError, "does not support containers that do not implement forward"),
        (lambda: copy.deepcopy(done), AssertionError, "FSDP does not support deepcopy"),
        (lambda: sharded(meta, how)(torch.zeros(1, 24)), RuntimeError, "on meta device: ['layers.0.weight', 'layers.0.bias']"),
        (lambda: own.set_allocate_memory_from_process_group_for_comm(True), AssertionError, ""),
        (lambda: how(Net(), reshard_after_forward="no"), ValueError, "should be a bool or an int representing the group size"),
        (lambda: how(Net(), reshard_after_forward=3), ValueError, "If passing reshard_after_forward as an int, it should be a factor of 2"),
        (lambda: done.set_reshard_after_forward(2), ValueError, "reshard_after_forward should be a bool, got <class 'int'>"),
        (lambda: done.set_reduce_scatter_max_input_buffers("2"), TypeError, "max_input_buffers must be an int, got str"),
        (lambda: done.set_reduce_scatter_max_input_buffers(0), ValueError, "max_input_buffers must be a positive int, got 0"),
        (lambda: done.set_modules_to_forward_prefetch([nn.Linear(2, 2)]), ValueError, "Expects FSDPModule but got"),
        (lambda: names["share_comm_ctx"]([nn.Linear(2, 2)]), ValueError, "Expects list of FSDPModules but got"),
        (lambda: names["register_fsdp_forward_method"](done, "nope"), ValueError, "does not have a method"),
        (lambda: how(on(flat1, Shard(0)), mesh=flat1, dp_mesh_dims=dims), ValueError, "Expected Replicate() on"),
        (lambda: how(on(flat1, Replicate()), mesh=flat1, dp_mesh_dims=nowhere), ValueError, "not found in mesh.mesh_dim_names"),
        (lambda: how(nn.Linear(4, 4), mesh=flat1, dp_mesh_dims=dims), ValueError, "must be DTensors on the"),
        (lambda: how(Net(), mesh=init_device_mesh("cpu", (2,)), dp_mesh_dims=dims), ValueError, "mesh must have mesh_dim_names when"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind) as error:
            call()
        assert words in str(error.value), (words, str(error.value))
