"""Checks of the arguments of ``fully_shard``. All of them run before the model changes."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from vescale_ray.compat.fsdp import DataParallelMeshDims
from vescale_ray.errors import BadArgument
from vescale_ray.fsdp.groups.hooked import has_gather_hooks
from vescale_ray.fsdp.layouts.group_parameter import REPLACED
from vescale_ray.fsdp.layouts.sharding import Sharding
from vescale_ray.fsdp.units.forward_checks import is_managed, is_replicated
from vescale_ray.fsdp.units.module_path import described
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.geometry import Block
from vescale_ray.quantization import Fp8Block

BlockPolicy = Callable[[str, nn.Parameter], Block | None]
QuantizePolicy = Callable[[str, nn.Parameter], Fp8Block | None]

_ONCE = "Each distinct composable distributed API can only be applied to a module once."
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one ``fully_shard`` call, which documents them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument can't be used, or two of them exclude each other.
    """

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter]
    dp_mesh_dims: DataParallelMeshDims | None
    block_policy: BlockPolicy | None
    quantize_policy: QuantizePolicy | None
    allow_gaps: bool | Callable[[str, nn.Parameter], bool]
    sharding: Sharding | None
    keep_cast: bool
    to_empty: bool

    def __post_init__(self) -> None:
        if self.mesh is not None:
            _check_mesh(self.mesh)
        _check_policies(self.mp_policy, self.offload_policy)
        _check_functions(self.shard_placement_fn, self.block_policy, self.quantize_policy, self.allow_gaps)
        _check_dims(self.sharding, self.dp_mesh_dims, self.reshard_after_forward)

    def resharding(self, mesh: DeviceMesh) -> tuple[bool | None, int | None]:
        """Return whether to reshard after forward, and the number of ranks to reshard to if that is not all those that shard over ``mesh``.

        Raises:
            ValueError: ``reshard_after_forward`` is neither a bool, None nor a divisor of their number.
        """
        value, shard_size = self.reshard_after_forward, mesh.size(mesh.ndim - 1)
        if value is None or isinstance(value, bool):
            return value, None
        if not isinstance(value, int):
            raise ValueError(
                f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value!r}; None reshards "
                f"all units but the root"
            )
        if value < 1 or value > shard_size or shard_size % value:
            raise ValueError(
                f"If passing reshard_after_forward as an int, it should be a factor of {shard_size}, not {value}: it must divide the shard "
                f"size"
            )
        return value != 1, value if 1 < value < shard_size else None


def check_type(name: str, value: Any, wanted: type, example: str) -> None:
    """Raise TypeError unless the argument ``name`` is a ``wanted``; the message shows ``example``."""
    if not isinstance(value, wanted):
        article = "an" if wanted.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name} must be {article} {wanted.__name__}, such as {example}, not {_shown(value)}")


def check_flag(name: str, value: Any) -> bool:
    """Return the value of a switch as a bool. A string, None or a container is refused, since it is most likely a mistake.

    Raises:
        TypeError: ``value`` is one of these.
    """
    if value is None or not hasattr(type(value), "__bool__"):
        raise TypeError(f"{name} = {_shown(value)} says neither yes nor no: give True or False")
    return bool(value)


def positive(name: str, value: Any) -> int:
    """Return ``value``, which must be a positive int.

    Raises:
        TypeError: it is not an int.
        ValueError: it is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be a positive int, got {value}")
    return value


def finite(name: str, value: Any) -> float:
    """Return ``value`` as a float.

    Raises:
        ValueError: it is not a finite number, or it is 0.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if number == 0 or not math.isfinite(number):
        raise ValueError(f"the {name} is {_shown(value)}: give a number other than 0")
    return number


def check_comm(what: str, comm: Any) -> None:
    """Raise TypeError if a custom collective can't be called or has no ``allocate``. None stands for the usual collective."""
    if comm is not None and not (callable(comm) and hasattr(comm, "allocate")):
        lacks = "has no allocate()" if callable(comm) else "can't be called"
        raise TypeError(f"the custom {what}, {_shown(comm)}, {lacks}: give an object with __call__ and allocate, or None for the usual one")


def check_call(name: str, function: Any, *arguments: str) -> None:
    """Raise TypeError unless ``function`` can be called with the named ``arguments``."""
    how = f"a function of ({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{name} = {_shown(function)} can't be called: give {how}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} takes ({', '.join(signature.parameters)}): give {how} ({error})") from None


def check_modules(what: str, modules: Any) -> None:
    """Raise TypeError unless ``modules`` is a list or another iterable of modules."""
    if isinstance(modules, torch.Tensor | str) or not isinstance(modules, Iterable):
        raise TypeError(f"{what} got {_shown(modules)}: give a list of modules, which may be empty")


def _check_policies(mixed: Any, offload: Any) -> None:
    """Raise TypeError for policies or dtypes of another type, and ValueError for dtypes that can't be used in training."""
    check_type("mp_policy", mixed, MixedPrecisionPolicy, "MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    check_type("offload_policy", offload, OffloadPolicy, "CPUOffloadPolicy()")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mixed, name)
        if dtype is None:
            continue
        check_type(f"{name} of mp_policy", dtype, torch.dtype, "torch.bfloat16")
        if not dtype.is_floating_point and not dtype.is_complex:
            raise ValueError(f"{name} of mp_policy is {dtype}: give a floating-point dtype, such as torch.bfloat16")
        if dtype.itemsize == 1 and name != "output_dtype":
            raise ValueError(
                f"{name} of mp_policy is {dtype}, which needs scales beside it: give torch.bfloat16, and float8 weights as tensors with "
                f"fsdp_pre_all_gather"
            )
    check_flag("cast_forward_inputs of mp_policy", mixed.cast_forward_inputs)


def _check_functions(shard_placement_fn: Any, block_policy: Any, quantize_policy: Any, allow_gaps: Any) -> None:
    """Raise TypeError for functions that can't be called with the arguments that they will get."""
    if shard_placement_fn is not None:
        check_call("shard_placement_fn", shard_placement_fn, "parameter")
    if block_policy is not None:
        check_call("block_policy", block_policy, "name", "parameter")
    if quantize_policy is not None:
        check_call("quantize_policy", quantize_policy, "name", "parameter")
    if not isinstance(allow_gaps, bool):
        if not callable(allow_gaps):
            raise TypeError(f"allow_gaps = {_shown(allow_gaps)}: give True, False or a function of (name, parameter)")
        check_call("allow_gaps", allow_gaps, "name", "parameter")


def _check_dims(sharding: Any, dims: Any, reshard_after_forward: Any) -> None:
    """Raise TypeError for mesh dimensions of another type, and ValueError for dimensions that two arguments name."""
    if dims is not None:
        check_type("dp_mesh_dims", dims, DataParallelMeshDims, "DataParallelMeshDims(shard='dp')")
    if sharding is not None:
        check_type("sharding", sharding, Sharding, "Sharding.zero3('shard')")
        if dims is not None:
            raise ValueError("sharding says where everything is sharded, and so does dp_mesh_dims: leave out one of them")
        if type(reshard_after_forward) is int:
            raise ValueError(
                f"sharding says where everything is sharded: leave out reshard_after_forward={reshard_after_forward}, and name the "
                f"dimension of these ranks in Sharding(parameters=..)"
            )


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device of ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _check_mesh(mesh: Any) -> None:
    """Raise TypeError if ``mesh`` is not a mesh. Raise ValueError if it does not contain this process, its devices can't train or are
    missing here, or its process groups are gone."""
    check_type("mesh", mesh, DeviceMesh, "init_device_mesh('cpu', (world_size,))")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not part of {mesh}: call fully_shard on the ranks of its mesh only, or give another mesh")
    if mesh.device_type != "cpu" and not hasattr(torch, mesh.device_type):
        raise ValueError(f"{mesh} has devices of type {mesh.device_type!r}, which can't hold parameters: give a mesh of 'cpu' or 'cuda'")
    if mesh.device_type != "cpu" and not torch.get_device_module(mesh.device_type).is_available():
        raise ValueError(f"{mesh} has devices of type {mesh.device_type!r}, and this process has none: give a mesh of 'cpu'")
    try:
        mesh.get_all_groups()
    except RuntimeError as error:
        raise ValueError(f"{mesh} has no process groups ({error}): make the mesh anew after the last init_process_group") from None


def ignored_of(params: Any) -> set[nn.Parameter]:
    """Return ``ignored_params`` as a set.

    Raises:
        TypeError: it holds something other than parameters.
    """
    if params is None:
        return set()
    how = "give the parameters themselves, such as {model.head.weight}"
    if isinstance(params, torch.Tensor | nn.Module | str) or not isinstance(params, Iterable):
        raise TypeError(f"ignored_params = {_shown(params)}: it must be a set of parameters; {how}")
    params = list(params)
    for one in params:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"ignored_params holds {_shown(one)}, which is not a parameter: {how}")
    return set(params)


def unit_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the outermost of the modules that form one unit.

    Raises:
        TypeError: something other than modules was given.
        ValueError: the list is empty or holds a container; a module has a unit already; inference mode is on, in which nothing trains.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("fully_shard was called in torch.inference_mode(): call it before that begins; the model may be called within")
    if isinstance(module, nn.Module):
        modules = [module]
    elif isinstance(module, Iterable) and not isinstance(module, torch.Tensor | str | dict):
        modules = list(module)
    else:
        raise TypeError(f"fully_shard got {_shown(module)}: give a module, or a list of modules")
    if not modules:
        raise ValueError("fully_shard got an empty list of modules: give a module, or those that are to form one unit")
    for one in modules:
        if not isinstance(one, nn.Module):
            raise TypeError(f"fully_shard got a list with {_shown(one)}: give modules only")
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and type(one).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward, such as {described(one)}: apply it to each module "
                f"in it"
            )
        if unit_of(one) is not None:
            raise BadArgument(f"{_ONCE} fully_shard was applied to this {described(one)} already: leave out the second call")
        if is_replicated(one):
            raise BadArgument(
                f"torch's replicate was applied to this {described(one)} already: use one of the two; fully_shard has replicas on a mesh "
                f"of two dimensions, ('replicate', 'shard')"
            )
        places = [place for place, other in enumerate(modules) if other is one]
        if len(places) > 1:
            raise BadArgument(f"{_ONCE} The list of modules holds the {described(one)} twice, at {places[0]} and {places[1]}: give it once")
    inside = {id(sub) for one in modules for sub in one.modules() if sub is not one}
    return [one for one in modules if id(one) not in inside]


def managed_modules(roots: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the modules below ``roots``, without subtrees that are units of their own or that torch's ``replicate`` manages.

    Raises:
        ValueError: another wrapper manages a module's parameters, or a module's class takes no hooks.
    """
    found: set[nn.Module] = set()
    stack = list(roots)
    while stack:
        one = stack.pop()
        if one in found:
            continue
        found.add(one)
        if isinstance(one, _WRAPPERS):
            raise ValueError(
                f"{_where(roots, one)} is a {type(one).__name__}, which manages its parameters itself: give fully_shard the plain model, "
                f"without the wrapper; replicas are a mesh dimension, such as mesh_dim_names=('replicate', 'shard')"
            )
        if isinstance(one, torch.jit.ScriptModule):
            raise ValueError(f"{_where(roots, one)} is a torch.jit.ScriptModule, which takes no hooks: give fully_shard the plain module")
        stack.extend(child for child in one.children() if unit_of(child) is None and not is_replicated(child))
    return found


def check_parameter(fqn: str, module: nn.Module, attribute: str, param: nn.Parameter) -> None:
    """Raise ValueError for a parameter that is sharded already or has no dense storage; warn if it has gradient hooks."""
    if is_managed(module, attribute):
        raise ValueError(
            f"parameter {fqn!r} is sharded already, with a module around this {described(module)}: apply fully_shard to inner modules "
            f"first, to the whole model last, and to modules that were added afterwards (adapters) each by itself"
        )
    if getattr(module, "_is_fsdp_managed_module", False) and isinstance(param, DTensor):
        raise ValueError(
            f"parameter {fqn!r} is sharded already, by torch's fully_shard: use one of the two for all modules of a model, as "
            f"vescale_ray.fully_shard for this {described(module)}"
        )
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {fqn!r} is not initialized: it is of a lazy module. Run one forward of the model first, then call fully_shard"
        )
    kind = "quantized" if param.is_quantized else "nested" if param.is_nested else str(param.layout).removeprefix("torch.")
    if kind != "strided":
        raise ValueError(
            f"parameter {fqn!r} is a {kind.removeprefix('_')} tensor, and fully_shard shares out dense ones: make it dense, or leave it to "
            f"every rank with ignored_params={{that parameter}}"
        )
    hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
    if hooks and REPLACED not in param.__dict__:
        warnings.warn(
            f"parameter {fqn!r} has gradient hooks, which no backward calls any more: fully_shard puts a sharded parameter in its place. "
            f"Register them after fully_shard, with register_post_accumulate_grad_hook() on that one",
            UserWarning,
            stacklevel=4,
        )


def check_block(fqn: str, block: Any) -> None:
    """Raise TypeError for a result of ``block_policy`` that is neither a block nor None."""
    if block is not None and not isinstance(block, Block):
        raise TypeError(f"block_policy gave {_shown(block)} for {fqn!r}: it must return a Block, such as Block.rows(4), or None")


def has_hooks(fqn: str, param: nn.Parameter, block: Block | None, shard_dim: int | None) -> bool:
    """True if the parameter's tensor class defines the all-gather itself.

    Raises:
        ValueError: it has only one of the two hooks, or is given a block or a dimension other than 0.
        NotImplementedError: the parameter is a DTensor.
    """
    if not has_gather_hooks(param._local_tensor if isinstance(param, DTensor) else param):
        return False
    if isinstance(param, DTensor):
        raise NotImplementedError(f"{fqn!r} is a DTensor of tensors with all-gather hooks: quantize it after it was sharded")
    if block is not None or shard_dim not in (None, 0):
        raise ValueError(f"{fqn!r} has all-gather hooks of its own and is sharded along dimension 0: give no block, no other dimension")
    return True


def _where(roots: Sequence[nn.Module], module: nn.Module) -> str:
    name = next(name for root in roots for name, one in root.named_modules() if one is module)
    return f"module {name!r}" if name else "the module"


def _shown(value: Any) -> str:
    """Return the value for a message: its repr if that is short, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value) if isinstance(value, str | int | float | tuple | list | dict | torch.dtype | type(None)) else ""
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__.removeprefix('FSDP')}"
