"""Loading parts, under other names, in other dtypes, into models without storage and within a memory budget.

Loads are strict unless an option says otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.checkpoint_ranks import meta_rank
from tests.checkpoint.checkpoint_support import bits, damage, flip, peak_growths, random_bits, random_layout, save_in_process
from tests.checkpoint.test_checkpoint_state import Net, adam, same_module, train
from tests.ranks import on_processes, run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.commits import _assemble
from vescale_ray.checkpoint.format.digest import block_bytes_for, root_of
from vescale_ray.checkpoint.format.manifest import ObjectEntry
from vescale_ray.checkpoint.format.object_layout import PlacedPiece
from vescale_ray.checkpoint.reading import loading, reader
from vescale_ray.checkpoint.state.name_tables import chosen


def saved_net(root: Path, **kwargs: Any) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(0, **kwargs)
    optimizer = adam(net)
    train(net, optimizer, 2)
    ckpt.save({"model": net, "optimizer": optimizer, "stream": {"consumed": 5}}, root, 2)
    return net, optimizer


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if bits(before[name]) != bits(after[name])}


# ---------------------------------------------------------------------------------------------------------------- which ones


def test_only_the_tensors_that_the_globs_choose_change(root):
    net, _ = saved_net(root)
    other = Net(1)
    before = copy.deepcopy(other.state_dict())
    loaded = ckpt.load({"model": other}, root, include="body.*", exclude="*.bias")
    assert changed(before, other.state_dict()) == {"body.0.weight", "body.1.weight"}
    assert bits(other.get_parameter("body.0.weight")) == bits(net.get_parameter("body.0.weight")) and loaded.missing == ()


def test_a_tied_tensor_is_chosen_by_either_of_its_names(root):
    net, _ = saved_net(root)
    for glob in ("head.*", "embed.*"):
        other = Net(1)
        ckpt.load({"model": other}, root, include=glob)
        assert bits(other.head.weight) == bits(net.embed.weight)


def test_an_optimizers_states_are_chosen_with_their_parameters(root):
    net, optimizer = saved_net(root)
    other = Net(1)
    fresh = adam(other, lr=9.0)
    ckpt.load({"model": other, "optimizer": fresh}, root, exclude="body.1.*")
    assert set(fresh.state) == {p for p in other.parameters() if p.requires_grad} - set(other.body[1].parameters())
    assert bits(fresh.state[other.scale]["exp_avg"]) == bits(optimizer.state[net.scale]["exp_avg"])
    assert fresh.state[other.scale]["step"] == 2 and fresh.param_groups[0]["lr"] == 1e-2
    train(other, fresh, 1)  # a state that was left out begins anew
    assert fresh.state[other.get_parameter("body.1.weight")]["step"] == 1


def test_load_refuses_missing_or_extra_parameters_unless_allowed(root):
    net, optimizer = saved_net(root)
    other = Net(1)
    other.body = nn.Sequential(other.body[0], other.body[1], nn.Linear(6, 6))
    del other.narrow
    fresh = adam(other)
    state = {"model": other, "optimizer": fresh}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ckpt.CheckpointMismatch, match=r"differs from the checkpoint's in body.2.bias, narrow"):
        ckpt.load(state, root)
    with pytest.raises(ckpt.CheckpointMismatch, match=r"lacks 'body.2.weight', 'body.2.bias'; it also has 'narrow'"):
        ckpt.load({"model": other}, root)
    with pytest.raises(ckpt.CheckpointMismatch, match="also has 'narrow'"):
        ckpt.load({"model": other}, root, allow_missing="body.2.*")
    with pytest.raises(ckpt.CheckpointMismatch, match="lacks 'body.2.weight'"):
        ckpt.load({"model": other}, root, allow_unexpected=["narrow"])
    assert not changed(before, other.state_dict())
    loaded = ckpt.load(state, root, allow_missing="body.2.*", allow_unexpected=["narrow"])
    assert loaded.missing == ("body.2.weight", "body.2.bias")
    assert bits(fresh.state[other.scale]["exp_avg"]) == bits(optimizer.state[net.scale]["exp_avg"])
    assert not fresh.state.get(other.get_parameter("body.2.weight"))
    assert not {"body.2.weight", "body.2.bias"} & changed(before, other.state_dict())


def test_allow_missing_covers_plain_values(root):
    saved_net(root)
    state: dict[str, Any] = {"model": Net(1), "epoch": 4}
    with pytest.raises(ckpt.CheckpointMismatch, match="has no state 'epoch'"):
        ckpt.load(state, root)
    ckpt.load(state, root, allow_missing="epoch")
    assert state["epoch"] == 4


def test_frozen_parameter_states_are_dropped_only_if_allowed(root):
    saved_net(root)
    other = Net(1)
    other.scale.requires_grad_(False)
    state = {"model": other, "optimizer": adam(other)}
    with pytest.raises(ckpt.CheckpointMismatch, match="scale"):
        ckpt.load(state, root)
    ckpt.load(state, root, allow_unexpected="scale")
    assert bits(other.scale) == bits(ckpt.open(root).read("scale"))


# -------------------------------------------------------------------------------------------------------------- other names


def test_names_are_mapped_for_weights_states_and_scalars(root):
    net, optimizer = saved_net(root)

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = Net(1)

    other = Renamed()
    fresh = adam(other.wrapped)
    ckpt.load({"model": other, "optimizer": fresh}, root, rename={"wrapped.*": "*"})
    assert same_module(net, other.wrapped)
    assert fresh.state[other.wrapped.scale]["step"] == 2
    assert bits(fresh.state[other.wrapped.scale]["exp_avg_sq"]) == bits(optimizer.state[net.scale]["exp_avg_sq"])
    with pytest.raises(ckpt.CheckpointMismatch, match=r"lacks 'wrapped.scale' \(stored as 'scales'\) \(nearest there: 'scale'\)"):
        ckpt.load({"model": other}, root, rename={"wrapped.scale": "scales", "wrapped.*": "*"})


@settings(max_examples=40)
@given(st.lists(st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,2}){0,3}", fullmatch=True), unique=True, min_size=1, max_size=8))
def test_a_table_and_its_inverse_undo_each_other(names):
    table = ckpt.NameTable({"a*": "model.a*", "*.b.*": "x.*.c.*", "q.weight": "r.weight"})
    try:
        mapped = table.map(names)
    except ckpt.CheckpointMismatch:
        return
    assert set(mapped) == set(names)
    for name, new in mapped.items():
        if name.startswith("a"):
            assert new == "model." + name and table.inverse()(new) == name


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"a.*.*": "b.*"}, "has 2 stars on one side and 1 on the other"),
        ({"re:(": "b"}, "not a regular expression"),
    ],
)
def test_invalid_rename_rule_is_refused(rules, words):
    with pytest.raises(ValueError, match=words):
        ckpt.NameTable(rules)


def test_name_table_takes_regexes_and_refuses_colliding_names():
    table = ckpt.NameTable({r"re:blocks\.(\d+)\.(.*)": r"model.layers.\1.\2", "a*": "z"})
    assert table("blocks.12.w.x") == "model.layers.12.w.x" and table("other") == "other"
    with pytest.raises(ckpt.CheckpointMismatch, match="'a1' and 'a2' both become 'z'"):
        table.map(["a1", "a2"])
    with pytest.raises(ValueError, match="has no inverse"):
        table.inverse()


def test_include_and_exclude_globs_follow_shell_rules():
    assert chosen("layers.0.w", ["layers.*"], []) and not chosen("layers.0.w", ["layers.*"], ["*.w"]) and not chosen("a", ["b"], [])


# ------------------------------------------------------------------------------------------------------------- other dtypes


def test_dtypes_are_converted_on_request_only_and_as_torch_does(root):
    values = torch.randn(70_001)
    ckpt.save({"model": {"w": values, "n": torch.arange(9), "b": torch.tensor([True])}}, root, 1)
    target = {"w": torch.zeros(70_001, dtype=torch.bfloat16), "n": torch.zeros(9, dtype=torch.int32), "b": torch.tensor([False])}
    with pytest.raises(ckpt.CheckpointMismatch, match="'w' is float32, wanted bfloat16; cast=True converts"):
        ckpt.load({"model": target}, root)
    assert not target["w"].any()
    ckpt.load({"model": target}, root, cast=True)
    assert torch.equal(target["w"], values.bfloat16()) and target["n"].tolist() == list(range(9)) and target["b"].item()
    for wrong in ({"w": torch.zeros(70_001, dtype=torch.int64)}, {"b": torch.zeros(1)}, {"n": torch.zeros(9)}):
        with pytest.raises(ckpt.CheckpointMismatch, match="wanted"):
            ckpt.load({"model": wrong}, root, cast=True, allow_unexpected="*")


# ---------------------------------------------------------------------------------------------------------- without a group


def test_a_state_dict_comes_without_a_model(root):
    net, _ = saved_net(root)
    checkpoint = ckpt.open(root)
    whole = checkpoint.to_state_dict()
    assert list(whole) != [] and set(whole) == set(net.state_dict())
    assert whole["head.weight"] is whole["embed.weight"]
    other = Net(3)
    other.load_state_dict(whole)
    assert same_module(net, other)
    some = checkpoint.to_state_dict(include=["body.*", "count"], exclude="body.1.*", dtype=torch.bfloat16)
    assert set(some) == {"body.0.weight", "body.0.bias", "count"} and some["count"].dtype == torch.int64
    assert torch.equal(some["body.0.weight"], net.get_parameter("body.0.weight").detach().bfloat16())
    with pytest.raises(ckpt.CheckpointMismatch, match="has no tensor that fits nothing.here"):
        checkpoint.to_state_dict(include="nothing.here")


def test_any_range_of_any_tensor_can_be_read_alone(root):
    net, optimizer = saved_net(root)
    checkpoint = ckpt.open(root)
    flat = net.embed.weight.detach().reshape(-1)
    for start, end in [(0, 66), (5, 6), (13, 13), (60, 66)]:
        assert torch.equal(checkpoint.read_range("embed.weight", start, end), flat[start:end])
    with pytest.raises(ckpt.CheckpointMismatch, match=r"has 66 elements in the checkpoint; \[60, 67\) was requested"):
        checkpoint.read_range("embed.weight", 60, 67)
    with pytest.raises(ckpt.CheckpointMismatch, match=r"no tensor 'embd.weight' \(nearest there: 'embed.weight'\)"):
        checkpoint.read("embd.weight")


# ------------------------------------------------------------------------------------------------- models without storage


def test_conjugated_negated_and_meta_destinations_are_refused(tmp_path):
    kept = {"c": torch.randn(50, dtype=torch.complex64), "f": torch.randn(50)}
    ckpt.save({"model": kept}, tmp_path, 1)
    found = ckpt.open(tmp_path)
    outs = {
        "conjugated": ("c", torch.zeros(50, dtype=torch.complex64).conj()),
        "negated": ("f", torch._neg_view(torch.zeros(50))),
        "meta": ("f", torch.empty(50, device="meta")),
    }
    for what, (name, out) in outs.items():
        with pytest.raises(ckpt.CheckpointMismatch, match=f"'{name}'.*{what}"):
            found.read_ranges([(name, "param", 0, 50, out)])
    with pytest.raises(ckpt.CheckpointMismatch, match="meta"):
        found.read("f", device="meta")


def test_meta_model_gets_storage_ties_and_a_matching_optimizer(root):
    net, optimizer = saved_net(root)
    with torch.device("meta"):
        other = Net(1)
        other.scratch = torch.zeros(2, device="cpu")
    fresh = adam(other)
    ckpt.load({"model": other, "optimizer": fresh}, root)
    assert same_module(net, other) and other.head.weight is other.embed.weight
    assert train(net, optimizer, 2, seed=4) == train(other, fresh, 2, seed=4)
    assert same_module(net, other)


def test_meta_load_refuses_unfilled_tensors_before_allocating(root):
    saved_net(root)
    with torch.device("meta"):
        other = Net(1)
    with pytest.raises(ValueError, match="'scratch' would get no value"):
        ckpt.load({"model": other}, root)
    other.scratch = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'body.0.weight', 'body.0.bias', 'body.1.weight' and 1 more would get no value"):
        ckpt.load({"model": other}, root, exclude="body.*")
    assert all(p.is_meta for p in other.parameters())


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sharded_meta_model_loads_its_shards_and_trains_on(tmp_path, world):
    truth = run_gloo(2, meta_rank, str(tmp_path), True)[0]
    for back in run_gloo(world, meta_rank, str(tmp_path), False):
        for kind, (state, losses) in back.items():
            assert state.keys() == truth[kind][0].keys()
            assert all(np.array_equal(state[name], truth[kind][0][name]) for name in state), kind
            assert np.allclose(losses, truth[kind][1], rtol=1e-5), kind


@on_processes(2)
def test_parts_under_other_names_load_on_several_ranks(rank, world, tmp_path):
    net = {f"layers.{i}.w": torch.arange(35.0).view(7, 5) + i for i in range(3)}
    ckpt.save({"model": net | {"head": torch.ones(11)}}, tmp_path, 1, timeout_s=20)
    mesh = init_device_mesh("cpu", (world,))
    target: dict[str, Any] = {f"blocks.{i}.w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(i % 2)]) for i in range(3)}
    others: dict[str, Any] = {"exclude": "blocks.1.*", "allow_missing": "new", "allow_unexpected": "head"}
    ckpt.load({"model": target | {"new": torch.zeros(2)}}, tmp_path, rename={"blocks.*": "layers.*"}, **others)
    for i in range(3):
        assert torch.equal(target[f"blocks.{i}.w"].full_tensor(), net[f"layers.{i}.w"] * (i != 1))


# --------------------------------------------------------------------------------------------- how much is read, and how


def llama_votes(writers: int, layers: int = 32) -> tuple[list[ckpt.Vote], dict[str, tuple[int, ...]]]:
    """Votes of ``writers`` ranks for Llama-3-8B's float32 weights, each layer cut evenly. The 32 GB need not be written."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, 4096)}
    units = [["embed"]]
    for i in range(layers):
        layer = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "n1": (4096,)}
        layer |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336), "n2": (4096,)}
        shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
        units.append([f"{i}.{name}" for name in layer])
    shapes |= {"norm": (4096,), "head": (128256, 4096)}
    units.append(["norm", "head"])
    votes = []
    for rank, held in enumerate(even_cuts(units, shapes, writers)):
        offset, pieces = 4096, []
        for name, start, end in held:
            pieces.append(PlacedPiece(name, "param", "float32", shapes[name], start, end, offset))
            offset += 4 * (end - start)
        size = -(-offset // 4096) * 4096
        sums = np.zeros(-(-size // (1 << 20)), dtype="<u8")
        entry = ObjectEntry(f"data/a/r{rank:05d}.safetensors", rank, size, 1 << 20, sums, root_of(sums))
        votes.append(ckpt.Vote("a", rank, 1, 0, entry, None, tuple(pieces)))
    return votes, shapes


def even_cuts(units: list[list[str]], shapes: dict[str, tuple[int, ...]], world: int) -> list[list[tuple[str, int, int]]]:
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(world)]
    for names in units:
        total = sum(math.prod(shapes[name]) for name in names)
        for rank in range(world):
            low, high, base = rank * total // world, (rank + 1) * total // world, 0
            for name in names:
                numel = math.prod(shapes[name])
                start, end = max(low - base, 0), min(high - base, numel)
                if end > start:
                    held[rank].append((name, start, end))
                base += numel
    return held


@pytest.mark.parametrize(("writers", "readers"), [(8, 6), (8, 16)])
def test_resharded_8b_load_plans_at_most_five_percent_extra(tmp_path, writers, readers):
    votes, shapes = llama_votes(writers)
    manifest = _assemble(votes, 1, 0, "a", writers, {}, {})
    checkpoint = ckpt.Checkpoint(ckpt.PosixStore(tmp_path), ckpt.Commit(manifest.name, "", 0, 1), manifest)
    units: dict[str, list[str]] = {}
    for name in shapes:
        units.setdefault(name.split(".")[0] if "." in name else ("embed" if name == "embed" else "last"), []).append(name)
    needed = planned = 0
    for held in even_cuts(list(units.values()), shapes, readers):
        plan = checkpoint.plan([(name, "param", start, end, torch.empty(end - start, device="meta")) for name, start, end in held])
        assert plan.needed == 4 * sum(end - start for _, start, end in held)
        assert plan.planned == sum(s.bytes for s in plan.segments) and plan.requests == len(plan.segments)
        needed, planned = needed + plan.needed, planned + plan.planned
    assert needed == 4 * sum(map(math.prod, shapes.values()))
    assert planned <= 1.05 * needed, planned / needed


def test_resharded_small_load_reads_at_most_five_percent_extra(tmp_path):
    """Compare the bytes that the store read with those requested: 5 million parameters with Adam's states in 4 units, 7 MB a rank."""
    layer: dict[str, tuple[int, ...]] = {"up": (1300, 480), "down": (480, 1300), "norm": (480,)}
    shapes = {f"{unit}.{name}": shape for unit in range(4) for name, shape in layer.items()}
    units = [[name for name in shapes if name.startswith(f"{unit}.")] for unit in range(4)]
    kinds = ("param", "exp_avg", "exp_avg_sq")
    full = {(name, kind): random_bits(shape, torch.float32, i) for i, (name, shape) in enumerate(shapes.items()) for kind in kinds}
    attempt, votes = ckpt.new_attempt(), []
    for rank, held in enumerate(even_cuts(units, shapes, 8)):
        pieces = [
            ckpt.ShardPiece(n, k, a, b, shapes[n], torch.float32, full[n, k].reshape(-1)[a:b].clone()) for k in kinds for n, a, b in held
        ]
        votes.append(ckpt.write_shard(tmp_path, attempt, rank, pieces, step=1, epoch=0, world=8))
    ckpt.commit(tmp_path, votes, step=1, epoch=0, attempt=attempt, world=8, meta={})
    read = 0

    class Counting(ckpt.PosixStore):
        @contextmanager
        def open_read(self, key: str) -> Iterator[Any]:
            with super().open_read(key) as reader:
                whole = reader.read_into

                def read_into(offset: int, view: memoryview) -> int:
                    nonlocal read
                    read += (count := whole(offset, view))
                    return count

                reader.read_into = read_into  # type: ignore[method-assign]
                yield reader

    checkpoint, needed = ckpt.open(Counting(tmp_path)), 0
    for held in even_cuts(units, shapes, 6):
        ranges = [(n, k, a, b, torch.empty(b - a)) for k in kinds for n, a, b in held]
        checkpoint.read_ranges(ranges)
        for name, kind, start, end, out in ranges:
            assert bits(out) == bits(full[name, kind].reshape(-1)[start:end])
            needed += out.nbytes
    assert needed == sum(tensor.nbytes for tensor in full.values()) and read <= 1.05 * needed, read / needed


def test_block_size_follows_object_size_and_bounds_checksums(tmp_path):
    for nbytes in (1, 5000, 7 << 20, 97 << 20, 512 << 20, 12 << 30, 1 << 40):
        for world in (1, 2, 8, 64, 1024, 1 << 20):
            block = block_bytes_for(nbytes, world)
            assert block % 4096 == 0 and 1 << 12 <= block <= 1 << 20
            count = -(-nbytes // block)
            assert block == 1 << 20 or (count <= 8192 and (count == 1 or count * world <= 65536)), (nbytes, world)
    assert (block_bytes_for(12 << 30, 8), block_bytes_for(94 << 20, 1024)) == (1 << 20, 1 << 20), "as large as they always were"
    for save in (ckpt.save, lambda *given: ckpt.Saver(given[1]).save(*given[:1], *given[2:])):
        save({"model": {"w": torch.ones(100_000)}}, tmp_path, 1)
        assert ckpt.open(tmp_path).manifest.objects[0].block_bytes == 4096


def test_load_reports_bytes_needed_planned_and_requests(root):
    saved_net(root)
    loaded = ckpt.load({"model": Net(1)}, root)
    weights = sum(t.numel() * t.element_size() for name, t in Net(1).state_dict().items() if name != "head.weight")
    assert loaded.read.needed == weights <= loaded.read.planned and loaded.read.requests >= 1


def test_small_gaps_are_read_along_and_large_ones_are_not(tmp_path):
    tensors = {("w", "param"): random_bits((1 << 20,), torch.uint8, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 1, seed=1), block_bytes=4096)
    checkpoint = ckpt.open(tmp_path)

    def plan(*ranges: tuple[int, int]) -> ckpt.ReadPlan:
        return checkpoint.plan([("w", "param", a, b, torch.empty(b - a, dtype=torch.uint8)) for a, b in ranges])

    block = 4096
    near = plan((0, 40 * block), (42 * block, 80 * block))
    assert near.runs == 2 and near.requests == 1 and near.planned == 80 * block
    far = plan((0, 40 * block), (45 * block, 80 * block))
    assert far.requests == 2 and far.planned == 75 * block


class Flaky:
    """A store whose reads damage each block in transit, the first ``times`` times."""

    def __init__(self, store: Any, times: int) -> None:
        self.store, self.times, self.seen, self.reads = store, times, {}, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def open_read(self, key: str) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def opened() -> Any:
            with self.store.open_read(key) as inner:

                class Reader:
                    def read_into(_, offset: int, view: memoryview) -> int:
                        count = inner.read_into(offset, view)
                        self.reads += 1
                        self.seen[key, offset] = self.seen.get((key, offset), 0) + 1
                        if self.seen[key, offset] <= self.times:
                            view[0] ^= 1
                        return count

                yield Reader()

        return opened()


def test_a_block_that_differs_is_read_once_more_by_every_stream(tmp_path):
    tensors = {("w", "param"): random_bits((300_000,), torch.float32, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 3, seed=1))
    out = torch.zeros(300_000)
    once = Flaky(ckpt.PosixStore(tmp_path), 1)
    told: list[int] = []
    plan = ckpt.open(once).read_ranges([("w", "param", 0, 300_000, out)], budget_bytes=64 << 10, progress=lambda: told.append(1))
    assert len(told) == len(plan.segments) > 3, "each piece that has come is told of"
    assert bits(out) == bits(tensors["w", "param"]) and once.reads == 2 * len(once.seen) and len(once.seen) > 30
    out.zero_()
    with pytest.raises(ckpt.CheckpointCorrupt, match="r00000.safetensors, block 1|r00000.safetensors, block 0"):
        ckpt.open(Flaky(ckpt.PosixStore(tmp_path), 99)).read_ranges([("w", "param", 0, 300_000, out)], budget_bytes=64 << 10)
    assert not out.any(), "nothing unverified arrives"


@on_processes(3)
def test_damage_seen_by_one_rank_makes_all_ranks_fall_back(rank, world, tmp_path):
    """Each rank loads its own rows alone, so that one rank alone meets the damage."""
    for step in (1, 2):
        made = ckpt.save({"model": {"w": torch.full((64, 1024), float(step))}}, tmp_path, step, timeout_s=20).commit
    if rank == 0:
        damage(tmp_path, made, -5000)  # in the last rows, which the last rank reads
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(64, 1024), init_device_mesh("cpu", (world,)), [Shard(0)])}
    loaded = ckpt.load({"model": target}, tmp_path)
    assert (loaded.step, loaded.skipped) == (1, (made.name,)) and bool((target["w"].full_tensor() == 1).all())


def test_load_hitting_damage_reports_a_partly_filled_state(root, caplog):
    """The last block is damaged.

    Without an older checkpoint the error says that the state is partly filled; else the older one loads whole.
    """
    first, second = ({"w": torch.randn(3_000_000), "v": torch.randn(5)} for _ in range(2))
    ckpt.save({"model": first}, root, 1)
    target = {"w": torch.zeros(3_000_000), "v": torch.zeros(5)}
    for step in (1, 2):
        if step == 2:
            ckpt.save({"model": second}, root, 2)
        newest = ckpt.latest(root)
        assert newest is not None
        victim = damage(root, newest, 12_000_000)
        if step == 1:
            with pytest.raises(
                ckpt.CheckpointCorrupt, match="another checksum; the state now holds parts of it: load again before using it"
            ):
                ckpt.load({"model": target}, root)
            flip(victim, 12_000_000)
    loaded = ckpt.load({"model": target}, root)
    assert loaded.step == 1 and len(loaded.skipped) == 1 and "going back to checkpoint" in caplog.text
    assert all(torch.equal(target[name], first[name]) for name in first)


NOT_NOW = {"no permission": errno.EACCES, "no file descriptor left": errno.EMFILE, "no memory": errno.ENOMEM}


@pytest.mark.parametrize("what", ["manifest", "data", "aux"])
@pytest.mark.parametrize("why", NOT_NOW)
def test_load_never_skips_an_unreachable_newest_checkpoint(monkeypatch, what, why):
    """Going back would lose sound steps. Only a person may permit it, or raise a limit."""
    root = store = ckpt.MemoryStore()
    for step in (1, 2):
        ckpt.save({"model": {"w": torch.full((3,), float(step))}}, root, step)
    newest = ckpt.ls(root)[1]
    data = f"data/{newest.attempt}/r00000"
    ending = {"manifest": newest.key, "data": f"{data}.safetensors", "aux": f"{data}.aux.json"}[what]
    real = store.get

    def refusing(key):
        if key == ending:
            raise OSError(NOT_NOW[why], os.strerror(NOT_NOW[why]), key)
        return real(key)

    target = {"w": torch.zeros(3)}
    monkeypatch.setattr(store, "get", refusing)
    with pytest.raises(OSError, match=f"{ending} is out of reach: .*; it may be intact, so no older checkpoint is loaded") as caught:
        ckpt.load({"model": target}, root)
    assert caught.value.errno == NOT_NOW[why] and not target["w"].any()
    assert [c.step for c in ckpt.ls(root)] == [1, 2], "it is listed all the same"
    if what == "manifest":
        for call in (lambda: ckpt.latest(root), lambda: ckpt.open(root), lambda: ckpt.open(root, newest.name)):
            with pytest.raises(OSError, match="out of reach"):
                call()
    monkeypatch.undo()
    assert ckpt.load({"model": target}, root).step == 2


def test_a_budget_below_one_block_is_refused(root):
    saved_net(root)
    with pytest.raises(ValueError, match="budget_bytes is 100, less than a block of the checkpoint: give at least"):
        ckpt.load({"model": Net(1)}, root, budget_bytes=100)


def load_twice(root, size, budget):
    target = {f"w{i}": torch.ones(size // 16) for i in range(4)}
    ckpt.save({"model": target}, root, 1)
    for tensor in target.values():
        tensor.zero_()
    yield
    ckpt.load({"model": target}, root, budget_bytes=budget)
    assert all(bool((t == 1).all()) for t in target.values())
    yield
    other = ckpt.open(root).to_state_dict(budget_bytes=budget)
    assert all(bool((t == 1).all()) for t in other.values())
    yield


@pytest.mark.parametrize("budget", [pytest.param(2 << 20, marks=pytest.mark.slow), 32 << 20])
def test_a_load_takes_its_budget_beside_the_tensors(tmp_path, budget):
    loaded, given = peak_growths(load_twice, tmp_path, 160 << 20, budget)
    assert loaded <= budget + (48 << 20), (loaded, "in place: no more than the budget and the threads' stacks")
    assert given <= (160 << 20) + budget + (48 << 20), (given, "into new tensors: those, and the budget")


def test_default_budget_matches_the_documentation():
    assert reader.BUDGET_BYTES == 16 << 20


def test_rescaled_load_gives_ranks_fresh_generators_and_no_aux(root, monkeypatch):
    """One process plays both ranks in turn, which works because the weights are replicated."""
    ckpt.save({"model": {"w": torch.ones(5)}}, root, 1, aux={"mine": 1})
    saved = torch.get_rng_state()
    drawn = []
    for rank in (0, 1, 1):
        monkeypatch.setattr(loading, "ranks_of", lambda group, rank=rank: (rank, 2))
        assert ckpt.load({"model": {"w": torch.zeros(5)}}, root).aux is None
        assert not torch.equal(torch.get_rng_state(), saved)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1] == drawn[2]
    monkeypatch.undo()
    assert ckpt.load({"model": {"w": torch.zeros(5)}}, root).aux == {"mine": 1} and torch.equal(torch.get_rng_state(), saved)


def test_rank_skips_a_commit_object_that_differs_from_rank_0s(root, monkeypatch):
    """One host has a stale copy of the folder, in which the name stands for another commit."""
    older = ckpt.save({"model": {"w": torch.ones(5)}}, root, 1).commit
    newer = ckpt.save({"model": {"w": torch.full((5,), 2.0)}}, root, 2).commit
    told = dataclasses.replace(newer, sha256="0" * 64)
    monkeypatch.setattr(loading, "_candidates", lambda store, named: [told, older])
    w = torch.zeros(5)
    loaded = ckpt.load({"model": {"w": w}}, root)
    assert loaded.commit == older and loaded.skipped == (newer.name,) and w.tolist() == [1.0] * 5
    monkeypatch.setattr(loading, "_candidates", lambda store, named: [told])
    with pytest.raises(ckpt.CheckpointCorrupt, match="rank 0 sees another commit object than rank 0"):
        ckpt.load({"model": {"w": w.zero_()}}, root)
    assert w.tolist() == [0.0] * 5
