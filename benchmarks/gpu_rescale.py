"""Consecutive generations on a GPU: the rows of ``gpu_check.py`` on rescaling over NCCL, without Ray, on parts of a real run.

NCCL allows one rank per GPU, so one GPU can show three things. One rank's communicator is aborted and followed by another, also under a
failed step and with work in flight. Two ranks on one GPU, which NCCL refuses, recover from that. Shards on a GPU move between two
processes, with the step's collectives over gloo. docs/fault-tolerance.md lists what remains unverified.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import RankFailed
from tests.workers.fleet import Fleet, State
from tests.workers.tiny import HOST, Run, held, leave, same_bits, start_fresh, start_from_memory, tiny, train, use, write_text
from vescale_ray.config import RunConfig
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.process_groups import GroupFailed
from vescale_ray.workers.resharding.held_state import choose_resume
from vescale_ray.workers.resharding.shards import export_shards

STEPS = 12
FORM_SECONDS = 15.0
GLOO = "cpu:gloo,cuda:gloo"
"""Back end for shards on a GPU. With a plain ``gloo``, a device mesh makes an NCCL group, which two ranks on one GPU cannot have."""
SLEEP_SECONDS = 2.0
"""Seconds for which the device is kept busy while a group is dissolved."""


class Skip(Exception):
    """A check does not apply here."""


def config_of(folder: str, **changes: Any) -> RunConfig:
    """A configuration with some MB of state, five slots, and a copy after every step."""
    return tiny(write_text(Path(folder)), model_dim=256, model_ffn=688, train_steps=STEPS, **changes)


def check_generations(device: torch.device) -> str:
    """Planned changes, a failing step, and a new communicator each time give the losses of an undisturbed run, and leave no memory
    behind."""
    with tempfile.TemporaryDirectory() as folder, Fleet(1, spawn=device.type == "cuda") as fleet:
        config = config_of(folder)
        told = fleet.run([0], _generations, device.type, config, fleet.port, timeout=240.0)[0]
    calm, changed, took, left = told
    furthest = max(abs(a - b) for a, b in zip(calm, changed, strict=True))
    assert len(changed) == STEPS and furthest <= 1e-5, f"losses differ from a calm run's by {furthest:.1e}"
    assert left <= 1 << 20, f"{left} bytes of the device are left after the last generation"
    shown = ", ".join(f"{what} {statistics.median(seconds):.3f} s" for what, seconds in took.items())
    return f"{len(took['form'])} groups in one process; losses differ from a calm run's by {furthest:.1e}; medians: {shown}"


def _generations(state: State, device: str, config: RunConfig, port: int) -> tuple[list[float], list[float], dict[str, list[float]], int]:
    use(state, device)
    took: dict[str, list[float]] = {"form": [], "dissolve": []}

    def where(name: str, generation: int) -> tuple[Any, ...]:
        return (config, port, name, 0, 1, generation)

    def timed(what: str, function: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        answer = function(*args)
        took[what].append(time.perf_counter() - begin)
        return answer

    start_fresh(state, *where("calm", 1))
    calm = [record.loss for record in train(state, STEPS, False)]
    leave(state, False)
    state["snapshots"].clear()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0

    changed: list[float] = []
    timed("form", start_fresh, state, *where("changed/1", 1))
    for generation, until in ((2, 3), (3, 6), (4, 9)):
        changed += [record.loss for record in train(state, until, True)]
        if generation == 3:
            _fail_in_a_step(state)
        else:
            timed("dissolve", leave, state)
        chosen = choose_resume({"0": held(state)})
        assert chosen is not None and chosen.step >= until - 1, f"of step {until} nothing is held: {held(state)}"
        del changed[chosen.step :]
        timed("form", start_from_memory, state, chosen.generation, chosen.step, *where(f"changed/{generation}", generation))
    changed += [record.loss for record in train(state, STEPS, False)]
    timed("dissolve", leave, state, False)
    state["snapshots"].clear()
    return calm, changed, took, (torch.cuda.memory_allocated() if device == "cuda" else 0) - before


def check_offload(device: torch.device) -> str:
    """With ``train.offload: cpu`` losses are those of shards on the device, also through a failing step and rescales. Shards and optimizer
    states are in host memory."""
    if device.type == "cpu":
        raise Skip("needs a GPU")
    with tempfile.TemporaryDirectory() as folder, Fleet(1, spawn=True) as fleet:
        offloaded = config_of(folder, train_offload="cpu")
        plain, homes, most = fleet.run([0], _undisturbed, config_of(folder), fleet.port, "plain", timeout=240.0)[0]
        losses, offloaded_homes, least = fleet.run([0], _undisturbed, offloaded, fleet.port, "offloaded", timeout=240.0)[0]
        calm, changed, _, _ = fleet.run([0], _generations, device.type, offloaded, fleet.port, timeout=240.0)[0]
    furthest = max(abs(a - b) for one in (losses, calm, changed) for a, b in zip(one, plain, strict=True))
    assert furthest <= 1e-5, f"losses differ from those with shards on the device by {furthest:.1e}"
    assert (homes, offloaded_homes) == ({"cuda"}, {"cpu"}), f"shards are on {homes}, and with offload on {offloaded_homes}"
    assert least < most, f"a step takes {least} bytes of the device, without offload {most}"
    return f"losses differ by {furthest:.1e}; a step takes {least / 2**20:.0f} MiB of the device, without offload {most / 2**20:.0f} MiB"


def _undisturbed(state: State, config: RunConfig, port: int, name: str) -> tuple[list[float], set[str], int]:
    """Losses of an undisturbed run, the kinds of device of its shards, and the most bytes that the device held."""
    use(state, "cuda")
    torch.cuda.reset_peak_memory_stats()
    start_fresh(state, config, port, name, 0, 1, 1)
    losses = [record.loss for record in train(state, STEPS, False)]
    homes = {piece.data.device.type for piece in export_shards(state["trainer"]).pieces}
    most = torch.cuda.max_memory_allocated()
    leave(state, False)
    state["snapshots"].clear()
    return losses, homes, most


def _failing(losses: Any) -> Any:
    calls = iter(range(100))

    def fails(*batch: Any) -> Any:
        if next(calls):
            raise ArithmeticError("as was to be")
        return losses(*batch)

    return fails


def _fail_in_a_step(state: State) -> None:
    """Raise after a backward, as a rank's own model might, and do what a worker does then."""
    trainer = state["trainer"]
    trainer._losses = _failing(trainer._losses)
    try:
        trainer.step(settle=state["snapshots"].settle)
    except ArithmeticError as error:
        process_groups.describe(error)
    else:
        raise AssertionError("the step did not fail")
    state["snapshots"].copied()
    del trainer
    state.pop("trainer").close()
    state["snapshots"].abandon()
    process_groups.dissolve()
    state["snapshots"].verify()


def check_abort(device: torch.device) -> str:
    """Dissolving a group while a collective waits for a busy device takes no longer than the device, and the next group works."""
    if device.type == "cpu":
        raise Skip("needs a GPU")
    with tempfile.TemporaryDirectory() as folder, Fleet(1, spawn=device.type == "cuda") as fleet:
        took = fleet.run([0], _abort, device.type, config_of(folder), fleet.port, timeout=120.0)[0]
    assert took <= SLEEP_SECONDS + 5.0, f"dissolving took {took:.1f} s, with {SLEEP_SECONDS:g} s of work in flight"
    return f"dissolved in {took:.2f} s with {SLEEP_SECONDS:g} s of work in flight; the next group trains"


def _abort(state: State, device: str, config: RunConfig, port: int) -> float:
    use(state, device)
    start_fresh(state, config, port, "busy", 0, 1, 1)
    train(state, 2, False)
    _keep_busy(SLEEP_SECONDS)
    work = dist.all_reduce(torch.ones(1 << 20, device=device), async_op=True)
    begin = time.perf_counter()
    leave(state, False)
    took = time.perf_counter() - begin
    del work
    start_fresh(state, config, port, "after", 0, 1, 2)
    train(state, 2, False)
    leave(state, False)
    return took


def _keep_busy(seconds: float) -> None:
    """Keep the device's current stream busy from now on."""
    some = 10**7
    times = []
    for _ in range(2):  # the first call loads the kernel
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(some)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    torch.cuda._sleep(int(some * seconds / times[-1]))


def check_refused(device: torch.device) -> str:
    """NCCL refuses two ranks on one GPU. Both get the error within the time to form a group, and each then trains alone."""
    if device.type == "cpu":
        raise Skip("needs a GPU")
    with tempfile.TemporaryDirectory() as folder, Fleet(2, spawn=device.type == "cuda") as fleet:
        config = config_of(folder)
        calls = {w: (device.type, config, fleet.port, w) for w in (0, 1)}
        told = fleet.run_each(calls, _refused, timeout=120.0)
    texts = {text for text, _ in told.values()}
    longest = max(seconds for _, seconds in told.values())
    assert longest <= 2 * FORM_SECONDS, f"it took {longest:.1f} s until both ranks were out"
    return f"both out after {longest:.1f} s at most, and train alone: {sorted(texts)[0][:160]}"


def _refused(state: State, device: str, config: RunConfig, port: int, rank: int) -> tuple[str, float]:
    use(state, device)
    begin = time.perf_counter()
    failure = ""
    try:
        with process_groups.collectives("the first collective"):
            process_groups.form(HOST, port, "refused", rank, 2, state["backend"], 20.0, form_timeout_s=FORM_SECONDS)
            dist.all_reduce(torch.ones(4, device=device))
            torch.cuda.synchronize()
    except GroupFailed as error:
        failure = str(error)
    process_groups.dissolve()
    took = time.perf_counter() - begin
    start_fresh(state, config, port, f"alone/{rank}", 0, 1, 1)
    train(state, 2, False)
    leave(state, False)
    return failure or "not refused", took


def check_moves(device: torch.device) -> str:
    """Two processes share the GPU, with collectives over gloo: 2 ranks, 1, 2, 1, with leavers and joiners. Every bit is right, and the
    fewest bytes move."""
    with tempfile.TemporaryDirectory() as folder, Fleet(2, spawn=device.type == "cuda") as fleet:
        fleet.run([0, 1], use, device.type, GLOO if device.type == "cuda" else "gloo")
        run = Run(fleet, config_of(folder))
        run.fresh([0, 1])
        try:
            run.train(1)
        except RankFailed as error:
            text = str(error).strip().splitlines()[-1]
            if device.type == "cpu" or not re.search("gloo|support|device", text, re.IGNORECASE):
                raise
            raise Skip(f"gloo on this GPU: {text}") from None
        moved = []
        for until, members in ((3, [0]), (6, [0, 1]), (9, [1])):
            run.train(until, rescale=True)
            before, survivors = run.full_state(), run.members
            run.end()
            report = run.resume(survivors, members)
            assert same_bits(before, run.full_state()), f"from {survivors} to {members} the state has changed"
            assert report.moved_bytes == report.lower_bound, f"{report.moved_bytes} bytes were moved, {report.lower_bound} had to"
            moved.append(report.moved_bytes)
        run.train(STEPS)
        run.end()
    return f"2 to 1 to 2 to 1 ranks, every bit kept; {sum(moved) / 1e6:.1f} MB moved, the least there is"
