"""Plain values and entries that can't be stored or loaded. Each is named, with a remedy that works."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import random
from collections import OrderedDict, defaultdict, deque
from pathlib import PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.checkpoint.plain_values import Module, _sgd, forged, same
from tests.resident import peak_growth
from vescale_ray import checkpoint as ckpt


class Pair(NamedTuple):
    x: int
    y: str


class Texts(list[str]):
    pass


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    ON = "on"


class Flag(enum.IntFlag):
    A = 1


class Real(float):
    pass


class Raw(bytes):
    pass


class Table(OrderedDict[str, int]):
    pass


@dataclasses.dataclass
class Trainer:
    step: int


class Odd:
    pass


def _scheduler() -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)


def _in_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"s": {1, 2}}, r"state.x.s is a set, which a checkpoint can't hold; give a sorted list"),
        ({"d": [datetime.datetime(2026, 1, 1)]}, r"state.x.d\[0\] is a datetime, .*give text or seconds"),
        ({"d": datetime.timedelta(1)}, "state.x.d is a timedelta, .*total_seconds"),
        ({"o": {"p": Odd()}}, "state.x.o.p is a Odd, .*give numbers, texts, bytes"),
        ((1, {2: decimal.Decimal(1)}), r"state.x\[1\].2 is a Decimal, .*give str\(\) of it, and make the Decimal from it after the load"),
        ({"p": PurePosixPath("a")}, r"state.x.p is a PurePosixPath, .*give str\(\) of it"),
        ({"r": range(3)}, r"state.x.r is a range, .*give list\(\) of it"),
        ({"n": SimpleNamespace(a=1)}, r"state.x.n is a SimpleNamespace, .*give vars\(\) of it"),
        ({"t": Trainer(3)}, r"state.x.t is a Trainer, .*give dataclasses.asdict\(\) of it, and make the Trainer from it after the load"),
        ({"q": deque([1, {2}])}, r"state.x.q\[1\] is a set"),
        ({"b": bytearray(b"x")}, "state.x.b is a bytearray, .*give bytes"),
        ({"g": torch.Generator()}, r"state.x.g is a Generator, .*give its get_state\(\)"),
        ({"g": np.random.default_rng(1)}, "state.x.g is a Generator, .*give its bit_generator.state"),
        ({"a": np.array([1, "x"], dtype=object)}, "state.x.a has NumPy's dtype object"),
        ({"a": np.zeros(2, "i4,f4")}, "state.x.a has NumPy's dtype"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, "state.x.a is a MaskedArray, .*give a plain numpy.ndarray"),
        ({"t": [torch.zeros(2, 2).to_sparse()]}, r"'state.x.t\[0\]' has layout"),
        ({"t": [torch.zeros(2, device="meta")]}, r"'state.x.t\[0\]' is on the meta device"),
        ({"r": np.random.RandomState(1)}, r"state.x.r is a RandomState, .*give its get_state\(\)"),
        ({"r": random.Random(1)}, r"state.x.r is a Random, .*give its getstate\(\)"),
        ([torch.nn.Linear(1, 1)], r"state.x\[0\] is a Linear, .*give it as an entry of the state itself"),
        ({"l": _scheduler()}, r"state.x.l is a StepLR, .*give its state_dict\(\), or the object as an entry"),
        (torch.nn.Linear, "state.x is a type"),
        ({"k": {torch.tensor(1): 2}}, "state.x.k has a Tensor as a key"),
        ({"k": {frozenset([1]): 2}}, "state.x.k has a frozenset as a key; give texts, numbers, bytes or tuples of them"),
        ({"k": {(1, datetime.date(2026, 1, 1)): 2}}, "state.x.k has a tuple as a key; give texts"),
        ({"e": [Level.HIGH]}, r"state.x.e\[0\] is a Level, which a checkpoint can't hold; give its value, and make the member from it"),
        ((Word.ON,), r"state.x\[0\] is a Word, .*give its value"),
        ({"f": Flag.A}, "state.x.f is a Flag, .*give its value"),
        ({"k": {Level.HIGH: 1}}, "state.x.k has a Level as a key; give texts, numbers"),
        ({"k": {(Word.ON, 1): 1}}, "state.x.k has a tuple as a key"),
        ({"n": Pair(1, "a")}, r"state.x.n is a Pair, .*give tuple\(\) of it, and make the Pair from it after the load"),
        ([Texts(["a"])], r"state.x\[0\] is a Texts, .*give list\(\) of it"),
        ({"d": defaultdict(list, {"a": [1]})}, r"state.x.d is a defaultdict, .*give dict\(\) of it"),
        (Table(a=1), r"state.x is a Table, .*give dict\(\) of it"),
        ({"m": MappingProxyType({"a": 1})}, r"state.x.m is a mappingproxy, .*give dict\(\) of it"),
        ({"r": Real(1.5)}, r"state.x.r is a Real, .*give float\(\) of it"),
        ({"r": Real("inf")}, "state.x.r is a Real"),
        ({"r": Raw(b"x")}, r"state.x.r is a Raw, .*give bytes\(\) of it"),
        ({"t": torch.strided}, "state.x.t is a layout, .*give numbers, texts"),
        (_in_itself(), "state.x.a.a.*is nested more than 100 deep, or holds itself"),
        (
            {"opt": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}},
            r"state.x.opt is an optimizer's state_dict\(\); give the",
        ),
    ],
)
def test_unstorable_value_is_refused_by_its_path_before_writing(root, value, words):
    with pytest.raises(ValueError, match=words) as caught:
        ckpt.save({"model": {"w": torch.ones(2)}, "x": value}, root, 1)
    assert "\n" not in str(caught.value) and not list(root.iterdir())
    with pytest.raises(ValueError, match=words.replace("state.x", "aux.x")):
        ckpt.save({"model": {"w": torch.ones(2)}}, root, 1, aux={"x": value})
    assert not list(root.iterdir())


def test_remedies_suggested_for_unstorable_objects_work(root):
    made = {"x": [_scheduler().state_dict(), random.Random(3).getstate(), np.random.RandomState(3).get_state()]}
    ckpt.save({"model": {"w": torch.ones(2)}, **made, "head": torch.nn.Linear(1, 1), "lr": _scheduler()}, root, 1)
    state: dict[str, Any] = {"x": None, "head": torch.nn.Linear(1, 1), "lr": _scheduler()}
    ckpt.load(state, root)
    assert same(state["x"], made["x"])


@pytest.mark.parametrize("value", [Level.HIGH, Word.ON, (1, Flag.A), Pair(1, "a"), Texts(["a"]), Real("nan")])
def test_hyperparameters_and_meta_of_other_types_are_refused(root, value):
    model, optimizer = _sgd(sort=value)
    with pytest.raises(ValueError, match=r"hyperparameter 'sort' of optimizer 'optimizer'(: sort(\[1\])?)? is a"):
        ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
    if isinstance(value, enum.Enum):
        with pytest.raises(ValueError, match=f"meta.sort is a {type(value).__name__}, which JSON can't hold"):
            ckpt.save({"model": model}, root, 1, meta={"sort": value})
    assert not list(root.iterdir())


ARRAY = {"dtype": "<i8", "shape": [100], "data": [0, 800]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"$date": "2026-01-01"}, r"a value of the sort '\$date', which this version does not know: load it with a newer one"),
        ({"$array": {**ARRAY, "data": [0, 801]}}, "bytes 0 to 801 were requested of 800"),
        ({"$array": {**ARRAY, "data": [-8, 792]}}, "bytes -8 to 792"),
        ([{"$array": ARRAY}] * 2, "of which 0 are unused"),
        ({"$array": {**ARRAY, "shape": [1 << 40, 1 << 40]}}, "is not a shape"),
        ({"$array": {**ARRAY, "shape": [1 << 40]}}, "800 bytes do not make an array of shape"),
        ({"$tensor": {**ARRAY, "dtype": "int64", "shape": [1 << 40]}}, "800 bytes do not make a tensor of shape"),
        ({"$array": {**ARRAY, "dtype": "|O"}}, "'.O' is not a dtype of an array"),
        ({"$array": {**ARRAY, "dtype": "01"}}, "'01' is not a dtype of an array"),
        ({"$array": {**ARRAY, "dtype": 8}}, "can't be taken back"),
        ({"$tensor": {"dtype": "qint8", "shape": [0], "data": ""}}, "qint8"),
        ({"$array": {}}, "KeyError"),
        ({"$bytes": "&"}, "can't be taken back"),
        ({"$tuple": 3}, "a tuple is not a list"),
        ({"$deque": [1, [1, 2]]}, "a deque of at most 1 has 2 items"),
        ({"$deque": [True, []]}, "a deque of at most True"),
        ({"$dtype": "zeros"}, "'zeros' is not a dtype of this torch"),
        ({"$dtype": 3}, "can't be taken back"),
        ({"$device": 3}, "can't be taken back"),
        ({"$device": "nowhere"}, "can't be taken back"),
        ({"items": [[{"$array": ARRAY}, 1]]}, "unhashable"),
    ],
)
def test_malformed_or_newer_plain_values_are_refused_cheaply(value, words):
    store = forged({"values": {"x": value}})
    into: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "x": None}
    caught: list[str] = []

    def refused() -> None:
        with pytest.raises(ckpt.CheckpointMismatch, match=words) as error:
            ckpt.load(into, store)
        caught.append(str(error.value))

    assert peak_growth(refused) < 32 << 20
    assert "\n" not in caught[0] and "meta.values.x" in caught[0] and not into["model"]["w"].any()
    assert ckpt.load({"model": {"w": torch.zeros(2)}}, store).step == 1, "what is not asked for does no harm"


def entries() -> dict[str, Any]:
    net = Module()
    return {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters()),
        "ema": {"w": torch.ones(2)},
        "stream": {"n": 1},
        "mix": [torch.ones(2)],
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swa": {"w": torch.zeros(2)}}, r"has no state 'swa'; it has 'ema' \(tensors\), 'mix' \(a plain value\), 'model' \(tensors\), "),
        ({"swa": Module()}, r"has no state 'swa'; it has 'ema' \(tensors\)"),
        ({"epoch": None}, r"has no state 'epoch'; .*'optimizer' \(an optimizer\), 'stream' \(a plain value\)"),
        (
            {"stream": {"w": torch.zeros(2)}},
            "has 'stream' as a plain value, the state has tensors there; give None, which becomes the value",
        ),
        ({"mix": {"w": torch.zeros(2)}}, "has 'mix' as a plain value, the state has tensors there"),
        ({"optimizer": None}, "has 'optimizer' as an optimizer, the state has a plain value there; give the optimizer itself"),
        ({"optimizer": {"w": torch.zeros(2)}}, "has 'optimizer' as an optimizer, the state has tensors there"),
        ({"ema": "SGD"}, "has 'ema' as tensors, the state has an optimizer there; give a module or a dict of tensors"),
        ({"ema": {"w": torch.zeros(2), "v": torch.zeros(1)}}, "does not fit the state: it lacks 'ema/v'"),
        ({"ema": {"v": torch.zeros(2)}}, r"has no state 'ema'|does not fit the state: it lacks 'ema/v' .*it also has 'ema/w'"),
        ({"ema": {"w": torch.zeros(3)}}, r"does not fit the state: 'ema/w' has shape \(2,\), wanted \(3,\)"),
        ({"ema": {"w": torch.zeros(2, dtype=torch.int32)}}, "does not fit the state: 'ema/w' is float32, wanted int32"),
        ({"model": {"v": torch.zeros(2)}, "optimizer": ...}, "is of another model: it lacks 'v'.*it also has 'w'"),
    ],
)
def test_missing_or_mistyped_entry_raises_and_changes_nothing(root, change, words):
    ckpt.save(entries(), root, 1)
    state = entries()
    with torch.no_grad():
        state["model"].w.fill_(7)
    before = state["model"].w.clone()
    for key, value in change.items():
        if value == "SGD":
            value = torch.optim.SGD(state["model"].parameters())
        state[key] = value
    state = {key: value for key, value in state.items() if value is not ...}
    kept = dict(state)
    with pytest.raises(ckpt.CheckpointMismatch, match=words) as caught:
        ckpt.load(state, root)
    assert "\n" not in str(caught.value) and str(root) in str(caught.value)
    assert all(state[key] is kept[key] for key in kept)
    model = state["model"]
    assert not isinstance(model, Module) or torch.equal(model.w, before), "nothing was changed"


def test_remedies_suggested_for_mistaken_entries_work(root):
    ckpt.save(entries(), root, 1)
    state: dict[str, Any] = {"model": Module(), "ema": None, "mix": None, "stream": None}
    ckpt.load(state, root)
    assert same(state["ema"], {"w": torch.ones(2)}) and same(state["mix"], [torch.ones(2)]) and state["stream"] == {"n": 1}
    into = {"ema": {"w": torch.zeros(2)}, "swa": {"w": torch.zeros(2)}}
    ckpt.load(into, root, allow_missing="swa/*")
    assert into["ema"]["w"].all() and not into["swa"]["w"].any()
    ckpt.load(into, root, rename={"swa/*": "ema/*"})
    assert into["swa"]["w"].all(), "under another name it is there"
