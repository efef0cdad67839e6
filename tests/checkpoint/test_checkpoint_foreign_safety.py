"""Malicious files of other programs: a DCP index, which is a pickle, archives and folders.

Each file is refused in one sentence, or read as its contents say. Both take little memory and time, and leave no trace in this process.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import resource
import signal
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from tests.checkpoint.checkpoint_support import bits, dcp_index, rewrite_dcp_index
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.bridges.dcp import ENTRIES
from vescale_ray.checkpoint.bridges.dcp_pickle import read_pickle
from vescale_ray.checkpoint.bridges.dcp_state import DcpSource
from vescale_ray.checkpoint.bridges.torch_archive import read_archive

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


@contextmanager
def cheap(seconds: int = 30, mib: int = 200) -> Iterator[None]:
    """Limit the time and memory of the block, so that a decompression bomb fails the test and not the machine."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (mib << 20), hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def everything(place: Path) -> Any:
    """All data that an import would take: tensors by bits, and the other values."""
    source = DcpSource(place, ENTRIES)
    tensors = {}
    for name, tensor in source.tensors.items():
        for kind, dtype in tensor.kinds.items():
            out = torch.empty(math.prod(tensor.shape), dtype=dtype)
            source.read_into(name, kind, 0, out)
            tensors[name, kind] = tensor.shape, dtype, bits(out)
    return tensors, source.meta


def stock(place: Path) -> dict[str, Any]:
    state = {
        "model": {"a": torch.randn(7, 5), "b": torch.arange(4), "s": torch.tensor(2.0), "e": torch.zeros(0, 3)},
        "optim": {
            "state": {"a": {"exp_avg": torch.randn(7, 5), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a"]}],
        },
        "sched": {"x": [1, 2], "n": 3},
    }
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return state


def index_of(shape: list[int], chunks: list[tuple[list[int], list[int]]]) -> Metadata:
    """A DCP index of one tensor ``w`` that places its chunks in one archive."""
    boxes = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), boxes)
    info = _StorageInfo("x.distcp", 0, 8)
    return Metadata({"w": entry}, None, {MetadataIndex("w", torch.Size(o)): info for o, _ in chunks})


# ------------------------------------------------------------------------------------------------------------------ the index


def attacks() -> dict[str, tuple[bytes, str]]:
    head = b"\x80\x04"
    name = b"torch.distributed.checkpoint.metadata"
    class_of = b"\x8c" + bytes([len(name)]) + name + b"\x8c\x08Metadata\x93"
    nested = b")" + b"".join(b"\x94h" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))  # pairs of pairs, 60 levels deep
    shared = index_of([2], [([0], [1]), ([1], [1])])
    for number in range(5000):
        shared.state_dict_metadata[f"w{number}"] = shared.state_dict_metadata["w"]
    empty = index_of([2], [([0], [2]), *[([0], [0])] * 3000])
    for number in range(3000):
        empty.state_dict_metadata[f"w{number}"] = empty.state_dict_metadata["w"]
        empty.storage_data[MetadataIndex(f"w{number}", torch.Size([0]))] = _StorageInfo("x.distcp", 0, 8)
    again = index_of([1600] + [2] * 7, [([0] * 8, [1] * 8)])
    again.state_dict_metadata["w"].chunks *= 1600 * 2**7
    deep = index_of([0], [])
    deep.state_dict_metadata = {f"w{number}": deep.state_dict_metadata["w"] for number in range(5000)}
    deep.planner_data = {name: ("model", long, name) for long in ["x" * 100_000] for name in deep.state_dict_metadata}
    side = 100
    grid = [([i, j], [1, 1]) for i in range(side) for j in range(side)]
    grid[-1] = grid[0]
    return {
        "a memo index of four billion": (head + b"Nr\xff\xff\xff\xff.", "no DCP metadata"),
        "a class that would be changed": (
            head + class_of + b"N}\x8c\x07version\x8c\x04evils\x86b.",
            "an object is missing|a record is missing",
        ),
        "a hash that never ends": (head + nested + b"\x94}h\x3cNs.", "a dict's key is not text"),
        "a text of an exabyte": (head + b"X\xff\xff\xff\xffabc.", "cut off at byte"),
        "bytes of an exabyte": (head + b"\x8e" + struct.pack("<Q", 1 << 60) + b".", "DCP never writes opcode 0x8e"),
        "a number of a gigabyte": (head + b"\x8b" + struct.pack("<i", 1 << 30) + b".", "DCP never writes opcode 0x8b"),
        "a call": (pickle.dumps(print), "refers to builtins.print, which is none of DCP's own classes"),
        "a class by its old name": (b"cos\nsystem\n(S'true'\ntR.", "refers to os.system"),
        "an attribute of torch": (b"ctorch\nload\n.", "refers to torch.load"),
        "a module that torch imports when it is asked for": (b"ctorch\n_inductor\n.", "refers to torch._inductor"),
        "a million numbers of one hash": (
            head + b"}(" + b"".join(b"\x8a\x09" + (n * ((1 << 61) - 1)).to_bytes(9, "little") + b"N" for n in range(5, 1000)) + b"u.",
            "a dict's key is not text",
        ),
        "a class of four megabytes": (head + b"X" + struct.pack("<I", 1 << 22) + b"m" * (1 << 22) + b"\x8c\x01n\x93.", "refers to"),
        "an extension": (head + b"\x82\x01.", "opcode 0x82"),
        "a persistent id": (head + b"NQ.", "opcode 0x51"),
        "a protocol to come": (b"\x80\x06N.", "protocol above 5"),
        "marks and nothing": (head + b"(((((u.", "missing"),
        "one list of chunks under many names": (pickle.dumps(shared), "it does not say where 'w0' is stored"),
        "empty chunks under many names": (pickle.dumps(empty), "chunks in an index of"),
        "one chunk two hundred thousand times": (pickle.dumps(again), "its chunks overlap, or leave a hole"),
        "one long path under many names": (pickle.dumps(deep), "the path of 'w0' in the state dict is longer than its name"),
        "a grid of chunks of which two overlap": (pickle.dumps(index_of([side, side], grid)), "overlap, or leave a hole"),
        "chunks cut in 20 dimensions": (
            pickle.dumps(index_of([2] * 20, [([0] * 20, [1] * 20), ([0] * 20, [2] * 19 + [1])][:1] + [([0] * 20, [1] + [1] * 19)])),
            "stored twice|elements, its chunks|is cut in|overlap",
        ),
        "a shape of 10^40 elements": (pickle.dumps(index_of([1 << 60] * 5, [])), "has shape .* and dtype"),
    }


ATTACKS = attacks()


@pytest.mark.parametrize("case", ATTACKS)
@pytest.mark.fault("K34")
def test_malicious_dcp_index_is_refused_cheaply(root, case):
    raw, words = ATTACKS[case]
    before = dict(vars(metadata.Metadata))
    (root / ".metadata").write_bytes(raw)
    with cheap(), pytest.raises(ckpt.ForeignFileError, match=words) as caught:
        everything(root)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 1000
    assert dict(vars(metadata.Metadata)) == before


def changed(raw: bytes, rng: random.Random) -> bytes:
    found = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, way = rng.randrange(len(found)), rng.randrange(5)
        if way == 0:
            found[place] ^= 1 << rng.randrange(8)
        elif way == 1:
            found[place] = rng.randrange(256)
        elif way == 2:
            del found[place : place + rng.choice((1, 2, 8, 50))]
        elif way == 3:
            found[place:place] = rng.randbytes(rng.choice((1, 4, 8)))
        else:
            other = rng.randrange(len(found))
            found[place : place + 8] = found[other : other + 8]
    return bytes(found)


@pytest.mark.parametrize("what", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 11))])
def test_corrupted_dcp_checkpoint_is_refused_or_read_cheaply(root, what, seed):
    """DCP has no checksums, so changed contents may be read as they are. Nothing else happens, and each read is quick."""
    stock(root)
    good, truth = (root / what).read_bytes(), everything(root)
    rng = random.Random(seed)
    outcomes = {"refused": 0, "same": 0, "other": 0}
    with cheap(seconds=300, mib=500):
        for index in range(100 if seed == 0 else 500):
            (root / what).write_bytes(changed(good, rng))
            began = time.monotonic()
            try:
                outcome = "same" if everything(root) == truth else "other"
            except ckpt.CheckpointError as error:
                outcome = "refused"
                assert "\n" not in str(error) and len(str(error)) <= 1000, (seed, index)
            except Exception as error:
                raise AssertionError(f"seed {seed}, change {index}: {type(error).__name__}: {error}") from error
            assert time.monotonic() - began < 5, (seed, index)
            outcomes[outcome] += 1
    assert outcomes["refused"] > 40 and outcomes["same"] > 1, outcomes


def test_restricted_unpickler_reads_dcp_metadata_as_pickle_does(root):
    """The test covers all pickle protocols since DCP exists, and both of Python's picklers."""
    stock(root)
    theirs = dcp_index(root)
    truth = everything(root)
    pure: Callable[..., Any] = pickle._Pickler  # type: ignore[attr-defined]
    for protocol in (2, 3, 4, 5):
        for make in (pickle.Pickler, pure):
            out = io.BytesIO()
            make(out, protocol).dump(theirs)
            (root / ".metadata").write_bytes(out.getvalue())
            assert everything(root) == truth
            read = read_pickle(out.getvalue()).state
            assert read["planner_data"] == theirs.planner_data and len(read["storage_data"]) == len(theirs.storage_data)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_accepted_only_if_they_tile_the_tensor_once(root, seed):
    """The oracle counts how many chunks cover each element."""
    rng = random.Random(seed)
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    chunks = [([0] * len(shape), list(shape))]
    for _ in range(rng.randint(0, 8)):  # cut one chunk in two, up to 8 times
        offsets, sizes = chunks.pop(rng.randrange(len(chunks)))
        d = rng.randrange(len(shape))
        at = rng.randint(0, sizes[d])
        chunks.append((list(offsets), [*sizes[:d], at, *sizes[d + 1 :]]))
        chunks.append(([*offsets[:d], offsets[d] + at, *offsets[d + 1 :]], [*sizes[:d], sizes[d] - at, *sizes[d + 1 :]]))
    chunks = [c for c in chunks if math.prod(c[1])]
    for moved in (False, True):
        if moved:
            offsets, sizes = rng.choice(chunks)
            d = rng.randrange(len(shape))
            offsets[d] = rng.randint(0, shape[d] - sizes[d])
        if len({tuple(o) for o, _ in chunks}) < len(chunks):
            continue  # two chunks at one place are another error
        covered = torch.zeros(shape, dtype=torch.int64)
        for offsets, sizes in chunks:
            covered[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        rewrite_dcp_index(root, index_of(shape, chunks))
        if bool((covered == 1).all()):
            DcpSource(root, ENTRIES)
        else:
            with pytest.raises(ckpt.ForeignFileError, match="overlap, or leave a hole"):
                DcpSource(root, ENTRIES)


# -------------------------------------------------------------------------------------------------------- archives and files


class _Call:
    """An object that is pickled as a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


def test_enum_members_load_from_every_pickle_form():
    formats = metadata._MEM_FORMAT_ENCODING
    for called in ((getattr, formats, "TORCH_CONTIGUOUS_FORMAT"), (formats, 0)):
        for protocol in (2, 3, 4, 5):
            assert read_pickle(pickle.dumps([_Call(*called)], protocol)) == [None]
    for arguments in ((metadata.Metadata, "__init__"), ("text", "join"), ()):
        with pytest.raises(ckpt.ForeignFileError, match="a call that DCP does not make"):
            read_pickle(pickle.dumps(_Call(getattr, *arguments)))


def put_object(place: Path, value: Any, change: Callable[[bytes], bytes] = lambda raw: raw) -> None:
    """Write a DCP checkpoint with one plain object, stored as ``value``."""
    stock(place)
    out = io.BytesIO()
    torch.save(value, out)
    raw = change(out.getvalue())
    described = dcp_index(place)
    described.state_dict_metadata["thing"] = metadata.BytesStorageMetadata()
    described.storage_data[MetadataIndex("thing")] = _StorageInfo("thing.distcp", 0, len(raw))
    rewrite_dcp_index(place, described)
    (place / "thing.distcp").write_bytes(raw)


def compressed(raw: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for one in old.namelist():
            new.writestr(one, old.read(one))
    return out.getvalue()


def pickled(body: bytes) -> Callable[[bytes], bytes]:
    """The archive with another pickle in it."""
    return holding("data.pkl", b"\x80\x02" + body)


def holding(name: str, data: bytes) -> Callable[[bytes], bytes]:
    """The archive with ``data`` as its entry ``name``."""

    def change(raw: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
            for one in old.namelist():
                new.writestr(one, data if one.endswith(f"/{name}") else old.read(one))
        return out.getvalue()

    return change


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def laughs() -> list[Any]:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("value", "change", "words"),
    [
        pytest.param("x" * (1 << 24), compressed, "'thing': it is compressed", id="a bomb of zip"),
        pytest.param(endless(), None, "'thing': it is nested more than 64 deep", id="a list in itself"),
        pytest.param(laughs(), None, "holds more than a million values", id="a billion laughs", marks=pytest.mark.slow),
        pytest.param([torch.ones(3)], None, "holds a tensor within a plain object", id="a tensor"),
        pytest.param({"a": 1}, lambda raw: b"PK" + raw[2:-60], "not an archive of torch.save, or cut off", id="half an archive"),
        pytest.param({"a": 1}, lambda raw: pickle.dumps({"a": 1}), "not an archive of torch.save, or cut off", id="a bare pickle"),
        pytest.param({"a": {3}}, None, "refers to __builtin__.set, which only unpickling could make", id="a set"),
        pytest.param(
            {},
            pickled(b"}" + b"K\x01" + 60 * b"q\x00h\x00\x86" + b"K\x01s."),
            "a dict's key is not text",
            id="a tuple to be hashed for ever",
        ),
        pytest.param(
            {}, pickled(b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x10\x85R."), "refers to builtins.bytearray", id="64 GiB of zeros"
        ),
        pytest.param({}, pickled(b"ccollections\nCounter\n}\x85R" + b"0" * 9), "opcode 0x30", id="an opcode of others"),
    ],
)
@pytest.mark.fault("K34")
def test_malicious_pickled_object_is_refused_cheaply(root, value, change, words):
    put_object(root, value, change or (lambda raw: raw))
    with cheap(mib=400), pytest.raises(ckpt.ForeignFileError, match=words) as caught:
        everything(root)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 1000


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("expanded", r"'model.w': a chunk of shape \(1048576, 256\) exceeds its archive of \d+ bytes"),
        ("one archive for many", "'model.v1' shares bytes with another tensor"),
        ("a file of a terabyte", "ends before byte .*, where 'model.w' ends: truncated"),
    ],
)
@pytest.mark.fault("K34")
def test_a_small_checkpoint_does_not_become_a_large_commit(root, what, words):
    """The index claims a gigabyte, but the files hold a few kilobytes."""
    state = {"w": torch.zeros(1000)} | ({f"v{n}": torch.zeros(1000) for n in range(3)} if what.startswith("one") else {})
    dcp.save({"model": state}, checkpoint_id=root / "dcp", no_dist=True)
    described = dcp_index(root / "dcp")
    info = described.storage_data[MetadataIndex("model.w", torch.Size([0]))]
    if what == "expanded":
        raw = io.BytesIO()
        torch.save(torch.zeros(1).expand(1 << 20, 256), raw)
        (root / "dcp" / info.relative_path).write_bytes(raw.getvalue())
        described.state_dict_metadata["model.w"] = index_of([1 << 20, 256], [([0, 0], [1 << 20, 256])]).state_dict_metadata["w"]
        described.storage_data = {MetadataIndex("model.w", torch.Size([0, 0])): _StorageInfo(info.relative_path, 0, len(raw.getvalue()))}
    elif what == "one archive for many":
        described.storage_data = dict.fromkeys(described.storage_data, info)
    else:
        info.length = 1 << 40
    rewrite_dcp_index(root / "dcp", described)
    with cheap(20), pytest.raises(ckpt.ForeignFileError, match=words):
        ckpt.import_dcp(root / "dcp", root / "root")
    assert not list((root / "root").rglob("*.safetensors"))


def test_impossible_length_is_refused_before_allocating_memory(root):
    put_object(root, {"a": 1})
    described = dcp_index(root)
    described.storage_data[MetadataIndex("thing")] = _StorageInfo("thing.distcp", 0, 1 << 45)
    rewrite_dcp_index(root, described)
    with cheap(), pytest.raises(ckpt.ForeignFileError, match="truncated"):
        everything(root)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to nothing"])
@pytest.mark.parametrize("what", ["index", "shard", "dcp index", "dcp file"])
def test_fifo_folder_or_dangling_link_is_refused_at_once(root, kind, what):
    """Opening a FIFO would otherwise wait for a writer for ever."""
    save_file({"a": torch.ones(2)}, root / "a.safetensors")
    (root / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    stock(root)
    victim = (
        root
        / {"index": "model.safetensors.index.json", "shard": "a.safetensors", "dcp index": ".metadata", "dcp file": "__0_0.distcp"}[what]
    )
    victim.unlink()
    if kind == "fifo":
        os.mkfifo(victim)
    elif kind == "folder":
        victim.mkdir()
    else:
        victim.symlink_to(root / "nowhere")
    with cheap(), pytest.raises(ckpt.ForeignFileError, match="regular file, but|can't be opened|it has no .metadata|holds no") as caught:
        ckpt.import_hf(victim if what == "index" else root, root / "root") if "dcp" not in what else everything(root)
    assert str(root) in str(caught.value)


def test_archive_reader_matches_torch_for_every_dtype_and_stride():
    """The cases are every dtype, every order in which a tensor can lie in its storage, and plain objects."""
    names = "float64 float32 float16 bfloat16 complex64 complex128 bool uint8 uint16 uint32 uint64 int8 int16 int32 int64"
    names += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    wide = (torch.arange(7 * 32) % 2).to(torch.uint8).view(7, 32)
    values: list[Any] = [wide.view(getattr(torch, name)) for name in names.split()]
    base = torch.randn(4, 6, 5)
    values += [
        base.transpose(0, 2),
        base[1:3, ::2],
        base[2, 3, 4],
        base[:, :0],
        base[0, 0].expand(3, 5),
        nn.Parameter(base.bfloat16()),
        torch.tensor(3),
    ]
    for value in values:
        out = io.BytesIO()
        torch.save(value, out)
        found = read_archive(out, len(out.getvalue()))
        assert (found.dtype, found.shape, found.contiguous) == (value.dtype, tuple(value.shape), value.is_contiguous()), value.dtype
        if value.numel():
            flat = torch.frombuffer(bytearray(out.getvalue()[found.offset :]), dtype=torch.uint8)
            width = value.element_size()
            span = (sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True)) + 1) * width
            read = flat[:span].clone().view(found.dtype).as_strided(found.shape, found.stride)
            assert bits(read) == bits(value.detach()), value.dtype
    plain = {
        "a": [1, -5, 1 << 63, 2.5, math.inf, None, True, "\u20ac"],
        "b": (torch.Size([2, 3]), torch.bfloat16),
        3: OrderedDict(x=1),
        "c": Counter("aab"),
    }
    out = io.BytesIO()
    torch.save(plain, out)
    assert read_archive(out, len(out.getvalue())) == plain


def tensor_pickle(numel: int, first: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: bytes) -> bytes:
    """Pickle of a float tensor as torch.save writes it. The tensor's storage 0 claims ``numel`` elements."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"

    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuJ" + struct.pack("<i", numel) + b"tQ"
    fields = b"J" + struct.pack("<i", first) + numbers(shape) + numbers(stride) + b"\x89}" + b"".join(more)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + fields + b"tR."


def moved(raw: bytes) -> bytes:
    """The archive with a false directory: the elements' entry has the offset of the archive's last entry."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
    victim, last = entries["data/0"], max(entries.values(), key=lambda one: one.header_offset)
    place = raw.rindex(victim.filename.encode())  # its name in the directory; the offset is in the 4 bytes before
    assert struct.unpack("<I", raw[place - 4 : place]) == (victim.header_offset,)
    return raw[: place - 4] + struct.pack("<I", last.header_offset) + raw[place:]


COUNTED = b"ccollections\nCounter\n" + b"}" + b"(" + b"".join(b"M" + struct.pack("<H", n) + b"K\1" for n in range(1000)) + b"u\x94"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pickled(tensor_pickle(1000, 0, (1000,), (1,))), None),
        (pickled(tensor_pickle(1000, 0, (1 << 30, 4), (0, 1))), None),
        (pickled(tensor_pickle(1001, 0, (1001,), (1,))), "its elements reach beyond its archive"),
        (pickled(tensor_pickle(10, 0, (11,), (1,))), "its elements reach beyond its archive"),
        (pickled(tensor_pickle(1000, 1, (1000,), (1,))), "its elements reach beyond its archive"),
        (pickled(tensor_pickle(1000, 0, (2, 2), (999, 1))), "its elements reach beyond its archive"),
        (pickled(tensor_pickle(1000, -1, (10,), (1,))), "an invalid tensor"),
        (pickled(tensor_pickle(1000, 0, (10,), (-1,))), "an invalid tensor"),
        (pickled(tensor_pickle(1000, 0, (10, 10), (1,))), "an invalid tensor"),
        (pickled(tensor_pickle(-1, 0, (0,), (1,))), "an invalid storage"),
        (pickled(tensor_pickle(1000, 0, (10,), (1,), b"}X\4\0\0\0conj\x88s")), "conjugated or negated view"),
        (pickled(tensor_pickle(1000, 0, (10,), (1,)).replace(b"\0\x000X", b"\0\x009X")), "it has no storage 9"),
        (moved, "its elements reach beyond its archive"),
        (holding("byteorder", b"big"), "of the other byte order"),
        (pickled(COUNTED + b"\x85R."), None),
        (pickled(b"](" + COUNTED + b"\x85R" + b"ccollections\nCounter\nh\0\x85R" * 60 + b"e."), "more counts than"),
    ],
)
@pytest.mark.fault("K34")
def test_an_archive_is_believed_only_within_its_bytes(root, change, words):
    out = io.BytesIO()
    torch.save(torch.arange(1000.0), out)
    raw = change(out.getvalue())
    with cheap(10):
        if words is None:
            read_archive(io.BytesIO(raw), len(raw))
            return
        with pytest.raises(ckpt.ForeignFileError, match=words) as caught:
            read_archive(io.BytesIO(raw), len(raw))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 1000
