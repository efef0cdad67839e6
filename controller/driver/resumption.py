"""The choice of the checkpoint from which a run resumes at its start, and the settings that have changed since it was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.config.mistakes import shown
from vescale_ray.controller.driver.resumed_keys import changed_keys
from vescale_ray.controller.protocol import RunRefused

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint, Commit
    from vescale_ray.config import RunConfig

_HASH = re.compile(r"[0-9a-f]{64}")
_ASIDE = ("dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "use_cache", "auto_map")
"""Keys of transformers' config.json that do not change what a model computes in training."""


def choose_commit(config: RunConfig, commits: Sequence[Commit]) -> tuple[Commit | None, tuple[str, ...]]:
    """Return the newest whole one of ``commits``, or None if there are none, and a warning for each newer one that is damaged.

    Args:
        commits: those that the run may resume from, oldest first.

    Raises:
        RunRefused: all are damaged, or there is none with ``checkpoint.resume: must``.
        OSError: a newer one is out of reach. It may be whole, so no older one takes its place.
    """
    from vescale_ray import checkpoint

    root = config.checkpoint_root
    damaged: list[Commit] = []
    for commit in reversed(commits):
        found = checkpoint.open(root, commit.name).commit if commit.unread else commit
        if found.problem is None:
            return found, tuple(f"{one.path} is skipped: {one.problem}" for one in damaged)
        damaged.append(found)
    if damaged:
        raise RunRefused(
            f"{root} holds {len(damaged)} checkpoints, of which none is whole ({damaged[0].name}: {damaged[0].problem}); "
            "repair the storage, or set checkpoint.resume=never to begin anew"
        )
    if config.checkpoint.resume == "must":
        raise RunRefused(f"checkpoint.resume = must, but {root} holds no checkpoint; set checkpoint.resume=auto or another checkpoint.dir")
    return None, ()


def check_same_stream(opened: Checkpoint, stream: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another text, seed or batch.

    Its position in the stream would mean other samples, so some would be lost, and some used twice."""
    stored = opened.meta.get("stream") or {}
    for key, value in stream.items():
        if key in stored and stored[key] != value:
            other = f"{key} = {stored[key]}, now it is {value}" if not _hashes(stored[key], value) else f"other content of {key}"
            raise RunRefused(
                f"{opened.commit.path} was saved with {other}: samples would be lost or repeated; set it back, or set "
                "checkpoint.resume=never to begin anew"
            )


def check_same_base(opened: Checkpoint, config: RunConfig) -> None:
    """Refuse adapters that were trained on weights other than those of ``model.hf``.

    A damaged checkpoint passes here. The workers go on from an older one, and check that one."""
    from vescale_ray import checkpoint
    from vescale_ray.workers.building.initial_values import base_of, other_base

    if config.model.lora is None:
        return
    try:
        trained = base_of(opened)
    except checkpoint.CheckpointCorrupt:
        return
    if trained != checkpoint.fingerprint(str(config.model.hf)):
        raise RunRefused(other_base(config, opened.commit.path))


def _hashes(*values: Any) -> bool:
    return all(_HASH.fullmatch(str(value)) for value in values)


def changes_since(opened: Checkpoint, config: RunConfig) -> Iterator[str]:
    """Yield a warning for each changed setting that changes the computation although the saved state fits."""
    told = [*changed_keys(opened.meta.get("config") or {}, config)]
    for key, before, now, follows in (*told, *(_changes(config) if config.model.hf is not None else ())):
        yield f"{opened.commit.path} was saved with {key} = {before}, now it is {now}: {follows}"


def _changes(config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield, as :func:`changed_keys`, the settings of a model's config.json that differ from the copy that the last start has made."""
    from vescale_ray.models.hf import CONFIG
    from vescale_ray.runfolder import RunFolder

    def read(folder: Path) -> dict[str, Any]:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if key not in _ASIDE}

    try:
        before, now = read(RunFolder(config.run_folder).path / "model"), read(Path(str(config.model.hf)))
    except (OSError, ValueError, AttributeError):
        return
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            values = shown(before.get(key)), shown(now.get(key))
            yield f"{config.model.hf}/{CONFIG}: {key}", *values, "its weights were trained with the former"
