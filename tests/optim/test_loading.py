"""Every optimizer refuses a state dict that does not fit, and stays unchanged. Copies and pickles work."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.optim_support import noise
from vescale_ray.optim import SOAP, AdamW, AdamW8bit, CombinedOptimizer, Flat, Muon, Shampoo

KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda params: Muon(params, lr=0.1),
    "NorMuon": lambda params: Muon(params, lr=0.1, normuon=0.9),
    "AdamW": lambda params: AdamW(params, lr=0.1),
    "AdamW8bit": lambda params: AdamW8bit(params, lr=0.1, min_8bit_numel=1, block=64),
    "Shampoo": lambda params: Shampoo(params, lr=0.1, block="tile 8x8", precondition_frequency=2),
    "SOAP": lambda params: SOAP(params, lr=0.1, block="tile 8x8", precondition_frequency=2),
    "Flat AdamW": lambda params: Flat(params, lr=0.1),
    "Flat SGD": lambda params: Flat(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "combined": lambda params: CombinedOptimizer([AdamW8bit(params[:1], min_8bit_numel=1, block=64), AdamW(params[1:])]),
    "torch's in a combined": lambda params: CombinedOptimizer([Muon(params[:1]), torch.optim.SGD(params[1:], lr=0.1, momentum=0.9)]),
}
SHAPES = ((16, 24), (8, 12))


def built(kind: str, steps: int = 2) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = [nn.Parameter(noise(shape, str(i), 0)) for i, shape in enumerate(SHAPES)]
    optimizer = KINDS[kind](params)
    advance(params, optimizer, range(steps))
    return params, optimizer


def advance(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = noise(tuple(p.shape), str(i), 1 + step)
        optimizer.step()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def first_tensor(states: dict[str, Any]) -> str:
    return next(key for key, value in states.items() if isinstance(value, torch.Tensor) and value.ndim == 2)


def without_one(given: Any) -> None:
    del given["state"][1]


def without_any(given: Any) -> None:
    given["state"] = {}


def without_a_key(given: Any) -> None:
    del given["state"][1][first_tensor(given["state"][1])]


def with_a_key(given: Any) -> None:
    given["state"][1]["other"] = torch.zeros(3)


def of_another_shape(given: Any) -> None:
    states = given["state"][1]
    states[first_tensor(states)] = states[first_tensor(states)].T.contiguous()


def with_nothing_in_it(given: Any) -> None:
    given["state"][1][first_tensor(given["state"][1])] = None


def of_an_unknown_parameter(given: Any) -> None:
    given["state"][7] = given["state"][1]


def of_fewer_parameters(given: Any) -> None:
    given["param_groups"][-1]["params"].pop()


SPOILS = {
    without_one: "has nothing, but .* keeps .* would start from zero",
    without_any: "has nothing, but .* keeps .* would start from zero",
    without_a_key: "but .* keeps .* would start from zero",
    with_a_key: r"\['.*other.*'\], but .* keeps",
    of_another_shape: r"of parameter #.* is \(12, 8\), not sharded, here \(8, 12\), not sharded",
    with_nothing_in_it: r"of parameter #.* is None",
    of_an_unknown_parameter: r"states of parameters \[7\], which are in none",
    of_fewer_parameters: "param groups of|none of its param groups",
}


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    # Every optimizer meets one mistake; an optimizer of each base class meets all.
    [
        (kind, spoil, message)
        for kind in KINDS
        for spoil, message in SPOILS.items()
        if spoil is of_another_shape or kind in ("AdamW8bit", "Flat AdamW", "combined")
    ],
)
def test_ill_fitting_state_dict_is_refused_and_nothing_changes(kind: str, spoil: Any, message: str) -> None:
    _, optimizer = built(kind)
    before = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(before)
    given["param_groups"][0]["lr"] = 7.0
    for states in given["state"].values():
        states[first_tensor(states)] += 1
    spoil(given)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(given)
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("Muon", "lr", math.nan), ("AdamW8bit", "weight_decay", -1.0), ("Shampoo", "maximize", True), ("SOAP", "lr", math.nan)],
)
def test_numbers_of_a_state_dict_that_make_no_sense_are_refused(kind: str, key: str, value: Any) -> None:
    _, optimizer = built(kind)
    before = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(before)
    given["param_groups"][0][key] = value
    with pytest.raises(ValueError, match=f"{key} = {value}"):
        optimizer.load_state_dict(given)
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_group_keeps_settings_that_the_state_dict_lacks(kind: str) -> None:
    _, optimizer = built(kind)
    given = copy.deepcopy(optimizer.state_dict())
    for group in given["param_groups"]:
        del group["weight_decay"]
        group["lr"] = 0.25
    kept = [group["weight_decay"] for group in optimizer.param_groups]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.load_state_dict(given)
    assert [group["weight_decay"] for group in optimizer.param_groups] == kept
    assert all(group["lr"] == 0.25 for group in optimizer.param_groups)
    advance(params, optimizer, range(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_copied_and_pickled_optimizers_step_independently(kind: str) -> None:
    for copied in (copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
        params, optimizer = built(kind)
        theirs, other = copied((params, optimizer))
        before = [p.detach().clone() for p in params]
        advance(theirs, other, range(2, 4))
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True)), "the original has not moved"
        advance(params, optimizer, range(2, 4))
        assert all(torch.equal(p, q) and not torch.equal(p, b) for p, q, b in zip(params, theirs, before, strict=True))
        assert equal(optimizer.state_dict(), other.state_dict())


def test_torchs_muon_state_dict_keeps_our_own_group_settings() -> None:
    p = nn.Parameter(noise((16, 24), "p", 0))
    theirs = torch.optim.Muon([p])
    advance([p], theirs, range(1))
    muon = Muon([p], row_blocks=8)
    muon.load_state_dict(theirs.state_dict())
    assert muon.param_groups[0]["row_blocks"] == 8 and muon.param_groups[0]["normuon"] is None


def test_torchs_adamw_is_taken_up_by_fp32_states() -> None:
    params = [nn.Parameter(noise((16, 24), "p", 0)) for _ in range(2)]
    theirs, ours = torch.optim.AdamW(params[:1], lr=0.1), AdamW8bit(params[1:], lr=0.3, block=None)
    advance(params[:1], theirs, range(2))
    params[1].data.copy_(params[0].data)
    ours.load_state_dict(theirs.state_dict())
    for p, optimizer in zip(params, (theirs, ours), strict=True):
        p.grad = noise((16, 24), "p", 9)
        optimizer.step()
    assert torch.equal(*params)
    switched = torch.optim.AdamW(params[:1], maximize=True)
    with pytest.raises(ValueError, match=r"maximize = True, which AdamW8bit does not do: negate the loss"):
        ours.load_state_dict({**theirs.state_dict(), "param_groups": switched.state_dict()["param_groups"]})


@pytest.mark.parametrize(
    ("kind", "switch"), [(Muon, "maximize"), (AdamW8bit, "amsgrad"), (Shampoo, "differentiable"), (SOAP, "capturable")]
)
def test_unsupported_torch_switch_of_a_group_is_refused(kind: Any, switch: str) -> None:
    optimizer = kind([nn.Parameter(noise((8, 8), "p", 0))])
    with pytest.raises(ValueError, match=f"{switch} = True, which {kind.__name__} does not do"):
        optimizer.add_param_group({"params": [nn.Parameter(noise((8, 8), "q", 0))], switch: True})
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        *((AdamW8bit, {"lr": value}, "lr = ") for value in (-1.0, math.nan, math.inf, "a", None)),
        *((kind, {key: math.nan}, f"{key} = ") for kind in (Muon, AdamW8bit, Shampoo, SOAP) for key in ("lr", "eps", "weight_decay")),
        *((kind, {"lr": torch.ones(2)}, "lr is a tensor of 2 elements") for kind in (Muon, AdamW8bit, Shampoo, SOAP)),
        *((AdamW8bit, {"betas": betas}, "betas = .*: give two numbers")
          for betas in ((0.9,), 0.9, (0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), ("a", 0.9))),
        *((kind, {"betas": (0.9, 1.0)}, "betas = .*: give two numbers") for kind in (Shampoo, SOAP)),
        (Muon, {"momentum": 1.5}, "momentum = 1.5: give a number from 0 to 1"),
        (Muon, {"ns_steps": 2.5}, "ns_steps = 2.5: give 1 to 99"),
        (Muon, {"ns_coefficients": (1.0, 2.0, math.nan)}, "give finite numbers"),
        (Muon, {"row_blocks": True}, "row_blocks = True"),
        (Muon, {"normuon": "a"}, "normuon = a"),
        (AdamW8bit, {"min_8bit_numel": -1}, "min_8bit_numel = -1: give a whole number"),
        (Shampoo, {"precondition_frequency": 1.5}, "precondition_frequency = 1.5: give a whole number"),
        (Shampoo, {"root": math.inf}, "root = inf"),
        (Shampoo, {"factor_beta": "a"}, "factor_beta = a"),
        (SOAP, {"start_preconditioning_step": 2.5}, "start_preconditioning_step = 2.5"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_in_a_sentence(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(noise((8, 8), "p", 0))], **settings)


def test_newton_schulz_settings_may_change_between_steps() -> None:
    """torch's Muon allows this too, because it reads the group in every step."""
    shape = (16, 24)
    params = [nn.Parameter(noise(shape, "p", 0)) for _ in range(2)]
    ours, theirs = Muon(params[:1], lr=0.1), torch.optim.Muon(params[1:], lr=0.1)
    changes_by_step: tuple[dict[str, Any], ...] = ({}, {"ns_steps": 2}, {"ns_coefficients": (2.0, -1.5, 0.5)}, {"eps": 100.0})
    for step, changes in enumerate(changes_by_step):
        for p, optimizer in zip(params, (ours, theirs), strict=True):
            optimizer.param_groups[0].update(changes)
            p.grad = noise(shape, "p", 1 + step)
            optimizer.step()
        assert torch.equal(*params), changes
