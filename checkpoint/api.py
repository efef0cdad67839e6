"""Save and load a training script's state under torchrun or alone, where each run may have another number of ranks.

The ranks agree on an attempt through the process group's key-value store. Each rank writes its object, and votes through the checkpoint's
store; rank 0 commits. A save uses no collective, so no watchdog can abort it, and a failing rank tells the others at once. :func:`save`
returns once the checkpoint is committed; ``saver.py`` saves while training continues.
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

from .arguments import of_type, order, seconds, state_of
from .commits import Commit, newest_order
from .errors import SaveAborted, SaveFailed
from .format.copies import sampled
from .format.digest import digest_of
from .format.object_layout import ShardPiece
from .format.shard import Vote, new_attempt, write_shard
from .format.strict_json import check_meta
from .plain_values.plain import KIND, Packed, data_name, pack
from .plain_values.rng import capture_rng
from .saving.accord import Accord, RankStatus
from .saving.bounded import Quiet, Watch, bounded
from .saving.handle import SaveHandle
from .saving.voting import Attempt, conclude
from .state.flat_state import State
from .state.flattening import flatten
from .state.matching import Pair, label
from .state.optimizer_hooks import warn_of_hooks
from .state.tensors import LocalPart, local_part, owners
from .stores.opening import store_of
from .stores.store import ObjectStore, Root
from .upkeep.collection import tend
from .upkeep.proof import prove
from .upkeep.retention import Retention

_log = logging.getLogger(__name__)
T = TypeVar("T")

HANG_S = 60.0
"""Seconds that the storage may be unresponsive, on top of the time limits of a save."""


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
    """Save a state. Every rank calls it at the same step, and it returns on each rank once the checkpoint is committed.

    Args:
        state: ``{"model": module or {fqn: tensor}, "optimizer": torch optimizer, ..}``; ``state.py`` describes other entries.
        root: checkpoint folder, the same on all ranks (shared between hosts).
        step: number of completed steps.
        epoch: incarnation of the run. The default makes the new checkpoint the newest: the newest commit's epoch, plus one if ``step`` is
            not beyond that commit (the run went back).
        meta: values that JSON can hold, the same on all ranks; rank 0's are stored.
        aux: plain values of this rank alone, such as a data loader's state. The random generators are always stored.
        metrics: metrics of this step, by name, by which :class:`Retention` finds the best checkpoint. Rank 0's are stored. NaN and
            infinities are left out, with a warning.
        retention: after the commit, delete the checkpoints that it does not keep.
        timeout_s: seconds to wait for each of: the other ranks, their votes, and the commit. If the storage is unresponsive for three times
            that plus one minute, the save fails.
        group: ranks that save together; all by default. Without a process group this process saves alone.

    Raises:
        ValueError: the state cannot be stored. Raised on every rank, before anything is written.
        SaveFailed: no commit was made: a rank failed, died or did not come, or the storage failed or hung. Earlier checkpoints are
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
            torch.cuda.current_stream(device).synchronize()  # another thread makes the copies, on another stream
    except BaseException as error:
        with suppress(SaveFailed):
            accord.tell(key, status_of(error))
        raise
    began = time.perf_counter()
    made: list[Commit] = []

    def work(watch: Watch) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        def name() -> tuple[str, int]:
            return new_attempt(), next_epoch(newest_order(store), epoch, step)

        verdict = accord.agree(key, prepared.status, name, timeout_s, watch)
        if verdict.fate == "unfit":
            raise ValueError(verdict.text)
        if verdict.fate != "go":
            raise SaveFailed(f"step {step}: {verdict.text}; earlier checkpoints are untouched")
        this = Attempt(verdict.attempt, step, verdict.epoch, world, rank, prepared.document, prepared.aliases, timeout_s)
        written = _write(store, this, prepared, watch)
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
        _log.warning("checkpoint %s is committed, but it is not read back and no older one is deleted: %s", made[0].path, text)
    return SaveHandle.finished(step, made[0], time.perf_counter() - began)


def _write(store: ObjectStore, this: Attempt, prepared: Prepared, watch: Watch) -> Vote | Exception:
    """Write this rank's object. Returns any error, since the other ranks must hear of it rather than wait."""
    pieces, aux = prepared.pieces, prepared.aux
    written: Vote | Exception
    try:
        written = write_shard(
            store, this.name, this.rank, pieces, aux=aux, step=this.step, epoch=this.epoch, cancelled=watch, world=this.world
        )
    except Exception as error:
        written = error
    if watch() and isinstance(written, Vote):
        return SaveAborted(f"step {this.step}: this save was given up; earlier checkpoints are untouched")
    return written


def look_after(store: ObjectStore, retention: Retention, made: Commit, vote: Vote, cancelled: Callable[[], bool] = lambda: False) -> None:
    """After a commit, read back this rank's objects. Then rank 0 deletes the checkpoints that the retention does not keep.

    Errors only go to the log, since they must not stop a training run; the commit stays.
    """
    began = time.monotonic()
    try:
        problem = prove(store, vote.object, vote.aux, cancelled) if retention.verify else None
        if problem is not None:
            _log.error("checkpoint %s is damaged, so older ones are kept: %s", made.path, problem)
    except SaveAborted:
        return
    except Exception as error:
        _log.warning("checkpoint %s could not be read back: %s: %s", made.path, type(error).__name__, error)
    if vote.rank == 0:
        tend(store, retention, made, max(5.0, 2 * (time.monotonic() - began)) if made.world > 1 else 0.0, cancelled)


@dataclass(frozen=True)
class Prepared:
    """One rank's part of a save, flattened and checked before anything is written.

    Attributes:
        pieces: views of the live tensors. All other fields are copies made at this moment.
        plain: digests of the plain values.
        copied: names of tensors assumed equal on all ranks.
        copies: hashes of a sample of each of these tensors, one after another, for comparison between the ranks.
    """

    pieces: list[ShardPiece]
    document: Mapping[str, Any]
    aliases: Mapping[str, str]
    aux: Mapping[str, Any]
    plain: Mapping[str, str] = field(default_factory=dict)
    copied: Sequence[str] = ()
    copies: str = ""

    @property
    def status(self) -> RankStatus:
        """The message to the other ranks. Only rank 0's optimizers are stored, so they must name the same parameters as every other
        rank's."""
        named = {key: [sorted(group["params"]) for group in saved["groups"]] for key, saved in self.document["optimizers"].items()}
        alike = digest_of(json.dumps(named, sort_keys=True).encode())
        order = digest_of("\n".join(self.copied).encode())[:8]
        numbers = {
            f"{what} of optimizer {key!r}": digest_of(json.dumps(value, sort_keys=True).encode())
            for key, saved in self.document["optimizers"].items()
            for what, value in (
                ("hyperparameters", [group["hyper"] for group in saved["groups"]]),
                ("scalar states", [saved["scalars"], saved.get("shared")]),
            )
        }
        return RankStatus(alike=alike, plain=self.plain, numbers=numbers, copies=order + self.copies, names=self.copied)


def prepare(
    state: State,
    step: int,
    world: int,
    rank: int,
    meta: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
    aux: Mapping[str, Any] | None,
) -> Prepared:
    """Flatten and check a state. Raises ValueError if it cannot be stored."""
    state_of(state)
    if not state:
        raise ValueError('the state is empty: give its parts by name, for example {"model": model}')
    for what, given in (("meta", meta), ("metrics", metrics), ("aux", aux)):
        if given is not None:
            of_type(what, given, Mapping, "give a dict")
    check_meta(meta or {})
    # A NaN loss must not lose the checkpoint; it only does not count as a metric.
    finite = {name: value for name, value in (metrics or {}).items() if not isinstance(value, float) or math.isfinite(value)}
    if len(finite) < len(metrics or {}):
        _log.warning("step %d: non-finite metrics are not stored: %s", step, sorted((metrics or {}).keys() - finite.keys()))
    check_meta(finite, "metrics")
    for name, value in finite.items():
        of_type(f"metrics.{name}", value, (int, float), "give a number")
    own = pack("aux", dict(aux or {}), inline=math.inf)
    if rank == 0:
        warn_of_hooks(state, "state_dict")
    flat = flatten(state)
    parts = {pair: local_part(pair[0], tensor, world, rank) for pair, tensor in flat.tensors.items()}
    pieces = _pieces(parts) + (_data(flat.values) if rank == 0 else [])
    # A plain tensor does not tell which ranks hold it, so assume that all do, with equal values.
    # Sorted, because the order of a state dict may differ by rank.
    plain = {label(*pair): parts[pair] for pair in sorted(parts)}
    plain = {name: part for name, part in plain.items() if part.replicas == world > 1 and not part.among and part.shared}
    values = {key: value.json for key, value in flat.values.items() if value.extended}
    state_json = {key: value.json for key, value in flat.values.items() if not value.extended}
    document = {"models": flat.models, "state": state_json, "optimizers": flat.optimizers, "meta": dict(meta or {})}
    if values:
        document["values"] = values
    if finite:
        document["metrics"] = finite
    # Copy through JSON, since the values may be live objects of the running training.
    frozen = json.loads(json.dumps(document, allow_nan=False))
    # A value without tags is plain JSON, and keeps the older key.
    beside = {"rng": capture_rng(), "values" if own.tags else "user": json.loads(json.dumps(own.json))}
    digests = {key: value.digest for key, value in flat.values.items()}
    return Prepared(pieces, frozen, dict(flat.aliases), beside, digests, list(plain), sampled([part.flat() for part in plain.values()]))


def _data(values: Mapping[str, Packed]) -> list[ShardPiece]:
    """Return the bytes of plain values, on rank 0: one tensor for each entry that has bytes."""
    pieces = []
    for key, value in values.items():
        if size := len(value.data):
            data = torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
            pieces.append(ShardPiece(data_name(key), KIND, 0, size, (size,), torch.uint8, data))
    return pieces


def _pieces(parts: Mapping[Pair, LocalPart]) -> list[ShardPiece]:
    alike = sorted(parts, key=lambda pair: (pair[1], pair[0]))  # the same order on every rank; orders of state dicts may differ
    writes = dict(zip(alike, owners([parts[pair] for pair in alike]), strict=True))
    pieces = []
    for (name, kind), part in parts.items():
        if writes[name, kind] and part.intervals:
            held = part.pieces(part.flat())
            about = part.shape, part.dtype
            pieces += [ShardPiece(name, kind, start, end, *about, data, part.apart, part.tiling) for start, end, data in held]
        else:  # another replica writes it; an empty piece keeps the tensor order the same on every rank
            pieces.append(ShardPiece(name, kind, 0, 0, part.shape, part.dtype, torch.empty(0, dtype=part.dtype)))
    return pieces


def next_epoch(newest: tuple[int, int] | None, epoch: int | None, step: int) -> int:
    """Return the epoch of a save of ``step``: ``epoch`` if given, or the least that makes the save the newest."""
    if epoch is not None:
        return epoch
    if newest is None:
        return 0
    return newest[0] if step > newest[1] else newest[0] + 1


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank in the group and the group's size; 0 and 1 without a process group.

    Raises:
        ValueError: ``group`` is not a process group or was destroyed, or this process is not in it.
    """
    of_type("group", group, (dist.ProcessGroup, int, NoneType), "give a process group, as new_group() makes it, or none")
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("the given process group was destroyed: give a new one, or none to let this process work alone")
        return 0, 1
    # On a rank outside the group, new_group() returns a number instead of a group.
    rank = dist.get_rank(group) if group is None or isinstance(group, dist.ProcessGroup) else -1
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the given process group: only its members can save or load with it")
    return rank, dist.get_world_size(group)


def status_of(error: BaseException) -> RankStatus:
    """Return the message to the other ranks if this rank could not flatten its state: the problem, or that it was interrupted."""
    if isinstance(error, Exception):
        return RankStatus(problem=str(error) or type(error).__name__)
    return RankStatus(left=f"interrupted by {type(error).__name__}")


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return rank 0's result on every rank, or raise rank 0's error."""
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


def gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value, in rank order."""
    _, world = ranks_of(group)
    if world == 1:
        return [mine]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run ``work`` on every rank. If any rank raises, every rank raises the error of the first rank that did."""
    if ranks_of(group)[1] == 1:
        return work()
    mine: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        mine = error
    first = next((e for e in gathered(_portable(mine), group) if e is not None), None)
    if mine is not None:
        # The same type of error on all ranks, so that all continue in the same way.
        raise mine if first is None or type(mine) is type(first) else first from mine
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def _portable(error: Exception | None) -> Exception | None:
    """Return the error itself if it can be pickled, or its text: a collective must not fail on one rank alone."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
