"""Each refusal of fully_shard and of its modules' methods: the user's mistake, the exception, and the remedy, which then trains.

A refused ``fully_shard`` leaves the model as it was: classes, parameters (objects and values), buffers, hooks and attributes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp.refusals import WIDTH, WORLD, Case, Net, batch, each_layer, fill, half_frozen, names, snapshot, trains_as_plain
from tests.ranks import on_threads
from vescale_ray import fully_shard
from vescale_ray.fsdp import Sharding
from vescale_ray.geometry import Block


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.double()


def half_on_meta() -> Net:
    model = Net()
    model.head.to("meta")
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


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    known = {k: v for k, v in model.named_parameters() if not isinstance(v, DTensor | nn.UninitializedParameter) and not v.is_meta}
    return {k: v.detach().clone() for k, v in known.items() if v.layout is torch.strided and not v.is_quantized}


NAMED_DTYPE = MixedPrecisionPolicy(param_dtype="float64")  # type: ignore[arg-type]


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
        TypeError, "offload_policy must be an OffloadPolicy", "CPUOffloadPolicy()", offload_policy=True, right=CPUOffloadPolicy()
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
