"""Refusals of a sharded module's methods, each with its remedy, which then trains; of meshes and values; a call that fails late."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.fsdp import refusals
from tests.fsdp.refusals import WORLD, Case, Net, batch, each_layer, fill, half_frozen, names, snapshot, trains_as_plain
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import RaggedShard, fully_shard, register_fsdp_forward_method
from vescale_ray import distribute_tensor as distribute_ragged
from vescale_ray.fsdp import Sharding, explain, share_comm_ctx
from vescale_ray.fsdp.layouts.phases import PhaseError
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.state_dict import StateDictOptions, get_model_state_dict


class Scaled(nn.Module):
    """A forward hook that multiplies an output by a parameter, which stays 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.scale


def building_fails_late(rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale_ray.fsdp.groups import group

    built = []
    original = group.ParameterGroup._new_master

    def second_fails(self: Any, device: torch.device) -> Any:
        built.append(self)
        if len(built) > 1:
            raise MemoryError("no memory for the second group")
        return original(self, device)

    model = fill(half_frozen())
    before = snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr(group.ParameterGroup, "_new_master", second_fails)
        with pytest.raises(MemoryError):
            fully_shard(model)
    assert snapshot(model) == before
    trains_as_plain(rank, fully_shard(model), fill(half_frozen()))


def test_a_call_that_runs_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank only, because the patch applies to the whole process."""
    monkeypatch.setattr(refusals, "WORLD", 1)
    run_threads(1, building_fails_late, monkeypatch)


# -- calls on what is sharded already -------------------------------------------------------------------------------------


def units() -> Any:
    return each_layer(fill(Net()))


def running_units() -> Any:
    model = units()
    model(batch(0, 0))
    model.reshard()
    return model


def one_unit() -> Any:
    return fully_shard(fill(Net()))


def ignore(model: Any) -> Any:
    return model


def hooked(module: Callable[[Any], nn.Module], act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A forward in which a hook calls ``act`` after a module."""

    def wrong(model: Any) -> None:
        handle = module(model).register_forward_hook(lambda *_: act(model) and None)
        try:
            model(batch(0, 0))
        finally:
            handle.remove()
            model.reset_iter_state()

    return wrong


def read_after_backward(model: Any) -> torch.Tensor:
    """Take a parameter between forward and backward, and read it after the backward."""
    loss = model(batch(0, 0)).sum()
    taken = next(model.parameters())
    loss.backward()
    model.zero_grad()
    return taken.detach().clone()


class Gather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def after(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def right(model: Any) -> Any:
        act(model)
        return model

    return right


def other_root(model: Any) -> None:
    other = fully_shard(Net())
    model.set_modules_to_forward_prefetch([other])
    try:
        model(batch(0, 0))
    finally:
        model.reset_iter_state()


def rebuilt(model: Any) -> Any:
    """A new module that loads the state of ``model``."""
    copy = Net()
    fully_shard(copy)
    copy.load_state_dict(model.state_dict())
    return copy


FLAGS = {
    "set_is_last_backward": "is_last_backward",
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_ordered_reduction": "ordered",
    "set_contributes": "contributes",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_separate_reduce_scatter_group": "enable",
    "set_force_sum_reduction_for_comms": "enable",
    "set_allocate_memory_from_process_group_for_comm": "enable",
}


def switch(method: str, flag: str) -> Case:
    """The mistake of passing a string to a switch. Two switches can't be on here, without replicas or a back end for the CPU."""
    off = method in ("set_ordered_reduction", "set_allocate_memory_from_process_group_for_comm")
    return Case(
        lambda m: getattr(m, method)("no"),
        TypeError,
        (f"{flag} = 'no'", "True or False"),
        after(lambda m: getattr(m, method)(not off)),
        one_unit,
    )


METHODS: dict[str, Case] = {
    "a layer twice": Case(
        lambda m: fully_shard(m.layers[1]), ValueError, ("applied to this Linear 'layers.1' already", "leave out"), ignore, running_units
    ),
    "twice": Case(fully_shard, ValueError, ("only be applied to a module once", "this Net", "leave out the second call"), ignore, one_unit),
    "root first": Case(
        lambda m: fully_shard(m.layers[0]),
        ValueError,
        ("'weight' is sharded already", "this Linear", "inner modules first"),
        lambda m: units(),
        one_unit,
    ),
    "a layer after a forward with gradients": Case(
        lambda m: (m(batch(0, 0)).sum().backward(), m.zero_grad(), fully_shard(m.layers[0])),
        ValueError,
        ("'weight' is sharded already",),
        ignore,
        one_unit,
    ),
    "functional_call first": Case(
        lambda m: torch.func.functional_call(m, {name: p * 0.5 for name, p in m.named_parameters()}, (batch(0, 0),)),
        ValueError,
        ("was replaced in its module", "functional_call"),
        ignore,
        units,
    ),
    "prefetch: one module": Case(
        lambda m: m.set_modules_to_forward_prefetch(m.layers[0]),
        TypeError,
        ("set_modules_to_forward_prefetch got a Linear", "a list"),
        after(lambda m: m.set_modules_to_forward_prefetch([m.layers[0]])),
        units,
    ),
    "prefetch: None": Case(
        lambda m: m.set_modules_to_backward_prefetch(None),
        TypeError,
        ("set_modules_to_backward_prefetch got None", "a list"),
        after(lambda m: m.set_modules_to_backward_prefetch([])),
        units,
    ),
    "prefetch: not sharded": Case(
        lambda m: m.set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
        ValueError,
        ("Expects FSDPModule but got Linear",),
        after(lambda m: m.set_modules_to_forward_prefetch([m.layers[1]])),
        units,
    ),
    "prefetch: of another root": Case(
        other_root,
        RuntimeError,
        ("belongs to another root module", "leave it out"),
        after(lambda m: m.set_modules_to_forward_prefetch([])),
        units,
    ),
    "divide by nothing": Case(
        lambda m: m.set_gradient_divide_factor(0),
        ValueError,
        ("factor is 0", "other than 0"),
        after(lambda m: m.set_gradient_divide_factor(2)),
        one_unit,
    ),
    "divide by a string": Case(
        lambda m: m.set_gradient_divide_factor("2"),
        ValueError,
        ("factor is '2'",),
        after(lambda m: m.set_gradient_divide_factor(2.0)),
        one_unit,
    ),
    "divide by NaN": Case(lambda m: m.set_gradient_divide_factor(float("nan")), ValueError, ("factor is nan",), ignore, one_unit),
    "all-reduce hook: a string": Case(
        lambda m: m.set_all_reduce_hook("mean"),
        TypeError,
        ("hook = 'mean'", "a function"),
        after(lambda m: m.set_all_reduce_hook(lambda grad: None)),
        one_unit,
    ),
    "all-gather: a function": Case(
        lambda m: m.set_custom_all_gather(lambda *_: None),
        TypeError,
        ("all-gather", "has no allocate()"),
        after(lambda m: m.set_custom_all_gather(Gather())),
        one_unit,
    ),
    "all-gather: a string": Case(
        lambda m: m.set_custom_all_gather("nccl"),
        TypeError,
        ("'nccl'", "None for the usual one"),
        after(lambda m: m.set_custom_all_gather(None)),
        one_unit,
    ),
    "symmetric memory on the CPU": Case(lambda m: m.set_symm_mem_for_comm(), ValueError, ("on cpu", "leave it out"), ignore, one_unit),
    "allocator beside a collective of one's own": Case(
        lambda m: (m.set_custom_all_gather(Gather()), m.set_allocate_memory_from_process_group_for_comm(True)),
        ValueError,
        ("a Gather as a custom collective", "None"),
        after(lambda m: (m.set_custom_all_gather(None), m.set_allocate_memory_from_process_group_for_comm(False))),
        one_unit,
    ),
    "reset on a layer": Case(
        lambda m: (m(batch(0, 0)), m.layers[0].reset_iter_state()),
        RuntimeError,
        ("'layers.0'", "outermost"),
        after(lambda m: m.reset_iter_state()),
        units,
    ),
    "pickle": Case(pickle.dumps, TypeError, ("a sharded Net", "state_dict()"), rebuilt, one_unit),
    "share_comm_ctx: one module": Case(
        share_comm_ctx, TypeError, ("share_comm_ctx got a Net", "a list"), after(lambda m: share_comm_ctx([m])), one_unit
    ),
    "share_comm_ctx: not sharded": Case(
        lambda m: share_comm_ctx([nn.Linear(2, 2)]), ValueError, ("got Linear", "apply fully_shard"), ignore, one_unit
    ),
    "forward method: none": Case(
        lambda m: register_fsdp_forward_method(m, "encode"), ValueError, ("Net does not have a method 'encode'",), ignore, one_unit
    ),
    "forward method: a module": Case(
        lambda m: register_fsdp_forward_method(m, "head"),
        ValueError,
        ("Net does not have a method 'head'",),
        after(lambda m: register_fsdp_forward_method(m, "forward")),
        one_unit,
    ),
    "explain: a list": Case(lambda m: explain([m]), TypeError, ("module must be a Module", "the model itself"), after(explain), one_unit),  # type: ignore[arg-type]
    "explain: not sharded": Case(lambda m: explain(nn.Linear(2, 2)), ValueError, ("Linear is not sharded",), after(explain), one_unit),
    "state dict in forward": Case(
        hooked(lambda m: m.head, lambda m: m.state_dict()),
        PhaseError,
        ("'(root)' is in phase forward", "between steps"),
        after(lambda m: m.state_dict()),
        one_unit,
    ),
    "load in forward": Case(
        hooked(lambda m: m.layers[0], lambda m: m.load_state_dict(Net().state_dict())),
        PhaseError,
        ("can't be loaded in the middle of a step", "between steps"),
        after(lambda m: m.load_state_dict(fill(Net()).state_dict())),
        units,
    ),
    "cast in forward": Case(
        hooked(lambda m: m.head, lambda m: m.float()),
        PhaseError,
        ("'(root)' is in phase forward", "between steps"),
        after(lambda m: m.double()),
        one_unit,
    ),
    "a layer's forward before the root's": Case(
        lambda m: (m.layers[0](batch(0, 0)), m(batch(0, 0))),
        RuntimeError,
        ("initialized for layers.0", "through the root module first"),
        lambda m: after(lambda m: (m(batch(0, 0)), m.layers[0](batch(0, 0)), m.reset_iter_state()))(units()),
        units,
    ),
    "a parameter taken in the middle of a step": Case(
        lambda m: read_after_backward(m),
        RuntimeError,
        ("of unit 'the root' (", "taken from the module in the middle of a step", "take parameters after backward"),
        after(lambda m: (m(batch(0, 0)).sum().backward(), next(m.parameters()).detach().clone(), m.zero_grad())),
        one_unit,
    ),
    "a backward after unshard alone": Case(
        lambda m: (m.unshard(), m.forward(batch(0, 0)).sum().backward()),
        RuntimeError,
        ("a backward reached parameters of 'Net' after unshard()", "call the model itself", "register_fsdp_forward_method(model, name)"),
        after(lambda m: m.reshard()),
        one_unit,
    ),
    "a parameter added beside sharded ones": Case(
        lambda m: (m.register_parameter("late", nn.Parameter(torch.ones(4))), m(batch(0, 0))),
        ValueError,
        ("'late' was added", "apply fully_shard to a module of its own whose forward uses it"),
        after(lambda m: (delattr(m, "late"), m.head.register_forward_hook(fully_shard(Scaled())))),
        one_unit,
    ),
    **{f"{method}: a string": switch(method, flag) for method, flag in FLAGS.items()},
}


@pytest.mark.parametrize("what", METHODS)
@on_threads(WORLD)
def test_a_sharded_module_refuses_and_the_remedy_trains(rank: int, world: int, what: str) -> None:
    case = METHODS[what]
    model = case.build()
    with pytest.raises(case.kind) as error:
        case.wrong(model)
    said = str(error.value)
    assert all(word in said for word in case.words), (case.words, said)
    trains_as_plain(rank, case.right(model), fill(Net()))


@on_threads(WORLD)
def test_another_method_trains_after_one_call_of_the_root(rank: int, world: int) -> None:
    """After one call of the root, a backward through gathered parameters ends as usual, whichever method has used them."""
    model = one_unit()
    model(batch(0, 0))
    model.unshard()
    model.forward(batch(rank, 0)).sum().backward()
    plain = fill(Net())
    for r in range(world):
        (plain(batch(r, 0)).sum() / world).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@on_threads(1)
def test_export_of_a_sharded_model_is_refused(rank: int, world: int) -> None:
    """The remedy works: the plain model with the whole state dict is exported and traced."""
    for model in (one_unit(), running_units()):
        with pytest.raises(RuntimeError, match=r"torch\.export of a sharded model .*full_state_dict=True"):
            torch.export.export(model, (batch(0, 0),))
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace of a sharded model .*full_state_dict=True"):
            torch.jit.trace(model, batch(0, 0), check_trace=False)
        with pytest.raises(RuntimeError, match=r"torch\.jit\.script of a sharded model .*full_state_dict=True"):
            torch.jit.script(model)
        plain = Net()
        plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        torch.testing.assert_close(torch.export.export(plain, (batch(0, 0),)).module()(batch(0, 0)), model(batch(0, 0)))


@on_threads(WORLD)
def test_a_mesh_without_this_process_is_refused(rank: int, world: int) -> None:
    model, mesh = fill(Net()), DeviceMesh("cpu", [0])
    if rank == 0:
        plain = fill(Net())
        fully_shard(model, mesh=mesh)
        torch.testing.assert_close(model(batch(0, 0)), plain(batch(0, 0)))
        return
    before = snapshot(model)
    with pytest.raises(ValueError, match="this process is not part of"):
        fully_shard(model, mesh=mesh)
    assert snapshot(model) == before


@on_processes(WORLD)
def test_a_mesh_whose_groups_are_gone_is_refused(rank: int, world: int) -> None:
    model, plain = fill(Net()), fill(Net())
    before, group = snapshot(model), dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"has no process groups \(.*\): make the mesh anew") as error:
        fully_shard(model, mesh=mesh)
    assert snapshot(model) == before and "\n" not in str(error.value)
    trains_as_plain(rank, fully_shard(model, mesh=init_device_mesh("cpu", (world,))), plain)


@on_threads(WORLD)
def test_a_pending_parameter_is_refused(rank: int, world: int) -> None:
    mesh = names("dp", "tp")
    model = fill(Net())
    model.head.weight = nn.Parameter(DTensor.from_local(model.head.weight.detach(), mesh["tp"], [Partial()]))
    with pytest.raises(ValueError, match=r"'head\.weight' has placement P.*redistribute it first"):
        fully_shard(model, mesh=mesh["dp"])
    model.head.weight = nn.Parameter(model.head.weight.detach().redistribute(placements=[Replicate()]))
    fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize("value", [None, 1, (0,)])
def test_sharding_dimensions_must_be_given_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Sharding\(parameters=.*: give the name of a mesh dimension"):
        Sharding(value)
    assert Sharding("a", ["a"], ("a", "b")).gradients == ("a",)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradients are sharded over 'shard' but optimizer are not"):
        Sharding((), "shard", ())


@pytest.mark.parametrize("yes", [True, 1, torch.tensor(True)])
def test_switch_accepts_any_true_or_false_value(yes: Any) -> None:
    def body(rank: int, world: int) -> None:
        model = one_unit()
        model.set_requires_gradient_sync(not yes)
        model.set_requires_gradient_sync(yes)
        trains_as_plain(rank, model, fill(Net()))

    run_threads(WORLD, body)


@on_threads(WORLD)
def test_a_source_that_is_no_rank_is_refused(rank: int, world: int) -> None:
    mesh, full = names("dp"), torch.arange(4.0)
    for source in (WORLD, -1):
        with pytest.raises(ValueError, match=f"src_data_rank = {source}: give a rank below 2, or None"):
            distribute_ragged(full, mesh, [RaggedShard((0,), (1, 1))], src_data_rank=source)
    for right in (1, None):
        assert torch.equal(distribute_ragged(full, mesh, [RaggedShard((0,), (1, 1))], src_data_rank=right).full_tensor(), full)


def test_a_plan_takes_specs_and_whole_numbers() -> None:
    spec = TensorSpec("a", (64, 4), Block.rows(2), torch.float32)
    with pytest.raises(TypeError, match="plan_layout got a str in specs"):
        plan_layout(["a"], WORLD)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"num_shards is 1\.5: give the number of ranks"):
        plan_layout([spec], 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a block of '2' rows or columns: give a whole number"):
        Block.rows("2")  # type: ignore[arg-type]
    assert plan_layout([spec], WORLD).shard_numel == 128
