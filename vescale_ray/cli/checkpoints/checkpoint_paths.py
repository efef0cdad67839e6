"""The arguments PATH and PATH@NAME of ``vescale-ray ckpt``: the checkpoints that they mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vescale_ray.errors import BadInput
from vescale_ray.lasting import check_lasting

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint, ObjectStore
    from vescale_ray.runfolder import RunFolder

Target = str | Path
COMMIT = re.compile(r"e\d{4,}-s\d{12,}")
"""Names of commits."""


def root_of(path: str | None, *, must_exist: bool = True) -> Target:
    """Return the folder (or URL) of checkpoints for PATH. ``None`` means the newest run."""
    from vescale_ray.config import load_config

    if path == "":
        raise BadInput("PATH is empty; give a run's name, a folder or a URL")  # an unset variable in a script must not mean this folder
    if path is not None and "://" in path:
        return path
    folder = _meant(path)
    root = folder.path
    if folder.config_path.is_file():
        # The run's folder may have moved; its present place counts, unless the configuration names another one.
        config = load_config(folder.config_path)
        if config.checkpoint.dir and "://" in config.checkpoint.dir:
            return config.checkpoint.dir
        root = Path(config.checkpoint_root) if config.checkpoint.dir else folder.checkpoints
    if must_exist and not root.is_dir():
        raise BadInput(f"{root}: no such folder of checkpoints, and no run of that name under ./runs; `vescale-ray ls` lists runs")
    if not must_exist:
        check_lasting(f"PATH = {path}", root)
    return root


def _meant(path: str | None) -> RunFolder:
    """Return the folder that PATH means: a run's, or one of checkpoints."""
    from vescale_ray.runfolder import RunFolder, newest_run

    named = Path("runs", path) if path is not None and not Path(path).exists() and os.sep not in path else None
    return newest_run() if path is None else RunFolder(named if named is not None and named.is_dir() else path)


def run_folder_of(path: str) -> RunFolder | None:
    """Return the run that PATH means; None if it is a URL or only a folder of checkpoints."""
    folder = None if "://" in path else _meant(path)
    return folder if folder is not None and folder.is_run() else None


def split(path: str | None) -> tuple[Target, str | None]:
    """Split PATH[@NAME] into (root, NAME)."""
    if path is not None and "@" in path:
        before, _, name = path.rpartition("@")
        if COMMIT.fullmatch(name):
            return root_of(before or None), name
    return root_of(path), None


def store_at(root: Target) -> ObjectStore:
    from vescale_ray.checkpoint.stores.opening import store_of

    with bad_values():
        return store_of(root)


def open_at(path: str | None, name: str | None) -> Checkpoint:
    from vescale_ray import checkpoint

    root, found = split(path)
    return checkpoint.open(store_at(root), name or found)


@contextmanager
def bad_values() -> Iterator[None]:
    """Turn the library's ValueErrors into bad input, because the user gave the value."""
    try:
        yield
    except ValueError as error:
        raise error if isinstance(error, BadInput) else BadInput(str(error)) from None
