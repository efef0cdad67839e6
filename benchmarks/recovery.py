"""Pauses of a run when workers are lost, hang, leave or join, and when its controller dies; next to Ray Train's elastic trainer.

    python benchmarks/recovery.py [--quick] [--rounds 10] [--workers 4] [--skip raytrain,..] [--json OUT] [--keep FOLDER]

One run trains a Llama with 200 MB of model state (parameters and AdamW's two moments, FP32) on its own Ray cluster. This process disturbs
it by means that any user has (signals, the run's HTTP commands). Times come from the run's own log lines, which use this machine's clock:

    kill      SIGKILL of a random worker -> the first step of the smaller world begins       (.pause: the run's own figure)
    grow      its replacement, warm by then, joins: from the end of the last step to the begin of the next
    shrink    `rescale N-1`, all old workers alive
    hang      SIGSTOP of a random worker -> it is ended (.of_goal: relative to the larger of 2 s and three of the last steps)
    controller  SIGKILL of the controller -> it answers again; the workers go on meanwhile (.obeys: it takes a command, .watches: its loop
              has heard all workers)
    wire      rate at which as many processes exchange data by gloo's all-to-all, for grow's and shrink's goals
    node      a run of its own on two raylets with half of the workers each (of an odd number one each, since a shard has one copy, which
              must be elsewhere), Ray's health checks tuned (HEALTH): SIGKILL of one raylet and all that is on it -> the first step of the
              smaller world begins; then a new node comes
    drain     in the same run: a notice that a node goes in 20 s (`drain_node`, as of a pre-emption) -> its workers have left, and the first
              step of the smaller world begins (.left; .pause is the run's own figure, .gone until their processes are gone)
    raytrain  the same model, same ranks, torch's FSDP2 in `ray.train.torch.TorchTrainer`, elastic, sharded checkpoints every 20 steps:
              SIGKILL of a worker -> the first step of the next worker group begins (`ray[train]` is among what `make` installs)

Values are medians over rounds, and the spread is half the quartiles' distance; the result file has every value. The exit code is 1 if the
run failed or lost a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import wire_mb_s
from benchmarks.recovery_raytrain import MODEL, SEQ_LEN, WAIT_S, raytrain
from benchmarks.reporting import figure, write

STEADY = 5
"""Steps of a world before the next disturbance."""
NOTICE_S = 20.0
OBJECTS = 200 << 20
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Settings of Ray's health checks. With the defaults Ray takes 13 s to declare a node dead; a replacement's place waits for that, training
does not."""


def config_of(folder: Path, workers: int, name: str = "recovery", address: str = "local", cpus_each: float = 0.5) -> Any:
    from vescale_ray.config import parse_config

    return parse_config(
        {
            "run": {"name": name, "dir": str(folder)},
            "model": MODEL,
            "data": {"corpus": "stdlib", "seq_len": SEQ_LEN, "eval_samples": 0},
            "train": {"steps": 1_000_000, "slots": workers, "slot_batch": 1, "threads": 1, "device": "cpu"},
            "elastic": {"workers": workers, "min_workers": 1, "snapshot_every": 1, "replace_lost": True},
            "checkpoint": {"every": 0, "keep_last": 1},
            "ray": {"address": address, "cpus_per_worker": cpus_each},
        }
    )


class Tail:
    """The lines of a growing file, each parsed once, since the run shares this machine's cores."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self._lines
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines


class Saboteur:
    """Disturbs a run, one way after another, and notes the times."""

    def __init__(self, config: Any, workers: int, rounds: int, kills: int, seed: int) -> None:
        from vescale_ray.runfolder import RunFolder

        self.folder, self.workers, self.rounds, self.kills = RunFolder(config.run_folder), workers, rounds, kills
        self.random = random.Random(seed)
        self._events, self._metrics = Tail(self.folder.path / "events.jsonl"), Tail(self.folder.path / "metrics.jsonl")
        self.found: dict[str, list[float]] = {}
        self.error: BaseException | None = None

    def note(self, name: str, value: float) -> None:
        self.found.setdefault(name, []).append(value)

    def events(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in self._events.lines() if e["event"] == kind and e["time"] >= since]

    def lines(self) -> list[dict[str, Any]]:
        return self._metrics.lines()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            state = self.folder.read_state() or {}
            if time.monotonic() > deadline or state.get("state") in ("FAILED", "STOPPED", "DONE"):
                raise RuntimeError(f"{what}: not within {WAIT_S:g} s (state {state.get('state')}: {state.get('error')})")
            time.sleep(0.05)
        return value

    def steady(self, world: int) -> list[str]:
        """Wait for some steps of a world of this size, and return its workers."""

        def there() -> bool:
            last = self.lines()[-STEADY:]
            return len(last) == STEADY and {line["world"] for line in last} == {world} and len({line["generation"] for line in last}) == 1

        self.until(there, f"{STEADY} steps of {world} workers")
        return list(self.events("generation")[-1]["workers"])

    def pid(self, worker: str) -> int:
        return int(next(e["pid"] for e in self.events("worker_started") if e["worker"] == worker))

    def rescaled(self, since: float) -> dict[str, Any]:
        return dict(self.until(lambda: self.events("rescaled", since), "the rescale")[0])

    def lose(self, how: int) -> None:
        victim = self.random.choice(self.steady(self.workers))
        pid, name = self.pid(victim), "kill" if how == signal.SIGKILL else "hang"
        last = [line["time"] for line in self.lines()[-STEADY - 1 :]]
        step_s = statistics.median(b - a for a, b in zip(last, last[1:], strict=False))
        time.sleep(self.random.random() * 0.5)  # anywhere in a step
        began = time.time()
        os.kill(pid, how)
        self.recovered(name, began)
        if name == "hang":
            self.note("hang.of_goal", self.found["hang.ended"][-1] / max(2.0, 3.0 * step_s))

    def recovered(self, name: str, began: float) -> None:
        """Note how long the recovery from the event at ``began`` took, and wait until there are as many workers as before."""
        event = self.rescaled(began)
        first = self.until(lambda: [x for x in self.lines() if x["generation"] >= event["generation"] and x["time"] > began], "a step")[0]
        if name == "hang":
            self.note("hang.ended", self.events("worker_lost", began)[0]["time"] - began)
        # The recorded pause ends when the last rank has begun the step, and counts from the end of the step before.
        before = [line["time"] for line in self.lines() if line["step"] == first["step"] - 1 and line["generation"] < first["generation"]]
        if not before:
            raise RuntimeError(f"after a {name} the run began anew from step {first['step'] - 1}: nobody held what was lost")
        self.note(f"{name}.first_step_begins", before[-1] + event["pause_seconds"] - began)
        self.note(f"{name}.first_step_ends", first["time"] - began)
        self.note(f"{name}.pause", event["pause_seconds"])
        self.note(f"{name}.steps_lost", float(event["steps_replayed"]))
        for phase, seconds in event["phases"].items():
            self.note(f"{name}.phase.{phase}", seconds)
        if event["to"] < self.workers:
            self.replaced(event)

    def replaced(self, event: dict[str, Any]) -> None:
        """Wait until there are as many workers as before ``event``."""
        after = event["time"] + 1e-6
        grown = self.until(lambda: [e for e in self.events("rescaled", after) if e["to"] == self.workers], "the replacement")
        self.planned("grow", grown[0])

    def planned(self, name: str, event: dict[str, Any]) -> None:
        self.note(f"{name}.pause", event["pause_seconds"])
        self.note(f"{name}.moved", event["moved_bytes"] / max(1, event["lower_bound_bytes"]))
        self.note(f"{name}.moved_mb", event["moved_bytes"] / 1e6)
        # Otherwise the bound is that of a numbering that may not be the best.
        self.note(f"{name}.unplanned", float(event["moved_bytes"] > 0 and event["numbered_by"] != "layouts"))
        for phase, seconds in event["phases"].items():
            self.note(f"{name}.phase.{phase}", seconds)

    def rescale(self) -> None:
        from vescale_ray.cli import client

        for name, workers in (("shrink", self.workers - 1), ("grow", self.workers)):
            self.steady(self.workers if name == "shrink" else self.workers - 1)
            began = time.time()
            client.request(self.folder, "rescale", {"workers": workers})
            self.planned(name, self.rescaled(began))

    def controller(self) -> None:
        from vescale_ray.cli import client

        members = self.steady(self.workers)
        before, epoch = self.lines()[-1]["step"], int(client.request(self.folder, "status")["info"]["controller_epoch"])
        pid = self.until(self.controller_pid, "the controller's process")
        began = time.time()
        os.kill(pid, signal.SIGKILL)

        def answers() -> bool:
            try:
                return int(client.request(self.folder, "status", timeout_s=1.0)["info"]["controller_epoch"]) > epoch
            except (client.RunNotAlive, client.CommandRefused):
                return False

        self.until(answers, "a new controller")
        self.note("controller.answers", time.time() - began)

        def obeys() -> bool:
            try:
                return bool(client.request(self.folder, "rescale", {"workers": self.workers})["ok"])
            except (client.RunNotAlive, client.CommandRefused):
                return False

        self.until(obeys, "a controller that takes commands")
        self.note("controller.obeys", time.time() - began)
        # It says RUNNING once its loop has heard all workers; only then does it watch them.
        self.until(lambda: client.request(self.folder, "status")["state"] == "RUNNING", "a controller that watches the workers")
        self.note("controller.watches", time.time() - began)
        self.until(lambda: self.lines()[-1]["step"] > before + 2, "steps after the controller's death")
        assert list(self.events("generation")[-1]["workers"]) == members, "the workers changed with the controller"

    def controller_pid(self) -> int | None:
        """The process whose title is the controller actor's, in this run's Ray, whose process is our child."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                title = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[0]
                mine = f"VESCALE_RECOVERY={os.getpid()}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if title.startswith(b"ray::Controller") and mine:
                return int(name)
        return None

    def all_of_it(self, skip: set[str]) -> None:
        """Rounds of worker events, then kills of the controller."""
        for index in range(self.rounds):
            for name, act in {
                "kill": lambda: self.lose(signal.SIGKILL),
                "rescale": self.rescale,
                "hang": lambda: self.lose(signal.SIGSTOP),
            }.items():
                if name not in skip:
                    act()
            print(f"round {index + 1} of {self.rounds}", file=sys.stderr, flush=True)
        for _ in range(self.kills if "controller" not in skip else 0):
            self.controller()

    def nodes(self, cluster: Any, started: list[Any], cpus: int) -> None:
        """Rounds in which a node is lost and a new one joins."""
        from vescale_ray.workers.monitoring.process import born

        for index in range(self.rounds):
            self.steady(self.workers)
            node = started.pop(self.random.randrange(len(started)))
            # Not by number alone: workers of earlier rounds are gone, and others may have their numbers.
            victims = [e["pid"] for e in self.events("worker_started") if e["node"] == node.node_id and born(e["pid"]) == e["born"]]
            raylet = node.all_processes["raylet"][0].process.pid
            time.sleep(self.random.random() * 0.5)
            began = time.time()
            for pid in (raylet, *victims):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it ended with the raylet
            cluster.remove_node(node, allow_graceful=False)
            started.append(cluster.add_node(num_cpus=cpus, object_store_memory=OBJECTS))
            self.recovered("node", began)
            print(f"node {index + 1} of {self.rounds}", file=sys.stderr, flush=True)

    def drains(self, cluster: Any, started: list[Any], cpus: int) -> None:
        """Rounds in which a node is told to go, does, and a new one joins."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        from vescale_ray.workers.monitoring.process import born

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        for index in range(self.rounds):
            members = self.steady(self.workers)
            node = started.pop(self.random.randrange(len(started)))
            there = [e for e in self.events("worker_started") if e["node"] == node.node_id and e["worker"] in members]
            time.sleep(self.random.random() * 0.5)
            began = time.time()
            deadline = int((began + NOTICE_S) * 1000)
            accepted, why = GcsClient(address=cluster.address).drain_node(node.node_id, reason, "a benchmark", deadline)
            if not accepted:
                raise RuntimeError(f"Ray does not drain the node: {why}")
            event = self.rescaled(began)
            if (event["source"], event["from"] - event["to"]) != ("memory", len(there)) or self.events("worker_lost", began):
                raise RuntimeError(f"the node was not left in order: {event}")
            self.note("drain.left", event["time"] - began)
            self.note("drain.steps_lost", float(event["steps_replayed"]))
            self.planned("drain", event)
            self.until(lambda gone=there: all(born(e["pid"]) != e["born"] for e in gone), "the end of those that left")
            self.note("drain.gone", time.time() - began)
            cluster.remove_node(node, allow_graceful=False)
            started.append(cluster.add_node(num_cpus=cpus, object_store_memory=OBJECTS))
            self.replaced(event)
            print(f"drain {index + 1} of {self.rounds}", file=sys.stderr, flush=True)

    def work(self, act: Callable[[], None]) -> None:
        from vescale_ray.cli import client

        try:
            self.steady(self.workers)
            act()
        except BaseException as error:
            self.error = error
        finally:
            # A controller that was just killed refuses commands for some seconds; without a retry the run would never end.
            deadline, stopped = time.monotonic() + WAIT_S, False
            while not stopped:
                try:
                    client.request(self.folder, "stop", {})
                    stopped = True
                except (client.RunNotAlive, client.CommandRefused) as error:
                    if time.monotonic() > deadline:
                        self.error, stopped = self.error or error, True
                    time.sleep(1.0)


def ours(folder: Path, workers: int, rounds: int, kills: int, skip: set[str]) -> dict[str, list[float]]:
    """The main run, with all disturbances of workers and controller."""
    os.environ["VESCALE_RECOVERY"] = str(os.getpid())  # marks the processes of this run's Ray
    config = config_of(folder, workers)
    saboteur = Saboteur(config, workers, rounds, kills, seed=1)
    return carried_out(config, saboteur, lambda: saboteur.all_of_it(skip))


def nodes_lost(folder: Path, workers: int, rounds: int, skip: set[str]) -> dict[str, list[float]]:
    """A run on two nodes or more: one node is lost in each round, then one is told to go."""
    from ray.cluster_utils import Cluster

    nodes = workers if workers % 2 else 2
    each = workers // nodes
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECTS, "_system_config": HEALTH}
    # Nodes are added from the saboteur's thread, which cannot set signal handlers.
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    try:
        started = [cluster.add_node(num_cpus=each, object_store_memory=OBJECTS) for _ in range(nodes)]
        config = config_of(folder, workers, "nodes", cluster.address, cpus_each=1.0)
        saboteur = Saboteur(config, workers, rounds, 0, seed=2)
        acts = {"node": saboteur.nodes, "drain": saboteur.drains}

        def act() -> None:
            for name in (name for name in acts if name not in skip):
                acts[name](cluster, started, each)

        found = carried_out(config, saboteur, act)
    finally:
        cluster.shutdown()
    # The other run measures the time after a loss; here the replacements' places depend on how fast nodes start.
    return {name: values for name, values in found.items() if name.startswith(("node.", "drain."))}


def carried_out(config: Any, saboteur: Saboteur, act: Callable[[], None]) -> dict[str, list[float]]:
    """Run until the saboteur is done, and return its findings.

    Raises:
        RuntimeError: the run failed or lost a sample.
    """
    from vescale_ray.controller.driver.driver import run
    from vescale_ray.data.order.stream import SampleStream
    from vescale_ray.data.sources.corpus import load_corpus
    from vescale_ray.reporting import report

    thread = threading.Thread(target=saboteur.work, args=(act,), daemon=True)
    thread.start()
    result = run(config)
    thread.join(10)
    if saboteur.error is not None or result.state != "STOPPED":
        raise RuntimeError(f"the run is {result.state} ({result.error}): {saboteur.error}")
    corpus = load_corpus("stdlib", SEQ_LEN, config.data.heldout)
    stream = SampleStream(corpus.num_samples, config.run.seed)
    accounting = report.accounting(saboteur.folder, stream, config.global_batch, result.step)
    if not accounting.exact:
        raise RuntimeError(f"samples were lost or repeated: {accounting}")
    return saboteur.found


# ------------------------------------------------------------------------------------------------------------------- the peer


GOALS = {
    "kill.first_step_begins": "< 1.5 s",
    "node.first_step_begins": "< 4 s",
    "hang.ended": "< max(2 s, 3 steps)",
    "controller.answers": "< 5 s",
    "hang.of_goal": "< 1",
    "kill.steps_lost": "0; 1 where the copies were on their way",
    "drain.left": f"< {NOTICE_S:g} s",
    "drain.steps_lost": "0",
    "drain.moved": "<= 1.02 of the lower bound",
    "shrink.moved": "<= 1.02 of the lower bound",
    "grow.moved": "<= 1.02 of the lower bound",
}
UNITS = {
    "wire": "MB/s",
    "of_goal": "of the goal",
    "steps_lost": "steps",
    "moved": "of the lower bound",
    "moved_mb": "MB",
    "unplanned": "of 1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--controller-kills", type=int, default=20)
    parser.add_argument("--node-rounds", type=int, default=None, help="default: as many as the rounds")
    parser.add_argument("--raytrain-rounds", type=int, default=3)
    parser.add_argument("--skip", default="", help="of kill, rescale, hang, controller, node, drain, raytrain")
    parser.add_argument("--keep", type=Path, default=None, help="keep the run's folder here")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 10)
    skip = set(filter(None, options.skip.split(",")))
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the same for all clusters, Ray Train's included
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vescale-recovery-") as scratch:
        folder = options.keep or Path(scratch)
        kills = 4 if options.quick else options.controller_kills
        found: dict[str, list[float]] = {}
        if {"kill", "rescale", "hang", "controller"} - skip:
            found |= ours(folder, options.workers, rounds, kills, skip)
        if "rescale" not in skip:
            found["wire"] = wire_mb_s(options.workers, rounds)
        if {"node", "drain"} - skip:
            found |= nodes_lost(folder, options.workers, options.node_rounds or rounds, skip)
        for name, values in sorted(found.items()):
            figures[name] = figure(values, UNITS.get(name.rpartition(".")[2], "s"), GOALS.get(name), None)
            figures[name] |= {"worst": (min if name == "wire" else max)(values), "values": [round(value, 4) for value in values]}
        for name in ("shrink", "grow"):
            if "wire" in found and f"{name}.moved_mb" in found:
                allowed = 0.5 + figures[f"{name}.moved_mb"]["value"] / figures["wire"]["value"]
                figures[f"{name}.pause"]["goal"] = f"< {allowed:.2f} s: 0.5 s + bytes / bandwidth"
        write(options.json, figures, workers=options.workers, rounds=rounds, model=MODEL)  # also if the peer fails
        if "raytrain" in skip:
            print("raytrain: left out")
        else:
            try:
                import ray.train.torch  # noqa: F401
            except ImportError as error:
                print(f"raytrain: left out: {error}")
            else:
                times = raytrain(Path(scratch), options.workers, options.raytrain_rounds)
                figures["raytrain.first_step_begins"] = figure(times, "s", None, "raytrain") | {"values": times}
                if "kill.first_step_begins" in found:
                    own = figures["kill.first_step_begins"]["value"]
                    figures["raytrain.ratio"] = figure([t / own for t in times], "of ours", ">= 10", "raytrain")
    for name, one in figures.items():
        worst = f"  worst {one['worst']:.2f}" if "worst" in one else ""
        print(f"{name:<30}{one['value']:>9.2f} +- {one['spread']:<6.2f}{one['unit']:<20}{worst}  {one['goal'] or ''}")
    write(options.json, figures, workers=options.workers, rounds=rounds, model=MODEL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
