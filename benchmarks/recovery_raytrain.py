"""The peer of recovery.py: the same model under Ray Train's elastic trainer with torch's FSDP2, which loses a worker in each round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MODEL = {"dim": 384, "layers": 10, "heads": 6, "kv_heads": 6, "ffn": 1024}
SEQ_LEN = 16
WAIT_S = 180.0


def train_loop(settings: dict[str, Any]) -> None:
    """One worker of Ray Train: FSDP2 and AdamW on the same model, a distributed checkpoint every 20 steps, a line per step in a file."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from ray import train
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from vescale_ray.models.llama import Llama, LlamaConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**MODEL, max_seq=SEQ_LEN, rope_theta=10000.0, tie=False))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step, saved = 0, train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as at:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(states, checkpoint_id=at)
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            step = json.loads((Path(at) / "step.json").read_text())
    while True:
        began = time.time()
        tokens = torch.randint(256, (1, SEQ_LEN), generator=torch.Generator().manual_seed(step))
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        context = train.get_context()
        if context.get_world_rank() == 0:
            with open(settings["lines"], "a") as file:
                file.write(json.dumps({"step": step, "began": began, "world": context.get_world_size(), "pid": os.getpid()}) + "\n")
        with open(settings["pids"] + f"/{os.getpid()}", "w") as file:
            file.write(str(context.get_world_rank()))
        if step % 20 == 0:
            at = settings["checkpoints"] + f"/{step}-{context.get_world_size()}"
            dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=at)
            (Path(at) / "step.json").write_text(str(step))
            dist.barrier()
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(at) if context.get_world_rank() == 0 else None)


def raytrain(folder: Path, workers: int, rounds: int) -> list[float]:
    """Seconds from the SIGKILL of a worker to the begin of the next group's first step, in each round.

    This script runs in a process of its own, which Ray Train may end when it shuts down.
    """
    found = folder / "raytrain.json"
    call = [sys.executable, __file__, str(found), str(workers), str(rounds)]
    ended = subprocess.run(call, timeout=WAIT_S * (rounds + 1)).returncode
    times = [float(t) for t in json.loads(found.read_text())] if found.exists() else []
    if len(times) < rounds:
        raise RuntimeError(f"Ray Train: {len(times)} of {rounds} rounds, exit code {ended}")
    return times


def measure(found: Path, workers: int, rounds: int) -> None:
    """Write the seconds of all rounds so far to ``found`` after each round."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = found.parent
    settings = {name: str(folder / f"raytrain-{name}") for name in ("lines", "pids", "checkpoints")}
    for name in ("pids", "checkpoints"):
        Path(settings[name]).mkdir()
    # "local": a killed cluster leaves its address in /tmp/ray, and a plain `ray.init` would try to join it
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=workers + 1, object_store_memory=200 << 20, **quiet)
    each = {"CPU": 1}
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=(1, workers), resources_per_worker=each, elastic_resize_monitor_interval_s=5.0),
        run_config=RunConfig(storage_path=str(folder / "raytrain"), failure_config=FailureConfig(max_failures=-1)),
    )
    threading.Thread(target=trainer.fit, daemon=True).start()

    def lines() -> list[dict[str, Any]]:
        path = Path(settings["lines"])
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Ray Train: {what}: not within {WAIT_S:g} s")
            time.sleep(0.1)
        return value

    times: list[float] = []
    try:
        for _ in range(rounds):
            begin = len(lines())
            wait(lambda begin=begin: len(lines()) >= begin + 25, "25 steps")
            leader = lines()[-1]["pid"]
            fresh = [p for p in Path(settings["pids"]).iterdir() if time.time() - p.stat().st_mtime < 5 and int(p.name) != leader]
            victim = int((fresh or [Path(str(leader))])[0].name)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            # The next group's rank 0 is another process.
            first = wait(lambda at=killed, pid=leader: [x for x in lines() if x["began"] > at and x["pid"] != pid], "the next group")[0]
            times.append(first["began"] - killed)
            found.write_text(json.dumps(times))
            print(f"Ray Train: {times[-1]:.1f} s", file=sys.stderr, flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
