"""FSDPModule: the methods that ``fully_shard`` adds to a module. They have torch's names and meanings, so FSDP2 scripts keep working."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from vescale_ray.compat.fsdp import (
    AllGather,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
    SymmMemAllGather,
    SymmMemReduceScatter,
)
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.errors import BadArgument
from vescale_ray.fsdp.buffers.lanes import Lanes
from vescale_ray.fsdp.construction.arguments import check_comm, check_flag
from vescale_ray.fsdp.layouts.phases import Phase, PhaseError
from vescale_ray.fsdp.surface.changes import ChangesParameters
from vescale_ray.fsdp.surface.figures import Figures
from vescale_ray.fsdp.surface.finalize import FinalizesBackward
from vescale_ray.fsdp.surface.lookup import prefetched, resting_unit, sharded_unit, units_below
from vescale_ray.fsdp.surface.reduce_settings import ReducesGradients
from vescale_ray.fsdp.surface.torch_state import state_of_unit
from vescale_ray.fsdp.units.forward_checks import adopt_parameters, check_managed, whole_model_needed
from vescale_ray.fsdp.units.unit import Unit


class FSDPModule(ChangesParameters, Figures, FinalizesBackward, ReducesGradients, TorchFSDPModule):
    """Mixed into the class of every module to which :func:`fully_shard` was applied.

    It subclasses torch's class, so that ``isinstance`` checks elsewhere (pipelining, Hugging Face) hold, and replaces all its methods.
    A method that is not supported raises and names the alternative.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class: some containers construct their own type again, for example when they are sliced."""
        original: Any = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        self = original.__new__(original)
        self.__init__(*args, **kwargs)  # type: ignore[misc]
        return self

    # -- parameters --------------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free the unsharded parameters and give the sharded ones to the module. Not recursive."""
        sharded_unit(self).reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters in the compute dtype and give them to the module. Not recursive.

        With ``async_op`` the all-gather only starts. Wait on the handle, or run the module's forward, which waits itself.
        """
        unit = sharded_unit(self)
        if unit.lanes is None:
            unit.lanes = Lanes(unit.device)
        if unit.schedule is not None:
            check_managed(unit)
        else:
            adopt_parameters([unit])
            for group in unit.groups:
                group.attach(unit.lanes.pool)
        unit.lanes.gather.after_current()  # the all-gather must see earlier writes to the sharded parameters
        unit.start_unshard(fresh=unit.phase is Phase.RESTING)
        for group in unit.groups:
            group.requested = True
        handle = _Handle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: bring every unit to rest and drop the step's gradients. Call it on the root.

        Raises:
            RuntimeError: the module is not the root.
        """
        unit = sharded_unit(self)
        if unit.schedule is None:
            return
        if not unit.is_root:
            raise RuntimeError(
                f"reset_iter_state must be called on the root FSDP module, not on unit {unit.name!r}: use the outermost module"
            )
        unit.schedule.reset()

    # -- resharding --------------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed after forward and gathered again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: {reshard_after_forward!r}")
        for unit in units_below(self, recurse):
            unit.options.reshard_after_forward = reshard_after_forward
            for group in unit.groups:
                group.subgroup = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether gathered values are freed after backward. If not, further micro-batches of the step need no all-gather.

        The modules hold the sharded parameters either way, once the gradients are reduced.
        """
        reshard_after_backward = check_flag("reshard_after_backward", reshard_after_backward)
        for unit in units_below(self, recurse):
            unit.options.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs the parameters. Use False only if it does not (an embedding that nothing else uses)."""
        unshard_in_backward = check_flag("unshard_in_backward", unshard_in_backward)
        for group in sharded_unit(self).groups:
            group.unshard_in_backward = unshard_in_backward

    # -- schedule ----------------------------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Prefetch these modules' parameters when this module's forward starts, instead of the next module's."""
        sharded_unit(self).options.forward_prefetch = prefetched("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Prefetch these modules' parameters when this module's backward starts, instead of the previous module's."""
        sharded_unit(self).options.backward_prefetch = prefetched("set_modules_to_backward_prefetch", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's all-gathers wait for ``event`` instead of the whole current stream. Call it on the root in each step."""
        sharded_unit(self).post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Torch's switch to allocate all-gather buffers on the compute stream. It has no effect: these buffers keep their addresses."""

    # -- custom collectives ------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather with ``comm``, into memory that ``comm.allocate`` returns once and that stays allocated. Not recursive.

        ``comm(output, input, group, async_op)`` receives this rank's shard as ``input``, which is not a part of ``output``.

        Raises:
            PhaseError: a step is under way.
        """
        check_comm("all-gather", comm)
        for group in resting_unit(self, "all-gather").groups:
            group.set_custom_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce gradients with ``comm``, from memory that ``comm.allocate`` returns. Not recursive.

        Raises:
            PhaseError: a step is under way.
            BadArgument: gradients are summed in a fixed order (:meth:`set_ordered_reduction`).
        """
        check_comm("reduce-scatter", comm)
        unit = resting_unit(self, "reduce-scatter")
        if any(group.grads.ordered for group in unit.groups):
            raise BadArgument(f"unit {unit.name!r} sums gradients in a fixed order: call set_ordered_reduction(False) first")
        for group in unit.groups:
            group.grads.custom_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the process group's back end allocate the buffers if it can (NCCL: registered memory). Not recursive.

        Raises:
            BadArgument: the unit has custom collectives, which allocate their own buffers.
        """
        enable = check_flag("enable", enable)
        unit = resting_unit(self, "allocator")
        for group in unit.groups:
            for own in (group.gathered.custom, group.grads.custom_scatter):
                if own is not None and not isinstance(own, ProcessGroupAllocAllGather | ProcessGroupAllocReduceScatter):
                    raise BadArgument(
                        f"unit {unit.name!r} has a {type(own).__name__} as a custom collective, whose allocate() makes the buffers: "
                        f"set it to None first"
                    )
        for group in unit.groups:
            shard_group = group.place.shard_group
            group.set_custom_gather(ProcessGroupAllocAllGather(shard_group) if enable else None)
            group.grads.custom_scatter = ProcessGroupAllocReduceScatter(shard_group) if enable else None

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Use buffers in symmetric memory, so that NCCL can use copy engines or symmetric kernels. CUDA only; not recursive.

        Raises:
            ValueError: ``backend`` is not "NCCL", or the device has no symmetric memory.
        """
        unit = resting_unit(self, "allocator")
        if backend != "NCCL" or unit.device.type != "cuda":
            raise ValueError(f"symmetric memory needs backend 'NCCL' and CUDA, not {backend!r} on {unit.device.type}: leave it out")
        for group in unit.groups:
            group.set_custom_gather(SymmMemAllGather(group.place.shard_group))
            group.grads.custom_scatter = SymmMemReduceScatter(group.place.shard_group)

    # -- torch's internals that other code calls -----------------------------------------------------------------------

    def _get_fsdp_state(self) -> Any:
        return state_of_unit(sharded_unit(self))

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Like ``nn.Module.to_empty``: allocate storage on ``device`` without values. It copies nothing, to leave that memory untouched."""
        before = _without_values.on
        _without_values.on = True
        try:
            inherited = super(TorchFSDPModule, self).to_empty  # type: ignore[misc]
            if getattr(inherited, "__func__", None) is not nn.Module.to_empty:  # the original class overrides it
                return inherited(device=device, recurse=recurse)
            return self._apply(lambda tensor: _empty(tensor, device), recurse=recurse)
        finally:
            _without_values.on = before

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the sharded parameters (``.to()``, ``to_empty()``, ..), then make them one master shard again."""
        unit = sharded_unit(self)
        if unit.phase is not Phase.RESTING:
            raise PhaseError(
                f"unit {unit.name!r} is in phase {unit.phase.value}: its parameters can't be moved or cast now: do it between steps"
            )
        unit.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # not torch's FSDPModule's
        for group in unit.groups:
            group.adopt(values=not _without_values.on)
        return result


def _empty(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Return a fast ``torch.empty_like(tensor, device=device)``: for a local part on the meta device torch decomposes the call in Python,
    which takes ten times as long."""
    if device is None or not isinstance(tensor, RaggedDTensor) or not tensor._local_tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    local = tensor._local_tensor
    return RaggedDTensor.from_spec(torch.empty(local.shape, dtype=local.dtype, device=device), tensor._spec)


class _WithoutValues(threading.local):
    """A flag of the thread that is inside ``to_empty()``, whose ``_apply`` reaches the units one by one."""

    on = False


_without_values = _WithoutValues()


class _Handle(UnshardHandle):
    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            for group in unit.groups:
                group.wait()


def _no_pickle(self: Any, _protocol: Any) -> NoReturn:
    name = type(self).__name__.removeprefix("FSDP")
    raise TypeError(f"a sharded {name} can't be pickled or copied: save its state_dict(), and load that into a module built anew")


def _no_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization: build a second module, shard it and load the first "
        "one's state_dict into it; an AveragedModel takes the plain module, before fully_shard, and its copy is sharded like the first"
    )


def _no_script(self: Any) -> NoReturn:
    """Raise where ``torch.jit.script`` prepares a module."""
    raise whole_model_needed("torch.jit.script", type(self).__name__.removeprefix("FSDP"))


def _takes_state_dict(save: Callable[..., Any]) -> bool:
    """Return whether ``save_pretrained()`` accepts a state dict: as an argument (transformers), or in ``**kwargs`` that it reads (peft) or
    passes on. Other ones (diffusers, ``PyTorchModelHubMixin``, a user's own that gathers) call ``state_dict()`` themselves.
    """
    parameters = inspect.signature(save).parameters.values()
    code = inspect.unwrap(save).__code__
    reads = "state_dict" in code.co_consts or "save_pretrained" in code.co_names
    return any(p.name == "state_dict" or (p.kind is p.VAR_KEYWORD and reads) for p in parameters)


def _whole_tensors_only(save: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse ``save_pretrained()`` of sharded tensors (transformers, peft): ``save`` would take parameters of one buffer for tied ones, and
    gather elements in another order on each rank."""
    signature = inspect.signature(save)

    @wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", signature.bind(self, *args, **kwargs).arguments.get("state_dict"))
        gathers = getattr(getattr(self, "config", None), "distributed_config", None) is not None
        if given is None and not gathers and any(isinstance(p, RaggedDTensor) for p in self.parameters()):
            raise ValueError(
                "save_pretrained() of a sharded module needs whole tensors: call it with state_dict=get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)), both from vescale_ray.state_dict, on all ranks"
            )
        return save(self, *args, **kwargs)

    return save_pretrained


@cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module of class ``cls`` after ``fully_shard``; the same for every module of ``cls``."""
    attributes: dict[str, Any] = {"__deepcopy__": _no_deepcopy, "__reduce_ex__": _no_pickle, "__module__": cls.__module__}
    attributes["__prepare_scriptable__"] = _no_script
    save = getattr(cls, "save_pretrained", None)
    if inspect.isfunction(save) and _takes_state_dict(save):
        attributes["save_pretrained"] = _whole_tensors_only(save)
    return cast(type[nn.Module], type(f"FSDP{cls.__name__}", (FSDPModule, cls), attributes))
