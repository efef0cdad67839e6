"""Buffers that keep their addresses while their memory comes, goes and moves to another buffer, and the pool's accounts."""

from __future__ import annotations

import ctypes
import mmap
import resource
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from vescale_ray.fsdp.buffers import address_range, memory
from vescale_ray.fsdp.buffers.memory import Buffer, Pool

CPU = torch.device("cpu")
LARGE = 4 * memory.MAPPED_BYTES
SIZES = [LARGE, LARGE + 4, 1000]


class User:
    """A stand-in for a group."""


def _users(pool: Pool, nbytes: int, count: int) -> list[User]:
    users = [User() for _ in range(count)]
    for user in users:
        pool.expect(nbytes, user)
    return users


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_address_stays_and_views_stay_valid(nbytes):
    buffer = Buffer(nbytes, CPU)
    flat, address = buffer.flat(torch.float32), None
    for value in range(3):
        buffer.allocate()
        address = address or flat.data_ptr()
        flat.fill_(value)
        assert flat is buffer.flat(torch.float32) and (flat == value).all()
        if nbytes >= memory.MAPPED_BYTES:
            assert flat.data_ptr() == address
        buffer.free()
    assert not buffer.allocated


def test_pages_move_from_one_buffer_to_the_next_without_a_fault():
    first, second = Buffer(LARGE, CPU), Buffer(LARGE, CPU)
    a, b = first.flat(torch.uint8), second.flat(torch.uint8)
    first.allocate()
    a.fill_(7)
    second.allocate(first)
    assert (b == 7).all(), "the very pages"
    first.allocate(second)
    second.allocate(first)
    before = faults()
    b.fill_(8)
    assert faults() - before < LARGE // 4096 // 4, "new pages would fault one by one"
    assert not first.allocated and second.allocated
    first.allocate(second)
    assert (a == 8).all()


class Owner:
    def why(self) -> str:
        return "the weights of 'layer 1' went away"


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda t: t.sum(),
    "add": lambda t: t + 1,
    "product with the transpose": lambda t: t.t() @ t,
    "copy": lambda t: t.clone(),
    "cast": lambda t: t.to(torch.bfloat16),
    "norm layer": lambda t: F.rms_norm(t, t.shape[-1:], t[0]),
    "embedding": lambda t: F.embedding(torch.tensor([1]), t),
    "convolution": lambda t: F.conv1d(t[None], t[:, :, None]),
    "for each": lambda t: torch._foreach_add([t, t], 1),
    "print": str,
    "one element": lambda t: t[1, 1].item(),
    "numpy": lambda t: t.numpy(),
    "raw pointer": lambda t: t.data_ptr(),
    "write": lambda t: t.fill_(3),
    "write elsewhere": lambda t: t.mul_(2),
    "copy into it": lambda t: t.copy_(torch.ones_like(t, device="cpu")),
}


@pytest.mark.parametrize("where", ["freed", "moved on", "released", "never had any"])
@pytest.mark.parametrize("side", [4, 512])
def test_using_a_buffer_without_memory_raises(where, side):
    nbytes = side * side * 4
    pool = Pool(CPU)
    users = _users(pool, nbytes, 2)  # noqa: F841 (alive)
    owner = Owner()
    first, second = Buffer(nbytes, CPU, invalid_because=weakref.WeakMethod(owner.why)), Buffer(nbytes, CPU)
    matrix = first.flat(torch.float32).view(side, side)
    if where != "never had any":
        first.allocate()
        matrix.fill_(1)
    if where == "freed":
        first.free()
    elif where == "moved on":
        second.allocate(first)
    elif where == "released":
        pool.release(first, None)
        assert first.allocated, "its memory waits for the next buffer"
    for name, use in USES.items():
        text = "Cannot access data pointer" if where == "never had any" and side == 512 else "the weights of .layer 1. went"
        with pytest.raises(RuntimeError, match=text):
            use(matrix)
            raise AssertionError(name)
    pool.provide(first)
    assert matrix.fill_(2).sum() == 2 * side * side


def test_error_text_of_an_invalid_storage_is_freed_with_it():
    class Talkative:
        def why(self) -> str:
            return "x" * 100_000

    owner = Talkative()
    peak = 0
    for index in range(2000):
        buffer = Buffer(64, CPU, invalid_because=weakref.WeakMethod(owner.why))
        buffer.allocate()
        buffer.free()
        with pytest.raises(RuntimeError, match="xxx"):
            buffer.flat(torch.uint8).sum()
        if index == 200:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50_000, "kB; 180 MB of texts were made"


def test_a_kernel_that_cannot_move_pages_gives_new_ones(monkeypatch):
    class Old:
        def __getattr__(self, name):
            return (lambda *_: -1) if name == "mremap" else getattr(libc, name)

    libc = address_range.libc()
    monkeypatch.setattr(address_range, "_LIBC", [Old()])
    first, second = Buffer(LARGE, CPU), Buffer(LARGE, CPU)
    first.allocate()
    first.flat(torch.uint8).fill_(7)
    second.allocate(first)
    assert not first.allocated
    second.flat(torch.uint8).fill_(3)
    first.allocate()
    first.flat(torch.uint8).fill_(4)
    assert (second.flat(torch.uint8) == 3).all()


def test_memory_goes_back_to_the_system_with_the_buffer():
    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum(int(end, 16) - int(start, 16) for start, end in (line.split()[0].split("-") for line in lines))

    Buffer(LARGE, CPU)
    before = mapped()
    for _ in range(20):
        buffer, other = Buffer(64 * LARGE, CPU), Buffer(64 * LARGE, CPU)
        buffer.allocate()
        other.allocate(buffer)
        other.flat(torch.uint8)[0] = 1
        del buffer, other
    assert mapped() - before < 64 * LARGE


@pytest.mark.parametrize("nbytes", SIZES)
def test_pool_hands_memory_on_and_counts_held_bytes(nbytes):
    pool = Pool(CPU)
    users = _users(pool, nbytes, 2)  # noqa: F841 (alive)
    a, b = Buffer(nbytes, CPU), Buffer(nbytes, CPU)
    pool.provide(a)
    assert pool.bytes_held() == nbytes
    pool.release(a, None)
    assert pool.bytes_held() == nbytes, "kept for the next one"
    pool.provide(b)
    assert pool.bytes_held() == nbytes and not a.allocated
    pool.provide(a)
    assert pool.bytes_held() == pool.bytes_held(nbytes) == 2 * nbytes and pool.bytes_held(nbytes + 1) == 0
    pool.release(b, None)
    scratch = pool.take(nbytes, CPU)
    assert pool.bytes_held() == 2 * nbytes, "scratch takes over what parameters have left"
    pool.give_back(scratch)
    pool.provide(b)
    assert pool.bytes_held() == 2 * nbytes, "and the other way round"
    pool.release(a, None)
    pool.release(b, None)
    pool.trim()
    assert pool.bytes_held() == 0 and pool.peak_bytes == 2 * nbytes
    assert pool.take(nbytes, CPU) is scratch, "its views are worth keeping"


def test_a_size_that_only_one_group_has_is_not_kept():
    pool = Pool(CPU)
    users = _users(pool, LARGE, 1)  # noqa: F841 (alive)
    a = Buffer(LARGE, CPU)
    pool.provide(a)
    pool.release(a, None)
    assert not a.allocated and pool.bytes_held() == 0


def resident(buffer: Buffer) -> int:
    """Bytes of the buffer that are resident in memory."""
    pages = (ctypes.c_ubyte * (buffer.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mincore(ctypes.c_void_p(buffer.flat(torch.uint8).data_ptr()), ctypes.c_size_t(buffer.nbytes), pages)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [LARGE, 3 << 20])
def test_buffer_written_in_pieces_counts_only_resident_memory(nbytes):
    pool = Pool(CPU)
    users = _users(pool, nbytes, 2)  # noqa: F841 (alive)
    pool.peak_bytes = 0
    for _ in range(2):
        buffer = pool.take(nbytes, CPU, in_pieces=True)
        flat, piece = buffer.flat(torch.uint8), nbytes // 8
        assert pool.bytes_held() == resident(buffer) == 0
        for start in (0, 3 * piece, piece):
            pool.written(buffer, piece)
            flat[start : start + piece] = 1
            assert pool.bytes_held() == resident(buffer)
        assert pool.bytes_held() == pool.peak_bytes == 3 * piece
        pool.give_back(buffer)
        pool.trim()
        assert pool.bytes_held() == 0
        pool.peak_bytes = 0


def test_reused_buffer_counts_as_fully_resident():
    pool = Pool(CPU)
    users = _users(pool, LARGE, 2)  # noqa: F841 (alive)
    buffer = pool.take(LARGE, CPU, in_pieces=True)
    pool.written(buffer, LARGE // 2)
    assert pool.bytes_held() == LARGE // 2
    pool.give_back(buffer)  # the step was given up
    assert pool.bytes_held() == LARGE, "at most: no one remembers which pages"
    assert pool.take(LARGE, CPU, in_pieces=True) is buffer and pool.bytes_held() == LARGE
    pool.give_back(buffer)
    pool.trim()
    assert pool.take(LARGE, CPU) is buffer and pool.bytes_held() == LARGE, "to be written at once, by an exchange"
    pool.give_back(buffer)
    parameters = Buffer(LARGE, CPU)
    pool.provide(parameters)
    pool.release(parameters, None)
    assert not buffer.allocated
    other = pool.take(LARGE, CPU, in_pieces=True)
    assert pool.bytes_held() == LARGE and not other.unwritten, "its pages were moved here"


def test_clean_padding_is_the_last_to_be_given_up():
    pool = Pool(CPU)
    users = _users(pool, LARGE, 3)  # noqa: F841 (alive)
    clean, dirty = pool.take(LARGE, CPU), pool.take(LARGE, CPU)
    clean.clean_for = "layout"
    pool.give_back(clean)
    pool.give_back(dirty)
    pool.provide(Buffer(LARGE, CPU))
    assert clean.allocated and not dirty.allocated
    assert pool.take(LARGE, CPU, "layout") is clean


@pytest.mark.parametrize(("value", "kept"), [("1000000000000", True), (str(LARGE - 1), False), ("", False), ("x", False)])
def test_unused_memory_is_kept_if_malloc_is_told_to_keep_it(value, kept, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", value)
    pool = Pool(CPU)
    users = _users(pool, LARGE, 2)  # noqa: F841 (alive)
    buffer = Buffer(LARGE, CPU)
    pool.provide(buffer)
    pool.release(buffer, None)
    pool.trim()
    assert buffer.allocated == kept and pool.bytes_held() == LARGE * kept


def test_users_that_are_gone_hold_nothing_and_count_no_more():
    pool = Pool(CPU)
    users = _users(pool, LARGE, 3)
    gathered, scratch, other = Buffer(LARGE, CPU), pool.take(LARGE, CPU), Buffer(LARGE, CPU)
    pool.provide(gathered)
    pool.provide(other)
    assert pool.bytes_held() == 3 * LARGE
    del users[:2], gathered, scratch  # two of three groups go, in the middle of a step
    assert pool.bytes_held() == LARGE
    pool.release(other, None)
    assert pool.bytes_held() == 0, "the last one hands its memory on to no one"
