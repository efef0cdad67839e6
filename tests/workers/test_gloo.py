"""All gloo groups of this project have one worker thread, because torch's default of two corrupts the heap."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests import ranks
from tests.ranks import RankFailed, on_processes, run_gloo
from tests.workers.tiny import tiny
from vescale_ray import gloo
from vescale_ray.communication.point_to_point import Messages, is_pairwise
from vescale_ray.fsdp import CPUOffloadPolicy, Sharding, fully_shard
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.workers.building import rehearsal
from vescale_ray.workers.building.model_building import NextModel
from vescale_ray.workers.network import process_groups

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def test_messages_that_could_not_be_made_are_dropped_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(TypeError, match="weak reference"):
        Messages(object(), 0)
    assert not unraisable


@on_processes(4)
def test_groups_derived_from_our_default_group_have_one_thread(rank: int, world: int) -> None:
    def threads(*made: Any) -> list[int]:
        return [gloo.worker_threads(group) for group in made]

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model).set_separate_reduce_scatter_group()
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    row = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    wide = fully_shard(nn.Linear(8, 8), mesh=grid, sharding=Sharding("b", "b", ("a", "b")))
    pair = dist.new_group([0, 1])
    found = {
        "the default group": threads(default_group()),
        "new_group": threads(dist.new_group(), pair if rank < 2 else default_group()),
        "new_group by the ranks in it": threads(dist.new_group([rank], use_local_synchronization=True)),
        "new_group by name": threads(dist.new_group(backend=gloo.BACKEND)),
        "new_subgroups": threads(dist.new_subgroups(2)[0]),
        "a mesh": threads(*grid.get_all_groups()),
        "a mesh flattened": threads(grid._flatten("ab").get_group()),
        "a mesh unflattened": threads(*row._unflatten(0, (2, world // 2), ("c", "d")).get_all_groups()),
        "fully_shard's own mesh": threads(*(group.place.shard_group for group in unit_of(model).groups)),
        "a group of reduce-scatters": threads(*(group.grads.group for group in unit_of(model).groups)),
        "the groups of a sharding": threads(*(group.place.shard_group for group in unit_of(wide).groups)),
    }
    assert is_pairwise(default_group(), CPU), "the engine exchanges messages between pairs on this back end"
    assert {way: set(threads) for way, threads in found.items()} == {way: {1} for way in found}


def named(rank: int, world: int) -> None:
    dist.new_group(backend="gloo")


def test_harness_fails_a_test_whose_group_has_two_threads() -> None:
    with pytest.raises(RankFailed, match="several worker threads"):
        run_gloo(1, named)


class LateRank0:
    """A function for :func:`run_gloo`. To unpickle it delays rank 0 after its connections are made."""

    def __reduce__(self) -> Any:
        return _delay_rank_0, ()


def _delay_rank_0() -> Callable[..., tuple[float, float]]:
    meet = ranks.join

    def join(store: dist.Store, rank: int, world: int, timeout: float) -> None:
        meet(store, rank, world, timeout)
        time.sleep(0.5 if rank == 0 else 0.0)
        ranks.met = time.monotonic()  # type: ignore[attr-defined]

    ranks.join = join
    return when_met


def when_met(rank: int, world: int) -> tuple[float, float]:
    return ranks.met, time.monotonic()  # type: ignore[attr-defined]


def test_no_rank_of_a_test_begins_before_all_have_met() -> None:
    (last, _), (_, begun) = run_gloo(2, LateRank0())  # type: ignore[arg-type]  # a function once it is unpickled
    assert begun >= last


def fails(rank: int, world: int) -> None:
    time.sleep(rank)
    raise ValueError("the cause" if rank else "another rank is gone")


def test_harness_reports_the_rank_that_fails_last() -> None:
    with pytest.raises(RankFailed, match="(?s)another rank is gone.*the cause"):
        run_gloo(2, fails)


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("gloo", "vescale_gloo"),
        ("GLOO", "vescale_gloo"),
        ("cpu:gloo", "vescale_gloo"),
        ("cpu:gloo,cuda:gloo", "vescale_gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:vescale_gloo,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:vescale_gloo"),
        ("nccl", "nccl"),
        ("fake", "fake"),
    ],
)
def test_our_backend_replaces_gloo_in_every_backend_string(asked: str, made: str) -> None:
    assert gloo.single_threaded(asked) == made


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:fake", None])
def test_a_group_of_each_specification_has_one_thread(backend: str | None) -> None:
    if backend is None and torch.accelerator.is_available():
        pytest.skip("the accelerator's back end is the default")
    gloo.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert gloo.worker_threads(default_group()) == 1
        assert gloo.worker_threads(dist.new_group()) == 1
        found = torch.ones(2)
        dist.all_reduce(found)
        dist.barrier()
        told: list[Any] = [None]
        dist.all_gather_object(told, "all of it")
        assert found.tolist() == [1.0, 1.0] and told == ["all of it"]
    finally:
        process_groups.dissolve()


def test_groups_of_workers_have_one_thread() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process_groups.form("127.0.0.1", store.port, "test/one", 0, 1, "gloo", 5.0)
    try:
        transfer = process_groups.open_transfer("127.0.0.1", store.port, "test/move", 0, 1, 5.0)
        assert gloo.worker_threads(default_group()) == transfer.options._threads == 1
        assert transfer.options._timeout == timedelta(seconds=5)
    finally:
        process_groups.dissolve()


def test_the_group_of_a_rehearsal_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    dissolve = process_groups.dissolve

    def looks() -> None:
        found.append(gloo.worker_threads(default_group()))
        dissolve()

    monkeypatch.setattr(process_groups, "dissolve", looks)
    config = tiny("stdlib", train_optimizer="adamw")
    rehearsal.rehearse(config, CPU, NextModel(config))
    assert found == [1]


@pytest.mark.parametrize("names", ["", "x", "lo", "lo,", "lo,lo"])
def test_interfaces_and_timeout_are_those_of_torchs_group(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    limit = timedelta(seconds=7)
    torchs = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit)
    ours = gloo.create(dist.HashStore(), 0, 1, limit)
    assert len(ours.options._devices) == len(torchs.options._devices) == max(1, names.count("lo"))
    assert ours.options._timeout == torchs.options._timeout == limit
    assert ours.options._threads == 1 < torchs.options._threads == 2 * len(ours.options._devices)


def test_missing_interface_raises_as_in_torchs_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError) as theirs:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    with pytest.raises(RuntimeError) as ours:
        gloo.create(dist.HashStore(), 0, 1)
    assert "none0" in str(theirs.value) and "none0" in str(ours.value)


def sharded(**options: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}])
def test_fully_shard_warns_once_of_a_group_with_two_threads(options: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for make, count in ((dist.init_process_group, 1), (gloo.init_process_group, 0)):
            told.clear()
            make("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                sharded(**options)
            finally:
                process_groups.dissolve()
            texts = [str(warning.message) for warning in told if "worker threads" in str(warning.message)]
            assert len(texts) == count, make
            assert all("2 gloo worker threads" in text and "vescale_ray.gloo.init_process_group" in text for text in texts)


def test_warning_about_gloo_by_name_recommends_our_backend() -> None:
    gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for backend, count in (("gloo", 1), (gloo.BACKEND, 0)):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                gloo.warn_of_threads([dist.new_group([0], backend=backend)])
            texts = [str(warning.message) for warning in told]
            assert len(texts) == count and all("this one with backend=vescale_ray.gloo.BACKEND" in text for text in texts)
    finally:
        process_groups.dissolve()


def test_backend_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(TypeError, match="backend is 3: give a name, such as 'gloo'"):
        gloo.init_process_group(3)  # type: ignore[arg-type]


MAKERS = {"init_process_group", "ProcessGroupGloo", "new_group", "new_subgroups", "init_device_mesh"}


def unsafe(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of each call in ``code`` that makes a gloo group through torch, also within programs in strings."""
    if not re.search(r"init_process_group|[gG]loo", code):
        return  # each such call has one of these words
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"init_process_group\(|\bgloo\b", node.value):
            try:
                within = list(unsafe(textwrap.dedent(node.value)))
            except SyntaxError:
                continue  # prose
            yield from ((node.lineno + line - 1, text) for line, text in within)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in MAKERS:
            continue
        owner = getattr(getattr(node.func, "value", None), "id", "")
        text = ast.unparse(node)
        if (
            (name == "init_process_group" and owner != "gloo" and "FakeStore" not in text and "BACKEND" not in text)
            or name == "ProcessGroupGloo"
            or (name in ("new_group", "new_subgroups", "init_device_mesh") and re.search(r"['\"][^'\"]*\bgloo\b", text))
        ):
            yield node.lineno, text


@pytest.mark.parametrize(
    "call",
    [
        'dist.init_process_group("gloo", rank=0)',
        "dist.init_process_group()",
        "torch.distributed.init_process_group(backend)",
        "init_process_group('cpu:gloo,cuda:nccl')",
        "dist.ProcessGroupGloo(store, 0, 1)",
        "dist.new_group(backend='gloo')",
        "init_device_mesh('cpu', (2,), backend_override={0: 'gloo'})",
        'SCRIPT = """\nimport torch\ntorch.distributed.init_process_group("gloo")\n"""',
    ],
)
def test_search_finds_each_call_that_makes_an_unsafe_group(call: str) -> None:
    assert list(unsafe(call))


def test_no_project_file_creates_a_torch_gloo_group() -> None:
    """Exempt are :mod:`vescale_ray.gloo`, and this file, which compares with torch's group."""
    exempt = {ROOT / "vescale_ray" / "gloo.py", Path(__file__).resolve()}
    found, files = [], 0
    for folder in ("vescale_ray", "workers", "controller", "checkpoint", "deploy", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() not in exempt:
                files += 1
                found += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in unsafe(path.read_text())]
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "upstream"]  # the report needs torch's own groups
    for page in (ROOT / "README.md", *sorted(pages)):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            found += [f"{page.relative_to(ROOT)}: {text}" for _, text in unsafe(block)]
    assert not found, "\n".join(found)
    assert files > 100


RACE = """
# Each collective is waited for before the next is started.
import os, sys, time, torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from vescale_ray import gloo

torch.set_num_threads(1)
make = {"torch": dist, "ours": gloo}[sys.argv[1]].init_process_group
make("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(8)

def gather():  # as DTensor does; its name, ALLGATHER_COALESCED, is too long to lie in the string itself
    return functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 1, dist.group.WORLD.group_name))

def exchange():  # the thread that completes it is held where it copies "ALLTOALL" into the string
    dist.all_to_all_single(torch.empty(8), x)

gather()
time.sleep(0.2)
for _ in range(4):
    exchange()
    gather()  # by the other thread, if there is one: it frees the memory that the first is about to write to
    time.sleep(1.5)
    for _ in range(20):
        gather()
print("survived", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_torchs_group_dies_of_the_race_and_ours_does_not(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("a C compiler (cc, gcc or clang) on Linux builds what holds a thread of torch's: install one")
    library = tmp_path / "hold_name.so"
    source = Path(__file__).with_name("hold_name.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-fno-builtin", "-o", library, source, "-ldl"], check=True)
    (tmp_path / "race.py").write_text(RACE)

    def run(whose: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "race.py", whose]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    ours, torchs = run("ours"), run("torch")
    assert ours.returncode == 0 and "survived" in ours.stdout, ours.stderr[-3000:]
    assert ours.stderr.count("held") >= 4 and "held" in torchs.stderr, "no thread was held where the name is copied"
    assert torchs.returncode < 0 and "survived" not in torchs.stdout, "torch has mended the race: vescale_ray/gloo.py can go"
