"""Differences between two checkpoints, against plain tensor arithmetic, for any pair of layouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.checkpoint_support import DTYPES, damage, memory_folder, peak_growths, random_bits, random_layout, save_in_process
from vescale_ray import checkpoint as ckpt


@settings(max_examples=30)
@given(st.sampled_from(DTYPES), st.integers(1, 3000), st.lists(st.integers(0, 2999), max_size=6), st.booleans(), st.integers(0, 1000))
def test_diff_counts_elements_and_finds_the_largest_difference(dtype, numel, places, alike, seed):
    before = random_bits((numel,), dtype, seed)
    after = before.clone()
    other = random_bits((numel,), dtype, seed + 1)
    for place in places:
        after[place % numel] = other[place % numel]
    with memory_folder() as folder:
        for step, tensor in ((1, before), (2, after)):
            stored = {("w", "param"): tensor, ("v", "param"): torch.arange(5)}
            save_in_process(folder, stored, random_layout(stored, 2, seed if alike else seed + step), step=step)
        a, b = (ckpt.open(folder, one.name) for one in ckpt.ls(folder))
        found = ckpt.diff(a, b)
    width = dtype.itemsize
    raw = (before.view(torch.uint8).view(-1, width) != after.view(torch.uint8).view(-1, width)).any(1)
    if not bool(raw.any()):
        assert found.equal and found.same == 2
        return
    (changed,) = found.changed
    assert (changed.name, changed.kind, changed.differing, changed.numel) == ("w", "param", int(raw.sum()), numel) and found.same == 1
    if dtype.is_complex or dtype == torch.bool:
        assert changed.largest is None
    elif dtype.is_floating_point:
        gap = (before.double() - after.double()).abs()[raw]
        expected = math.nan if bool(gap.isnan().any()) else gap.max().item()
        assert changed.largest is not None
        assert changed.largest == expected or (math.isnan(expected) and math.isnan(changed.largest))
    else:
        assert changed.largest == float(max(abs(x - y) for x, y in zip(before.tolist(), after.tolist(), strict=True)))


def test_diff_separates_added_removed_and_reshaped_tensors(root):
    ckpt.save({"model": {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4), "e": torch.zeros(2)}}, root, 1)
    ckpt.save(
        {"model": {"b": torch.zeros(3, 1), "c": torch.zeros(4, dtype=torch.int32), "d": torch.zeros(1), "e": torch.zeros(2)}}, root, 2
    )
    a, b = (ckpt.open(root, one.name) for one in ckpt.ls(root))
    found = ckpt.diff(a, b)
    assert found.removed == (("a", "param"),) and found.added == (("d", "param"),) and found.same == 1 and not found.changed
    assert found.reshaped == ((("b", "param"), "float32 [3]", "float32 [3, 1]"), (("c", "param"), "float32 [4]", "int32 [4]"))
    assert ckpt.diff(a, b, include="e").equal and not ckpt.diff(a, b, exclude=["a", "b", "c"]).equal


def test_diff_that_compares_no_tensor_is_an_error(root):
    """If an empty comparison succeeded, a typing error in a glob would pass every check of a script."""
    ckpt.save({"model": {"w": torch.ones(3)}}, root, 1)
    opened = ckpt.open(root)
    with pytest.raises(ckpt.CheckpointMismatch, match=r"neither .* nor .* has a tensor that fits v\*$"):
        ckpt.diff(opened, opened, include="v*")
    with pytest.raises(ckpt.CheckpointMismatch, match=r"that fits \* without w$"):
        ckpt.diff(opened, opened, exclude="w")
    assert ckpt.diff(opened, opened, include=("v*", "w")).same == 1


def test_zeros_of_two_signs_differ_and_equal_nans_do_not(root):
    ckpt.save({"model": {"w": torch.tensor([0.0, math.nan, 1.0])}}, root, 1)
    ckpt.save({"model": {"w": torch.tensor([-0.0, math.nan, 1.0])}}, root, 2)
    a, b = (ckpt.open(root, one.name) for one in ckpt.ls(root))
    (changed,) = ckpt.diff(a, b).changed
    assert changed.differing == 1 and changed.largest == 0.0


def test_blocks_with_equal_checksums_are_not_read(root):
    tensors = {f"t{i}": torch.randn(1 << 19) for i in range(8)}
    ckpt.save({"model": tensors}, root, 1)
    tensors["t6"][77] += 1
    ckpt.save({"model": tensors}, root, 2)
    a, b = (ckpt.open(root, one.name) for one in ckpt.ls(root))
    seen: list[int] = []
    found = ckpt.diff(a, b, progress=seen.append)
    assert [c.name for c in found.changed] == ["t6"] and found.changed[0].differing == 1
    assert found.bytes_read <= 2 * 3 * (2 << 20), "the tensor, and at most its neighbours on either side in the same blocks, of both"
    assert sum(seen) == 8 * (2 << 20)
    assert ckpt.diff(a, a).bytes_read == 0


def test_diff_raises_on_damage_in_a_block_that_it_reads(root):
    ckpt.save({"model": {"w": torch.randn(3000)}}, root, 1)
    damaged = ckpt.save({"model": {"w": torch.randn(3000)}}, root, 2).commit
    damage(root, damaged, -5000)
    a, b = (ckpt.open(root, one.name) for one in ckpt.ls(root))
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"block 2 \(holds w\)"):
        ckpt.diff(a, b)


def compare(root):
    for step in (1, 2):
        ckpt.save({"model": {"w": torch.full((64 << 20,), float(step))}}, root, step)
    yield
    (changed,) = ckpt.diff(*(ckpt.open(root, one.name) for one in ckpt.ls(root))).changed
    assert changed.differing == 64 << 20 and changed.largest == 1.0
    yield


@pytest.mark.slow
def test_a_comparison_takes_a_bounded_memory(tmp_path):
    assert peak_growths(compare, tmp_path)[0] <= (64 << 20) + (64 << 20), "not the 512 MiB of both"


@pytest.mark.parametrize("dtype", [torch.uint4, torch.float4_e2m1fn_x2, torch.bits8])
def test_diff_compares_dtypes_that_torch_cannot_compute_with(tmp_path, dtype):
    raw = torch.arange(64, dtype=torch.uint8)
    for name, last in (("one", 0), ("other", 1)):
        raw[-1] = last
        ckpt.save({"model": {"w": raw.clone().view(dtype)}}, tmp_path / name, 1)
    (found,) = ckpt.diff(ckpt.open(tmp_path / "one"), ckpt.open(tmp_path / "other")).changed
    assert (found.name, found.differing, found.numel, found.largest) == ("w", 1, 64, None)
