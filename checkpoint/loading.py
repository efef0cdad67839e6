"""Loading a training script's state, whatever the number of ranks and the layout then and now; all of it, or chosen parts.

    candidates (rank 0 lists, all take them) -> names, shapes, dtypes -> storage for what is on the meta device -> verified reads

Every rank reads its own intervals; the ranks only agree on the commit and, at the end, on whether it was sound.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .api import from_first, ranks_of, together
from .arguments import device_of, nbytes, state_of
from .commits import Commit, newest_first
from .entries import PlainValues, check_entries, plain_values, restore_values
from .errors import CheckpointCorrupt, CheckpointMismatch, NoCheckpoint
from .matching import Pair, match, some
from .materialize import materialize, on_meta
from .names import Globs, NameTable, globs, matches, table_of
from .plain import Data, unpack
from .read_plan import Range, ReadPlan
from .reader import BUDGET_BYTES, Checkpoint, open_checkpoint
from .rng import derive_rng, restore_rng
from .saved_meta import check_saved_meta
from .state import (
    Choice,
    Flat,
    Holder,
    Saved,
    State,
    created_states,
    flatten_models,
    flatten_targets,
    stored_pairs,
)
from .store import ObjectStore, Root, store_of
from .tensors import LocalPart, check_target, local_part

_log = logging.getLogger(__name__)
PARTLY = "the state holds parts of it now: load again before it is used"


@dataclass(frozen=True)
class Loaded:
    """The result of a load beside the tensors: ``values`` are the plain entries saved (each access reads one anew), ``aux`` this rank's own
    (``None`` if the number of ranks has changed), ``skipped`` damaged newer commits that were passed over, ``missing`` names that
    ``allow_missing`` left as they were, ``read`` the bytes and requests of this rank."""

    commit: Commit
    step: int
    epoch: int
    meta: Mapping[str, Any]
    values: Mapping[str, Any]
    aux: Any
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    read: ReadPlan


@dataclass(frozen=True)
class _Request:
    """How to load, the same for every candidate."""

    choice: Choice
    cast: bool
    device: torch.device | None
    rng: bool
    budget_bytes: int


def load(
    state: State,
    root: Root,
    *,
    commit: str | Commit | None = None,
    include: Globs = "*",
    exclude: Globs = (),
    allow_missing: Globs = (),
    allow_unexpected: Globs = (),
    rename: Mapping[str, str] | NameTable | None = None,
    cast: bool = False,
    device: torch.device | str | None = None,
    rng: bool = True,
    budget_bytes: int = BUDGET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load into the modules, tensors and optimizers of ``state``, in place; every rank calls it. Any number of ranks, any layout.

    Only what ``state`` names is read: ``{"model": module}`` reads the weights alone. Plain JSON entries are replaced in
    ``state``. A damaged newest checkpoint is passed over for the one before, by all ranks together. Every tensor of the entries must be in
    the checkpoint and the other way round, with the same shape and dtype, but for what these arguments allow. Globs: see ``names.py``.

    Args:
        commit: a commit's name; default: the newest whole one. A named one is never passed over.
        include, exclude: globs of the model's names; other tensors, and their optimizer states, are left as they are.
        allow_missing: globs of the model's names (and of plain entries) that the checkpoint may lack; they are left as they are.
        allow_unexpected: globs of the checkpoint's names that ``state`` may lack.
        rename: table from the model's names to the checkpoint's.
        cast: convert between dtypes of floating point, or of integers.
        device: where to put parameters that are on the meta device; default: a DTensor's mesh's device, else CPU. They get storage shard
            by shard, and optimizers that hold them go on with the new ones.
        rng: restore the random generators; on another number of ranks they are seeded from (commit, rank) instead.
        budget_bytes: memory to take beside the tensors.

    Raises:
        NoCheckpoint: nothing to load. CheckpointMismatch: it is another model's; nothing was changed (where a model was on the meta
            device and an optimizer's states don't fit, the model has storage without values).
        CheckpointCorrupt: damaged, and no older one to go back to; the message says so if tensors hold parts of it.
        OSError: a checkpoint is out of reach (no permission, no file descriptor left): it may be whole, and is not passed over.
        ValueError: a parameter or buffer on the meta device that would get no value, or a tensor that can't be filled (expanded, sparse).
    """
    rank, world = ranks_of(group)
    state_of(state)
    nbytes("budget_bytes", budget_bytes)
    store = store_of(root)
    choice = Choice(globs(include), globs(exclude), globs(allow_missing), globs(allow_unexpected), table_of(rename))
    request = _Request(choice, cast, device_of(device), rng, budget_bytes)
    candidates = from_first(lambda: _candidates(store, commit), group)
    skipped: list[str] = []
    for index, chosen in enumerate(candidates):
        try:
            return together(partial(_load_one, state, store, chosen, request, rank, world, tuple(skipped)), group)
        except CheckpointCorrupt as error:
            if index + 1 == len(candidates):
                raise
            skipped.append(chosen.name)
            _log.error("%s; going back to checkpoint %s", error, candidates[index + 1].name)
    raise AssertionError("unreachable: candidates are never empty")


def _candidates(store: ObjectStore, named: str | Commit | None) -> list[Commit]:
    if named is not None:
        return [open_checkpoint(store, named).commit]
    found = list(newest_first(store))
    if not found:
        open_checkpoint(store)  # raises, saying what is there
        raise NoCheckpoint(f"no checkpoint in {store.describe()}")
    return found


def _load_one(
    state: State, store: ObjectStore, chosen: Commit, request: _Request, rank: int, world: int, skipped: tuple[str, ...]
) -> Loaded:
    checkpoint = open_checkpoint(store, chosen)
    if checkpoint.commit.sha256 != chosen.sha256:
        raise CheckpointCorrupt(chosen.key, None, ("manifest",), f"rank {rank} sees another commit object than rank 0")
    choice = request.choice
    aux = checkpoint.aux(rank) if checkpoint.world == world else None
    where = f"checkpoint {checkpoint.commit.path}"
    own = _own(where, rank, aux)
    flat, there, values = prepared(state, checkpoint, where, choice, request.cast, request.device)
    try:
        plan = _fill(checkpoint, flat, there, request, world, rank)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(error.object, error.block, error.tensors, f"{error.reason}; {PARTLY}") from error
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"{error.strerror or error}; {PARTLY}") from error
    restore_values(state, values, checkpoint, flat, choice)
    if request.rng:
        if aux is not None and "rng" in aux:
            try:
                restore_rng(aux["rng"])
            except ValueError as error:
                raise CheckpointMismatch(
                    f"checkpoint {checkpoint.commit.path}, rank {rank}: {error}; rng=False leaves them alone"
                ) from error
        else:
            derive_rng(chosen.sha256, rank)
            if rank == 0:
                _log.warning(
                    "checkpoint %s holds no random generator states for %d ranks (saved by %d): generators were seeded anew",
                    chosen.name,
                    world,
                    checkpoint.world,
                )
    meta = checkpoint.meta.get("meta", checkpoint.meta)
    missing = tuple(dict.fromkeys(pair[0] for pair in flat.tensors if pair not in there and choice.takes_pair(pair, flat)))
    kept = PlainValues(where, checkpoint, values)
    return Loaded(chosen, checkpoint.step, checkpoint.epoch, meta, kept, own, skipped, missing, plan)


def _own(where: str, rank: int, aux: Any) -> Any:
    """This rank's own ``aux`` of the save. Raises CheckpointMismatch."""
    if not isinstance(aux, dict) or "values" not in aux:
        return aux.get("user") if isinstance(aux, dict) else None
    try:
        return unpack(aux["values"], Data())
    except ValueError as error:
        raise CheckpointMismatch(f"{where}, rank {rank}: its aux can't be taken back: {error}") from error


def prepared(
    state: Mapping[str, Any], holder: Saved, where: str, choice: Choice, cast: bool, device: torch.device | None
) -> tuple[Flat, dict[Pair, Pair], dict[str, Any]]:
    """Make ``state`` ready to be read into: names, shapes and dtypes agree with what ``holder`` has; what is on the meta device gets
    storage; optimizer states that it lacks are made. Returns the state taken apart, ``{pair here: pair stored}`` of what is to be read, and
    the values of its plain entries.

    Raises:
        CheckpointMismatch: nothing was changed, but that models on the meta device may have got storage.
        ValueError: a parameter or buffer on the meta device that would get no value.
    """
    check_saved_meta(where, holder.meta, optimizers=any(isinstance(value, torch.optim.Optimizer) for value in state.values()))
    check_entries(where, state, holder, flatten_models(state), choice)
    values = plain_values(where, state, holder)
    models = [value for value in state.values() if isinstance(value, nn.Module) and on_meta(value)]
    if models:
        # The weights are checked before anything gets storage; with the optimizers once more below, which need it.
        weights = {key: value for key, value in state.items() if not isinstance(value, torch.optim.Optimizer)}
        flat = flatten_models(weights)
        check_filled(flat, _agreed(where, holder, stored_pairs(weights, holder), flat, choice, cast), models)
        optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
        for model in models:
            materialize(model, device, optimizers)
    with created_states() as created:
        flat = flatten_targets(state, holder, choice, created)
        return flat, _agreed(where, holder, stored_pairs(state, holder), flat, choice, cast), values


def _agreed(where: str, holder: Holder, among: Set[Pair], flat: Flat, choice: Choice, cast: bool) -> dict[Pair, Pair]:
    """``{pair here: pair stored}`` of what will be read.

    Args:
        among: the stored pairs that belong to the entries of the state, and may not be left over.

    Raises:
        CheckpointMismatch: what doesn't fit. ValueError: a tensor that can't be loaded into.
    """
    taken = {pair: tensor for pair, tensor in flat.tensors.items() if choice.takes_pair(pair, flat)}
    for (name, _), tensor in taken.items():
        check_target(name, tensor)
    wanted = {pair: (tuple(t.shape), t.dtype) for pair, t in taken.items()}
    if flat.tensors and not wanted and choice.include != ("*",):
        there = some(list(dict.fromkeys(pair[0] for pair in flat.tensors)))
        raise CheckpointMismatch(f"{where}: no tensor of the state fits include={', '.join(choice.include)!r}; it has {there}")
    source = {pair: choice.source(pair, flat, holder) for pair in flat.tensors}
    # A tensor that was left out on purpose has its counterpart all the same: that is not unexpected.
    left_out = {(holder.aliases.get(n, n), k) for pair, (n, k) in source.items() if pair not in wanted}
    among = {pair for pair in among - left_out if choice.takes_stored(pair[0])}
    for alias, name in flat.aliases.items():
        one, other = choice.table(alias), choice.table(name)
        two = one != other and one in holder.tensors and other in holder.tensors
        if two and choice.takes(name, flat) and not matches(one, choice.allow_unexpected):
            raise CheckpointMismatch(
                f"{alias!r} and {name!r} are one tensor in the model, but two in {where}; allow_unexpected={one!r} takes {other!r} for both"
            )
    return match(
        where,
        holder.tensors,
        holder.aliases,
        wanted,
        among,
        source=source,
        allow_missing=choice.allow_missing,
        allow_unexpected=choice.allow_unexpected,
        cast=cast,
        models=flat.models,
    )


def check_filled(flat: Flat, there: Mapping[Pair, Pair], models: list[nn.Module]) -> None:
    """Raises ValueError, naming what of ``models`` is on the meta device and not in ``there``."""
    empty = [name for (name, kind), tensor in flat.tensors.items() if tensor.is_meta and (name, kind) not in there]
    known = {id(tensor) for tensor in flat.tensors.values()}
    empty += [name for model in models for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in known]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise ValueError(
            f"{', '.join(map(repr, empty[:3]))}{more} would stay without a value: on the meta device, and not read from the checkpoint; "
            "give them storage and values (to_empty, init) before loading"
        )


def _fill(checkpoint: Checkpoint, flat: Flat, there: Mapping[Pair, Pair], request: _Request, world: int, rank: int) -> ReadPlan:
    """Read this rank's part of every tensor straight into it. What isn't contiguous goes through a copy, one tensor at a time."""
    ranges: list[Range] = []
    copied: list[tuple[LocalPart, Pair]] = []
    for pair, stored in there.items():
        part = local_part(pair[0], flat.tensors[pair], world, rank)
        if part.shared:
            ranges += [Range(*stored, start, end, piece, part.tiling) for start, end, piece in part.pieces(part.flat())]
        else:
            copied.append((part, stored))
    with torch.no_grad():
        plans = [checkpoint.read_ranges(ranges, cast=request.cast, budget_bytes=request.budget_bytes)]
        for part, stored in copied:
            whole = part.flat()
            pieces = [Range(*stored, start, end, piece, part.tiling) for start, end, piece in part.pieces(whole)]
            plans.append(checkpoint.read_ranges(pieces, cast=request.cast, budget_bytes=request.budget_bytes))
            part.local.copy_(whole.view(part.local.shape))
    return ReadPlan.whole(plans)
