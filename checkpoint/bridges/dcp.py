"""Convert between our checkpoints and PyTorch's distributed checkpoint (DCP), both ways.

    dcp.load(state_dict, storage_reader=DcpReader(root))     stock DCP reads ours into FSDP2, tensor-parallel, 2-D or plain models
    import_dcp(folder, model or root)                        .distcp files -> shards, or a new commit
    export_dcp(root, commit, folder)                         a commit -> a stock DCP checkpoint (in dcp_export.py)

Names are those of torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``, in the usual nesting:

    ours                                    DCP
    tensor ``fqn`` of the entry "model"     ``model.<fqn>``
    kind ``exp_avg`` of ``fqn``             ``optim.state.<fqn>.exp_avg``        (the entry "optimizer" is called "optim")
    scalars (``step``)                      ``optim.state.<fqn>.step``, 0-d tensors
    hyperparameters, by parameter group     ``optim.param_groups.<i>.lr``, .., ``.params``
    tensor ``key/fqn``, value ``key``       ``<key>.<fqn>``, ``<key>``
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from vescale_ray.compat.checkpoint import flatten_state_dict

from ..api import from_first, together
from ..commits import Commit
from ..errors import CheckpointMismatch
from ..format.digest import as_bytes
from ..format.object_layout import dtype_name
from ..format.tiling import Tiling
from ..plain_values.plain_entries import PlainValues
from ..reading.read_plan import Range
from ..reading.reader import BUDGET_BYTES, Checkpoint, open_checkpoint
from ..state.matching import castable
from ..state.name_tables import Globs, NameTable, entry_of, globs, table_of
from ..state.nested_state import unfold
from ..state.saved_meta import check_saved_meta
from ..stores.store import Root
from .dcp_state import DcpSource
from .foreign import OBJECT_BYTES, Imported, Progress, into_commit, into_state, is_root, state_of

ENTRIES = {"optimizer": "optim"}
"""Entries of our state that DCP names differently."""


@dataclass(frozen=True)
class Ref:
    """A tensor of the checkpoint, as a leaf of the nested state dict."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def nested(checkpoint: Checkpoint, entries: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the checkpoint's state as torch's ``get_*_state_dict`` would give it, with a :class:`Ref` for every tensor."""
    called = {**ENTRIES, **(entries or {})}
    meta = checkpoint.meta
    where = f"checkpoint {checkpoint.commit.path}"
    check_saved_meta(where, meta)
    state: dict[str, Any] = {}
    for key in meta.get("models", ["model"]):
        names = checkpoint.names(key)
        if names:
            state[called.get(key, key)] = {name: _ref(checkpoint, stored, "param") for name, stored in names.items()}
    for key, saved in meta.get("optimizers", {}).items():
        per_param: dict[str, dict[str, Any]] = {}
        for group in saved["groups"]:
            for name in group["params"]:
                per_param[name] = _states(checkpoint, key, saved, name)
        groups = [
            {**{k: unfold(v) for k, v in group["hyper"].items()}, "params": [_local(checkpoint, n) for n in group["params"]]}
            for group in saved["groups"]
        ]
        state[called.get(key, key)] = {"state": {_local(checkpoint, n): s for n, s in per_param.items()}, "param_groups": groups}
    for key, value in PlainValues(where, checkpoint).items():
        state.setdefault(called.get(key, key), value)
    return state


def _states(checkpoint: Checkpoint, key: str, saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    stored = checkpoint.aliases.get(name, name)
    refs: dict[str, Ref] = {}
    for state_key in (*saved["kinds"], *saved.get("nested", ())):
        kind = state_key if key == "optimizer" else f"{key}.{state_key}"
        if stored in checkpoint.tensors and kind in checkpoint.tensors[stored].kinds:
            refs[state_key] = _ref(checkpoint, stored, kind)
        elif f"{stored}/{kind}" in checkpoint.tensors:
            refs[state_key] = _ref(checkpoint, f"{stored}/{kind}", "state")
    scalars = {k: _by_keys(unfold(by_name[name], refs.__getitem__)) for k, by_name in saved["scalars"].items() if name in by_name}
    return {**scalars, **{k: ref for k, ref in refs.items() if k in saved["kinds"]}}


def _by_keys(value: Any) -> Any:
    """Return ``value`` with lists and tuples of tensors as dicts by position. DCP flattens lists of torch's own tensors only."""
    if isinstance(value, Mapping):
        return {key: _by_keys(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_by_keys(item) for item in value]
        return dict(enumerate(items)) if any(isinstance(item, (Ref, Mapping)) for item in items) else value
    return value


def _ref(checkpoint: Checkpoint, stored: str, kind: str) -> Ref:
    tensor = checkpoint.tensors[stored]
    return Ref(stored, kind, tensor.shape, tensor.kinds[kind])


def _local(checkpoint: Checkpoint, name: str) -> str:
    """Return a parameter's name within its entry."""
    entry = entry_of(name, checkpoint.meta.get("models", []))
    return name if entry == "model" else name.removeprefix(f"{entry}/")


# ----------------------------------------------------------------------------------------------------- stock DCP reads ours


class _Answers(dict[str, Any]):
    """A dict that lists every key once, but also answers to other common names (a bare model's state dict, flattened parameter groups)."""

    def __init__(self, items: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        super().__init__(items)
        self._others = others

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._others

    def __missing__(self, key: str) -> Any:
        return self._others[key]


class DcpReader(StorageReader):
    """Reads our checkpoints for ``torch.distributed.checkpoint.load``: any model, any sharding, with or without a process group.

    Each tensor is declared as one chunk, so that DCP plans one item per box of the destination. A box is read as flat runs, merged if they
    share blocks, with every block verified. Besides the names at the head of this module, it answers to a bare model's names
    (``dcp.load(model.state_dict(), ..)``) and to those of ``flatten_optimizer_state_dict``.

    Args:
        root: checkpoint root.
        commit: name of a commit; ``None`` means the newest intact one, on which the ranks must agree.
        entries: ``{our entry: DCP's}`` for entries with other names than in :data:`ENTRIES`.
        cast: whether to convert between floating-point dtypes, or between integer dtypes. Otherwise another dtype is an error (DCP itself
            converts silently).
        budget_bytes: memory to use besides the tensors, in bytes.
    """

    def __init__(
        self,
        root: Root,
        commit: str | Commit | None = None,
        *,
        entries: Mapping[str, str] | None = None,
        cast: bool = False,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        super().__init__()
        self._root, self._commit, self._entries, self._cast, self._budget = root, commit, entries, cast, budget_bytes
        self._checkpoint: Checkpoint | None = None
        self._leaves: dict[str, Any] = {}
        self.bytes_read = 0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._root = checkpoint_id
        self._checkpoint, self.bytes_read = None, 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._checkpoint = checkpoint = open_checkpoint(self._root, self._commit)
        leaves, paths = flatten_state_dict(nested(checkpoint, self._entries))
        others = _other_names(checkpoint, leaves, self._entries)
        self._leaves = {**others, **leaves}
        return Metadata(
            _Answers({key: declared(leaf) for key, leaf in leaves.items()}, {key: declared(leaf) for key, leaf in others.items()}),
            planner_data=paths,
            storage_data={},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        commit = self._opened().commit
        return replace(plan, storage_data=(commit.name, commit.sha256))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = sorted({plan.storage_data for plan in plans})
        if len(seen) > 1:
            raise CheckpointMismatch(
                f"the ranks see different newest checkpoints ({', '.join(name for name, _ in seen)}): one was committed just now; "
                "give DcpReader the commit's name"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._opened()
        ranges: list[Range] = []
        ready: list[tuple[Any, torch.Tensor, torch.Tensor | None]] = []
        for item in plan.items:
            leaf = self._leaves[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                raw = io.BytesIO()
                torch.save(leaf, raw)
                raw.seek(0)
                planner.load_bytes(item, raw)
                continue
            target = planner.resolve_tensor(item).detach()
            if not isinstance(leaf, Ref):
                target.copy_(leaf)
                ready.append((item, target, None))
                continue
            if target.dtype != leaf.dtype and not (self._cast and castable(leaf.dtype, target.dtype)):
                raise CheckpointMismatch(
                    f"{item.dest_index.fqn!r} is {dtype_name(leaf.dtype)} in checkpoint {checkpoint.commit.path}, "
                    f"{dtype_name(target.dtype)} wanted; DcpReader(cast=True) converts"
                )
            direct = target.is_contiguous()
            flat = target.view(-1) if direct else torch.empty(target.numel(), dtype=target.dtype, device=target.device)
            position = 0
            # A box of columns becomes one range, not one range per row.
            box = tuple(item.storage_offsets), tuple(item.lengths)
            tiling = Tiling.around(leaf.shape, box)
            for start, end in tiling.held(leaf.shape, [box]) or ():
                ranges.append(Range(leaf.name, leaf.kind, start, end, flat[position : position + end - start], tiling))
                position += end - start
            assert position == flat.numel(), (box, leaf.shape)
            ready.append((item, target, None if direct else flat))
        self.bytes_read += checkpoint.read_ranges(ranges, cast=self._cast, budget_bytes=self._budget).planned
        for item, target, copied in ready:
            if copied is not None:
                target.copy_(copied.view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise RuntimeError("DcpReader: read_metadata() comes first; use it through torch.distributed.checkpoint.load")
        return self._checkpoint


def declared(leaf: Any) -> Any:
    """DCP's metadata of a leaf: a tensor as one whole chunk, anything else as bytes."""
    if not isinstance(leaf, (Ref, torch.Tensor)):
        return BytesStorageMetadata()
    size = torch.Size(leaf.shape)
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])


def _other_names(checkpoint: Checkpoint, leaves: Mapping[str, Any], entries: Mapping[str, str] | None) -> dict[str, Any]:
    called = {**ENTRIES, **(entries or {})}
    others: dict[str, Any] = {}
    for key in ("model", "optimizer"):
        prefix = called.get(key, key) + "."
        others |= {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}
    for key, saved in checkpoint.meta.get("optimizers", {}).items():
        flat = {
            f"param_groups.{_local(checkpoint, name)}.{k}": unfold(v)
            for group in saved["groups"]
            for name in group["params"]
            for k, v in group["hyper"].items()
        }
        others |= {f"{called.get(key, key)}.{name}": value for name, value in flat.items()}
        if key == "optimizer":
            others |= flat
    return others


# -------------------------------------------------------------------------------------------------------------------- import


def import_dcp(
    folder: str | os.PathLike[str],
    target: Root | nn.Module | Mapping[str, Any],
    *,
    rename: Mapping[str, str] | NameTable | None = None,
    include: Globs = "*",
    exclude: Globs = (),
    allow_missing: Globs = (),
    allow_unexpected: Globs = (),
    cast: bool = False,
    device: torch.device | str | None = None,
    entries: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    step: int = 0,
    object_bytes: int = OBJECT_BYTES,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Imported | Commit:
    """Import a stock DCP checkpoint into the shards of a model or a whole state, or into a root as its newest commit. Every rank calls it.

    A commit gets everything (weights, optimizer states, scalars, hyperparameters, plain values), so that ``load`` can resume from it. A
    state, ``{"model": model, "optimizer": optimizer, "scheduler": scheduler, ..}``, gets the entries that it names.

    Args:
        folder: folder that ``torch.distributed.checkpoint.save`` wrote.
        target: a model or dict of tensors, sharded or not; a state as for :func:`~vescale_ray.checkpoint.load`; or a checkpoint root.
        rename: table from our names to the checkpoint's; for a root its inverse is used.
        include, exclude: globs of our names.
        allow_missing, allow_unexpected, cast, device: for a model or state, as in :func:`~vescale_ray.checkpoint.load`.
        entries: ``{our entry: DCP's}`` for entries with other names than in :data:`ENTRIES`.
        tied: ``{other name: name}`` of our names (for a model or state, of the checkpoint's). DCP stores tied tensors twice; they become
            one if they are equal.
        step, object_bytes: for a root, the commit's step and the size of its objects in bytes, which is also the memory used.

    Raises:
        ForeignFileError: the checkpoint is malformed, or has objects that cannot be read without unpickling them.
        CheckpointMismatch: names, shapes or dtypes differ.
    """
    called, aliases = {**ENTRIES, **(entries or {})}, dict(tied or {})
    if not is_root(target):
        if not isinstance(target, (nn.Module, Mapping)):
            raise ValueError(f"the target is a {type(target).__name__}; give a module, a state, a checkpoint folder or a store")
        state = state_of(target)
        source = together(lambda: DcpSource(folder, called, only=set(state)), group)
        from_first(lambda: _check_tied(source, aliases), group)
        source.tie(aliases)
        return into_state(
            source,
            state,
            include=include,
            exclude=exclude,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            rename=rename,
            cast=cast,
            device=device,
            group=group,
            progress=progress,
        )
    back = table_of(rename).inverse()
    source = together(lambda: DcpSource(folder, called, back, globs(include), globs(exclude)), group)
    from_first(lambda: _check_tied(source, aliases), group)
    source.tie(aliases)
    together(source.check_room, group)
    meta = together(lambda: source.meta, group)
    return into_commit(
        source,
        target,  # type: ignore[arg-type]
        {name: name for name in source.tensors},
        step=step,
        meta=meta,
        aliases=aliases,
        object_bytes=object_bytes,
        group=group,
        progress=progress,
    )


def _check_tied(source: DcpSource, aliases: Mapping[str, str]) -> None:
    for alias, name in aliases.items():
        one, other = source.tensors.get(alias), source.tensors.get(name)
        if one is None or other is None:
            raise CheckpointMismatch(f"{source.describe()} has no tensor {(alias if one is None else name)!r}, which is in tied")
        if set(one.kinds) != {"param"}:
            raise CheckpointMismatch(f"{source.describe()}: {alias!r} has optimizer states of its own: it is not tied to {name!r}")
        numel = math.prod(one.shape)
        same = (one.shape, one.kinds["param"]) == (other.shape, other.kinds.get("param"))
        for start in range(0, numel if same else 0, 1 << 20):
            left, right = (torch.empty(min(1 << 20, numel - start), dtype=one.kinds["param"]) for _ in range(2))
            source.read_into(alias, "param", start, left)
            source.read_into(name, "param", start, right)
            same = same and torch.equal(as_bytes(left), as_bytes(right))
        if not same:
            raise CheckpointMismatch(f"{source.describe()}: {alias!r} and {name!r} differ: they are not tied")
