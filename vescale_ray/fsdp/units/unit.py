"""Unit: the modules and groups of one ``fully_shard`` call. Its hooks drive the groups through forward and backward.

    pre_forward   gather, prefetch the next unit, mark the inputs        (recomputation by checkpointing: gather only)
    post_forward  mark the outputs, reshard
    pre_backward  gather when the gradient of an output arrives, prefetch the unit before
    close         reshard when the gradients of the inputs arrive, start the reduce-scatter

:mod:`vescale_ray.fsdp.units.marks` makes the marks. The end of backward closes units that are still open, for example those whose inputs
need no gradient. The moment of a unit's reduction never depends on which parameters this rank used. Ranks may differ in that, and all must
start the same reductions in the same order.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_ray.compat.core import disable_dynamo, outside_transforms
from vescale_ray.fsdp.buffers.lanes import Lanes
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.communication.labels import log, span
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.layouts.phases import Phase, PhaseError, StepEnd, check_transition
from vescale_ray.fsdp.units.aliases import with_own_memory
from vescale_ray.fsdp.units.interfaces import TorchState, UnitSchedule
from vescale_ray.fsdp.units.marks import Call, kept_tensors, mark_inputs
from vescale_ray.fsdp.units.tree import Copies, floating_as, graph_tensors, map_arguments, map_tensors
from vescale_ray.fsdp.units.unit_options import UnitOptions


class Unit:
    """The modules and groups of one ``fully_shard`` call. The modules own the unit; the unit holds them weakly.

    Args:
        start: makes a unit the root of a schedule, at the first forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        options: UnitOptions,
        device: torch.device,
        start: Callable[[Unit], UnitSchedule[Unit]],
    ) -> None:
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.groups = tuple(groups)
        self.policy, self.device = policy, device
        self.options = options
        self.name = type(modules[0]).__name__ if len(modules) == 1 else "[" + ", ".join(type(m).__name__ for m in modules) + "]"
        self.fqn = ""
        """Names of the modules below the root, set by the first forward; empty for the root."""
        self.phase = Phase.RESTING
        self._start = start
        self.schedule: UnitSchedule[Unit] | None = None
        self.lanes: Lanes | None = None
        self.is_root = False
        self.last_call: Call[Unit] | None = None
        self.torch_state: TorchState | None = None
        self.ending = StepEnd()
        self.post_optim_event: Any = None
        """An accelerator event that the next forward's all-gathers wait for. It and ``ending`` are read on the root only."""

        self.call: Call[Unit] | None = None
        """The running forward, if it makes a graph."""
        self.stashing: tuple[weakref.ref[nn.Module], ...] = ()
        """Modules that may keep tensors of their forward as attributes: all but torch's own classes."""
        self._depth = 0
        self._handled = 0
        """Identity of the exception that the caller of the running forward handles, or of None; another one ends the forward."""
        self._copies = Copies()
        """Copies of containers among the running forward's inputs."""
        self._waiting: set[int] = set()
        self._outer = Phase.RESTING
        self.open_call: Call[Unit] | None = None
        """The call whose part of the graph the backward is in."""
        self._prefetch_after: Call[Unit] | None = None
        self._prefetches_late = False
        self._entering: Call[Unit] | None = None
        self._exit: weakref.ref[Any] | None = None
        """The exit mark on the running forward's inputs."""
        self._calls: weakref.WeakSet[Call[Unit]] = weakref.WeakSet()
        """Calls that a backward may still reach."""
        self.reduced = False
        """True if the running backward has started a reduction."""
        self._trains = False
        """True if a backward may reach the running forward."""
        self._owes = False
        """True if a backward has accumulated gradients here since the last reduction; the rank then joins the next one."""
        self.keeps_graph = False
        """True if a backward with ``create_graph`` has run: a later backward may read the parameters through its graph."""
        self.loads = 0
        """Number of state dicts that were loaded."""
        self.pre_hooks = [module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True) for module in modules]
        self.post_hooks = [module.register_forward_hook(self.post_forward, prepend=False, always_call=True) for module in modules]

    @property
    def gathered(self) -> bool:
        """True if every group's parameters are gathered, being gathered, or kept."""
        return all(group.at_hand for group in self.groups)

    def set_phase(self, phase: Phase) -> None:
        check_transition(self.name, self.phase, phase)
        self.phase = phase

    # -- forward -----------------------------------------------------------------------------------------------------

    @disable_dynamo
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        schedule = self.schedule or self._start(self)
        schedule.abandon_forward(if_interrupted=True)
        if self._depth == 0:
            self._handled = id(sys.exc_info()[1])
        mark = self._depth == 0 and not self._waiting
        if mark:
            if schedule.recomputes:
                self._outer = self.phase
                self.set_phase(Phase.RECOMPUTE)
                self.unshard(backward=True)
            else:
                args, kwargs = schedule.enter_forward(self, module, args, kwargs)
                self.set_phase(Phase.FORWARD)
                self.keeps_graph = self._trains = False
                self._waiting = {id(m()) for m in self.modules}
                with span("pre_forward", self.fqn, logged=True):
                    self.unshard(fresh=True)
                    schedule.prefetch_forward(self)
        self._depth += 1
        dtype, copies = self.policy.param_dtype, Copies()
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = map_arguments(floating_as(dtype), args, kwargs, copies)
        if mark:
            self._exit = None
            if torch.is_grad_enabled():
                args, kwargs, self._exit = mark_inputs(self, args, kwargs, copies)
        if self._depth == 1:
            self._copies = copies
        if self._depth == 1 and torch.is_grad_enabled():
            self.call = Call(self)
            self.call.exit = self._exit
        return args, kwargs

    @disable_dynamo
    def post_forward(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if output is None and id(sys.exc_info()[1]) != self._handled:
            self._abandon_forward()
            return None
        schedule = self.schedule
        assert schedule is not None
        self._depth -= 1
        if self._depth:
            return self._cast_output(output)
        given, self._copies = self._copies.give_back(), Copies()
        output = with_own_memory(output, self.groups) if self.resharding_after_forward else output
        self._mark_outputs((output, *given) if given else output)
        if self.phase is Phase.RECOMPUTE:
            self.set_phase(self._outer)
            return self._cast_output(output)
        self._waiting.discard(id(module))
        if not self._waiting:
            with span("post_forward", self.fqn, logged=True):
                try:
                    self.end_forward(reshard=True)
                except RuntimeError:
                    if schedule.forward_root is self:
                        schedule.abandon_forward()
                    raise
        if schedule.forward_root is self:
            if self._waiting:  # the user called one module of a list on its own (a chunked loss): the next chunk needs the parameters again
                self.end_forward(reshard=False)
            schedule.leave_forward()
        return self._cast_output(output)

    def end_forward(self, *, reshard: bool) -> None:
        """End the forward, also if only a part of it ran."""
        self._waiting.clear()
        self.set_phase(Phase.RESTING)
        trains = self._trains
        if reshard and (self.resharding_after_forward or not trains):
            # If no backward needs the parameters, the modules get the sharded ones back, so that an optimizer built now, or a write made
            # now, reaches them. The buffer keeps the gathered values for the next forward, unless the unit reshards. If the user called
            # unshard(), the modules keep them, too.
            keep = not self.resharding_after_forward
            groups = [group for group in self.groups if not (keep and group.requested)]
            with outside_transforms():
                self._each(lambda group: group.rest(after_forward=trains, keep=keep and not group.hooked), groups)
            if self.schedule is not None:
                self.schedule.leaves_unit()

    @property
    def resharding_after_forward(self) -> bool:
        given = self.options.reshard_after_forward
        return given if given is not None else not self.is_root

    def _abandon_forward(self) -> None:
        """Reset after an exception in the module. Checkpointing ends a recomputation with an exception, too."""
        if self._depth > 1:  # a call of the unit by itself, which may catch the exception
            self._depth -= 1
            return
        if self.phase is Phase.RECOMPUTE:
            self._depth, self.phase, self.call = 0, self._outer, None
        elif self.schedule is not None and self.schedule.forward_root is self:
            self.schedule.abandon_forward()
        else:
            self.drop_forward()

    def drop_forward(self) -> None:
        """Return to rest after an exception in the outermost forward."""
        self._depth, self.call = 0, None
        self._waiting.clear()
        if self.phase is Phase.FORWARD:
            self.reshard()
            self.phase = Phase.RESTING

    def _cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else map_tensors(floating_as(dtype), output)

    def _mark_outputs(self, output: Any) -> None:
        call, self.call = self.call, None
        if call is None or not torch.is_grad_enabled():
            return
        call.mark(graph_tensors(output))
        for ref in self.stashing:
            module = ref()
            if module is not None:
                call.mark(kept_tensors(module))
        if call.reachable:
            assert self.schedule is not None
            self._trains = True
            call.follow(self.schedule.last_call, self.last_call)
            self.last_call = self.schedule.last_call = call
            self._calls.add(call)

    # -- backward ----------------------------------------------------------------------------------------------------

    @disable_dynamo
    def pre_backward(self, call: Call[Unit]) -> None:
        """Enter the unit: a backward has reached the part of the graph that ``call`` made."""
        replaced = self.torch_state.replaced("pre_backward") if self.torch_state is not None else None
        if replaced is None:
            self.enter_backward(call)
        else:
            self._entering = call
            replaced()

    def backward_inside(self) -> None:
        """Begin a backward inside the unit's own forward: for example forces computed from an energy, or a layer's own loss."""
        assert self.schedule is not None
        self.schedule.enter_backward(self, inside=True)
        self._owes = self._owes or self.schedule.accumulates

    def enter_backward(self, call: Call[Unit] | None = None) -> None:
        """Gather, and prefetch the unit before. ``call``: None stands for the call whose gradient has just arrived."""
        call, self._entering = call or self._entering, None
        if call is None:
            return
        with span("pre_backward", self.fqn, logged=True):
            self._enter_backward(call)

    def _enter_backward(self, call: Call[Unit]) -> None:
        if call.loads != self.loads:
            raise PhaseError(
                f"a backward reached unit {self.name!r}, but a state dict was loaded into it since the forward: load between steps, then "
                f"run the forward again (after reset_iter_state() on the root)"
            )
        self.keeps_graph = self.keeps_graph or torch.is_grad_enabled()
        if self.phase is not Phase.BACKWARD:
            self.set_phase(Phase.BACKWARD)
        assert self.schedule is not None
        self.open_call, call.consumed = call, True
        self._calls.discard(call)
        first = self.schedule.enter_backward(self)
        self._owes = self._owes or self.schedule.accumulates
        self._prefetches_late = first and self.schedule.lanes.pool.spares(sum(group.gathered.nbytes for group in self.groups))
        self.unshard(backward=True)
        self._prefetch_after = call
        if call.previous is None or not any(group.grads.trainable_count for group in self.groups):
            self.prefetch_backward()

    def prefetch_backward(self) -> None:
        """Prefetch the unit that backward reaches next, in any case before this unit's own reduce-scatter.

        It starts at the first gradient: until then the last reduce-scatter may use the memory that the all-gather writes to. In the first
        unit below the root nearly all activations are still alive, so it starts later. On the CPU, it starts when five sixths of the
        gradients have arrived. On an accelerator, whose host runs ahead, it starts when all have arrived.
        """
        call, self._prefetch_after = self._prefetch_after, None
        if call is not None and self.schedule is not None:
            self.schedule.prefetch_backward(self, call)

    def close(self) -> None:
        """End this unit's part of a backward: reshard, and reduce the gradients that have arrived."""
        replaced = self.torch_state.replaced("post_backward") if self.torch_state is not None else None
        (self.leave_backward if replaced is None else replaced)()

    def leave_backward(self) -> None:
        log("post_backward", self.fqn)
        self.prefetch_backward()
        if self.phase is Phase.BACKWARD:
            self.set_phase(Phase.RESTING)
        call, self.open_call = self.open_call, None
        for group in self.groups:
            group.grads.end_window()
        stay = not self.options.reshard_after_backward
        # If values stay, the modules get the sharded parameters back, but not before gradients are reduced: a zero-bubble pipeline computes
        # those of weights later, with the gathered parameters.
        if not stay or self.options.gradient_sync:
            with span("post_backward_reshard", self.fqn):
                self._each(lambda group: group.rest(after_forward=False, keep=stay or self.keeps_graph))
        if call is not None and self.schedule is not None and call.is_nearly_first:
            self.schedule.trim(scratch=False)  # no later unit of this backward gathers, so none could reuse the memory
        if call is not None and not (call.is_first and not any(other.is_to_come() for other in self._calls)):
            return
        if self.options.reduce_unused and self.options.reduces:
            self._open_unused()
        self.reduce()

    def _open_unused(self) -> None:
        """With ``reduce_unused``: let every group join the reduction, with zeros for gradients that have not arrived."""
        for group in self.groups:
            if group.grads.trainable_count and any(p.unsharded is not None for p in group.params) and not group.grads.awaits_claimed:
                group.grads.open_unused()

    def reduce(self) -> None:
        """Start to reduce the gradients that have arrived, unless they only add up for now.

        If none has arrived here, other ranks may have some: every rank whose backward has reached the unit joins.
        """
        if not self.options.reduces:
            return
        self.prefetch_backward()
        assert self.schedule is not None
        owes, self._owes = self._owes, False
        if not owes and not any(group.grads.waits for group in self.groups):
            return
        # Include groups of which this rank used nothing: another rank may have used them.
        due = [g for g in reversed(self.groups) if g.grads.is_due and not g.grads.awaits_claimed]
        if due:
            with span("post_backward_reduce", self.fqn):
                self.schedule.reduce(due, asks=not self.options.reduce_unused)
            self.reduced = True

    def end_backward(self, *, creates_graph: bool) -> None:
        """Close the unit at the end of the whole backward. ``creates_graph``: another backward may follow through its graph."""
        if self.keeps_graph and not creates_graph:
            self.keeps_graph = False
            for group in self.groups:
                group.drop_kept()
        for group in self.groups:
            group.grads.end_backward()
        if self.phase is Phase.FORWARD:  # the backward ran inside the model's forward, and the parameters stay
            self.reduce()
            return
        if self.options.reduce_unused and self.options.reduces and not self.reduced:
            self._open_unused()
        left = any(g.grads.waits or g.residency is not g.residency.SHARDED for g in self.groups)
        if self.phase is Phase.BACKWARD or self._owes or left:
            self.close()
        for group in self.groups:
            group.grads.end_window()
        self.open_call = None
        self.reduced = False

    # -- both --------------------------------------------------------------------------------------------------------

    def unshard(self, *, backward: bool = False, fresh: bool = False) -> None:
        """Gather the parameters and install them in the modules."""
        with outside_transforms():
            if backward:
                for group in self.groups:
                    group.drop_torn()
            self.start_unshard(backward=backward, fresh=fresh)
            for group in self.groups:
                group.wait()

    def start_unshard(self, *, backward: bool = False, fresh: bool = False) -> None:
        """Start the all-gathers that have not started yet."""
        assert self.lanes is not None
        together = comm.Together(self.lanes.gather)
        with outside_transforms():
            try:
                for group in self.groups:
                    if group.unshard_in_backward or not backward:
                        group.unshard(self.lanes.gather, together, fresh=fresh)
            finally:
                together.start()
            for group in self.groups:
                group.hide()

    def reshard(self) -> None:
        self._each(lambda group: group.reshard())

    def _each(self, rests: Callable[[ParameterGroup], None], groups: Sequence[ParameterGroup] | None = None) -> None:
        """Call ``rests`` on every group, even if one raises; then raise the first error."""
        first: RuntimeError | None = None
        for group in self.groups if groups is None else groups:
            try:
                rests(group)
            except RuntimeError as error:
                first = first or error
        try:
            if first is not None:
                raise first
        finally:
            first = None  # the error's traceback holds this frame

    def reset(self) -> None:
        """Return to rest after an exception and drop the step's gradients."""
        self.phase, self._depth = Phase.RESTING, 0
        self._waiting.clear()
        self.call = self.open_call = self._prefetch_after = self._entering = self.last_call = None
        self.reduced = self._owes = False
        for group in self.groups:
            group.discard()
            group.grads.holds = not self.options.reduces  # ranks may have reduced different units

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.groups)} groups, {self.phase.value})"
