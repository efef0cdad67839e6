"""Each refusal of fully_shard and of its modules' methods: the user's mistake, the exception, and the remedy, which then trains.

A refused ``fully_shard`` leaves the model as it was: classes, parameters (objects and values), buffers, hooks and attributes.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import RaggedShard, fully_shard, register_fsdp_forward_method
from vescale_ray import distribute_tensor as distribute_ragged
from vescale_ray.fsdp import Sharding, explain, share_comm_ctx
from vescale_ray.fsdp.layouts.phases import PhaseError
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.state_dict import StateDictOptions, get_model_state_dict

WIDTH, WORLD = 8, 2


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(4))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x) * self.scale


class Scaled(nn.Module):
    """A forward hook that multiplies an output by a parameter, which stays 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.scale


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.double()


def half_on_meta() -> Net:
    model = Net()
    model.head.to("meta")
    return model


def half_frozen() -> Net:
    model = Net()
    model.head.requires_grad_(False)
    return model


def with_frozen(value: Callable[[], torch.Tensor]) -> Callable[[], Net]:
    """A model with an additional frozen parameter of another kind."""

    def build() -> Net:
        model = Net()
        model.table = nn.Parameter(value(), requires_grad=False)
        return model

    return build


def placed(mesh: Callable[[], DeviceMesh], placement: Any) -> Callable[[], Net]:
    """A model whose head is already a DTensor."""

    def build() -> Net:
        model = fill(Net())
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh(), [placement]))
        return model

    return build


def fill(model: Any) -> Any:
    """Fill the model without random numbers, because threads share the generator."""
    with torch.no_grad():
        dense = [p for p in model.parameters() if not isinstance(p, nn.UninitializedParameter) and p.layout is torch.strided]
        for index, param in enumerate(p for p in dense if p.is_floating_point()):
            if not param.is_meta and not isinstance(param, DTensor):
                param.copy_(torch.arange(param.numel()).add(index).sin().view(param.shape) / 2)
    return model


def batch(rank: int, step: int, width: int = WIDTH) -> torch.Tensor:
    return torch.arange(3 * width, dtype=torch.float64).add(7 * rank + 3 * step).cos().view(3, width)


def trains_as_plain(rank: int, model: Any, plain: Any, width: int = WIDTH) -> None:
    """Check that two steps of ``model`` on this rank's batches equal two steps of ``plain`` on all batches."""
    trained = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    for step in range(2):
        for optimizer in trained:
            optimizer.zero_grad()
        model(batch(rank, step, width)).square().mean().backward()
        (sum(plain(batch(one, step, width)).square().mean() for one in range(WORLD)) / WORLD).backward()
        for optimizer in trained:
            optimizer.step()
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            full = param.full_tensor() if isinstance(param, DTensor) else param
            torch.testing.assert_close(full, expected[name], rtol=0, atol=1e-12, msg=name)


def snapshot(model: nn.Module) -> dict[Any, Any]:
    """All properties of the model that ``fully_shard`` changes."""
    seen: dict[Any, Any] = {}
    for name, module in model.named_modules():
        seen[name, "class"] = type(module)
        seen[name, "attributes"] = sorted(module.__dict__)
        seen[name, "hooks"] = {
            k: [*map(id, v.values())] for k, v in module.__dict__.items() if k.endswith("_hooks") and isinstance(v, dict)
        }
        seen[name, "buffers"] = {k: id(v) for k, v in module._buffers.items()}
        seen[name, "parameters"] = {k: (id(v), v._version, sorted(v.__dict__)) for k, v in module._parameters.items() if v is not None}
    return seen


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    known = {k: v for k, v in model.named_parameters() if not isinstance(v, DTensor | nn.UninitializedParameter) and not v.is_meta}
    return {k: v.detach().clone() for k, v in known.items() if v.layout is torch.strided and not v.is_quantized}


@dataclass
class Case:
    """A user's mistake (``wrong``), its exception, and the remedy that the message names (``right``), applied to the same model."""

    wrong: Callable[[Any], Any]
    kind: type[BaseException]
    words: tuple[str, ...]
    right: Callable[[Any], Any] = fully_shard
    build: Callable[[], Any] = Net
    plain: Callable[[], Any] = Net
    width: int = WIDTH


NAMED_DTYPE = MixedPrecisionPolicy(param_dtype="float64")  # type: ignore[arg-type]


def names(*names_: str) -> DeviceMesh:
    shape = (1,) * (len(names_) - 1) + (WORLD,)
    return init_device_mesh("cpu", shape, mesh_dim_names=names_)


def unnamed() -> DeviceMesh:
    return init_device_mesh("cpu", (1, WORLD))


NOTHING = object()


def argument(kind: type[BaseException], *words: str, right: Any = NOTHING, build: Callable[[], Any] = Net, **wrong: Any) -> Case:
    """A call with other keyword arguments. Values marked lazy are made on the ranks.

    ``right`` has the arguments of the remedy, or the right value of the one that is wrong. Without it, the remedy has no arguments.
    """
    remedy = {} if right is NOTHING else right if isinstance(right, dict) else dict.fromkeys(wrong, right)

    def given(options: dict[str, Any]) -> dict[str, Any]:
        return {k: v() if getattr(v, "__name__", "") == "lazy" else v for k, v in options.items()}

    return Case(
        lambda model: fully_shard(model, **given(wrong)), kind, words, lambda model: fully_shard(model, **given(remedy)), build, build
    )


def lazy(make: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def lazy() -> Any:
        return make(*args)

    return lazy


def first_forward(model: Any) -> Any:
    model(batch(0, 0))
    return fill(model)


def inferring(model: Any) -> Any:
    with torch.inference_mode():
        model(batch(0, 0))
    return model


def elsewhere() -> DeviceMesh:
    """A mesh of devices that this machine lacks."""
    kind = next(kind for kind in ("xpu", "mtia", "cuda") if not torch.get_device_module(kind).is_available())
    return DeviceMesh(kind, list(range(WORLD)), _init_backend=False)


def materialize(model: Net) -> Any:
    model.head.to_empty(device="cpu")
    return fully_shard(fill(model))


def plain_head(model: Any) -> Any:
    model.head.weight = nn.Parameter(model.head.weight.detach().full_tensor())
    return fully_shard(model)


def ignoring_table(model: Any) -> Any:
    return fully_shard(model, ignored_params={model.table})


def each_layer(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


SCRIPTING = threading.Lock()
"""Lock for torch.jit, which compiles a class once for all threads, but not in two threads at a time."""


def scripted() -> Any:
    model: Any = Net()
    with SCRIPTING:
        model.head = torch.jit.script(model.head)
    return model


def unscripted(model: Any) -> Any:
    head = nn.Linear(WIDTH, 4).double()
    head.load_state_dict(model.head.state_dict())
    model.head = head
    return fully_shard(model)


def half_hooked() -> Any:
    model: Any = Net()
    model.head.weight.fsdp_pre_all_gather = lambda *_: None
    return model


def unhooked(model: Any) -> Any:
    del model.head.weight.fsdp_pre_all_gather
    return fully_shard(model)


def wrapped_head() -> Any:
    model: Any = Net()
    model.head = nn.DataParallel(model.head)
    return model


def unwrapped_head(model: Any) -> Any:
    model.head = model.head.module
    return fully_shard(model)


ONE_DIM = "init_device_mesh('cpu', (world_size,))"
CALLS: dict[str, Case] = {
    # -- what is sharded
    "None": Case(lambda m: fully_shard(None), TypeError, ("fully_shard got None", "give a module")),
    "a parameter": Case(lambda m: fully_shard(m.head.weight), TypeError, ("got a Parameter", "give a module")),
    "a class": Case(lambda m: fully_shard(nn.Linear), TypeError, ("the class Linear", "give a module")),
    "a dict": Case(lambda m: fully_shard({"a": m}), TypeError, ("fully_shard got", "give a module, or a list")),
    "an empty list": Case(lambda m: fully_shard([]), ValueError, ("empty list", "give a module")),
    "None in a list": Case(lambda m: fully_shard([m, None]), TypeError, ("a list with None", "modules only")),
    "a layer twice in a list": Case(
        lambda m: fully_shard([*m.layers, m.layers[1]]), ValueError, ("only be applied to a module once", "Linear twice, at 1 and 2")
    ),
    "a ModuleList": Case(lambda m: fully_shard(m.layers), ValueError, ("such as ModuleList", "each module in it"), each_layer),
    "torch's on it": Case(
        fully_shard, ValueError, ("'head.weight'", "by torch's fully_shard"), lambda m: fully_shard(fill(Net())), lambda: torch_head(Net())
    ),
    "DDP": Case(
        fully_shard,
        ValueError,
        ("the module is a DistributedDataParallel", "without the wrapper"),
        lambda m: fully_shard(m.module),
        lambda: DistributedDataParallel(Net()),
    ),
    "FSDP1": Case(
        fully_shard,
        ValueError,
        ("the module is a FullyShardedDataParallel", "without the wrapper"),
        lambda m: fully_shard(fill(Net())),
        lambda: FullyShardedDataParallel(Net(), device_id=torch.device("cpu")),
    ),
    "DataParallel inside": Case(
        fully_shard, ValueError, ("module 'head' is a DataParallel", "without the wrapper"), unwrapped_head, wrapped_head
    ),
    "replicate": Case(
        fully_shard,
        ValueError,
        ("replicate", "use one of the two", "('replicate', 'shard')"),
        lambda m: fully_shard(fill(Net())),
        lambda: replicate(Net()),
    ),
    "scripted": Case(fully_shard, ValueError, ("module 'head' is a torch.jit.ScriptModule", "the plain module"), unscripted, scripted),
    # -- its parameters
    "lazy": Case(
        fully_shard,
        ValueError,
        ("'0.weight' is not initialized", "Run one forward"),
        lambda m: fully_shard(first_forward(m)),
        Lazy,
        lambda: first_forward(Lazy()),
    ),
    "half on meta": Case(fully_shard, ValueError, ("'head.weight' is on the meta device", "materialize"), materialize, half_on_meta),
    "sparse": Case(
        fully_shard,
        ValueError,
        ("'table' is a sparse_coo tensor", "ignored_params"),
        ignoring_table,
        with_frozen(lambda: torch.eye(4).to_sparse()),
    ),
    "quantized": Case(
        fully_shard,
        ValueError,
        ("'table' is a quantized tensor", "ignored_params"),
        ignoring_table,
        with_frozen(lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
    ),
    "one of the all-gather hooks": Case(
        fully_shard, ValueError, ("no fsdp_post_all_gather: define both all-gather hooks, or none",), unhooked, half_hooked
    ),
    "distributed": Case(
        fully_shard, ValueError, ("'head.weight' is a DTensor", "full_tensor()"), plain_head, placed(lambda: names("dp"), Shard(0))
    ),
    # -- meshes
    "mesh: a string": argument(TypeError, "mesh must be a DeviceMesh", ONE_DIM, "'cpu'", mesh="cpu", right=lazy(names, "dp")),
    "mesh: three dimensions": argument(
        ValueError,
        "1D or 2D",
        "sharding=",
        mesh=lazy(names, "a", "b", "dp"),
        right={"mesh": lazy(names, "a", "b", "dp"), "sharding": Sharding.zero3("dp")},
    ),
    "mesh: no names": argument(
        ValueError, "mesh_dim_names", "('replicate', 'shard')", mesh=lazy(unnamed), right=lazy(names, "replicate", "shard")
    ),
    "mesh: meta": argument(ValueError, "devices of type 'meta'", "'cpu'", mesh=lazy(init_device_mesh, "meta", (WORLD,))),
    "dp_mesh_dims: a string": argument(
        TypeError, "dp_mesh_dims must be a DataParallelMeshDims", "'dp'", mesh=lazy(names, "dp"), dp_mesh_dims="dp"
    ),
    "dp_mesh_dims: plain parameters": argument(
        ValueError,
        "'layers.0.weight' is a plain tensor",
        "without dp_mesh_dims",
        mesh=lazy(names, "dp"),
        dp_mesh_dims=DataParallelMeshDims("dp"),
        right={"mesh": lazy(names, "dp")},
    ),
    "dp_mesh_dims: unknown": argument(ValueError, "'x'", "('dp',)", mesh=lazy(names, "dp"), dp_mesh_dims=DataParallelMeshDims("x")),
    "sharding: a string": argument(TypeError, "sharding must be a Sharding", "'zero3'", sharding="zero3", right=Sharding.zero3("shard")),
    "sharding: unknown": argument(
        ValueError,
        "'shard'; the mesh has a, dp",
        "Sharding.zero3('dp')",
        mesh=lazy(names, "a", "dp"),
        sharding=Sharding.zero3(),
        right={"mesh": lazy(names, "a", "dp"), "sharding": Sharding.zero3("dp")},
    ),
    "sharding: not the last": argument(
        ValueError,
        "over a, the optimizer over a, dp",
        "name a last",
        mesh=lazy(names, "a", "dp"),
        sharding=Sharding("a", ("a", "dp"), ("a", "dp")),
        right={"mesh": lazy(names, "dp", "a"), "sharding": Sharding("a", ("a", "dp"), ("a", "dp"))},
    ),
    "sharding: no names": argument(
        ValueError,
        "mesh_dim_names",
        mesh=lazy(unnamed),
        sharding=Sharding.zero3(),
        right={"mesh": lazy(names, "a", "shard"), "sharding": Sharding.zero3()},
    ),
    "sharding: an int beside it": argument(
        ValueError,
        "leave out reshard_after_forward=2",
        sharding=Sharding.zero3(),
        reshard_after_forward=2,
        right={"sharding": Sharding.zero3()},
    ),
    # -- the other arguments
    "reshard_after_forward: a string": argument(ValueError, "a bool or an int", "'yes'", reshard_after_forward="yes", right=True),
    "reshard_after_forward: a string beside sharding": argument(
        ValueError, "'yes'", sharding=Sharding.zero3(), reshard_after_forward="yes"
    ),
    "reshard_after_forward: no divisor": argument(ValueError, "a factor of 2, not 3", reshard_after_forward=3, right=2),
    "mp_policy: a dict": argument(
        TypeError,
        "mp_policy must be a MixedPrecisionPolicy",
        mp_policy={"param_dtype": torch.float64},
        right=MixedPrecisionPolicy(param_dtype=torch.float64),
    ),
    "mp_policy: a dtype's name": argument(
        TypeError,
        "param_dtype of mp_policy",
        "torch.bfloat16",
        "'float64'",
        mp_policy=NAMED_DTYPE,
        right=MixedPrecisionPolicy(param_dtype=torch.float64),
    ),
    "mp_policy: whole numbers": argument(
        ValueError, "reduce_dtype of mp_policy is torch.int32", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int32)
    ),
    "mp_policy: float8": argument(
        ValueError,
        "param_dtype of mp_policy is torch.float8_e4m3fn",
        "needs scales",
        "give torch.bfloat16",
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn),
    ),
    "mp_policy: a switch as a string": argument(
        TypeError,
        "cast_forward_inputs of mp_policy = 'no'",
        "True or False",
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs="no"),  # type: ignore[arg-type]
        right={"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)},
    ),
    "mesh: of a device that is not here": argument(
        ValueError, "devices of type", "and this process has none", "'cpu'", mesh=lazy(elsewhere), right=lazy(names, "dp")
    ),
    "inference mode": Case(
        torch.inference_mode()(fully_shard),
        ValueError,
        ("torch.inference_mode()", "call it before that begins"),
        lambda m: inferring(fully_shard(m)),
    ),
    "offload_policy: True": argument(
        TypeError, "offload_policy must be a OffloadPolicy", "CPUOffloadPolicy()", offload_policy=True, right=CPUOffloadPolicy()
    ),
    "ignored_params: names": argument(
        TypeError, "ignored_params holds 'head.weight'", "the parameters themselves", ignored_params=["head.weight"]
    ),
    "ignored_params: a module": Case(
        lambda m: fully_shard(m, ignored_params=m.head),
        TypeError,
        ("ignored_params = a Linear",),
        lambda m: fully_shard(m, ignored_params=m.head.parameters()),
        half_frozen,
        half_frozen,
    ),
    "shard_placement_fn: Replicate": argument(
        ValueError, "Replicate() for 'layers.0.weight'", "None", shard_placement_fn=lambda p: Replicate(), right=lambda p: None
    ),
    "shard_placement_fn: a placement": argument(
        TypeError, "shard_placement_fn", "function of (parameter)", shard_placement_fn=Shard(0), right=lambda p: Shard(0)
    ),
    "shard_placement_fn: names": argument(
        TypeError,
        "shard_placement_fn takes (n, p)",
        "function of (parameter)",
        shard_placement_fn=lambda n, p: Shard(0),
        right=lambda p: Shard(0),
    ),
    "shard_placement_fn: a dimension too many": argument(
        ValueError,
        "Shard dim 2",
        "'layers.0.weight'",
        "from 0 to 1",
        shard_placement_fn=lambda p: Shard(2),
        right=lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else None,
    ),
    "shard_placement_fn: of the frozen ones": argument(
        ValueError,
        "Shard dim 7",
        "'head.weight'",
        shard_placement_fn=lambda p: None if p.requires_grad else Shard(7),
        right=lambda p: None,
        build=half_frozen,
    ),
    "shard_placement_fn: uneven": Case(
        lambda m: fully_shard(m, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None),
        NotImplementedError,
        ("'layers.0.weight' of shape (9, 9)", "return Shard(0), or None"),
        lambda m: fully_shard(m, shard_placement_fn=lambda p: Shard(0)),
        lambda: Net(9),
        lambda: Net(9),
        9,
    ),
    "block_policy: an int": argument(
        TypeError,
        "block_policy gave 4 for 'layers.0.weight'",
        "Block.rows(4)",
        block_policy=lambda n, p: 4,
        right=lambda n, p: Block.rows(4),
    ),
    "block_policy: a block": argument(
        TypeError, "block_policy", "function of (name, parameter)", block_policy=Block.rows(4), right=lambda n, p: Block.rows(4)
    ),
    "block_policy: without names": argument(
        TypeError, "block_policy takes (p)", "(name, parameter)", block_policy=lambda p: None, right=lambda n, p: None
    ),
    "block_policy: beside a placement": argument(
        ValueError,
        "'layers.0.weight' has Shard(0)",
        "Block.rows(2)",
        "one of them",
        block_policy=lambda n, p: Block.rows(2),
        shard_placement_fn=lambda p: Shard(0),
        right={"block_policy": lambda n, p: Block.rows(2)},
    ),
    "allow_gaps: a string": argument(TypeError, "allow_gaps = 'yes'", "True, False", allow_gaps="yes", right=True),
    "to_empty: a device": argument(TypeError, "to_empty = 'cpu'", "True or False", to_empty="cpu", right=True),
}


def torch_head(model: Any) -> Any:
    torch_fully_shard(model.head)
    return model


def refused(call: Callable[[], Any], case: Case) -> None:
    with pytest.raises(case.kind) as error:
        call()
    said = str(error.value)
    assert type(error.value) is case.kind or case.kind is ValueError, type(error.value)
    assert "\n" not in said and all(word in said for word in case.words), (case.words, said)


@pytest.mark.parametrize("what", CALLS)
@on_threads(WORLD)
def test_a_refused_call_changes_nothing_and_its_remedy_trains(rank: int, world: int, what: str) -> None:
    case = CALLS[what]
    model = fill(case.build())
    before, known = snapshot(model), values(model)
    refused(lambda: case.wrong(model), case)
    assert snapshot(model) == before
    for name, value in values(model).items():
        assert torch.equal(value, known[name]), name
    trains_as_plain(rank, case.right(model), fill(case.plain()), case.width)


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
    import tests.fsdp.test_fsdp_refusals as here

    monkeypatch.setattr(here, "WORLD", 1)
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
