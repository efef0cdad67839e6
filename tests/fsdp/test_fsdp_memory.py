"""Bytes that fully_shard copies, sends and holds, and memory that it frees."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fsdp.towers import Tower, shard_tower
from tests.fsdp.transformer import build
from tests.operations import Operations
from tests.ranks import join, on_processes, run_gloo, run_threads
from vescale_ray.fsdp import explain, fully_shard
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.units.schedule import Schedule, unit_of
from vescale_ray.fsdp.units.unit import Unit
from vescale_ray.planner.step_buffers import Travel, device_buffers

WIDTH, LAYERS = 64, 6
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(**options):
    return shard_tower(Tower(LAYERS, WIDTH), **options)


def step(model, optimizer=None):
    model(torch.ones(2, WIDTH)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()


class Recorder:
    """Counts this rank's collectives and messages, and keeps the storages that they read and wrote."""

    NAMES = ("all_gather_single", "all_to_all_single", "reduce_scatter_single", "all_reduce", "broadcast", "isend", "irecv")

    def __init__(self, monkeypatch):
        self.calls, self.read, self.written = {}, {}, {}
        for name in self.NAMES:
            monkeypatch.setattr(dist, name, self._wrap(name, getattr(dist, name)))

    def clear(self):
        rank = dist.get_rank()
        self.calls[rank], self.read[rank], self.written[rank] = Counter(), set(), set()

    def _wrap(self, name, original):
        def wrapped(*args, **kwargs):
            rank = dist.get_rank()
            if rank in self.calls:
                self.calls[rank][name] += 1
                if name != "isend":
                    self.written[rank].add(storage(args[0]))
                if name not in ("irecv", "all_reduce"):
                    self.read[rank].add(storage(args[0] if name == "isend" else args[1]))
            return original(*args, **kwargs)

        return wrapped


class Writes(TorchDispatchMode):
    """Counts the bytes that copy operations write."""

    COPIES = {"copy_", "clone", "_to_copy", "cat", "split_with_sizes_copy", "chunk_cat", "_foreach_copy_", "_chunk_cat", "stack"}

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in self.COPIES:
            tensors = result if isinstance(result, list | tuple) else [result] if isinstance(result, torch.Tensor) else args[0]
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        return result


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def counts(rank, world, recorder):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    lanes = unit_of(model).lanes
    per_step = []
    for _ in range(3):
        recorder.clear()
        before = lanes.gather.issued, lanes.reduce.issued
        step(model, optimizer)
        per_step.append((lanes.gather.issued - before[0], lanes.reduce.issued - before[1], dict(recorder.calls[rank])))
    recorder.clear()
    inside = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, a: inside.extend(storage(p) for p in m.parameters()))
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    masters = {storage(g.master.flat) for u in _units(model) for g in u.groups}
    return per_step, recorder.read[rank] == masters, len(inside) == 2 * LAYERS and set(inside) <= recorder.written[rank]


def counts_in_process(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        return counts(rank, world, Recorder(patch))


GATHERS, REDUCTIONS = 2 * LAYERS + 1, LAYERS + 1
"""Forward gathers every unit. Backward gathers every unit but the root, which stays gathered."""


def test_step_is_one_all_gather_per_unshard_one_reduce_per_group(monkeypatch):
    for per_step, reads_masters, writes_parameters in run_threads(3, counts, Recorder(monkeypatch)):
        calls = {"all_gather_single": GATHERS, "reduce_scatter_single": REDUCTIONS, "all_reduce": 1}
        assert per_step == [(GATHERS, REDUCTIONS, calls)] * 3, "and which parameters were used, once"
        assert reads_masters, "the all-gather reads the master shards themselves"
        assert writes_parameters, "parameters are views of what the all-gather wrote"


def test_gloo_collective_is_one_message_to_and_from_each_rank():
    messages = GATHERS + REDUCTIONS + 1  # and which parameters were used, once
    for per_step, reads_masters, writes_parameters in run_gloo(2, counts_in_process):
        assert per_step == [(GATHERS, REDUCTIONS, {"isend": messages, "irecv": messages})] * 3
        assert reads_masters and writes_parameters


def copied_bytes():
    """Bytes copied in one steady step, by operation, in FP32 and with a BF16 compute dtype."""
    results = {}
    for name, policy in (("fp32", MixedPrecisionPolicy()), ("bf16", BF16)):
        model = sharded(mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, optimizer)
        shard = sum(g.layout.shard_numel for u in _units(model) for g in u.groups)
        laid_out = sum(g.layout.numel for u in _units(model) for g in u.groups)
        biases = sum(p.numel() for p in model.parameters() if p.dim() == 1)
        x = torch.ones(2, WIDTH)
        with Writes() as writes:
            out = model(x)
        forward = dict(writes.bytes)
        with Writes() as writes:
            out.float().square().mean().backward()
        (root,) = [g.layout.shard_numel for g in unit_of(model).groups]
        results[name] = forward, dict(writes.bytes), (shard, root), laid_out, biases
    return results


@pytest.fixture
def one_of_two():
    """Rank 0 of 2 with collectives that do nothing, so that all counted copies are the engine's."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_all_gather_copies_nothing_and_gradients_at_most_once(one_of_two):
    result = copied_bytes()
    forward, backward, _, _, biases = result["fp32"]
    assert forward == {}
    assert backward.pop("copy_") == biases * 4, "weights' gradients are written where they are reduced"
    assert sum(backward.values()) < 2048, backward
    forward, backward, (shard, root), laid_out, biases = result["bf16"]
    cast_once = shard * 2
    assert cast_once <= forward.get("copy_", 0) + forward.get("_to_copy", 0) <= cast_once + 1024, "the cast of the shard, and of the inputs"
    again = (shard - root) * 2
    assert backward["copy_"] == again + biases * 2
    assert backward["_foreach_copy_"] == laid_out * 4, "products in BF16 are cast once, when they are reduced"


def test_shard_is_cast_in_the_gathered_buffer_at_each_gather(one_of_two):
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    group = unit_of(model.layers[0]).groups[0]
    step(model)

    def cast(name, args):
        if name == "aten::copy_" and args[0].shape == (group.layout.shard_numel,) and args[0].dtype == torch.bfloat16:
            return args[0].untyped_storage()._cdata

    with Operations(cast) as seen:
        model(torch.ones(2, WIDTH)).float().square().mean().backward()
    assert len(seen.seen) == 2 * LAYERS
    gathered = group.gathered.buffer._storage.untyped_storage()._cdata
    assert gathered in seen.seen and len(set(seen.seen)) == LAYERS, "there is no other copy of a shard"


@pytest.mark.parametrize("world", [2, 3])
@on_processes()
def test_units_share_three_buffers_and_the_pool_does_not_grow(rank, world):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    pool = unit_of(model).lanes.pool
    peaks = []
    for _ in range(6):
        pool.peak_bytes = 0
        step(model, optimizer)
        peaks.append(pool.peak_bytes)
    layer, root = (unit_of(module).groups[0].gathered.nbytes for module in (model.layers[0], model))
    assert peaks == peaks[:1] * 6
    assert peaks[0] <= 3 * layer + 2 * root, "gathered: prefetch depth + 1; gradients: one; the root has its own"
    assert pool.bytes_held() == 0, "on the CPU idle memory goes back"


@on_processes(2)
def test_first_unit_frees_its_memory_before_the_last_reduction(rank, world):
    model = sharded()
    layer = unit_of(model.layers[0]).groups[0]
    schedule_end, counted = Schedule.end_backward, []
    step(model)

    def recorded(schedule):
        counted.append(schedule.lanes.pool.count()[layer.gathered.nbytes])
        schedule_end(schedule)

    with patch.object(Schedule, "end_backward", recorded):
        model(torch.ones(2, WIDTH, requires_grad=True)).square().mean().backward()
    assert counted == [(0, 1)], "nothing is gathered; the gradients on their way are there"


@on_processes(2)
def test_one_kernel_adds_a_groups_gradients_and_drops_free_them(rank, world):
    model = sharded()
    step(model)
    backward = lambda: model(torch.ones(2, WIDTH)).square().mean().backward()  # noqa: E731
    backward()
    once = [p.grad.to_local().clone() for p in model.parameters()]
    storages = {StorageWeakRef(p.grad.to_local().untyped_storage()) for p in model.parameters()}
    sizes = Counter(unit_of(unit).groups[0].layout.shard_numel for unit in (*model.layers, model))

    def added(name, args):
        return args[0].numel() if name == "aten::add_" and args[0].dim() == 1 and args[0].numel() in sizes else None

    with Operations(added) as seen:
        backward()
    twice = [p.grad.to_local() for p in model.parameters()]
    assert all(torch.equal(b, 2 * a) for a, b in zip(once, twice, strict=True))
    del twice
    model.zero_grad()
    assert len(storages) == sum(ref.expired() for ref in storages) == LAYERS + 1
    assert Counter(seen.seen) == sizes


def released(rank, world):
    """All memory is freed with the model, without garbage collection, and no engine object is left."""
    gc.collect()
    gc.disable()
    try:
        model = sharded(mp_policy=BF16)
        for _ in range(2):
            loss = model(torch.ones(2, WIDTH)).float().square().mean()
            loss.backward()
        unit = unit_of(model.layers[1])
        group = unit.groups[0]
        tensors = group.master.flat, group.params[0].unsharded, model.head.weight.grad
        watched = [weakref.ref(it) for it in (*tensors, unit, group, unit.schedule)]
        del unit, group, loss, model, tensors
        return [ref() is None for ref in watched]
    finally:
        gc.enable()


@on_processes(2)
def test_models_may_end_and_start_during_an_optimizer_step(rank, world):
    """Hooks of an optimizer's step drop one model and start another, as garbage collection and other threads may."""
    models = [sharded() for _ in range(3)]
    for model in models:
        step(model)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)

    def change(*_):
        del models[1:]
        gc.collect()
        models.append(sharded())
        step(models[-1])

    handles = [register_optimizer_step_post_hook(hook) for hook in (change, lambda *_: None)]
    try:
        step(models[0], optimizer)
        assert len(models) == 2
        step(models[0], optimizer)
    finally:
        for handle in handles:
            handle.remove()


def test_deleting_the_model_frees_its_memory_without_gc():
    for freed in run_gloo(2, released):
        assert all(freed), freed


def survives_a_lost_rank(rank, world, folder):
    """The other rank goes away in the middle of a step. This rank drops everything and trains again in a new group."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    if rank == 1:
        model(torch.ones(2, WIDTH))
        return "gone"  # the test harness destroys the process group
    failed = ""
    try:
        for _ in range(3):
            step(model, optimizer)
    except RuntimeError as error:
        failed = str(error)
    group_ref = weakref.ref(dist.distributed_c10d._get_default_group())
    del model, optimizer
    gc.collect()
    left = [type(o).__name__ for o in gc.get_objects() if isinstance(o, Unit | ParameterGroup | Schedule | dist.Work)]
    dist.destroy_process_group()
    gc.collect()
    alive = group_ref() is not None
    join(dist.FileStore(f"{folder}/again", 1), 0, 1, 20.0)
    again = sharded()
    step(again, torch.optim.AdamW(again.parameters()))
    return bool(failed), left, alive


def test_failed_collective_leaves_nothing_and_a_new_group_works(tmp_path):
    failed, left, alive = run_gloo(2, survives_a_lost_rank, str(tmp_path))[0]
    assert failed, "losing a rank must raise"
    assert left == []
    assert not alive, "someone still holds the old process group"


@pytest.mark.parametrize("world", range(2, 10))
def test_every_rank_sends_a_multiple_of_128_bytes(world):
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    try:
        for policy in (MixedPrecisionPolicy(), BF16):
            model = build()
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            for unit in _units(model):
                for group in unit.groups:
                    for dtype in (group.compute_dtype, group.reduce_dtype):
                        assert group.layout.shard_numel * dtype.itemsize % 128 == 0
            model(torch.zeros(2, 4, dtype=torch.long)).float().sum().backward()
            assert model.head.weight.grad.to_local().shape == model.head.weight.to_local().shape
    finally:
        dist.destroy_process_group()


def test_explain_reports_units_groups_and_parameter_ranges():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        model = build()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        report = explain(model)
        assert [unit.name for unit in report.units] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
        assert report.parameter_count == sum(p.numel() for p in model.parameters())
        for unit in report.units:
            for group in unit.groups:
                assert group.shard_numel * group.ranks * 4 == group.gathered_bytes
                for p in group.parameters:
                    assert [e for a, b in p.ranges if b > a for e in (a, b)][:1] == [0], "ranges tile the tensor"
                    assert sum(b - a for a, b in p.ranges) == torch.Size(p.shape).numel()
        text = str(report)
        assert "4 units" in text and "qkv.weight  [60, 20]" in text and "padding" in text
        with pytest.raises(ValueError, match="not sharded"):
            explain(nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()


def test_device_buffers_add_up_units_that_stay_gathered():
    stays = [Travel(10, 20), Travel(1, 2)]
    assert device_buffers([], stays) == (11, 22)
    assert device_buffers([[Travel(5, 7)]], stays) == (16, 29)
    assert device_buffers([[Travel(5, 7)], [Travel(6, 1)], [Travel(3, 3)]], stays) == (16, 30), "the first one and two gradients"
    assert device_buffers([[Travel(5, 4)], [Travel(6, 1)], [Travel(3, 3)]], stays) == (22, 23), "two units and one gradient"
    assert device_buffers([[Travel(5, 4, cast=8)], [Travel(6, 1)], [Travel(3, 3)]], stays) == (22, 31), "and what casts it"


def _units(model):
    return [unit_of(m) for m in model.modules() if hasattr(m, "_get_fsdp_state")]


def forwards_without_backward(rank, world):
    model = sharded()
    step(model)
    schedule = unit_of(model).schedule
    for _ in range(300):
        model(torch.ones(2, WIDTH))
    held, calls, call = schedule.lanes.pool.bytes_held(), 0, schedule.last_call
    while call is not None:
        calls, call = calls + 1, call.previous
    step(model)
    root, layer = (unit_of(m).groups[0].gathered.nbytes for m in (model, model.layers[0]))
    return held, root, layer, calls


def test_forwards_that_no_backward_follows_leave_nothing_behind(one_of_two):
    held, root, layer, calls = forwards_without_backward(0, 2)
    assert held <= root + 2 * layer, "the root stays gathered until backward, and prefetch depth + 1 buffers for it"
    assert calls <= LAYERS + 1
