"""Containers of the user's own classes reach and leave a unit as they are, with their attributes, though tensors in them are replaced."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads
from vescale_ray import MixedPrecisionPolicy, fully_shard


@dataclass
class Doubled:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


@dataclass
class Late:
    name: str
    x: torch.Tensor = field(init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: torch.Tensor


class Getter(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Attributes(dict[str, Any]):
    x: torch.Tensor

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.__dict__ = self


class Tagged(dict[str, Any]):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.factor = 3.0


class Listed(list[Any]):
    def __init__(self, x: torch.Tensor, factor: float) -> None:
        super().__init__([x])
        self.factor = factor


Pair = namedtuple("Pair", ["x", "factor"])


class Named(Pair):
    def __new__(cls, x: torch.Tensor) -> Any:
        return super().__new__(cls, x, 3.0)


class Both(tuple[Any, ...]):
    def __new__(cls, x: torch.Tensor, factor: float) -> Any:
        made = super().__new__(cls, (x,))
        made.factor = factor
        return made


def late(x: torch.Tensor) -> Late:
    made = Late("late")
    made.x = x
    return made


def default(x: torch.Tensor) -> Any:
    made: defaultdict[str, Any] = defaultdict(lambda: 3.0)
    made["x"] = x
    return made


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass with a __post_init__": (Doubled, lambda it: it.x),
    "dataclass with a field of init=False": (late, lambda it: it.x),
    "frozen dataclass with slots": (lambda x: Frozen(x=x), lambda it: it.x),
    "dict with attributes by __getattr__": (lambda x: Getter(x=x), lambda it: it.x),
    "dict with attributes by __dict__": (Attributes, lambda it: it.x + it["x"]),
    "dict with a constructor": (Tagged, lambda it: it["x"] * it.factor),
    "list with a constructor": (lambda x: Listed(x, 3.0), lambda it: it[0] * it.factor),
    "named tuple with a constructor": (Named, lambda it: it.x * it.factor),
    "tuple with a constructor": (lambda x: Both(x, 3.0), lambda it: it[0] * it.factor),
    "defaultdict": (default, lambda it: it["x"] * it["factor"]),
    "OrderedDict": (lambda x: OrderedDict(x=x), lambda it: it["x"]),
    "maximum": (lambda x: torch.max(x[..., None], dim=-1), lambda it: it.values),
    "packed sequence": (lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None], [1] * 4, batch_first=True), lambda it: it.data),
}


class Layer(nn.Linear):
    kind: str

    def forward(self, packed: Any) -> Any:
        make, take = KINDS[self.kind]
        return make(super().forward(take(packed)).tanh())


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(2))
        for layer in self.layers:
            layer.kind = kind  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        make, take = KINDS[self.kind]
        packed = make(self.embed(x).float())
        for layer in self.layers:
            packed = layer(packed)
        out: torch.Tensor = self.head(take(packed).to(self.head.weight.dtype))
        return out.float()


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_containers_of_any_class_pass_through_a_unit(rank: int, world: int, cast: bool) -> None:
    """The unit marks tensors that require a gradient, and casts them with a policy."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32) if cast else MixedPrecisionPolicy()
    for kind in KINDS:
        alone, ours = filled(Net(kind), 3, 0.3), filled(Net(kind), 3, 0.3)
        for unit in (*ours.layers, ours):
            fully_shard(unit, mp_policy=policy)
        for model in (alone, ours):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(5))).square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6, msg=f"{kind}: {name}")


@dataclass
class State:
    x: torch.Tensor
    calls: int = 0


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    calls: int = 0


class Entries(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Kept(list[Any]):
    @property
    def x(self) -> torch.Tensor:
        return torch.stack(list(self)).sum(0)

    @x.setter
    def x(self, value: torch.Tensor) -> None:
        self.append(value)


STATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": State,
    "dataclass with slots": Slotted,
    "dict with attributes by __setattr__": lambda x: Entries(x=x, calls=0),
    "dict with attributes by __dict__": Attributes,
    "list of a subclass": lambda x: Kept([x]),
}


class Changing(nn.Linear):
    def forward(self, state: Any, more: Any = None) -> None:  # type: ignore[override]
        state.x = state.x + super().forward(state.x).tanh()
        if not isinstance(state, Kept | Attributes):
            state.calls += 1
        state = more["inner"]
        state.x = state.x * 2 + super().forward(state.x)


class Passing(nn.Module):
    """The layers return nothing: they change the objects that they get."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.layers = kind, nn.Linear(8, 8), nn.ModuleList(Changing(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        make = STATES[self.kind]
        state, more = make(self.embed(x)), {"inner": make(self.embed(x).sin())}
        inner = more["inner"]
        for layer in self.layers:
            layer(state, more=more)
        assert more["inner"] is inner and getattr(state, "calls", 2) == 2
        out: torch.Tensor = state.x + inner.x
        return out


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_changes_to_containers_of_any_class_reach_the_caller(rank: int, world: int) -> None:
    for kind in STATES:
        alone, ours = filled(Passing(kind), 3, 0.3), filled(Passing(kind), 3, 0.3)
        for unit in (*ours.layers, ours):
            fully_shard(unit)
        for model in (alone, ours):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(5))).square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6, msg=f"{kind}: {name}")
