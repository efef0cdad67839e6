"""Load a training script's state, or parts of it, with any number of ranks and any layout.

    candidates (listed by rank 0) -> check of names, shapes, dtypes -> storage for meta-device tensors -> verified reads

Every rank reads its own intervals. The ranks only agree on the commit and, at the end, on whether it is intact.
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

from ..api import from_first, ranks_of, together
from ..arguments import device_of, nbytes, state_of
from ..commits import Commit, newest_first
from ..errors import CheckpointCorrupt, CheckpointMismatch, NoCheckpoint, first_few
from ..plain_values.plain import EntryBytes, unpack
from ..plain_values.plain_entries import PlainValues
from ..plain_values.rng import derive_rng, restore_rng
from ..state.entries import check_entries, plain_values, restore_values
from ..state.flat_state import FlatState, Holder, Saved, State, TensorChoice, flatten_models
from ..state.flattening import flatten_targets, stored_pairs
from ..state.matching import Pair, match
from ..state.name_tables import Globs, NameTable, globs, matches, table_of
from ..state.optimizer_hooks import warn_of_hooks
from ..state.optimizer_state import created_states
from ..state.saved_meta import check_saved_meta
from ..state.tensors import LocalPart, check_target, local_part
from ..stores.opening import store_of
from ..stores.store import ObjectStore, Root
from .materialize import materialize, on_meta
from .read_plan import Range, ReadPlan
from .reader import BUDGET_BYTES, Checkpoint, open_checkpoint

_log = logging.getLogger(__name__)
PARTLY = "the state now holds parts of it: load again before using it"


@dataclass(frozen=True)
class Loaded:
    """The result of a load, besides the tensors.

    Attributes:
        values: plain entries of the checkpoint; each access reads one anew.
        aux: this rank's own values; ``None`` if the number of ranks has changed.
        skipped: damaged newer commits that were skipped.
        missing: names that ``allow_missing`` left unchanged.
        read: bytes and requests of this rank.
    """

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
    """Options of a load, the same for every candidate."""

    choice: TensorChoice
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
    """Load into the modules, tensors and optimizers of ``state``, in place, with any number of ranks and any layout. Every rank calls it.

    Only the entries of ``state`` are read: ``{"model": module}`` reads the weights alone. Plain JSON entries are replaced in ``state``. If
    the newest checkpoint is damaged, all ranks go back to the one before. Every tensor of the entries must be in the checkpoint and vice
    versa, with equal shape and dtype, except as these arguments allow. ``names.py`` describes globs.

    Args:
        commit: name of a commit; by default the newest intact one. A named commit is never skipped.
        include, exclude: globs of the model's names; other tensors and their optimizer states stay unchanged.
        allow_missing: globs of the model's names (and of plain entries) that the checkpoint may lack; they stay unchanged.
        allow_unexpected: globs of the checkpoint's names that ``state`` may lack.
        rename: table from the model's names to the checkpoint's.
        cast: whether to convert between floating-point dtypes, or between integer dtypes.
        device: device for parameters on the meta device; by default the device of a DTensor's mesh, or the CPU. Only the shards get
            storage, and optimizers that hold the parameters get the new ones.
        rng: whether to restore the random generators. With another number of ranks they are seeded from (commit, rank) instead.
        budget_bytes: memory to use besides the tensors, in bytes.

    Raises:
        NoCheckpoint: there is nothing to load. CheckpointMismatch: the checkpoint is another model's. Nothing was changed, except that a
            model on the meta device has storage without values if an optimizer's states do not fit.
        CheckpointCorrupt: the checkpoint is damaged, and there is no older one. The message says if tensors hold parts of it.
        OSError: a checkpoint is out of reach (no permission, no free file descriptor). It may be intact, so it is not skipped.
        ValueError: a parameter or buffer on the meta device would get no value, or a tensor cannot be filled (expanded, sparse).
    """
    rank, world = ranks_of(group)
    state_of(state)
    nbytes("budget_bytes", budget_bytes)
    store = store_of(root)
    choice = TensorChoice(globs(include), globs(exclude), globs(allow_missing), globs(allow_unexpected), table_of(rename))
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
        open_checkpoint(store)  # raises an error that names what is there
        raise NoCheckpoint(f"no checkpoint in {store.describe()}")
    return found


@torch.inference_mode(False)  # training goes on with the states that are made here
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
    if rank == 0:
        warn_of_hooks(state, "load_state_dict")
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
    """Return this rank's own ``aux`` of the save. Raises CheckpointMismatch."""
    if not isinstance(aux, dict) or "values" not in aux:
        return aux.get("user") if isinstance(aux, dict) else None
    try:
        return unpack(aux["values"], EntryBytes())
    except ValueError as error:
        raise CheckpointMismatch(f"{where}, rank {rank}: its aux cannot be restored: {error}") from error


def prepared(
    state: Mapping[str, Any], holder: Saved, where: str, choice: TensorChoice, cast: bool, device: torch.device | None
) -> tuple[FlatState, dict[Pair, Pair], dict[str, Any]]:
    """Prepare ``state`` for reading: check names, shapes and dtypes against ``holder``, allocate meta-device tensors, create missing
    optimizer states. Returns the flattened state, ``{pair here: pair stored}`` of the tensors to read, and the values of its plain entries.

    Raises:
        CheckpointMismatch: nothing was changed, except that models on the meta device may have storage.
        ValueError: a parameter or buffer on the meta device would get no value.
    """
    check_saved_meta(where, holder.meta, optimizers=any(isinstance(value, torch.optim.Optimizer) for value in state.values()))
    check_entries(where, state, holder, flatten_models(state), choice)
    values = plain_values(where, state, holder)
    models = [value for value in state.values() if isinstance(value, nn.Module) and on_meta(value)]
    if models:
        # Check the weights before anything gets storage. The check with optimizers below needs the storage.
        weights = {key: value for key, value in state.items() if not isinstance(value, torch.optim.Optimizer)}
        flat = flatten_targets(where, weights, holder, choice, [])
        check_filled(flat, _agreed(where, holder, stored_pairs(weights, holder), flat, choice, cast), models)
        optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
        for model in models:
            materialize(model, device, optimizers)
    with created_states() as created:
        flat = flatten_targets(where, state, holder, choice, created)
        return flat, _agreed(where, holder, stored_pairs(state, holder), flat, choice, cast), values


def _agreed(where: str, holder: Holder, among: Set[Pair], flat: FlatState, choice: TensorChoice, cast: bool) -> dict[Pair, Pair]:
    """Return ``{pair here: pair stored}`` of the tensors to read.

    Args:
        among: stored pairs that belong to the state's entries and must not be left over.

    Raises:
        CheckpointMismatch: something does not fit. ValueError: a tensor cannot be loaded into.
    """
    taken = {pair: tensor for pair, tensor in flat.tensors.items() if choice.takes_pair(pair, flat)}
    for (name, _), tensor in taken.items():
        check_target(name, tensor)
    wanted = {pair: (tuple(t.shape), t.dtype) for pair, t in taken.items()}
    if flat.tensors and not wanted and choice.include != ("*",):
        there = first_few(list(dict.fromkeys(pair[0] for pair in flat.tensors)))
        raise CheckpointMismatch(f"{where}: no tensor of the state fits include={', '.join(choice.include)!r}; it has {there}")
    source = {pair: choice.source(pair, flat, holder) for pair in flat.tensors}
    # A tensor that was excluded on purpose still has a stored counterpart; that one is not unexpected.
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


def check_filled(flat: FlatState, there: Mapping[Pair, Pair], models: list[nn.Module]) -> None:
    """Raise ValueError if tensors of ``models`` are on the meta device and not in ``there``. The message has their names."""
    empty = [name for (name, kind), tensor in flat.tensors.items() if tensor.is_meta and (name, kind) not in there]
    known = {id(tensor) for tensor in flat.tensors.values()}
    empty += [name for model in models for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in known]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise ValueError(
            f"{', '.join(map(repr, empty[:3]))}{more} would get no value: on the meta device, and not read from the checkpoint; "
            "give them storage and values (to_empty, init) before loading"
        )


def _fill(checkpoint: Checkpoint, flat: FlatState, there: Mapping[Pair, Pair], request: _Request, world: int, rank: int) -> ReadPlan:
    """Read this rank's part of every tensor directly into it. Non-contiguous tensors go through a copy, one at a time."""
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
