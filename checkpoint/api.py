"""Saving and loading a training script's state under torchrun (or alone), whatever the number of ranks then and now.

The ranks agree on an attempt through the process group's key-value store, each writes its object, and votes through the checkpoint's
store; rank 0 commits. A save makes no collective, so that no watchdog can strike, and a rank that fails tells the others at once.
:func:`save` returns when the checkpoint is there; ``saver.py`` writes beside the training.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .accord import Accord, Word
from .arguments import of_type, order, seconds, state_of
from .bounded import Quiet, Watch, bounded
from .commits import Commit
from .copies import sampled
from .digest import digest_of
from .errors import SaveAborted, SaveFailed
from .handle import SaveHandle
from .layout import ShardPiece
from .manifest import check_meta, parse_commit_name
from .matching import Pair, label
from .plain import KIND, Packed, data_name, pack
from .proof import prove
from .retention import Retention, tend
from .rng import capture_rng
from .shard import Vote, new_attempt, write_shard
from .state import State, flatten
from .store import ObjectStore, Root, store_of
from .tensors import LocalPart, local_part, owners
from .voting import Attempt, conclude

_log = logging.getLogger(__name__)
T = TypeVar("T")

HANG_S = 60.0
"""Seconds that storage may stand still, beside the time limits of a save."""


def save(
    state: State,
    root: Root,
    step: int,
    *,
    epoch: int | None = None,
    meta: Mapping[str, Any] | None = None,
    aux: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    retention: Retention | None = None,
    timeout_s: float = 600.0,
    group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Save a state; every rank calls it at the same step. Returns on each rank once the checkpoint is committed.

    Args:
        state: ``{"model": module or {fqn: tensor}, "optimizer": torch optimizer, ..}``; other entries: see ``state.py``.
        root: the checkpoint folder, the same on all ranks (shared between hosts).
        step: completed steps.
        epoch: the incarnation of the run. By default the newest commit's, one higher if ``step`` is not beyond it (the run
            went back): the new checkpoint is always the newest.
        meta: JSON-able, the same on all ranks; rank 0's is stored. aux: plain values, this rank's own (a data loader's state, for
            one). The random generators are stored in any case.
        metrics: of this step, by name; what :class:`Retention` calls the best is told by them. Rank 0's are stored; NaN and infinities
            are left out, with a warning.
        retention: delete what it does not keep, after this one is committed.
        timeout_s: how long to wait for the other ranks to come, for their votes, and for the commit. Storage that stands still for three
            times as long and a minute (no chunk taken, no answer) is given up, with an error.
        group: the ranks that save together; default: all. Without a process group this process saves alone.

    Raises:
        ValueError: a state that can't be stored; on every rank, before anything is written.
        SaveFailed: no commit was made (a rank failed, died, did not come, storage refused or stands still); earlier checkpoints are
            untouched.
    """
    rank, world = ranks_of(group)
    seconds("timeout_s", timeout_s)
    accord = Accord(group, rank, world, root)
    key = accord.key(step)
    try:
        step, epoch = order(step, epoch)
        if retention is not None:
            of_type("retention", retention, Retention, "give Retention(keep_last=2), for example, or none")
        store = store_of(root)
        prepared = prepare(state, step, world, rank, meta, metrics, aux)
        device = next((piece.data.device for piece in prepared.pieces if piece.data.is_cuda), None)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()  # the copies are made from another thread, whose stream is another
    except BaseException as error:
        with suppress(SaveFailed):
            accord.tell(key, word_of(error))
        raise
    began = time.perf_counter()
    made: list[Commit] = []

    def work(watch: Watch) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        verdict = accord.agree(
            key, prepared.word, lambda: (new_attempt(), next_epoch(newest_order(store), epoch, step)), timeout_s, watch
        )
        if verdict.fate == "unfit":
            raise ValueError(verdict.text)
        if verdict.fate != "go":
            raise SaveFailed(f"step {step}: {verdict.text}; earlier checkpoints are untouched")
        this = Attempt(verdict.attempt, step, verdict.epoch, world, rank, prepared.document, prepared.aliases, timeout_s)
        written: Vote | Exception
        try:
            written = write_shard(
                store, this.name, rank, prepared.pieces, aux=prepared.aux, step=step, epoch=this.epoch, cancelled=watch, world=world
            )
        except Exception as error:
            # Whatever it is, the other ranks must hear of it rather than wait.
            written = error
        if watch() and isinstance(written, Vote):
            written = SaveAborted(f"step {step}: this save was given up; earlier checkpoints are untouched")
        made.append(conclude(store, this, written, watch))
        accord.forget()
        if retention is not None and isinstance(written, Vote):
            look_after(store, retention, made[0], written, watch)

    try:
        bounded(work, 3 * timeout_s + HANG_S)
    except Quiet as quiet:
        text = f"{store.describe()} has not answered for {quiet.seconds:.0f} s"
        if not made:
            raise SaveFailed(f"step {step}: given up, {text}; earlier checkpoints are untouched") from None
        _log.warning("checkpoint %s is committed; what comes after it, reading back and deleting, is left alone: %s", made[0].path, text)
    return SaveHandle.finished(step, made[0], time.perf_counter() - began)


def look_after(store: ObjectStore, retention: Retention, made: Commit, vote: Vote, cancelled: Callable[[], bool] = lambda: False) -> None:
    """After a commit, on every rank: read back what this rank wrote; then rank 0 deletes what the retention does not keep. What goes wrong
    is told in the log: it must not stop a training run, and the commit stays."""
    began = time.monotonic()
    try:
        problem = prove(store, vote.object, vote.aux, cancelled) if retention.verify else None
        if problem is not None:
            _log.error("checkpoint %s is damaged, and nothing older is deleted for it: %s", made.path, problem)
    except SaveAborted:
        return
    except Exception as error:
        _log.warning("checkpoint %s could not be read back: %s: %s", made.path, type(error).__name__, error)
    try:
        if vote.rank == 0:
            patience = max(5.0, 2 * (time.monotonic() - began)) if made.world > 1 else 0.0
            for problem in tend(store, retention, made, patience, cancelled):
                _log.warning("checkpoint retention: %s", problem)
    except Exception as error:
        _log.warning("checkpoint retention: %s: %s", type(error).__name__, error)


@dataclass(frozen=True)
class Prepared:
    """One rank's share of a save, taken apart and checked; nothing is written. ``pieces`` are views of the live tensors, everything
    else is a copy of this moment. ``plain``: digests of the plain values. ``copied``: names of tensors that are taken to be on all ranks,
    and the same; ``copies``: a sample of each."""

    pieces: list[ShardPiece]
    document: Mapping[str, Any]
    aliases: Mapping[str, str]
    aux: Mapping[str, Any]
    plain: Mapping[str, str] = field(default_factory=dict)
    copied: Sequence[str] = ()
    copies: str = ""

    @property
    def word(self) -> Word:
        """What the ranks tell each other of it: rank 0's optimizers, by which all load, must name the same parameters as every other's."""
        named = {key: [sorted(group["params"]) for group in saved["groups"]] for key, saved in self.document["optimizers"].items()}
        alike = digest_of(json.dumps(named, sort_keys=True).encode())
        order = digest_of("\n".join(self.copied).encode())[:8]
        return Word(alike=alike, plain=self.plain, copies=order + self.copies, names=self.copied)


def prepare(
    state: State,
    step: int,
    world: int,
    rank: int,
    meta: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
    aux: Mapping[str, Any] | None,
) -> Prepared:
    """Raises ValueError for what can't be stored."""
    state_of(state)
    if not state:
        raise ValueError('the state is empty, and so would the checkpoint be; give its parts by name, as {"model": model}')
    for what, given in (("meta", meta), ("metrics", metrics), ("aux", aux)):
        if given is not None:
            of_type(what, given, Mapping, "give a dict")
    check_meta(meta or {})
    # A loss that has become NaN is no reason to lose the checkpoint; it is only no measure of it.
    finite = {name: value for name, value in (metrics or {}).items() if not isinstance(value, float) or math.isfinite(value)}
    if len(finite) < len(metrics or {}):
        _log.warning("step %d: metrics that are no finite number are not stored: %s", step, sorted((metrics or {}).keys() - finite.keys()))
    check_meta(finite, "metrics")
    for name, value in finite.items():
        of_type(f"metrics.{name}", value, (int, float), "give a number")
    own = pack("aux", dict(aux or {}), inline=math.inf)
    flat = flatten(state)
    parts = {pair: local_part(pair[0], tensor, world, rank) for pair, tensor in flat.tensors.items()}
    pieces = _pieces(parts) + (_data(flat.values) if rank == 0 else [])
    # Which ranks hold a plain tensor nobody can tell: all, it is assumed, and the same.
    plain = {label(*pair): part for pair, part in parts.items() if part.replicas == world > 1 and not part.among and part.shared}
    values = {key: value.json for key, value in flat.values.items() if value.extended}
    state_json = {key: value.json for key, value in flat.values.items() if not value.extended}
    document = {"models": flat.models, "state": state_json, "optimizers": flat.optimizers, "meta": dict(meta or {})}
    if values:
        document["values"] = values
    if finite:
        document["metrics"] = finite
    # Through JSON: the values may be live objects of the training, which goes on.
    frozen = json.loads(json.dumps(document, allow_nan=False))
    # Without a tag it is what it is in JSON, and stands there as it always did.
    beside = {"rng": capture_rng(), "values" if own.tags else "user": json.loads(json.dumps(own.json))}
    digests = {key: value.digest for key, value in flat.values.items()}
    return Prepared(pieces, frozen, dict(flat.aliases), beside, digests, list(plain), sampled([part.flat() for part in plain.values()]))


def _data(values: Mapping[str, Packed]) -> list[ShardPiece]:
    """The bytes of plain values, on rank 0: one tensor for each entry that has any."""
    pieces = []
    for key, value in values.items():
        if size := len(value.data):
            data = torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
            pieces.append(ShardPiece(data_name(key), KIND, 0, size, (size,), torch.uint8, data))
    return pieces


def _pieces(parts: Mapping[Pair, LocalPart]) -> list[ShardPiece]:
    writes = owners(list(parts.values()))
    pieces = []
    for ((name, kind), part), mine in zip(parts.items(), writes, strict=True):
        if mine and part.intervals:
            held = part.pieces(part.flat())
            about = part.shape, part.dtype
            pieces += [ShardPiece(name, kind, start, end, *about, data, part.apart, part.tiling) for start, end, data in held]
        else:  # also what another replica writes is named, empty: so that every rank lists every tensor in the same order
            pieces.append(ShardPiece(name, kind, 0, 0, part.shape, part.dtype, torch.empty(0, dtype=part.dtype)))
    return pieces


def newest_order(store: ObjectStore) -> tuple[int, int] | None:
    """(epoch, step) of the newest commit, from the names alone."""
    names = (entry.key.removeprefix("commits/").removesuffix(".json") for entry in store.list("commits/"))
    return max(filter(None, map(parse_commit_name, names)), default=None)


def next_epoch(newest: tuple[int, int] | None, epoch: int | None, step: int) -> int:
    """The epoch of a save of ``step``: the one given, or the least that makes it the newest."""
    if epoch is not None:
        return epoch
    if newest is None:
        return 0
    return newest[0] if step > newest[1] else newest[0] + 1


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank in the group, and its size; without a process group 0 and 1.

    Raises:
        ValueError: this process is not in the group, the group was destroyed, or it is none.
    """
    of_type("group", group, (dist.ProcessGroup, int, NoneType), "give a process group, as new_group() makes it, or none")
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("the process group that was given was destroyed; give none, and this process works alone, or a new one")
        return 0, 1
    # The group of a rank that is not in it, as new_group() returns it there, is a number.
    rank = dist.get_rank(group) if group is None or isinstance(group, dist.ProcessGroup) else -1
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group that was given; only its members save or load with it")
    return rank, dist.get_world_size(group)


def word_of(error: BaseException) -> Word:
    """What a rank says that could not take its state apart: what is wrong with it, or that it was interrupted."""
    if isinstance(error, Exception):
        return Word(problem=str(error) or type(error).__name__)
    return Word(left=f"interrupted by {type(error).__name__}")


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Rank 0's result on every rank; its error too."""
    rank, world = ranks_of(group)
    if world == 1:
        return make()
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [(True, make())]
        except Exception as error:
            box = [(False, _portable(error))]
    dist.broadcast_object_list(box, group=group, group_src=0)
    ok, value = box[0]
    if not ok:
        raise value
    return value  # type: ignore[no-any-return]


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run ``work`` on every rank; if any rank raises, every rank raises the first rank's error that did."""
    rank, world = ranks_of(group)
    if world == 1:
        return work()
    mine: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        mine = error
    errors: list[Exception | None] = [None] * world
    dist.all_gather_object(errors, _portable(mine), group=group)
    first = next((e for e in errors if e is not None), None)
    if mine is not None:
        # One sort of error on all ranks, so that all take the same way on.
        raise mine if first is None or type(mine) is type(first) else first from mine
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def _portable(error: Exception | None) -> Exception | None:
    """The error itself if it survives pickling, else its text: a collective must not fail on one rank alone."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
