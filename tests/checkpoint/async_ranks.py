"""Functions that ranks run in the multi-process tests of asynchronous saves; processes can import them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoint.built_models import BUILDERS, full_state, one_step
from tests.ranks import join
from vescale_ray import checkpoint as ckpt


def async_rank(rank: int, world: int, roots: dict[str, str]) -> Any:
    """Save asynchronously under each builder, and train on during the write. The expected values are gathered before."""
    results = {}
    for builder, root in roots.items():
        model, optimizer = BUILDERS[builder](0, world)
        with ckpt.Saver(root, timeout_s=20, when_busy="wait") as saver:
            for step in (1, 2, 3):
                one_step(model, optimizer)
                truth = full_state(model, optimizer)
                state = {"model": model, "optimizer": optimizer, "stream": {"consumed": 6 * step}}
                saver.async_save(state, step, aux={"rank": rank}, wait_staged=False).wait_staged()
        results[builder] = [c.name for c in ckpt.ls(root)], truth
    return results


class NoCollectives:
    """Make every collective, barrier and message of the process group raise while the context is active."""

    NAMES = (
        *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier", "monitored_barrier"),
        *("all_gather", "all_reduce", "broadcast", "gather", "scatter", "reduce", "all_to_all_single", "isend", "irecv", "send", "recv"),
    )

    def __enter__(self) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a save has made a collective")

        self._before = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, refuse)

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)


def async_failing_rank(rank: int, world: int, root: str) -> Any:
    """Outcomes on each rank when rank 1's disk is full once, is slow, its state can't be stored, or it is late.

    No save uses a collective.
    """

    class Store(ckpt.PosixStore):
        slow = 0.0

        def put_stream(self, key, chunks, size):  # type: ignore[no-untyped-def]
            time.sleep(self.slow)
            super().put_stream(key, chunks, size)

    store, told = Store(root), dict[str, Any]()
    saver = ckpt.Saver(store, timeout_s=20)
    state = {"model": {"w": torch.ones(10)}}
    with NoCollectives():
        if rank == 1:
            os.environ[ckpt.FAULT_ENV] = "data.chunk=ENOSPC"
        told["full"] = str(saver.async_save(state, 1).exception(20))
        os.environ.pop(ckpt.FAULT_ENV, None)
        told["after"] = saver.async_save(state, 2).wait(20).step
        told["sync"] = ckpt.save(state, store, 3, timeout_s=20).commit.name
        store.slow = 1.5 * (rank == 1)
        handles = [saver.async_save(state, step) for step in (10, 11, 12)]
        told["skipped"] = [isinstance(handle.exception(20), ckpt.SaveSkipped) for handle in handles]
        with ckpt.Saver(store, timeout_s=20, double_buffer=False) as single:
            first = single.async_save(state, 20)
            while rank != 1 and single._writer._slabs():  # until the other ranks have written their data and have their buffers back
                time.sleep(0.01)
            second = single.async_save(state, 21)
            told["skipped at once"] = second.skipped
            told["single"] = [first.wait(20).step, str(second.exception(20)), second.skipped]
        store.slow = 0.0
        odd = {**state, "odd": object()} if rank == 1 else state
        for name, save in (("unfit", saver.async_save), ("unfit sync", lambda *a: ckpt.save(a[0], store, a[1], timeout_s=20))):
            try:
                told[name] = str(save(odd, 30).exception(20))  # type: ignore[operator]
            except ValueError as error:
                told[name] = f"ValueError: {error}"
        if rank != 2:
            told["alone"] = str(ckpt.Saver(store, timeout_s=0.5).async_save(state, 31).exception(20))
        if rank != 2:
            try:
                ckpt.save(state, store, 32, timeout_s=0.5)
            except ckpt.SaveFailed as error:
                told["missed"] = str(error)
        told["back"] = [saver.async_save(state, 33).wait(20).step, ckpt.save(state, store, 34, timeout_s=20).step]
        told["two"] = two_savers(f"{root}-two", state)
        told["files"] = len([p for p in os.scandir(f"{root}/data") if any(os.scandir(p.path))])
    dist.barrier()
    told["steps"] = [c.step for c in ckpt.ls(root)]
    told["outside"] = told["gone"] = "nothing"
    pair = dist.new_group([0, 1])
    try:
        ckpt.save(state, store, 40, timeout_s=20, group=pair)
    except ValueError as error:
        told["outside"] = str(error)
    dist.destroy_process_group()
    try:
        saver.async_save(state, 41)
    except ValueError as error:
        told["gone"] = str(error)
    # A new process group over a store that holds the words of an older group.
    again = dist.PrefixStore("again", dist.FileStore(f"{root}/../store", world))
    join(again, rank, world, 20.0)
    told["anew"] = [saver.async_save(state, 42).wait(20).step, ckpt.save(state, store, 43, timeout_s=20).step]
    assert saver._accord is not None and saver._accord._group is dist.group.WORLD, "the store of the group before may be gone"
    saver.close()
    return told


def two_savers(root: str, state: Any) -> list[tuple[bool, ...]]:
    """For each step, which of three simultaneous saves to one folder were committed: a synchronous one, and those of two savers."""
    ends = []
    with ckpt.Saver(root, timeout_s=20) as one, ckpt.Saver(root, timeout_s=20, retention=ckpt.Retention(keep_last=2)) as other:
        for step in range(1, 5):
            handles = [saver.async_save(state, step) for saver in (one, other)]
            try:
                between = ckpt.save(state, root, step, timeout_s=20).commit.step == step
            except ckpt.CheckpointError:
                between = False
            ends.append((between, *(handle.exception(20) is None for handle in handles)))
    return ends


def async_killed_rank(rank: int, world: int, store: str, root: str, report: str, victim: int, point: str) -> None:
    """Save asynchronously while the victim dies at ``point``; the other rank goes on and ends.

    The test does not use run_gloo, which reports a death as a failure.
    """
    torch.set_num_threads(1)
    if rank == victim:
        os.environ[ckpt.FAULT_ENV] = point
    join(dist.FileStore(store, world), rank, world, 20.0)
    saver = ckpt.Saver(root, timeout_s=1.0)
    handle = saver.async_save({"model": {"w": torch.full((10,), 2.0)}}, 8)
    began = time.monotonic()
    outcome = f"{type(handle.exception(20)).__name__}: {handle.exception()}"
    with open(f"{report}.{rank}", "w") as file:
        file.write(f"{time.monotonic() - began} {outcome}")
    saver.close()
    os._exit(0)  # the other member of the group is gone, so leave without a shutdown
