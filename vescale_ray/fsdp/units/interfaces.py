"""Interfaces of objects that a unit holds and whose modules import the unit's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from vescale_ray.fsdp.buffers.lanes import Lanes
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.layouts.phases import StepEnd
from vescale_ray.fsdp.units.marks import Call, MarkedUnit

U = TypeVar("U", bound=MarkedUnit)


class TorchState(Protocol):
    """Torch's state object of a unit (:class:`vescale_ray.fsdp.surface.torch_state.State`)."""

    def replaced(self, name: str) -> Callable[[], None] | None: ...


class UnitSchedule(Protocol[U]):
    """The schedule of a root (:class:`vescale_ray.fsdp.units.schedule.Schedule`), as its units use it. Its methods are documented there."""

    lanes: Lanes
    ending: StepEnd
    max_reductions: int
    accumulates: bool
    forward_root: U | None
    last_call: Call[U] | None

    @property
    def units(self) -> Sequence[U]: ...

    @property
    def running(self) -> bool: ...

    @property
    def recomputes(self) -> bool: ...

    @property
    def overlaps(self) -> bool: ...

    def enter_forward(
        self, unit: U, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

    def leave_forward(self) -> None: ...

    def abandon_forward(self, *, if_interrupted: bool = False) -> None: ...

    def leaves_unit(self) -> None: ...

    def prefetch_forward(self, unit: U) -> None: ...

    def enter_backward(self, unit: U, *, inside: bool = False) -> bool: ...

    def prefetch_backward(self, unit: U, call: Call[U]) -> None: ...

    def reduce(self, groups: Sequence[ParameterGroup], *, asks: bool) -> None: ...

    def finish_reductions(self) -> None: ...

    def lend_reduced(self) -> None: ...

    def end_backward(self) -> None: ...

    def settle(self, *, wait: bool) -> None: ...

    def trim(self, *, scratch: bool = True) -> None: ...

    def share(self, lanes: Lanes) -> None: ...

    def reset(self) -> None: ...
