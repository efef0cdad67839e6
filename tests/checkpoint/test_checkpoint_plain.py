"""Plain values of a state. A stored value loads with equal contents and types.

Other values are refused by name before anything is written.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import json
import logging
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.checkpoint_support import bits, flip, random_bits
from tests.checkpoint.test_checkpoint_safety import sealed
from tests.ranks import on_processes, run_gloo
from tests.resident import peak_growth
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.plain_values.plain import INLINE_BYTES
from vescale_ray.cli import main


def loader_state(rank: int) -> dict[str, Any]:
    """State of a shuffled loader, as torchdata stores it, with arrays and bytes in addition."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "yielded": 4 + rank,
        "sampler": {"generator": generator.get_state(), "weights": [torch.full((3,), rank / 3, dtype=torch.bfloat16)]},
        "numpy": np.random.RandomState(rank).get_state(),
        "cursor": bytes(range(rank, 200)) * 4,
        "at": np.int64(2**40 + rank),
    }


def digest(value: Any) -> str:
    """Digest of a value with its type and dtype."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{bits(value)!r}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type(value).__name__}{value.dtype.str}{value.shape}{value.tobytes()!r}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "(" + ",".join(map(digest, value)) + ")"
    return f"{type(value).__name__} {value!r}"


def weights(world: int) -> torch.Tensor:
    return distribute_tensor(torch.arange(12.0).view(6, 2), init_device_mesh("cpu", (world,)), [Shard(0)])


def save_rank(rank: int, world: int, root: str, beside: bool) -> tuple[str | None, list[str]]:
    """Save twice, each rank with its own loader state.

    Returns the error, if any, and the logged messages.
    """
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vescale_ray.checkpoint").addHandler(handler)
    mine = loader_state(rank)
    options: dict[str, Any] = {"aux": {"loader": mine}} if beside else {}
    with ckpt.Saver(root) as saver:
        for step in (1, 2):
            saver.save({"model": {"w": weights(world)}, "loader": mine, "same": {"n": (1, 2)}}, step, **options)
    return None, records


def load_rank(rank: int, world: int, root: str) -> tuple[str, str, bool]:
    state: dict[str, Any] = {"model": {"w": torch.zeros_like(weights(world))}, "loader": None}
    loaded = ckpt.load(state, root)
    right = torch.equal(state["model"]["w"].full_tensor(), torch.arange(12.0).view(6, 2))
    return digest(state["loader"]), digest(loaded.aux), right


def same(left: Any, right: Any) -> bool:
    """True if two values are equal bit for bit, with the same types and dtypes."""
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(one, other) and same(left[one], right[other]) for one, other in zip(left, right, strict=True))
        )
    if isinstance(left, (list, tuple, deque)):
        return (
            type(left) is type(right)
            and getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
            and len(left) == len(right)
            and all(map(same, left, right))
        )
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and (left.dtype, left.shape) == (right.dtype, right.shape) and digest(left) == digest(right)
    if isinstance(left, (np.ndarray, np.generic)):
        return type(left) is type(right) and digest(left) == digest(right)
    return type(left) is type(right) and repr(left) == repr(right)


TENSORS = st.builds(
    random_bits,
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(
        [
            torch.float32,
            torch.float64,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.uint8,
            torch.int16,
            torch.bool,
            torch.complex64,
            torch.uint16,
            torch.uint64,
            torch.float8_e4m3fn,
        ]
    ),
    st.integers(0, 1000),
).filter(lambda tensor: tensor.numel() != 1 or not tensor.dtype.is_floating_point or bool(torch.isfinite(tensor.float()).all()))
ARRAYS = st.builds(
    lambda shape, dtype, seed: np.frombuffer(random.Random(seed).randbytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(
        shape
    ),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["<i8", ">i4", "<f4", "<f2", "<u2", "<c16", "<M8[ns]", "<m8[s]", "S3", "|u1"]),
    st.integers(0, 1000),
)
SCALARS = ARRAYS.filter(lambda array: array.size > 0 and array.dtype.kind != "S" and array.dtype.str[0] != ">").map(
    lambda a: a.reshape(-1)[0]
)
TEXT_SCALARS = st.one_of(st.text(st.characters(exclude_categories=())).map(np.str_), st.binary(max_size=300).map(np.bytes_))
ATOMS = st.one_of(
    TEXT_SCALARS,
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 9000), 1 << 9000),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(exclude_categories=())),
    st.binary(max_size=600),
    TENSORS,
    ARRAYS,
    SCALARS,
    st.sampled_from([torch.float32, torch.complex64, torch.qint8, torch.device("cpu"), torch.device("cuda", 1)]),
)
PLAIN_KEYS = st.one_of(TEXT_SCALARS, st.text(), st.integers(), st.binary(), st.booleans(), st.floats(allow_nan=False), st.none())
KEYS = st.one_of(
    PLAIN_KEYS, st.tuples(PLAIN_KEYS, PLAIN_KEYS), st.sampled_from(["float", "items", "counter", "tensor", "$tuple", "$x", "$"])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=4), st.one_of(st.none(), st.integers(0, 5))),
        st.lists(st.integers(0, 9), max_size=4).map(torch.Size),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(PLAIN_KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=20,
)


@settings(max_examples=75)
@given(VALUES, VALUES)
def test_plain_values_load_equal_with_their_types(value, own):
    store = ckpt.MemoryStore()
    state = {"model": {"w": torch.arange(3.0)}, "x": [value], "y": {"a": value, "b": 1}}
    ckpt.save(state, store, 1, aux={"own": own})
    into: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "x": None, "y": None}
    loaded = ckpt.load(into, store)
    assert same(into["x"], [value]) and same(into["y"], {"a": value, "b": 1})
    assert same(loaded.values["x"], [value]) and same(loaded.aux, {"own": own})
    assert ckpt.verify(store).ok


def test_dict_of_tensors_loads_into_an_entry_that_is_none(root):
    held = {"r": torch.get_rng_state(), "z": torch.tensor(3)}
    ckpt.save({"model": {"w": torch.ones(2)}, "rng": held}, root, 1)
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "rng": None}
    loaded = ckpt.load(state, root)
    assert same(state["rng"], held) and same(loaded.values["rng"], held)


class Loader:
    """A data loader whose order comes from a generator."""

    def __init__(self, seed: int) -> None:
        self.generator, self.position = torch.Generator().manual_seed(seed), 0

    def __next__(self) -> list[int]:
        self.position += 1
        return torch.randperm(5, generator=self.generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.position = state["position"]


def test_shuffled_loader_resumes_in_its_saved_order(root):
    loader = Loader(3)
    next(loader)
    with ckpt.Saver(root) as saver:
        saver.async_save({"model": {"w": torch.ones(2)}, "loader": loader}, 1)
        wanted = [next(loader) for _ in range(3)]  # drawn after the call, which stores the state of its own moment
    resumed = Loader(0)
    ckpt.load({"model": {"w": torch.zeros(2)}, "loader": resumed}, root)
    assert [next(resumed) for _ in range(3)] == wanted and resumed.position == loader.position


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


def _sgd(**hyper: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update(hyper)
    return model, optimizer


def test_hyperparameters_load_with_their_types(root):
    hyper = {"plan": [[1, 2], (3, [4])], "betas": (0.9, 0.99), "name": "a", "on": True, "scale": math.inf}
    model, optimizer = _sgd(**hyper)
    ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
    model, again = _sgd(**{**hyper, "betas": (0.0, 0.0), "name": "b"})
    ckpt.load({"model": model, "optimizer": again}, root)
    assert same({k: again.param_groups[0][k] for k in hyper}, hyper)


@pytest.mark.parametrize("value", [Level.HIGH, Word.ON, (1, Flag.A), Pair(1, "a"), Texts(["a"]), Real("nan")])
def test_hyperparameters_and_meta_of_other_types_are_refused(root, value):
    model, optimizer = _sgd(sort=value)
    with pytest.raises(ValueError, match=r"hyperparameter 'sort' of optimizer 'optimizer'(: sort(\[1\])?)? is a"):
        ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
    if isinstance(value, enum.Enum):
        with pytest.raises(ValueError, match=f"meta.sort is a {type(value).__name__}, which JSON can't hold"):
            ckpt.save({"model": model}, root, 1, meta={"sort": value})
    assert not list(root.iterdir())


def test_large_plain_values_are_stored_outside_the_manifest(root):
    value = {"index": torch.arange(1 << 20), "names": np.arange(1 << 18), "blob": bytes(1 << 20), "small": bytes(INLINE_BYTES)}
    made = ckpt.save({"model": {"w": torch.ones(2)}, "x": value}, root, 1).wait()
    assert (root / made.key).stat().st_size < 1 << 16, "of 11 MB; most of it are checksums"
    opened = ckpt.open(root)
    assert opened.tensors["state.x"].shape == (sum(8 << n for n in (20, 18)) + (1 << 20),)
    assert opened.names() == {"w": "w"} and list(opened.to_state_dict()) == ["w"], "no part of the model"
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "x": None}
    ckpt.load(state, root)
    assert same(state["x"], value)
    alone = ckpt.load({"model": {"w": torch.zeros(2)}}, root)
    assert alone.read.planned < 1 << 14, "weights alone: nothing else is read"


def test_differing_plain_values_load_as_rank_0s_with_one_warning(root):
    told = run_gloo(2, save_rank, str(root), True)
    warned = [text for _, records in told for text in records if "differs between ranks" in text]
    assert warned == [
        "the plain value 'loader' differs between ranks 0 and 1, and rank 0's is stored for all ranks; if each rank has its own (a data "
        "loader's position, a random state), give it as aux={'loader': ..}, which each rank gets back"
    ]
    first = digest(loader_state(0))
    for rank, found in enumerate(run_gloo(2, load_rank, str(root))):
        assert found == (first, digest({"loader": loader_state(rank)}), True)
    assert run_gloo(3, load_rank, str(root)) == [(first, digest(None), True)] * 3, "on other ranks nobody's own is right"
    assert run_gloo(1, load_rank, str(root)) == [(first, digest(None), True)]
    assert ckpt.verify(root).ok


def test_plain_values_saved_by_one_rank_load_on_two(root):
    run_gloo(1, save_rank, str(root), False)
    assert run_gloo(2, load_rank, str(root)) == [(digest(loader_state(0)), digest(None), True)] * 2


@on_processes(2)
def test_every_rank_refuses_a_sharded_tensor_in_a_plain_value(rank, world, root):
    said = r"state.x.deep\[0\].w is a sharded tensor \(DTensor\) among plain values, of which rank 0's are stored"
    with pytest.raises(ValueError, match=said):
        ckpt.save({"model": {"w": weights(world)}, "x": {"n": 1, "deep": [{"w": weights(world)}]}}, root, 1)
    dist.barrier()
    assert not list(root.iterdir())


def test_damaged_bytes_are_found_named_and_passed_over(root, caplog):
    state = {"model": {"w": torch.ones(2)}, "loader": loader_state(0)}
    ckpt.save(state, root, 1)
    made = ckpt.save({**state, "loader": loader_state(1)}, root, 2).wait()
    [path] = root.glob(f"data/{made.attempt}/*.safetensors")
    path.chmod(0o644)
    flip(path, path.read_bytes().index(loader_state(1)["sampler"]["generator"].numpy().tobytes()) + 17, 4)
    [problem] = ckpt.verify(root, made.name).problems
    assert "state.loader (plain)" in str(problem)
    into: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "loader": None}
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"holds state.loader \(plain\)") as caught:
        ckpt.load(into, root, commit=made.name)
    assert into["loader"] is None and not into["model"]["w"].any() and "parts of it" not in str(caught.value), "nothing was changed"
    assert ckpt.load(into, root).step == 1 and digest(into["loader"]) == digest(loader_state(0))


def forged(values: dict[str, Any]) -> ckpt.MemoryStore:
    """A checkpoint with the given plain values and a valid seal."""
    store = ckpt.MemoryStore()
    made = ckpt.save({"model": {"w": torch.ones(2)}, "x": {"a": np.arange(100)}}, store, 1).wait()
    raw, when = store.objects[made.key]
    document = json.loads(raw[:-65])
    document["meta"] = {**document["meta"], **values}
    store.objects[made.key] = (sealed(document), when)
    return store


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


def test_plain_values_of_earlier_versions_load_unchanged():
    """Tags of earlier versions, and dicts that look like today's tags."""
    written = {
        "plain": [1, {"$tuple": [1, 2]}, {"$date": 1}, {"float": "inf"}],
        "keys": {"items": [[3, "a"], [None, {"counter": [[2, 1]]}]]},
        "rates": {"tensor": {"dtype": "float32", "value": 0.5}},
    }
    store = forged({"state": written, "values": {}})
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "plain": None, "keys": None, "rates": None}
    ckpt.load(state, store)
    assert same(state["plain"], [1, {"$tuple": [1, 2]}, {"$date": 1}, math.inf])
    assert same(state["keys"], {3: "a", None: Counter({2: 1})}) and same(state["rates"], torch.tensor(0.5))


def test_simple_plain_values_stay_where_old_readers_find_them(root):
    value = {"consumed": 12, "best": math.inf, "by": {3: [1.5, None]}}
    ckpt.save({"model": {"w": torch.ones(2)}, "stream": value, "new": (1,)}, root, 1, aux={"n": [1]})
    opened = ckpt.open(root)
    assert opened.meta["state"] == {"stream": {"consumed": 12, "best": {"float": "inf"}, "by": {"items": [[3, [1.5, None]]]}}}
    assert opened.meta["values"] == {"new": {"$tuple": [1]}} and opened.aux(0)["user"] == {"n": [1]}


def test_documented_format_suffices_to_read_an_array(root):
    array = np.arange(90, dtype="<f4").reshape(9, 10)
    made = ckpt.save({"model": {"w": torch.ones(2)}, "x": {"a": [array], "b": b"xyz"}}, root, 1).wait()
    manifest = json.loads((root / made.key).read_bytes()[:-65])
    about = manifest["meta"]["values"]["x"]["a"][0]["$array"]
    assert base64.b64decode(manifest["meta"]["values"]["x"]["b"]["$bytes"]) == b"xyz"
    tensor = next(t for t in manifest["tensors"] if t["fqn"] == "state.x")
    [kind] = [k for k in manifest["groups"][tensor["group"]]["kinds"] if k["kind"] == "plain"]
    assert (kind["start"], kind["end"], tensor["base"]) == ([0], [360], 0)
    start, end = (kind["offset"][0] + at for at in about["data"])
    raw = (root / manifest["objects"][kind["object"][0]]["key"]).read_bytes()[start:end]
    assert np.array_equal(np.frombuffer(raw, about["dtype"]).reshape(about["shape"]), array)


def test_numpy_scalars_round_trip_as_hyperparameters(root):
    def made(**options: Any) -> tuple[Module, torch.optim.Optimizer]:
        net = Module()
        return net, torch.optim.SGD([{"params": [net.w], "limit": np.float64("inf"), "flag": np.bool_(True)}], **options)

    net, optimizer = made(lr=np.float32(0.3), momentum=np.float64(0.9))
    ckpt.save({"model": net, "optimizer": optimizer}, root, 1)
    other, resumed = made(lr=1.0)
    ckpt.load({"model": other, "optimizer": resumed}, root)
    [group] = resumed.param_groups
    assert (group["lr"], group["momentum"], group["limit"], group["flag"]) == (np.float32(0.3), 0.9, math.inf, True)


def test_command_line_shows_and_diffs_plain_values(root, capsys):
    for step in (1, 2):
        ckpt.save({"model": {"w": torch.ones(2)}, "loader": loader_state(step)}, root, step)
    before, _ = ckpt.ls(root)
    assert main(["ckpt", "show", str(root), "--tensors"]) == 0
    kept = loader_state(2)
    size = len(kept["cursor"]) + kept["sampler"]["generator"].numel() + kept["numpy"][1].nbytes
    assert f"state.loader  [{size}]  plain uint8" in capsys.readouterr().out
    assert main(["ckpt", "diff", f"{root}@{before.name}", str(root)]) == 1
    out = capsys.readouterr().out
    assert "plain of 'state.loader'" in out and "1 tensors equal bit for bit" in out


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))


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


def test_tensors_in_a_plain_value_survive_a_dcp_round_trip(root, tmp_path):
    loader = {
        "n": 3,
        "sampler": {"generator": torch.Generator().manual_seed(1).get_state(), "w": [torch.ones(2), torch.zeros(1)]},
        "k": "a",
    }
    ckpt.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(3)}, "loader": loader}, root, 1)
    other = {
        "loader": {"n": 0, "sampler": {"generator": torch.zeros(5056, dtype=torch.uint8), "w": [torch.zeros(2), torch.ones(1)]}, "k": ""}
    }
    dcp.load(other, storage_reader=ckpt.DcpReader(root), no_dist=True)
    assert same(other["loader"], loader), "stock DCP reads ours"
    ckpt.export_dcp(root, None, tmp_path / "dcp")
    ckpt.import_dcp(tmp_path / "dcp", tmp_path / "back", step=1)
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "ema": {"w": torch.zeros(3)}, "loader": None}
    ckpt.load(state, tmp_path / "back")
    assert same(state["loader"], loader) and state["ema"]["w"].all()
    straight: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "loader": None}
    ckpt.import_dcp(tmp_path / "dcp", straight)
    assert same(straight["loader"], loader)
