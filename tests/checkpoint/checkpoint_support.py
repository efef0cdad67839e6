"""Checkpoints of random layouts, made without the library's own planner, and the values that loading must give."""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.ranks import _context
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.stores.store import Root

Tensors = Mapping[tuple[str, str], torch.Tensor]
Held = list[list[tuple[str, str, int, int]]]
"""For each rank, the (name, kind, start, end) intervals that it holds, in the model's order."""

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where the system has one. Syncing costs nothing there, so that property tests can save often."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="vescale-ckpt-", dir=base)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bits, with NaN payloads, negative zeros and subnormals. Only a bit-exact copy equals it. Bools stay 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape)) if size else torch.empty(tuple(shape), dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def adam_like(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Parameters and moments of a small model: split tensors, a frozen one, 0-d, empty, 1 element, four dtypes."""
    shapes: list[tuple[str, tuple[int, ...], torch.dtype, bool]] = [
        ("embed.weight", (37, 16), torch.float32, True),
        ("layers.0.attention.weight", (24, 24), torch.float32, True),
        ("layers.0.norm.weight", (24,), torch.bfloat16, True),
        ("layers.0.scale", (), torch.float32, True),
        ("layers.0.empty", (0, 5), torch.float32, True),
        ("layers.1.experts", (3, 7, 11), torch.float32, True),
        ("layers.1.one", (1,), torch.float32, True),
        ("frozen.weight", (19, 5), torch.float16, False),
        ("counts", (13,), torch.int64, False),
        ("mask", (9,), torch.bool, False),
        ("quantized", (33,), torch.float8_e4m3fn, False),
    ]
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for index, (name, shape, dtype, trained) in enumerate(shapes):
        tensors[name, "param"] = random_bits(shape, dtype, seed * 1000 + index)
        if trained:
            tensors[name, "exp_avg"] = random_bits(shape, torch.float32, seed * 1000 + 100 + index)
            tensors[name, "exp_avg_sq"] = random_bits(shape, torch.float32, seed * 1000 + 200 + index)
    return tensors


def random_layout(tensors: Tensors, world: int, seed: int, *, together: bool = True) -> Held:
    """Cut every tensor at random places into one interval per rank, many of them empty, with ranks in a random order.

    If ``together``, all kinds of a tensor are cut alike, as in training; otherwise each kind has its own cuts.
    """
    rng = random.Random(seed)
    held: Held = [[] for _ in range(world)]
    cuts_of: dict[str, tuple[list[int], list[int]]] = {}
    for (name, kind), tensor in tensors.items():
        key = name if together else f"{name}/{kind}"
        if key not in cuts_of:
            inner = sorted(rng.randint(0, tensor.numel()) for _ in range(world - 1))
            order = list(range(world))
            if rng.random() < 0.3:
                rng.shuffle(order)
            cuts_of[key] = ([0, *inner, tensor.numel()], order)
        cuts, order = cuts_of[key]
        for position, rank in enumerate(order):
            held[rank].append((name, kind, cuts[position], cuts[position + 1]))
    return held


def pieces_of(tensors: Tensors, intervals: Sequence[tuple[str, str, int, int]], *, name_empty: bool = True) -> list[ckpt.ShardPiece]:
    return [
        ckpt.ShardPiece(name, kind, start, end, tuple(full.shape), full.dtype, full.reshape(-1)[start:end].clone())
        for name, kind, start, end in intervals
        if (full := tensors[name, kind]) is not None and (name_empty or end > start or full.numel() == 0)
    ]


def save_in_process(
    root: Root,
    tensors: Tensors,
    held: Held,
    *,
    step: int = 1,
    epoch: int = 0,
    block_bytes: int = 4096,
    chunk_bytes: int = 8192,
    name_empty: bool = True,
    aux: bool = True,
) -> ckpt.Commit:
    """Write every rank's shard and commit, one after the other in this process. Votes go through JSON as between hosts."""
    attempt = ckpt.new_attempt()
    votes = []
    for rank, intervals in enumerate(held):
        vote = ckpt.write_shard(
            root,
            attempt,
            rank,
            pieces_of(tensors, intervals, name_empty=name_empty),
            aux={"rank": rank} if aux else None,
            step=step,
            epoch=epoch,
            block_bytes=block_bytes,
            chunk_bytes=chunk_bytes,
        )
        votes.append(ckpt.Vote.from_json(vote.to_json()))
    return ckpt.commit(root, votes, step=step, epoch=epoch, attempt=attempt, world=len(held), meta={"consumed": step * 6})


def load_in_process(checkpoint: ckpt.Checkpoint, tensors: Tensors, held: Held) -> list[ckpt.ReadPlan]:
    """Read the intervals of every rank of another layout, and assert that each equals the original bit for bit."""
    plans = []
    for intervals in held:
        ranges = []
        for name, kind, start, end in intervals:
            out = torch.zeros(end - start, dtype=tensors[name, kind].dtype)
            ranges.append((name, kind, start, end, out))
        plans.append(checkpoint.read_ranges(ranges))
        for name, kind, start, end, out in ranges:
            assert bits(out) == bits(tensors[name, kind].reshape(-1)[start:end]), (name, kind, start, end)
    return plans


def assert_equals(root: Root, tensors: Tensors, commit: str | None = None) -> None:
    checkpoint = ckpt.open(root, commit)
    assert {(n, k) for n, t in checkpoint.tensors.items() for k in t.kinds} == set(tensors)
    for (name, kind), full in tensors.items():
        stored = checkpoint.tensors[name]
        assert stored.shape == tuple(full.shape) and stored.kinds[kind] == full.dtype, (name, kind)
    load_in_process(checkpoint, tensors, [[(name, kind, 0, full.numel()) for (name, kind), full in tensors.items()]])


def flip(path: Path, byte: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[byte] ^= mask
    path.write_bytes(raw)


def damage(root: Path, commit: ckpt.Commit, byte: int = 5000) -> Path:
    """Flip a bit in the first data object of a checkpoint. Returns the object's path."""
    victim = next((root / "data" / commit.attempt).glob("*.safetensors"))
    flip(victim, byte)
    return victim


def in_subprocess(function, *args, timeout: float = 60.0) -> int:  # type: ignore[no-untyped-def]
    """Run a module-level ``function(*args)`` in its own process, which has torch imported.

    Returns the exit code, -9 if the process is killed.
    """
    process = _context().Process(target=function, args=args, daemon=True)
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{function.__name__}{args} was still running after {timeout} s")
    assert process.exitcode is not None
    return process.exitcode


class Script:
    """A module-level ``function(*args)`` in its own process, which ends as an interpreter does: it joins threads and calls exit handlers.

    A new interpreter would import torch for seconds.
    """

    def __init__(self, folder: Path, function: Callable[..., None], *args: Any) -> None:
        self.texts = folder / "stdout", folder / "stderr"
        self.process = _context().Process(target=_run_script, args=(self.texts, function, args))
        self.process.start()

    def ended(self, timeout: float) -> tuple[int | None, str, str]:
        """Wait for the end. Returns the exit code, None if it still ran, and what it wrote to stdout and stderr."""
        self.process.join(timeout)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        output, errors = (path.read_text() for path in self.texts)
        return code, output, errors


def _run_script(texts: tuple[Path, Path], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    for descriptor, path in enumerate(texts, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        function(*args)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def peak_growths(phases: Callable[..., Iterator[None]], *args: object) -> list[int]:
    """For each phase, the growth of the peak resident memory in bytes. ``phases(*args)`` runs in its own process.

    The phases end at a ``yield`` each; the first one prepares and is not measured.
    """
    receiver, sender = _context().Pipe(duplex=False)
    assert in_subprocess(_measure, sender, phases, args) == 0
    found: list[int] = receiver.recv()
    return found


def _measure(sender: Any, phases: Callable[..., Iterator[None]], args: tuple[object, ...]) -> None:
    def peak() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    torch.set_num_threads(1)
    parts, found, before = phases(*args), [], 0
    for _ in parts:
        found.append(peak() - before)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = peak()
    sender.send(found[1:])


def dcp_index(place: Path) -> Metadata:
    """Read the index of a checkpoint that torch's own DCP wrote: the oracle of our reader, and the base of forged indexes."""
    found: Metadata = pickle.loads((place / ".metadata").read_bytes())
    return found


def rewrite_dcp_index(place: Path, described: Any) -> None:
    (place / ".metadata").write_bytes(pickle.dumps(described))
