"""Choice of the checkpoint that a run resumes from when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vescale_ray.controller.protocol import RunRefused

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Commit
    from vescale_ray.config import RunConfig


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
