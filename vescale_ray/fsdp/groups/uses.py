"""Uses: the ranks exchange which parameters they used, so that all of them deliver the same gradients.

Ranks may use different parameters of a unit, for example the experts that their tokens chose. Every rank joins the reduction of all of
them, and contributes zeros for parameters that it did not use. So a rank knows a part of the answer from its own graph::

    ranks that used a parameter    this rank delivers its gradient ..
    this rank, maybe others        as soon as its reduction has finished
    other ranks only               at the end of the backward
    none                           never: ``.grad`` stays as it is

At the end of a backward the ranks exchange one byte per parameter of the model (:class:`Use`). This takes one all-reduce per shard group
and one per replicate group, or on gloo messages between all pairs of ranks. A rank that used every parameter knows the answer, so it sends
its bytes without waiting. On an accelerator the host does not wait either.

The answer also shows a rank that trains a parameter which another rank has frozen. A rank whose own trained parameters have changed reads
it before it waits for its reductions: a rank that has frozen all parameters of a group joins no reduction of it. On the CPU every rank
reads it at the end of the next backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from vescale_ray import gloo
from vescale_ray.communication import wait_notes
from vescale_ray.communication.point_to_point import is_pairwise
from vescale_ray.compat.core import disable_current_modes
from vescale_ray.fsdp.communication.comm import Lane, all_gather_pairwise
from vescale_ray.fsdp.communication.debug import agree, agree_on_gradients
from vescale_ray.fsdp.groups.delivery import Use
from vescale_ray.fsdp.groups.group import ParameterGroup


class Uses:
    """The open questions of a backward, and the exchanges whose results this rank does not need."""

    def __init__(self) -> None:
        self._questions: dict[tuple[int, int], _Question] = {}
        self._under_way: list[_Question] = []

    def add(self, group: ParameterGroup) -> None:
        """Add ``group``, whose reduction has started and will be delivered."""
        self._questions.setdefault(_ranks_of(group), _Question()).groups.setdefault(group)

    def ask(self, lane: Lane, groups: Sequence[ParameterGroup]) -> None:
        """Send this rank's bytes over the shard groups, once all reductions of the backward have started. Collective.

        Args:
            groups: all groups of the model, in the same order on every rank.

        Raises:
            RuntimeError: a parameter is trained here, and frozen on another rank.
        """
        under_way, self._under_way = self._under_way, []
        for question in under_way:  # from the last backward: every rank has joined this exchange by now
            question.verify(lane)
        for ranks, question in self._questions.items():
            question.ask(lane, [group for group in groups if _ranks_of(group) == ranks])

    def deliver(self, lane: Lane) -> None:
        """Ask the replicas, and deliver the gradients that only other ranks used, once all reductions have finished. Collective."""
        questions, self._questions = [*self._questions.values()], {}
        for question in questions:
            question.ask_replicas(lane)
        for question in questions:
            used = question.answer(lane)
            if question.works:
                self._under_way.append(question)
            for group in question.listed:
                if group in question.groups:
                    group.grads.deliver_rest(used[: len(group.params)])
                used = used[len(group.params) :]
        for question in questions:
            question.check()

    def discard(self) -> None:
        """Drop the questions of an abandoned step."""
        self._questions.clear()
        self._under_way.clear()


def _ranks_of(group: ParameterGroup) -> tuple[int, int]:
    return id(group.grads.group), id(group.place.replicate_group)


class _Largest:
    """An element-wise maximum over the ranks of a gloo group, in place. It consists of messages: torch's collectives of one group would
    meet in another order on each rank if a thread of the user's, such as that of ``dcp.async_save``, called others meanwhile."""

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup, lane: Lane) -> None:
        self._own, self._told = own, own.new_empty(group.size() * own.numel())
        self._messages = all_gather_pairwise([(self._told, own)], group, lane, "uses of parameters")

    def wait(self) -> None:
        self._messages.wait()
        torch.amax(self._told.view(-1, self._own.numel()), 0, out=self._own)


class _Question:
    """One exchange, for the groups that have the same shard group and the same replicate group."""

    def __init__(self) -> None:
        self.groups: dict[ParameterGroup, None] = {}
        """Groups that this backward has reduced."""
        self.listed: list[ParameterGroup] = []
        """All groups of these ranks. If a rank has frozen a group, it does not reduce it."""
        self.works: list[Any] = []
        """Running all-reduces; empty if an accelerator's stream runs them."""
        self._own: list[Use] = []
        self._complete = True
        """True if this rank knows the answer for the groups that it reduces."""
        self._bytes: torch.Tensor | None = None

    @property
    def _place(self) -> Any:
        return next(iter(self.groups)).place

    def ask(self, lane: Lane, listed: list[ParameterGroup]) -> None:
        self.listed, group = listed, next(iter(self.groups)).grads.group
        agree(f"end of a backward that reduced {', '.join(repr(one.name) for one in self.groups)}", group, self._place.device)
        changed = False
        for one in listed:
            uses, differs = one.grads.delivery.uses()
            self._own += uses
            self._complete = self._complete and (one not in self.groups or all(uses))
            changed = changed or differs
        if group.size() > 1:
            self._send(group, lane)
            if changed:
                self.verify(lane)

    def ask_replicas(self, lane: Lane) -> None:
        place = self._place
        if place.replicate_group is None or place.replicas == 1:
            return
        if self._complete:
            self._bytes = None  # this rank knows the shard group's answer, and its bytes may still be on the way
        else:
            self._wait()
        self._send(place.replicate_group, lane)

    def answer(self, lane: Lane) -> list[Any]:
        """Return, for each parameter of the listed groups, whether any rank used it.

        Waits for the other ranks only if this rank may get a gradient that it has not computed itself."""
        return self._own if self._bytes is None or self._complete else self.verify(lane)

    def verify(self, lane: Lane) -> list[int]:
        """Wait for the answer, and check that all ranks train the same parameters.

        Raises:
            RuntimeError: a parameter is trained here, and frozen on another rank.
        """
        assert self._bytes is not None
        self._wait()
        with lane.context(), disable_current_modes():
            told: list[int] = self._bytes.tolist()
        params = (param for group in self.listed for param in group.params)
        for param, own, most in zip(params, self._own, told, strict=True):
            if own != most == Use.FROZEN:
                raise RuntimeError(
                    f"parameter {param.fqn!r} has requires_grad=True on this rank, and requires_grad=False on another one: set it on all "
                    f"ranks alike (decide with a value that all ranks have, as an all-reduced loss)"
                )
        return told

    def check(self) -> None:
        """In debug mode: check that every rank has the same gradients."""
        place, params = self._place, [param for group in self.groups for param in group.params]
        for group in (place.shard_group, place.replicate_group):
            if group is not None:
                agree_on_gradients([(param.fqn, param.sharded) for param in params], group, place.device)

    def _send(self, group: dist.ProcessGroup, lane: Lane) -> None:
        device = self._place.device
        if is_pairwise(group, device):
            self._bytes = torch.tensor(self._own, dtype=torch.uint8) if self._bytes is None else self._bytes
            self.works.append(_Largest(self._bytes, group, lane))
            return
        # Modes that count, record or fake a step's operations must not see this one.
        with lane.context(), disable_current_modes(), wait_notes.counted("all_reduce"):
            if self._bytes is None:
                if all(use == Use.USED for use in self._own):  # needs no copy from the host
                    self._bytes = torch.ones(len(self._own), dtype=torch.uint8, device=device)
                else:
                    host = torch.tensor(self._own, dtype=torch.uint8)
                    # A copy from memory that is not page-locked would wait for all reductions on the lane.
                    self._bytes = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
            with gloo.unrecorded() if lane.stream is None else nullcontext():
                work = dist.all_reduce(self._bytes, op=dist.ReduceOp.MAX, group=group, async_op=lane.stream is None)
        if work is not None:
            self.works.append(work)

    def _wait(self) -> None:
        works, self.works = self.works, []
        with wait_notes.counted("all_reduce"):
            for work in works:
                work.wait()
