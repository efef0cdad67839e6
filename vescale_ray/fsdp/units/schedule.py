"""Schedule: the state that all units of one root share: side streams, the buffer pool, the order of units, running reductions.

Collectives start in an order that follows from the order of forwards alone, so it is the same on every rank:
- forward: all-gather of unit i, then of unit i+1 (known from the last step), then unit i computes;
- backward: all-gather of unit i-1 before the reduce-scatter of unit i, so that it does not queue behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from vescale_ray.compat.core import disable_current_modes, disable_dynamo
from vescale_ray.fsdp.buffers.lanes import Lanes
from vescale_ray.fsdp.communication.debug import agree, debugging
from vescale_ray.fsdp.communication.labels import log, span
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.groups.reduction import Sums
from vescale_ray.fsdp.groups.running_backward import in_backward
from vescale_ray.fsdp.groups.uses import Uses
from vescale_ray.fsdp.layouts.phases import Phase, PhaseError, StepEnd
from vescale_ray.fsdp.units.arrivals import will_come
from vescale_ray.fsdp.units.forward_checks import (
    adopt_parameters,
    check_all_ignored,
    check_hooks,
    check_parameters,
    check_replaced,
    check_tied,
    name_parameters,
    refuse_tracing,
    warn_of_shared_buffers,
)
from vescale_ray.fsdp.units.forward_order import ForwardOrder
from vescale_ray.fsdp.units.marks import Call
from vescale_ray.fsdp.units.optimizer_steps import OptimizerSteps
from vescale_ray.fsdp.units.same_plan import check_same_plan
from vescale_ray.fsdp.units.tree import to_device
from vescale_ray.fsdp.units.unit import Unit


class Schedule:
    """The schedule of one root. It holds its units weakly, so that a dropped model is freed without the garbage collector."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._units: list[weakref.ref[Unit]] = []
        self.forward_root: Unit | None = None
        """The unit whose forward is the outermost one at the moment."""
        self.last_call: Call[Unit] | None = None
        """The last call of the running forward."""
        self.ending = StepEnd()
        self.max_reductions = 1
        self._reducing: list[list[ParameterGroup]] = []
        """Groups whose reduce-scatters are under way, by the unit that started them."""
        self._uses = Uses()
        self._order: ForwardOrder[Unit] = ForwardOrder()
        self._in_backward = False
        self.accumulates = False
        """True if the running backward adds to ``.grad`` of parameters; ``torch.autograd.grad`` for inputs alone does not."""
        self._below_root = False
        """True if the running backward has reached a unit other than the root."""
        self._creates_graph = False
        """True if the running backward has ``create_graph``."""
        self._optimizer_steps = OptimizerSteps(self)

    @property
    def units(self) -> list[Unit]:
        """The units, in the order of the root's ``named_modules``."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def groups(self) -> list[ParameterGroup]:
        """The groups of all units."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def running(self) -> bool:
        """True if a forward or a backward is under way."""
        return self.forward_root is not None or self._in_backward

    @property
    def recomputes(self) -> bool:
        """Return whether a forward that starts now is a recomputation. A frozen model's forward in another model's hook is not."""
        return in_backward() and (torch.is_grad_enabled() or (self._in_backward and self.forward_root is None))

    @property
    def overlaps(self) -> bool:
        """True if collectives run on side streams."""
        return self.lanes.gather.stream is not None

    # -- start -------------------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, root: Unit) -> Schedule:
        """Make ``root`` the root of the units below it, at the first forward, and run the checks that need all units.

        Raises:
            ValueError: a parameter is tied to one of another unit.
            RuntimeError: a unit below belongs to another root already; parameters are still on the meta device; the ranks planned
                different layouts; the forward is traced.
        """
        refuse_tracing(root)
        modules = [module for ref in root.modules if (module := ref()) is not None]
        if len(modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {root.name}: apply fully_shard to the whole model, too")
        found: dict[int, tuple[Unit, list[str]]] = {}
        fqns = {}
        for fqn, module in modules[0].named_modules():
            fqns[id(module)] = fqn
            unit = unit_of(module)
            if unit is None:
                continue
            if unit is not root and unit.schedule is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {fqn}\nFSDP requires running forward through the root module "
                    f"first. If two models share {fqn}, apply fully_shard to a module that holds both, and call them in its forward"
                )
            if unit is not root and unit.ending.by_hand:
                raise RuntimeError(f"set_manual_backward_finalization must be called on the root FSDP module, not on {fqn!r}")
            found.setdefault(id(unit), (unit, []))[1].append(fqn)
        schedule = cls(root.lanes or Lanes(root.device))
        schedule.ending = root.ending
        schedule._take_in(found, fqns)
        root.is_root = True
        if not root.resharding_after_forward:
            for group in root.groups:
                schedule.lanes.pool.keep_apart(group.gathered.nbytes, group.grads.buffer_bytes)
        check_all_ignored(schedule.units, modules[0])
        warn_of_shared_buffers(schedule.units, modules[0])
        return schedule

    def _take_in(self, found: dict[int, tuple[Unit, list[str]]], fqns: dict[int, str]) -> None:
        """Check units and add them to this schedule. Collective."""
        for unit, names in found.values():
            unit.name = ", ".join(name or "(root)" for name in names)
            unit.fqn = ", ".join(name for name in names if name)
            for group in unit.groups:
                kind = str(group.orig_dtype).removeprefix("torch.") + ("" if group.grads.trainable_count else ", frozen")
                group.name, group.fqn = f"{unit.name} [{kind}]", unit.fqn
                name_parameters(group, fqns)
        units = [unit for unit, _ in found.values()]
        check_tied(units)
        check_replaced(units)
        adopt_parameters(units)
        check_hooks(units)
        with disable_current_modes():  # a mode that counts or records the step must not see this
            check_same_plan(units)
        for unit in units:
            unit.schedule, unit.lanes, unit.ending = self, self.lanes, self.ending
            self._units.append(weakref.ref(unit))
            self.max_reductions = max(self.max_reductions, unit.options.max_reductions)
            for group in unit.groups:
                group.attach(self.lanes.pool)

    def _check_parameters(self, module: nn.Module) -> None:
        """Check the parameters below ``module``, and add the units that were made since its last forward."""
        late = check_parameters(self.units, module)
        if late:
            fqns = {id(one): fqn for fqn, one in module.named_modules()}
            found: dict[int, tuple[Unit, list[str]]] = {}
            for one in late:
                unit = unit_of(one)
                assert unit is not None
                found.setdefault(id(unit), (unit, []))[1].append(fqns[id(one)])
            self._take_in(dict(sorted(found.items(), key=lambda item: item[1][1])), fqns)

    # -- forward -----------------------------------------------------------------------------------------------------

    def enter_forward(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record that a unit starts its forward with ``module``. The outermost unit also starts the schedule's forward.

        Raises:
            ValueError: the outermost module has parameters that its units do not manage.
            RuntimeError: the forward is traced.
        """
        if self.forward_root is not None:
            self._order.enter(unit)
            return args, kwargs
        refuse_tracing(unit)
        if self.ending.pending:
            raise PhaseError(f"a forward of {unit.name!r} starts while finalize_backward(async_op=True) is under way: wait on its handle")
        if self._in_backward:
            raise PhaseError(
                f"a forward of {unit.name!r} starts, but the last backward did not end (an exception?): call reset_iter_state() on the root"
            )
        self._check_parameters(module)
        self.forward_root = unit
        with span("root_pre_forward", logged=True):
            if self.lanes.gather.stream is not None:
                if unit.post_optim_event is not None:
                    self.lanes.gather.after(unit.post_optim_event)
                    unit.post_optim_event = None
                else:
                    self.lanes.gather.after_current()
                with span("inputs_to_device"):
                    args, kwargs = to_device(args, kwargs, unit.device)
        self.last_call = None
        self._order.begin(unit)
        return args, kwargs

    def leave_forward(self) -> None:
        """End the outermost forward."""
        root, self.forward_root = self.forward_root, None
        assert root is not None
        for unit in self.units:
            if unit.phase is Phase.FORWARD:  # only some modules of a list ran
                unit.end_forward(reshard=True)
            for group in unit.groups:
                group.drop_prefetch()
        self._order.finish()
        self.trim()  # activations take the most memory now, and backward gathers again anyway

    def abandon_forward(self, *, if_interrupted: bool = False) -> None:
        """Reset all units after an exception in the outermost forward. ``if_interrupted``: only if its module's call is over."""
        if if_interrupted and (self.forward_root is None or not self._order.is_interrupted()):
            return
        self.forward_root = None
        self._order.drop()
        for unit in self.units:
            unit.drop_forward()
            for group in unit.groups:
                group.drop_prefetch()

    def prefetch_forward(self, unit: Unit) -> None:
        """Prefetch the user's list, else the unit that followed this one in the last forward, as long as the order repeats."""
        if unit.options.forward_prefetch:
            targets = [target for ref in unit.options.forward_prefetch if (target := ref()) is not None]
        else:
            following = self._order.following(1) if self.forward_root is not None else None
            targets = [target for target in following or [] if target is not None]
        for target in targets:
            self._check_mine(target)
            with span("forward_prefetch for {}", target.fqn):
                target.start_unshard()

    def leaves_unit(self) -> None:
        """Trim the pool after a unit has resharded in forward, if no later unit could gather into the released memory."""
        following = self._order.following(2)
        if following is not None and not following[1:] and all(unit is None or unit.gathered for unit in following):
            self.trim()

    # -- backward ----------------------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit, *, inside: bool = False) -> bool:
        """Enter a unit's part of a backward; the first unit also schedules the end of the backward. ``inside``: the backward runs inside
        the unit's own forward.

        Returns whether the unit is the first one below the root, when nearly all activations are still alive."""
        if not self._in_backward:
            self._in_backward, self._creates_graph = True, torch.is_grad_enabled()
            self.ending.begin()
            self._below_root = False
            self.accumulates = any(will_come(group) for unit in self.units for group in unit.groups)
            Variable._execution_engine.queue_callback(self.end_backward)
        first = not self._below_root and not unit.is_root and not inside
        self._below_root = self._below_root or first
        return first

    def prefetch_backward(self, unit: Unit, call: Call[Unit]) -> None:
        """Prefetch the user's list, else the unit whose forward ran before this call's."""
        if unit.options.backward_prefetch:
            for ref in unit.options.backward_prefetch:
                target = ref()
                if target is not None:
                    self._check_mine(target)
                    if target.last_call is not None and not target.last_call.consumed:
                        with span("backward_prefetch for {}", target.fqn):
                            target.start_unshard(backward=True)
            return
        earlier = call.previous
        if earlier is not None and not earlier.consumed:
            target = earlier.unit()
            if target is not None and target.schedule is self:
                with span("backward_prefetch for {}", target.fqn):
                    target.start_unshard(backward=True)
        elif call.previous is None:
            self.trim(scratch=False)

    def trim(self, *, scratch: bool = True) -> None:
        """Free the pool's unused memory while no unit needs it. ``scratch``: whether to free the memory of gradient buffers, too."""
        self.lanes.pool.trim(scratch=scratch)

    def finish_reductions(self) -> None:
        """Wait until the reduce-scatters of fewer than ``max_reductions`` units are under way."""
        while len(self._reducing) >= self.max_reductions:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        groups = self._reducing[0]
        while groups:
            groups.pop(0).grads.finish()
        self._reducing.pop(0)

    def lend_reduced(self) -> None:
        """Let the next all-gather use the memory of the gradients that are being reduced, after their reduction."""
        for group in (group for groups in self._reducing for group in groups):
            group.grads.lend()

    def reduce(self, groups: Sequence[ParameterGroup], *, asks: bool) -> None:
        """Start the reduce-scatters of a unit's groups, with those of at most ``max_reductions`` units under way.

        ``asks``: ranks may have used different parameters.
        """
        self.finish_reductions()
        asks = asks or debugging()
        together = Sums(self.lanes.reduce)
        for group in groups:
            agree(f"reduce-scatter of {group.name!r} in {group.grads.buffer_dtype}", group.grads.group, group.place.device)
            group.grads.reduce(self.lanes.reduce, together, asks=asks)
        together.start()
        self._reducing.append([*groups])
        for group in groups:
            if asks and group.grads.delivers:
                self._uses.add(group)

    @disable_dynamo
    def end_backward(self) -> None:
        """Close all units at the end of the backward. Autograd calls this."""
        log("root_post_backward")
        with span("root_post_backward_callback"):
            for unit in reversed(self.units):
                unit.end_backward(creates_graph=self._creates_graph)
            self.settle(wait=self.ending.is_last and not self.ending.active)

    def settle(self, *, wait: bool) -> None:
        """Reset after a backward. ``wait``: it is the step's last one, so wait for all its reductions and deliver the gradients."""
        if wait:
            self._uses.ask(self.lanes.reduce, self.groups)
            while self._reducing:
                self._finish_oldest()
            self._uses.deliver(self.lanes.reduce)
            self.ending.over()
        for unit in self.units:
            for group in unit.groups:
                group.drop_prefetch()
                group.grads.delivery.settle(delivered=wait and unit.options.reduces and group.grads.delivers)
        if self.forward_root is None:
            self.last_call = None
        self.lanes.pool.settle()
        self.trim()
        self._in_backward = False

    def refresh(self, groups: Sequence[ParameterGroup]) -> None:
        """Forget casts of the groups' master shards, which an optimizer has written. Units at rest show the sharded parameters again: the
        gathered ones are out of date."""
        for group in groups:
            group.refresh()
        for unit in self.units:
            for group in unit.groups if unit.phase is Phase.RESTING else ():
                if group in groups and group.residency is group.residency.UNSHARDED and not group.requested:
                    group.reshard()

    # -- other streams and buffers ---------------------------------------------------------------------------------------

    def share(self, lanes: Lanes) -> None:
        """Use other streams and another pool from now on. Call it between steps."""
        self.lanes = lanes
        for unit in self.units:
            unit.lanes = lanes
            for group in unit.groups:
                group.attach(lanes.pool)

    # -- recovery ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """After an exception in a step: bring all units to rest, reshard the parameters and drop the step's gradients."""
        self.forward_root, self._in_backward = None, False
        self.ending.over()
        self.last_call = None
        self._order.forget()  # the ranks may have recorded different orders
        self._reducing.clear()
        self._uses.discard()
        for unit in self.units:
            unit.reset()

    def _check_mine(self, unit: Unit) -> None:
        if unit.schedule is not self:
            raise RuntimeError(f"unit {unit.name!r} is to be prefetched, but belongs to another root module: leave it out of the list")


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made for this module, or None."""
    unit = module.__dict__.get("_vescale_unit")
    return unit if isinstance(unit, Unit) else None
