"""M ranks read bit for bit the data that N ranks wrote, for any cuts, and read no more than they asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.checkpoint_support import (
    DTYPES,
    assert_equals,
    load_in_process,
    memory_folder,
    peak_growths,
    pieces_of,
    random_bits,
    random_layout,
    save_in_process,
)
from tests.ranks import run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray import fully_shard
from vescale_ray.checkpoint.format import staging
from vescale_ray.checkpoint.format.object_layout import lay_out
from vescale_ray.checkpoint.format.shard import write_staged


@st.composite
def models(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3), min_size=1, max_size=6))
    tensors = {}
    for index, shape in enumerate(shapes):
        kinds = draw(st.sampled_from([("param",), ("param", "exp_avg"), ("param", "exp_avg", "exp_avg_sq"), ("momentum", "param")]))
        for k, kind in enumerate(kinds):
            dtype = draw(st.sampled_from(DTYPES))
            tensors[f"t{index}", kind] = random_bits(shape, dtype, seed=10 * index + k)
    return tensors


@settings(max_examples=30)
@given(models(), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_random_models_round_trip_across_any_layouts_and_dtypes(tensors, writers, readers, seed, together, name_empty):
    with memory_folder() as root:
        save_in_process(root, tensors, random_layout(tensors, writers, seed, together=together), name_empty=name_empty)
        checkpoint = ckpt.open(root)
        load_in_process(checkpoint, tensors, random_layout(tensors, readers, seed + 1, together=False))
        assert_equals(root, tensors)
        assert ckpt.verify(root).ok


@settings(max_examples=20)
@given(models(), st.integers(1, 6), st.integers(0, 10**6), st.booleans())
def test_staged_object_equals_the_directly_written_one(tensors, writers, seed, together):
    """One buffer serves all ranks and keeps their bytes in between, as it does from save to save."""
    pool = staging.SlabPool()
    pool.take(1 << 14).release()
    with memory_folder() as root:
        for rank, intervals in enumerate(random_layout(tensors, writers, seed, together=together)):
            pieces = pieces_of(tensors, intervals)
            first = ckpt.write_shard(root / "a", "x", rank, pieces, step=3, epoch=2, block_bytes=4096, chunk_bytes=8192)
            layout = lay_out(pieces)
            slab = pool.take(layout.bytes)
            staging.copy_pieces(layout, pieces, slab.lay(layout)).wait()
            second = write_staged(
                ckpt.PosixStore(root / "b"), slab, "x", rank, aux=None, step=3, epoch=2, block_bytes=4096, chunk_bytes=8192
            )
            slab.release()
            slab.buffer.random_(0, 255)
            assert first.to_json() == second.to_json()
            assert (root / "a" / first.object.key).read_bytes() == (root / "b" / first.object.key).read_bytes()


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_read_adds_at_most_two_blocks_a_run_and_five_percent(writers, readers, seed):
    block = 4096
    tensors = {(f"w{i}", kind): random_bits((13 + 29 * i, 41), torch.float32, seed + i) for i in range(4) for kind in ("param", "exp_avg")}
    with memory_folder() as root:
        save_in_process(root, tensors, random_layout(tensors, writers, seed), block_bytes=block)
        checkpoint = ckpt.open(root)
        held = random_layout(tensors, readers, seed + 1)
        for plan, intervals in zip(load_in_process(checkpoint, tensors, held), held, strict=True):
            # The oracle counts bytes from the intervals themselves, not from the plan.
            assert plan.needed == sum((end - start) * 4 for _, _, start, end in intervals)
            assert plan.planned <= 1.05 * plan.needed + 2 * block * plan.runs
            assert plan.planned == sum(s.bytes for s in plan.segments)


def test_unchanged_layout_reads_one_run_per_kind():
    """The layout on disk is the layout in memory, so a rank of the same layout has one run per kind of a group."""
    tensors = {(f"layers.{i}.w", kind): random_bits((64, 64), torch.float32, i) for i in range(8) for kind in ("param", "exp_avg")}
    whole = 8 * 64 * 64
    with memory_folder() as root:
        held = []
        for rank in range(2):
            low, high = rank * whole // 2 + (77 if rank else 0), (rank + 1) * whole // 2 + (0 if rank else 77)
            intervals = []
            for name, kind in tensors:
                base = int(name.split(".")[1]) * 64 * 64
                start, end = max(low - base, 0), max(min(high - base, 64 * 64), 0)
                intervals.append((name, kind, min(start, end), end))
            held.append(intervals)
        save_in_process(root, tensors, held)
        checkpoint = ckpt.open(root)
        assert [len(e.start) for e in checkpoint.manifest.groups[0].kinds] == [2, 2]
        for rank, plan in enumerate(load_in_process(checkpoint, tensors, held)):
            assert plan.runs == 2 and plan.planned <= plan.needed + 2 * 4096, rank


def test_reading_weights_alone_skips_the_adam_states(tmp_path):
    tensors = {("w", k): random_bits((256, 256), torch.float32, i) for i, k in enumerate(("param", "exp_avg", "exp_avg_sq"))}
    save_in_process(tmp_path, tensors, random_layout(tensors, 2, seed=0))
    out = torch.empty(256 * 256)
    plan = ckpt.open(tmp_path).read_ranges([("w", "param", 0, 256 * 256, out)])
    assert plan.needed == 256 * 256 * 4 and plan.planned <= plan.needed + 4 * 4096


def test_overlapping_and_repeated_requests_are_all_filled(tmp_path):
    tensors = {("w", "param"): random_bits((5000,), torch.float32, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 3, seed=1))
    outs = [(s, e, torch.empty(e - s)) for s, e in [(0, 5000), (0, 5000), (1200, 4100), (4099, 4100), (7, 7)]]
    checkpoint = ckpt.open(tmp_path)
    plan = checkpoint.read_ranges([("w", "param", s, e, out) for s, e, out in outs])
    for s, e, out in outs:
        assert torch.equal(out.view(torch.int32), tensors["w", "param"][s:e].view(torch.int32))
    (extents,) = checkpoint.manifest.groups[0].kinds
    assert plan.runs == len(extents.start) == 3, "what lies within another request is no run of its own"


def test_mismatched_request_is_refused_before_any_read(tmp_path):
    tensors = {("w", "param"): random_bits((10, 3), torch.float32, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 2, seed=1))
    checkpoint = ckpt.open(tmp_path)
    good = torch.zeros(30)
    for bad, words in [
        (("v", "param", 0, 30, torch.zeros(30)), "no tensor 'v'"),
        (("w", "exp_avg", 0, 30, torch.zeros(30)), "no 'exp_avg' of tensor 'w'; it has param"),
        (("w", "param", 0, 31, torch.zeros(31)), "30 elements in the checkpoint"),
        (("w", "param", 0, 30, torch.zeros(30).bfloat16()), "is float32 in the checkpoint, bfloat16 wanted"),
        (("w", "param", 0, 30, torch.zeros(10, 3)), "give it flat"),
    ]:
        with pytest.raises(ckpt.CheckpointMismatch, match=words):
            checkpoint.read_ranges([("w", "param", 0, 30, good), bad])
        assert not good.any()


def test_checkpoint_of_another_model_raises_a_one_line_error(tmp_path):
    tensors = {("a", "param"): torch.zeros(4, 2), ("b", "param"): torch.zeros(3), ("a", "exp_avg"): torch.zeros(4, 2)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 2, seed=1))
    checkpoint = ckpt.open(tmp_path)
    checkpoint.require({("a", "param"): ((4, 2), torch.float32), ("b", "param"): ((3,), torch.float32)})
    with pytest.raises(ckpt.CheckpointMismatch) as caught:
        checkpoint.require({("a", "param"): ((4, 3), torch.float32), ("c", "param"): ((3,), torch.float32)})
    message = str(caught.value)
    assert "\n" not in message and str(tmp_path) in message and "of another model" in message
    for words in ("lacks 'c'", "also has 'b'", "'a' has shape (4, 2), wanted (4, 3)"):
        assert words in message


def factored(rank, world, root, save):
    """Train with Adafactor, whose states have other shapes than their parameters, in one go or from a checkpoint after two steps."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 6))
    for i, p in enumerate(model.parameters()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    fully_shard(model)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer}
    if not save:
        ckpt.load(state, root)
    for step in range(0 if save else 2, 4):
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if save and step == 1:
            ckpt.save(state, root, 1)
    return [p.full_tensor().tolist() for p in model.state_dict().values()]


def test_factored_states_of_sharded_parameters_are_resumed(tmp_path):
    whole = run_gloo(2, factored, str(tmp_path), True)[0]
    for world in (1, 2, 3):
        for a, b in zip(run_gloo(world, factored, str(tmp_path), False)[0], whole, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


def save_and_load(root, size):
    data = torch.ones(size // 4)
    yield
    attempt = ckpt.new_attempt()
    piece = ckpt.ShardPiece("w", "param", 0, data.numel(), (data.numel(),), torch.float32, data)
    vote = ckpt.write_shard(root, attempt, 0, [piece], step=1, epoch=0)
    ckpt.commit(root, [vote], step=1, epoch=0, attempt=attempt, world=1, meta={})
    yield
    data.zero_()
    ckpt.open(root).read_ranges([("w", "param", 0, data.numel(), data)])
    assert bool((data == 1).all())
    yield


def test_a_save_and_a_load_take_little_memory_beside_the_tensors(tmp_path):
    saved, loaded = peak_growths(save_and_load, tmp_path, 160 << 20)
    assert saved <= (8 << 20) + (24 << 20) and loaded <= (16 << 20) + (40 << 20), (saved, loaded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_tensors_are_saved_and_read_back_onto_the_gpu(tmp_path):
    tensors = {
        ("w", "param"): random_bits((300_001,), torch.bfloat16, 1).cuda(),
        ("v", "param"): random_bits((7,), torch.float32, 2).cuda(),
    }
    save_in_process(tmp_path, tensors, random_layout(tensors, 3, seed=1), block_bytes=1 << 16, chunk_bytes=1 << 18)
    checkpoint = ckpt.open(tmp_path)
    for (name, kind), full in tensors.items():
        got = checkpoint.read(name, kind, device="cuda")
        assert got.is_cuda and torch.equal(got.view(torch.uint8), full.view(torch.uint8))


def test_read_bumps_the_version_of_its_destination_tensor(tmp_path):
    """Autograd looks at the version. So does an engine that keeps a low-precision copy of a parameter."""
    tensors = {("w", "param"): random_bits((5000,), torch.float32, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 3, seed=1))
    parameter = torch.nn.Parameter(torch.zeros(50, 100))
    before = parameter._version
    ckpt.open(tmp_path).read_ranges([("w", "param", 0, 5000, parameter.detach().view(-1))])
    assert parameter._version > before
