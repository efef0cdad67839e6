"""Plain values of a state. A stored value loads with equal contents and types.

Other values are refused by name before anything is written.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.checkpoint_support import flip, random_bits
from tests.checkpoint.plain_values import Module, _sgd, digest, forged, same
from tests.ranks import on_processes, run_gloo
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


def test_hyperparameters_load_with_their_types(root):
    hyper = {"plan": [[1, 2], (3, [4])], "betas": (0.9, 0.99), "name": "a", "on": True, "scale": math.inf}
    model, optimizer = _sgd(**hyper)
    ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
    model, again = _sgd(**{**hyper, "betas": (0.0, 0.0), "name": "b"})
    ckpt.load({"model": model, "optimizer": again}, root)
    assert same({k: again.param_groups[0][k] for k in hyper}, hyper)


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
