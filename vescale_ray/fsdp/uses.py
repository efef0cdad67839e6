"""Uses: the ranks tell each other which parameters they used, so that all of them deliver the same gradients.

Ranks may use different parameters of a unit: the experts that their tokens chose, for example. Every rank reduces the gradients of all of
them, and a rank that used none of a parameter's has only zeros to add. So its own graph says what it has to deliver at the least::

    a parameter was used by ..     its gradient is delivered ..
    this rank                      as soon as its reduction is finished
    other ranks only               at the end of the backward
    no rank                        nowhere: ``.grad`` stays as it is

One byte for each parameter of the groups that were reduced goes round at the end of a backward, in one all-reduce for each shard group and
one for each replicate group. A rank that used every parameter knows the answer: it sends its bytes and does not wait. On an accelerator it
does not wait on the host either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vescale_ray import waiting
from vescale_ray.compat.core import disable_current_modes
from vescale_ray.fsdp.comm import Lane
from vescale_ray.fsdp.debug import agree, agree_on_gradients
from vescale_ray.fsdp.group import Group


class Uses:
    """The questions for the end of a backward, and those whose answer this rank did not need."""

    def __init__(self) -> None:
        self._questions: dict[tuple[int, int], _Question] = {}
        self._under_way: list[Any] = []

    def add(self, group: Group) -> None:
        """A reduction of ``group`` was started that will be delivered. In the same order on every rank."""
        key = id(group.grads.group), id(group.place.replicate_group)
        self._questions.setdefault(key, _Question()).groups.setdefault(group)

    def ask(self, lane: Lane) -> None:
        """All reductions of the backward were started: send this rank's bytes over the shard groups. Collective."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:  # of the last backward: all ranks have come here since
            work.wait()
        for question in self._questions.values():
            question.ask(lane)

    def deliver(self, lane: Lane) -> None:
        """All reductions are finished: hear from the replicas and deliver what other ranks used. Collective."""
        questions, self._questions = [*self._questions.values()], {}
        for question in questions:
            question.ask_replicas(lane)
        for question in questions:
            used = question.answer(lane)
            self._under_way += question.works
            for group in question.groups:
                group.grads.deliver_rest(used[: len(group.params)])
                used = used[len(group.params) :]
        for question in questions:
            question.check()

    def discard(self) -> None:
        """The step is given up."""
        self._questions.clear()
        self._under_way.clear()


class _Question:
    """The question about the groups of one shard group and one replicate group."""

    def __init__(self) -> None:
        self.groups: dict[Group, None] = {}
        self.works: list[Any] = []
        """Under way, unless an accelerator's stream has them."""
        self._own: list[bool] = []
        self._bytes: torch.Tensor | None = None

    @property
    def _place(self) -> Any:
        return next(iter(self.groups)).place

    def ask(self, lane: Lane) -> None:
        group = next(iter(self.groups)).grads.group
        agree(f"end of a backward that reduced {', '.join(repr(one.name) for one in self.groups)}", group, self._place.device)
        self._own = [bit for one in self.groups for bit in one.grads.uses()]
        if group.size() > 1:
            self._send(group, lane)

    def ask_replicas(self, lane: Lane) -> None:
        place = self._place
        if place.replicate_group is None or place.replicas == 1:
            return
        if all(self._own):
            self._bytes = None  # the shard group's answer is known, and its bytes may be under way
        else:
            self._wait()
        self._send(place.replicate_group, lane)

    def answer(self, lane: Lane) -> list[bool]:
        if self._bytes is None or all(self._own):
            return self._own
        self._wait()
        with lane.context(), disable_current_modes():
            told: list[bool] = self._bytes.bool().tolist()
        return told

    def check(self) -> None:
        """In debug mode: the same gradients are there on every rank."""
        place, params = self._place, [param for group in self.groups for param in group.params]
        for group in (place.shard_group, place.replicate_group):
            if group is not None:
                agree_on_gradients([(param.fqn, param.sharded) for param in params], group, place.device)

    def _send(self, group: dist.ProcessGroup, lane: Lane) -> None:
        device = self._place.device
        # Modes that count, record or fake the operations of a step must not see it.
        with lane.context(), disable_current_modes(), waiting.counted("all_reduce"):
            if self._bytes is None:
                complete = all(self._own)  # then nothing is copied from the host
                made = torch.ones(len(self._own), dtype=torch.uint8, device=device) if complete else None
                self._bytes = torch.tensor(self._own, dtype=torch.uint8, device=device) if made is None else made
            work = dist.all_reduce(self._bytes, op=dist.ReduceOp.MAX, group=group, async_op=lane.stream is None)
        if work is not None:
            self.works.append(work)

    def _wait(self) -> None:
        works, self.works = self.works, []
        with waiting.counted("all_reduce"):
            for work in works:
                work.wait()
