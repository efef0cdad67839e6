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
import shutil
import signal
import struct
import time
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
from vescale_ray.checkpoint.bridges.dcp_files import Archives, DcpFiles
from vescale_ray.checkpoint.bridges.dcp_index import StorageInfo, read_index
from vescale_ray.checkpoint.bridges.dcp_state import DcpSource

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


class _Call:
    """An object that is pickled as a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


def attacks() -> dict[str, tuple[bytes, str]]:
    head = b"\x80\x04"
    side = 100
    grid = [([i, j], [1, 1]) for i in range(side) for j in range(side)]
    grid[-1] = grid[0]
    return {
        "a text of an exabyte": (head + b"X\xff\xff\xff\xffabc.", "not DCP metadata, or cut off"),
        "a call": (pickle.dumps(math.sqrt), "refers to math.sqrt, which is none of DCP's own classes"),
        "a class by its old name": (b"cos\nsystem\n(S'true'\ntR.", "refers to os.system"),
        "an attribute of torch": (b"ctorch\nload\n.", "refers to torch.load"),
        "a module that torch imports when it is asked for": (b"ctorch\n_inductor\n.", "refers to torch._inductor"),
        "a class of four megabytes": (head + b"X" + struct.pack("<I", 1 << 22) + b"m" * (1 << 22) + b"\x8c\x01n\x93.", "refers to"),
        "a getattr of a class": (pickle.dumps(_Call(getattr, Metadata, "__init__"), 2), "in place of a Metadata"),
        "a grid of chunks of which two overlap": (pickle.dumps(index_of([side, side], grid)), "overlap, or leave a hole"),
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
    assert outcomes["refused"] > 40 and outcomes["same"], outcomes


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
            read = read_index(out.getvalue())
            assert read.paths == theirs.planner_data and len(read.tensors) + len(read.objects) == len(theirs.state_dict_metadata)


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


def test_enum_members_load_from_every_pickle_form(root):
    formats = metadata._MEM_FORMAT_ENCODING
    for called in ((getattr, formats, "TORCH_CONTIGUOUS_FORMAT"), (formats, 0)):
        for protocol in (2, 3, 4, 5):
            stock(root)
            described = dcp_index(root)
            described.planner_data = _Call(*called)
            assert read_index(pickle.dumps(described, protocol)).tensors
            shutil.rmtree(root)
            root.mkdir()


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


@pytest.mark.parametrize(
    ("value", "change", "words"),
    [
        pytest.param({"a": 1}, lambda raw: b"PK" + raw[2:-60], "not an archive of torch.save, or cut off", id="half an archive"),
        pytest.param({"a": 1}, lambda raw: pickle.dumps({"a": 1}), "not an archive of torch.save, or cut off", id="a bare pickle"),
        pytest.param({"a": _Call(math.sqrt, 4.0)}, None, "refers to math.sqrt, which only unpickling could make", id="a call"),
        pytest.param({"a": random.Random(0)}, None, "refers to random.Random, which only unpickling could make", id="an object"),
    ],
)
@pytest.mark.fault("K34")
def test_malicious_pickled_object_is_refused_cheaply(root, value, change, words):
    put_object(root, value, change or (lambda raw: raw))
    with cheap(mib=400), pytest.raises(ckpt.ForeignFileError, match=words) as caught:
        everything(root)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 1000


def test_a_truncated_file_is_found_before_a_commit_is_written(root):
    dcp.save({"model": {"w": torch.zeros(1000)}}, checkpoint_id=root / "dcp", no_dist=True)
    described = dcp_index(root / "dcp")
    described.storage_data[MetadataIndex("model.w", torch.Size([0]))].length = 1 << 40
    rewrite_dcp_index(root / "dcp", described)
    with cheap(), pytest.raises(ckpt.ForeignFileError, match="ends before byte .*, where 'model.w' ends: truncated"):
        ckpt.import_dcp(root / "dcp", root / "root")
    assert not list((root / "root").rglob("*.safetensors"))


def test_impossible_length_is_refused_before_allocating_memory(root):
    put_object(root, {"a": 1})
    described = dcp_index(root)
    described.storage_data[MetadataIndex("thing")] = _StorageInfo("thing.distcp", 0, 1 << 45)
    rewrite_dcp_index(root, described)
    with cheap(), pytest.raises(ckpt.ForeignFileError, match="truncated"):
        everything(root)


@pytest.mark.parametrize(
    ("what", "kind"),
    [*((what, "fifo") for what in ("index", "shard", "dcp index", "dcp file")), ("shard", "folder"), ("dcp file", "link to nothing")],
)
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


def test_archive_reader_matches_torch_for_every_dtype_and_stride(root):
    """The cases are every dtype and every order in which a tensor can lie in its storage."""
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
    for number, value in enumerate(values):
        with open(root / f"{number}", "wb") as file:
            file.write(b"x" * number)
            torch.save(value, file)
            end = file.tell()
        found = Archives(root).payload(StorageInfo(str(number), number, end - number))
        assert (found.dtype, found.shape, found.contiguous) == (value.dtype, tuple(value.shape), value.is_contiguous()), value.dtype
        if value.numel():
            flat = torch.frombuffer(bytearray((root / f"{number}").read_bytes()[found.offset :]), dtype=torch.uint8)
            width = value.element_size()
            span = (sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True)) + 1) * width
            read = flat[:span].clone().view(found.dtype).as_strided(found.shape, found.stride)
            assert bits(read) == bits(value.detach()), value.dtype


def test_plain_objects_with_tensors_are_read(root):
    plain = {
        "a": [1, -5, 1 << 63, 2.5, math.inf, None, True, "\u20ac"],
        "b": (torch.Size([2, 3]), torch.bfloat16),
        3: OrderedDict(x=1),
        "c": Counter("aab"),
        "d": [torch.arange(3)],
    }
    put_object(root, plain)
    found = DcpFiles(root).object("thing")
    assert torch.equal(found["d"].pop(), plain["d"].pop()) and found == plain


def test_a_view_that_is_not_as_in_memory_is_refused(root):
    torch.save(torch.ones(3, dtype=torch.complex64).conj(), root / "c")
    with pytest.raises(ckpt.ForeignFileError, match="not a dense tensor as it is in memory"):
        Archives(root).payload(StorageInfo("c", 0, (root / "c").stat().st_size))
