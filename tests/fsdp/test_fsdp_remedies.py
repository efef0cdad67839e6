"""Refusals of single parameters, hooks and groups that come late, in the first forward or backward. Each remedy is followed."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

import vescale_ray
from tests.fsdp.test_fsdp_hooked import Plain, bare
from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import RaggedShard, fully_shard
from vescale_ray.fsdp import register_fsdp_forward_method, stand_in_for_torch


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def layers(width: int = 8) -> Any:
    return filled(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)), 1, 0.3)


def sharded(model: Any, **options: Any) -> Any:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def trains_as(ours: Any, alone: Any, x: torch.Tensor) -> None:
    """Compare the gradients of two steps, by name, since a parametrization moves its parameter to the end."""
    for _ in range(2):
        for model in (ours, alone):
            model.zero_grad()
            model(x).square().mean().backward()
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        found = {name: full(p.grad) for name, p in ours.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@on_threads(2)
def test_nested_parameter_may_be_ignored(rank: int, world: int, layout: torch.layout) -> None:
    def model() -> Any:
        made = layers()
        made.table = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout), requires_grad=False)
        return made

    ours = model()
    with pytest.raises(ValueError, match=r"'table' is a nested tensor.* leave it to every rank with ignored_params="):
        fully_shard(ours)
    trains_as(fully_shard(ours, ignored_params={ours.table}), model(), torch.ones(2, 8))


@on_threads(2)
def test_embedding_with_sparse_gradients_trains_with_dense_ones(rank: int, world: int) -> None:
    def model(sparse: bool) -> Any:
        return filled(nn.Sequential(nn.Embedding(6, 8, sparse=sparse), nn.Linear(8, 8)), 1, 0.3)

    wrong = sharded(model(True))
    with pytest.raises(RuntimeError, match=r"'0\.weight' has a sparse gradient: build the embedding with sparse=False"):
        wrong(torch.arange(4)).sum().backward()
    trains_as(sharded(model(False)), model(False), torch.arange(4))


class Added(nn.Module):
    def __init__(self, change: torch.Tensor) -> None:
        super().__init__()
        self.change = [change]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.change[0]


class Adapted(nn.Module):
    """A module that changes the weight of its base for each forward, as peft does for ``LoraConfig(target_parameters=..)``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = filled(nn.Linear(8, 8), 1, 0.3)
        self.base.weight.requires_grad_(False)
        self.change = nn.Parameter(torch.full((8, 8), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base, "weight", Added(self.change))
        try:
            out: torch.Tensor = self.base(x)
            return out
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


@on_threads(2)
def test_weight_parametrized_in_each_forward_may_be_ignored(rank: int, world: int) -> None:
    def model() -> Any:
        return nn.Sequential(Adapted(), filled(nn.Linear(8, 8), 2, 0.3))

    with pytest.raises(RuntimeError, match=r"written in place.*: 0\.base\.weight\. .* leave them to every rank with ignored_params"):
        sharded(model())(torch.ones(2, 8)).sum().backward()
    ours = model()
    trains_as(sharded(ours, ignored_params={ours[0].base.weight}), model(), torch.ones(2, 8))


class OtherArguments(Plain):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:  # type: ignore[override]
        return (self.data_inside,), None


class OtherRows(Plain):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.data_inside.new_zeros(1, 9),), None


REFUSED_HOOKS = [
    (OtherArguments, "fsdp_pre_all_gather of OtherArguments takes 2 arguments: it must take"),
    (OtherRows, "'0.weight' of shape .* is cut unevenly: fsdp_pre_all_gather must return tensors of this rank's [45] rows"),
]


@pytest.mark.parametrize(("kind", "words"), REFUSED_HOOKS)
@on_threads(2)
def test_a_gather_hook_that_can_not_be_used_is_named(rank: int, world: int, kind: type[Plain], words: str) -> None:
    alone, x = layers(9), torch.ones(2, 9)
    for one in (kind, Plain):  # the remedy: the hook takes the mesh, and returns this rank's rows
        ours = copy.deepcopy(alone)
        ours[0].weight = nn.Parameter(one(ours[0].weight.detach().clone()))
        sharded(ours)
        if one is kind:
            with pytest.raises(ValueError, match=words):
                ours(x)
    ours(x).square().mean().backward()
    alone(x).square().mean().backward()
    own = slice(0, 5) if rank == 0 else slice(5, 9)
    torch.testing.assert_close(bare(ours[0].weight.grad), alone[0].weight.grad[own])


@pytest.mark.parametrize("change", [lambda layer: layer.double(), lambda layer: layer.requires_grad_(False)], ids=["dtype", "frozen"])
@on_threads(2)
def test_all_reduce_hook_needs_a_unit_of_one_group(rank: int, world: int, change: Callable[[nn.Module], object]) -> None:
    def model() -> Any:
        made = layers()
        change(made[1])
        made[0].register_forward_hook(lambda module, args, out: out.to(made[1].bias.dtype))
        return made

    with pytest.raises(ValueError, match=r"has 2 groups .*Apply fully_shard to modules of one dtype and one requires_grad each"):
        fully_shard(model()).set_all_reduce_hook(lambda grad: None)
    ours, called = model(), list[int]()
    fully_shard(ours[1])
    fully_shard(ours).set_all_reduce_hook(lambda grad: called.append(grad.numel()))
    trains_as(ours, model(), torch.ones(2, 8))
    assert len(called) == 2


@on_threads(4)
def test_all_reduce_hook_of_replicas_takes_no_stream(rank: int, world: int) -> None:
    ours, alone = layers(), layers()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(ours, mesh=mesh)
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP: leave it out"):
        ours.set_all_reduce_hook(lambda grad: None, stream=object())
    ours.set_all_reduce_hook(lambda grad: grad.mul_(2))
    for model in (ours, alone):
        model(torch.ones(2, 8)).sum().backward()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad * 2)


def test_from_local_of_ragged_parts_takes_no_gradient_placements() -> None:
    def body(rank: int, world: int) -> None:
        mesh, home = init_device_mesh("cpu", (world,)), [RaggedShard((0,), (1, 2))]
        part = torch.arange(12.0).view(6, 2)[(0, 2)[rank] : (2, 6)[rank]]
        with pytest.raises(ValueError, match="takes no grad_placements: leave it out"):
            DTensor.from_local(part, mesh, home, grad_placements=[Shard(0)])
        assert torch.equal(DTensor.from_local(part, mesh, home).full_tensor(), torch.arange(12.0).view(6, 2))

    with stand_in_for_torch():  # once for all threads, since it changes the process
        run_threads(2, body)


@on_threads(2)
def test_parameter_of_another_shape_is_refused(rank: int, world: int) -> None:
    """The sentences of torch and of the ragged tensor name both shapes. The model still trains."""
    ours, alone = sharded(layers()), layers()
    with pytest.raises(
        ValueError, match=r"can't set \.data of parameter '0.weight' \(a ragged .* to a Tensor of shape \(3, 8\): give a DTensor of its"
    ):
        ours[0].weight.data = torch.zeros(3, 8)
    for assign in (True, False):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            ours.load_state_dict({**ours.state_dict(), "0.weight": torch.zeros(3, 8)}, assign=assign)
    ours[0].weight.data = ours[0].weight.data * 1.0
    trains_as(ours, alone, torch.ones(2, 8))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ScaledLayers(nn.Module):
    """Two layers, the second of which is scaled by what was added to ``extra``: parameters, or modules that use theirs."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.layers, self.extra = layers(), extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        for one in self.extra:  # type: ignore[attr-defined]
            x = one(x) if isinstance(one, nn.Module) else x * one
        return x


@on_threads(2)
def test_a_parameter_added_to_a_list_needs_a_forward(rank: int, world: int) -> None:
    ours, alone, x = ScaledLayers(nn.ParameterList()), ScaledLayers(nn.ModuleList([Scale()])), torch.ones(2, 8)
    sharded(ours.layers)
    fully_shard(ours)(x)
    ours.extra.append(nn.Parameter(torch.ones(8)))  # type: ignore[operator]
    with pytest.raises(ValueError, match="'extra.0' was added .* apply fully_shard to a module of its own whose forward uses it"):
        ours(x)
    ours.extra = nn.ModuleList([fully_shard(Scale())])
    trains_as(ours, alone, x)


@pytest.mark.parametrize("change", [lambda layer: parametrize.register_parametrization(layer, "weight", Scaled()), weight_norm])
@on_threads(2)
def test_a_weight_is_parametrized_before_it_is_sharded(rank: int, world: int, change: Callable[[Any], object]) -> None:
    late = sharded(layers())
    change(late[0])
    with pytest.raises(ValueError, match="'0.weight' was removed .* parametrize or prune it, before fully_shard"):
        late(torch.ones(2, 8))
    ours, alone = layers(), layers()
    change(ours[0])
    change(alone[0])
    trains_as(sharded(ours), alone, torch.ones(2, 8))


@on_threads(2)
def test_an_average_is_made_of_the_plain_model(rank: int, world: int) -> None:
    ours, alone = layers(), layers()
    with pytest.raises(AssertionError, match="an AveragedModel takes the plain module"):
        AveragedModel(sharded(layers()))
    averages = AveragedModel(ours), AveragedModel(alone)
    sharded(ours)
    sharded(averages[0].module)
    for average, model in zip(averages, (ours, alone), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    torch.testing.assert_close(averages[0](torch.ones(2, 8)), averages[1](torch.ones(2, 8)))


@pytest.mark.parametrize("kind", ["plain", "replicated"])
@on_threads(2)
def test_a_gradient_of_another_placement_is_named(rank: int, world: int, kind: str) -> None:
    ours, alone, x = sharded(layers()), layers(), torch.ones(2, 8)
    weight = ours[1].weight
    value = torch.ones(8, 8)
    weight.grad = value if kind == "plain" else DTensor.from_local(value, weight.device_mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"'1.weight' has a \w+ with .* as its gradient.*torch.zeros_like\(parameter\)"):
        ours(x).square().mean().backward()
    ours.reset_iter_state()
    ours.zero_grad()
    weight.grad = torch.zeros_like(weight)
    for model in (ours, alone):
        model(x).square().mean().backward()
    torch.testing.assert_close(full(weight.grad), alone[1].weight.grad)


@on_processes(2)
def test_a_penalty_on_gathered_parameters_is_named(rank: int, world: int) -> None:
    """The root's parameters are gathered between forward and backward, and those of other units are not."""
    ours, alone, x = sharded(layers()), layers(), torch.ones(2, 8)
    old = {name: p.detach() + 1 for name, p in ours.named_parameters()}
    loss = ours(x).square().mean()
    with pytest.raises(ValueError, match=r"the gathered parameter '1.weight' meets .* or with full_tensor\(\) of the other"):
        _ = ours[1].weight - old["1.weight"]
    before = {name: old[name] if isinstance(p, DTensor) else full(old[name]) for name, p in ours.named_parameters()}
    penalties = [(p - before[name]).square().sum() for name, p in ours.named_parameters()]
    (loss + sum(one.full_tensor() if isinstance(one, DTensor) else one for one in penalties)).backward()
    (alone(x).square().mean() + sum((p - p.detach() - 1).square().sum() for p in alone.parameters())).backward()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)
    ours.zero_grad()
    penalty: Any = sum((p - old[name]).square().sum() for name, p in ours.named_parameters())  # before the forward
    (ours(x).square().mean() + penalty.full_tensor()).backward()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)


@on_processes(2)
def test_plain_shards_of_another_rank_are_not_loaded(rank: int, world: int) -> None:
    ours = sharded(layers(), shard_placement_fn=lambda _: Shard(0))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, ours.state_dict())
    ours.load_state_dict(states[rank])
    with pytest.raises(ValueError, match=rf"the part that rank {1 - rank} on .* on rank {rank} of 2"):
        ours.load_state_dict(states[1 - rank])
    trains_as(ours, layers(), torch.ones(2, 8))


@on_threads(2)
def test_a_sharded_parameter_outside_its_forward_is_named(rank: int, world: int) -> None:
    ours, alone, x = sharded(layers()), layers(), torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"parameter '0.weight' is sharded"):
        _ = x @ ours[0].weight.t()
    ours(x).sum().backward()
    named = r"parameter '1.(weight|bias)' is sharded, since this is not the forward of its .* unshard\(\)"
    for use in (lambda: ours.forward(x), lambda: ours[1](x), lambda: x @ ours[1].weight.t(), lambda: x * ours[1].bias):
        with pytest.raises(ValueError, match=named):
            use()
    ours.unshard()
    torch.testing.assert_close(ours[1](x), alone[1](x))
    ours.reshard()
    ours.second = lambda x: ours[1](x)
    register_fsdp_forward_method(ours, "second")
    torch.testing.assert_close(ours.second(x), alone[1](x))
    ours.reshard()
    torch.testing.assert_close((distribute_like(x[:1], ours[1].bias) * ours[1].bias).full_tensor(), x[:1] * alone[1].bias)
    trains_as(ours, alone, x)


@on_threads(2)
def test_a_parametrization_is_removed_before_sharding(rank: int, world: int) -> None:
    def model() -> Any:
        made = layers()
        parametrize.register_parametrization(made[0], "weight", Scaled())
        return made

    wrong, right, alone = fully_shard(model()), model(), model()
    parametrize.remove_parametrizations(wrong[0], "weight")
    with pytest.raises(ValueError, match=r"'0.weight' was made of its parametrization after .* remove parametrizations before"):
        wrong(torch.ones(2, 8))
    for made in (right, alone):
        parametrize.remove_parametrizations(made[0], "weight")
    trains_as(fully_shard(right), alone, torch.ones(2, 8))


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@on_processes(lambda mesh_shape: math.prod(mesh_shape))
def test_whole_parameter_gets_the_mean_gradient_of_the_ranks(rank: int, world: int, mesh_shape: tuple[int, ...]) -> None:
    """Each rank computes with its own data, as the head of a loss does."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    ours, alone, x = sharded(layers(), mesh=mesh), layers(), torch.arange(8.0 * world).reshape(world, 8) / 64
    p, replicated = ours[1].weight, [Replicate()] * mesh.ndim
    for whole in (p.full_tensor, p.double().full_tensor, p.redistribute(placements=replicated).to_local):
        ours.zero_grad()
        alone.zero_grad()
        weight = whole()
        (ours(x[rank : rank + 1]).to(weight.dtype) @ weight.t()).square().mean().backward()
        (alone(x) @ alone[1].weight.t()).square().mean().backward()
        for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)


def distribute_like(whole: torch.Tensor, p: Any) -> Any:
    return vescale_ray.distribute_tensor(whole[0], p.device_mesh, p.placements).view(whole.shape)


@on_threads(1)
def test_a_buffer_in_the_memory_of_a_parameter_is_named(rank: int, world: int) -> None:
    model, x = layers(), torch.ones(2, 8)
    model[1].register_buffer("old", model[1].weight.data[2:])
    with pytest.warns(UserWarning, match=r"buffer '1.old' shared memory with parameter '1.weight' .* or give the buffer its own .*clone"):
        sharded(model)(x)
    for change in (lambda of: of.weight.data.clone(), lambda of: of.weight.requires_grad_(False).data):
        model = layers()
        model[1].register_buffer("old", change(model[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sharded(model)(x)
