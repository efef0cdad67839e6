"""A tiny run for the tests of this folder: config, text, and a worker's actions in a generation of a :class:`Fleet`."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.workers import tiny_models
from tests.workers.fleet import Fleet, State
from vescale_ray import checkpoint
from vescale_ray.config import RunConfig, parse_config
from vescale_ray.data.dataset import Dataset
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.lr_schedule import lr_at
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.workers.messages import StepRecord
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.connections import Connections
from vescale_ray.workers.network.process_groups import GroupFailed
from vescale_ray.workers.resharding import reshard
from vescale_ray.workers.resharding.copy_exchange import SHARDS_TAG, SUMS_TAG
from vescale_ray.workers.resharding.held_state import HeldState, choose_resume
from vescale_ray.workers.resharding.memory_snapshots import Snapshots
from vescale_ray.workers.resharding.reshard import ReshardReport, execute, restore_from_checkpoint
from vescale_ray.workers.resharding.shards import export_shards
from vescale_ray.workers.trainer import Trainer

FullState = dict[tuple[str, str], np.ndarray]


HOST = "127.0.0.1"


reshard.DIRECT_BYTES = 1024
"""Smaller than some of these tests' tensors and larger than others, so that both paths run."""


def write_text(folder: Path) -> str:
    """Write 40 KB of varied words to a file; deterministic."""
    words = ["shard", "worker", "ring", "step", "buddy", "loss", "epoch", "tensor", "plan", "route"]
    rng = np.random.default_rng(0)
    path = folder / "text.txt"
    path.write_text(" ".join(words[i] + str(i * 7 % 13) for i in rng.integers(0, len(words), 5500)))
    return str(path)


def tiny(corpus: str | None, **changes: Any) -> RunConfig:
    """``tiny(path, train_steps=3)`` sets ``train.steps``. It has 5 slots of 2 sequences; only the world sizes 1 and 5 divide them."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"seed": 7},
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 56},
        "data": {"corpus": corpus, "seq_len": 16, "heldout": 0.1, "eval_samples": 13},
        "train": {"steps": 20, "slots": 5, "slot_batch": 2, "lr": 3e-3, "warmup_steps": 4},
        "elastic": {"workers": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        tree.setdefault(section, {})[name] = value
    return parse_config(tree)


def text_of(config: RunConfig) -> Dataset:
    return load_dataset(config.data)


# ------------------------------------------------------------------------------------------------- one process, plain PyTorch


def plain_run(config: RunConfig, start: FullState, steps: int) -> tuple[list[float], FullState, float]:
    """Train one unsharded model on whole global batches with torch's own optimizers.

    Parameters that no sample of a batch uses have zero gradients. Returns the losses, the final parameters and the held-out loss.
    """
    corpus = text_of(config)
    m, t = config.model, config.train
    model: Any
    if m.factory is not None:
        model = getattr(tiny_models, m.factory.partition(":")[2])()
    else:
        sizes = LlamaConfig(m.dim, m.layers, m.heads, m.kv_heads, m.ffn, corpus.vocab, config.data.seq_len, m.rope_theta, tie=m.tie)
        model = Llama(sizes)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            model.init_buffer(name, buffer)
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(start[name, "param"]))
    everything = list(model.parameters())
    kept = [p for name, p in model.named_parameters() if any(fnmatchcase(name, pattern) for pattern in t.no_decay)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in everything if not any(p is q for q in kept)]},
        {"params": kept, "weight_decay": 0.0},
    ]
    adamw = {"lr": t.lr, "betas": t.betas, "eps": t.eps, "weight_decay": t.weight_decay}
    clipped, optimizers = everything, [torch.optim.AdamW(groups, **adamw)]  # type: ignore[arg-type]
    if t.optimizer == "sgd":
        optimizers = [torch.optim.SGD(groups, lr=t.lr, momentum=t.betas[0], weight_decay=t.weight_decay)]  # type: ignore[list-item]
    if t.optimizer == "muon":
        hidden = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2]
        clipped = [p for p in everything if not any(p is q for q in hidden)]
        muon = torch.optim.Muon(hidden, lr=t.lr, weight_decay=t.weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers = [muon, torch.optim.AdamW(clipped, **adamw)]  # type: ignore[list-item, arg-type]
    stream = corpus.order(config.run.seed)
    batch = t.slots * t.slot_batch
    losses = []
    for step in range(steps):
        tokens, targets = corpus.batch(stream.ids(step * batch, batch))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        for p in everything:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if t.grad_clip:
            nn.utils.clip_grad_norm_(clipped, t.grad_clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, t)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        count = min(config.data.eval_samples, corpus.heldout_samples)
        tokens, targets = corpus.heldout_batch([i * corpus.heldout_samples // count for i in range(count)])
        heldout = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    return losses, {(n, "param"): p.detach().numpy() for n, p in model.named_parameters()}, heldout


# ---------------------------------------------------------------------------------------------- what a worker does, piece by piece


def use(state: State, device: str, backend: str | None = None) -> None:
    """Set the device of this worker's shards, and the back end (default: ``nccl`` for ``cuda``, else ``gloo``)."""
    state["device"], state["backend"] = device, backend or ("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(0)


def form(state: State, config: RunConfig, port: int, prefix: str, rank: int, world: int, generation: int, *, filled: bool = True) -> None:
    """Join the generation's group and build the trainer. If ``filled``, all values are to arrive; missing ones stay NaN."""
    device, backend = state.get("device", "cpu"), state.get("backend", "gloo")
    state.setdefault("snapshots", Snapshots(config.elastic.snapshot_every, pin=device == "cuda"))
    if state.get("corpus_of") != config.data:
        state["corpus"], state["corpus_of"] = text_of(config), config.data
    process_groups.form(HOST, port, prefix, rank, world, backend, config.elastic.collective_timeout_s)
    state["trainer"] = Trainer(config, rank, world, generation, device, state["corpus"], filled=filled)
    for piece in export_shards(state["trainer"]).pieces if filled else ():
        piece.data.fill_(float("nan") if piece.data.is_floating_point() else 99)


def forget(state: State) -> None:
    state["snapshots"].clear()


def start_fresh(state: State, *where: Any) -> None:
    form(state, *where, filled=False)
    state["trainer"].initialize()
    state["snapshots"].begin(state["trainer"])


def start_from_memory(state: State, generation: int, step: int, *where: Any) -> ReshardReport:
    form(state, *where)
    snapshots, trainer = state["snapshots"], state["trainer"]
    report = execute(snapshots.shards(generation, step), trainer, word=snapshots.word(trainer))
    trainer.load_base()
    snapshots.begin(trainer, generation, report.words)
    return report


def start_with_leavers(
    state: State, generation: int, step: int, transfer_prefix: str, transfer_rank: int, transfer_world: int, *where: Any
) -> ReshardReport:
    """Like :func:`start_from_memory`, with leavers, whose transfer rank is no rank of the new world."""
    port, world = where[1], where[4]
    if transfer_rank < world:
        form(state, *where)
    snapshots, lines = state["snapshots"], Connections()
    word = snapshots.word(state["trainer"]) if transfer_rank < world else b""
    group = process_groups.open_transfer(HOST, port, transfer_prefix, transfer_rank, transfer_world, 20.0, lines=lines)
    report = execute(snapshots.shards(generation, step), state.get("trainer"), group, word=word, round_bytes=4096)
    closing = process_groups.Closing(group, lines)
    del group
    if transfer_rank < world:
        state["closing"] = closing
        state["trainer"].load_base()
        snapshots.begin(state["trainer"], generation, report.words[:world])
    else:
        closing.wait()
        if not state.pop("keeps", False):
            snapshots.clear()
    return report


def _end_the_move(state: State) -> None:
    if "closing" in state:
        state.pop("closing").give_up()


def keep_on_leaving(state: State) -> None:
    """Let this worker keep its shards after giving them, as long as the controller keeps it."""
    state["keeps"] = True


def keep_its_copies_to_itself(state: State) -> None:
    """Withhold all copies that this worker would send."""
    send = dist.isend

    def hold(*args: Any, **kwargs: Any) -> Any:
        copied = kwargs.get("tag") in (SHARDS_TAG, SUMS_TAG)
        return SimpleNamespace(wait=lambda *about: True) if copied else send(*args, **kwargs)

    setattr(dist, "isend", hold)  # noqa: B010


def lose_the_group(state: State) -> None:
    """Dissolve the group as if a rank were lost before the generation's first step is complete."""
    _end_the_move(state)
    state.pop("trainer").close()
    state["snapshots"].abandon()
    process_groups.dissolve()
    state["snapshots"].verify()


def start_from_checkpoint(state: State, root: str, *where: Any) -> int:
    form(state, *where)
    assert restore_from_checkpoint(state["trainer"], checkpoint.open(root)) > 0
    state["trainer"].load_base()
    state["snapshots"].begin(state["trainer"])
    return int(state["trainer"].completed)


def train(state: State, until: int, rescale: bool) -> list[StepRecord]:
    records = []
    while (done := state["trainer"].completed) < until:
        records.append(state["trainer"].step(settle=state["snapshots"].settle))
        state.pop("closing", None)
        state["snapshots"].after_step(state["trainer"], rescale=rescale and done + 1 == until)
    return records


def prove(state: State, aborted_at: int | None = None) -> None:
    """Make steps prove their collectives, as on NCCL. In step ``aborted_at`` this rank's collectives end without an effect."""
    trainer, add_up = state["trainer"], dist.all_reduce
    trainer._proves = True

    def aborted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if trainer.completed == aborted_at and tensor.shape == (1,) else add_up(tensor, *args, **kwargs)

    setattr(dist, "all_reduce", aborted)  # noqa: B010


def slow_down(state: State, seconds: float) -> None:
    """Make each of this rank's slots ``seconds`` slower."""
    trainer = state["trainer"]
    losses = trainer._losses

    def slow(*batch: Any) -> Any:
        time.sleep(seconds if batch[0].numel() > 1 else 0.0)
        return losses(*batch)

    trainer._losses = slow


def evaluate(state: State) -> Any:
    return state["trainer"].evaluate()


def pieces(state: State) -> list[tuple[str, str, tuple[int, ...], int, np.ndarray]]:
    """Copies of this rank's pieces."""
    return [(p.name, p.kind, p.shape, p.start, as_numpy(p.data)) for p in export_shards(state["trainer"]).pieces]


def as_numpy(data: Tensor) -> np.ndarray:
    """A copy as numpy array; numpy has no BF16, so BF16 tensors give their bits."""
    return (data.view(torch.int16) if data.dtype is torch.bfloat16 else data).cpu().numpy().copy()


def scalars(state: State) -> dict[str, Any]:
    return dict(export_shards(state["trainer"]).scalars)


def held(state: State) -> list[HeldState]:
    """Held states, once this rank's own last copy is made. That needs no other rank."""
    state["snapshots"].copied()
    answer: list[HeldState] = state["snapshots"].held()
    return answer


def leave(state: State, park: bool = True) -> dict[str, bool]:
    """End the generation at a boundary. Returns which of its objects are still alive afterwards."""
    trainer: Trainer = state.pop("trainer")
    _end_the_move(state)
    if park:
        state["snapshots"].park(trainer)
    alive = {"model": weakref.ref(trainer.model), "group": weakref.ref(dist.distributed_c10d._get_default_group())}
    trainer.close()
    del trainer
    process_groups.dissolve()
    return {what: ref() is not None for what, ref in alive.items()}


def train_or_fail(state: State, until: int, kill_at: tuple[int, float] | None) -> tuple[str, list[StepRecord], list[HeldState], float]:
    """Train until ``until``, or until a peer is lost. The victim kills itself at ``kill_at`` (step, seconds into it).

    Returns the failure or '', the records, the held states and the time.
    """
    records: list[StepRecord] = []
    failure = ""
    try:
        with process_groups.collectives("train"):
            while state["trainer"].completed < until:
                if kill_at and state["trainer"].completed == kill_at[0]:
                    threading.Timer(kill_at[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
                    kill_at = None
                records.append(state["trainer"].step(settle=state["snapshots"].settle))
                state.pop("closing", None)
                state["snapshots"].after_step(state["trainer"])
    except GroupFailed as error:
        failure = str(error)
    if failure:
        state.pop("trainer").close()
        state["snapshots"].abandon()
        _end_the_move(state)
        process_groups.dissolve()
        state["snapshots"].verify()
        return failure, records, state["snapshots"].held(), time.monotonic()
    return failure, records, state["snapshots"].held(), time.monotonic()


def threads_and_files(state: State) -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------------------------- what the controller does


class Run:
    """A run on a fleet: members in rank order, generation, and the newest record of every step."""

    def __init__(self, fleet: Fleet, config: RunConfig) -> None:
        self.fleet, self.config = fleet, config
        self.members: list[int] = []
        self.generation = 0
        self.records: dict[int, StepRecord] = {}

    def _where(self, members: list[int]) -> dict[int, tuple[Any, ...]]:
        self.generation += 1
        prefix = self.fleet.prefix()
        return {w: (self.config, self.fleet.port, prefix, rank, len(members), self.generation) for rank, w in enumerate(members)}

    def fresh(self, members: list[int]) -> None:
        self.fleet.run_each(self._where(members), start_fresh)
        self.members = list(members)

    def from_checkpoint(self, members: list[int], root: str) -> int:
        where = self._where(members)
        steps = self.fleet.run_each({w: (root, *rest) for w, rest in where.items()}, start_from_checkpoint)
        self.members = list(members)
        return next(iter(steps.values()))

    def resume(self, survivors: list[int], members: list[int]) -> ReshardReport:
        """Resume from the memory of ``survivors``. Some of them may leave, and ``members`` may include joiners."""
        held_states = self.fleet.run(survivors, held)
        chosen = choose_resume({str(w): h for w, h in held_states.items()}, prefer=[str(w) for w in members])
        assert chosen is not None, held_states
        leavers = [w for w in survivors if w not in members and str(w) in chosen.workers]
        where = self._where(members)
        state = (chosen.generation, chosen.step)
        if leavers:
            prefix, party = self.fleet.prefix(), [*members, *leavers]
            some = next(iter(where.values()))
            reports = self.fleet.run_each(
                {w: (*state, prefix, rank, len(party), *where.get(w, some)) for rank, w in enumerate(party)}, start_with_leavers
            )
        else:
            reports = self.fleet.run_each({w: (*state, *where[w]) for w in members}, start_from_memory)
        self.members = list(members)
        assert len({(r.step, r.moved_bytes, r.lower_bound) for r in reports.values()}) == 1
        return reports[members[0]]

    def train(self, until: int, rescale: bool = False) -> list[StepRecord]:
        by_worker = self.fleet.run(self.members, train, until, rescale)
        records = by_worker[self.members[0]]
        for others in by_worker.values():
            assert [r.loss for r in others] == [r.loss for r in records]
            assert [r.ids for r in others] == [r.ids for r in records]
        self.records.update((record.index, record) for record in records)
        return records

    def train_with_a_death(self, until: int, victim: int, step: int, delay: float) -> tuple[list[int], float, int]:
        """Train while ``victim`` dies.

        Returns the survivors, the seconds between the first and the last survivor's exit, and the most steps that one of them recorded.
        """
        for worker in self.members:
            self.fleet.start(worker, train_or_fail, until, (step, delay) if worker == victim else None)
        outcome = self.fleet.outcomes(self.members)
        assert outcome.pop(victim)[1] == "died", "the victim outlived the run"
        self.fleet.reap(victim)
        for _, (failure, records, _, _) in outcome.values():
            assert failure, "a survivor noticed nothing"
            self.records.update((record.index, record) for record in records)
        out = [moment for _, (_, _, _, moment) in outcome.values()]
        return sorted(outcome), max(out) - min(out), max(len(records) for _, (_, records, _, _) in outcome.values())

    def end(self) -> dict[int, dict[str, bool]]:
        return self.fleet.run(self.members, leave)

    def full_state(self) -> FullState:
        """Every parameter and optimizer state, assembled from all ranks. Fails if the parts do not tile a tensor, or replicas differ."""
        parts: dict[tuple[str, str], tuple[tuple[int, ...], dict[int, np.ndarray]]] = {}
        for rank_pieces in self.fleet.run(self.members, pieces).values():
            for name, kind, shape, start, data in rank_pieces:
                if data.size:
                    first = parts.setdefault((name, kind), (shape, {}))[1].setdefault(start, data)
                    assert first.tobytes() == data.tobytes(), f"{kind} of {name} differs between replicas"
        full: FullState = {}
        for key, (shape, spans) in parts.items():
            full[key] = np.concatenate([data for _, data in sorted(spans.items())]).reshape(shape)
        return full

    def losses(self) -> list[float]:
        return [self.records[index].loss for index in sorted(self.records)]


def same_bits(a: FullState, b: FullState) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


@contextmanager
def running(config: RunConfig, world: int) -> Iterator[tuple[Fleet, Run]]:
    """A fleet of its own, with a run that starts on ``world`` workers."""
    with Fleet(world) as fleet:
        run = Run(fleet, config)
        run.fresh(list(range(world)))
        yield fleet, run
