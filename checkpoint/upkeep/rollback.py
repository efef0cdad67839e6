"""Roll back: make an older checkpoint the newest again, by another commit of the same data in a higher epoch.

Nothing is deleted. The checkpoints of abandoned steps stay until retention deletes them, and data stays as long as any commit refers to it.
One object is created, exclusively, so no half-done state exists. Every later resume starts from it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from ..commits import Commit, find, ls, read_manifest
from ..errors import CommitExists, CommitRefused, SaveFailed
from ..format.manifest_codec import encode
from ..stores.opening import store_of
from ..stores.store import KeyExists, Root


def roll_back(root: Root, name: str) -> Commit:
    """Make the checkpoint called ``name`` the newest one of ``root``. Returns the new commit, whose ``meta`` has ``rolled_back``.

    No run may be saving there, since its next checkpoints would be refused.

    Raises:
        NoCheckpoint, CheckpointCorrupt, OSError: as :func:`vescale_ray.checkpoint.open`; the data is not read.
        CommitRefused: it is the newest one already. CommitExists: another process has just committed. SaveFailed: the storage failed.
    """
    store = store_of(root)
    commits = ls(store)
    found = find(store, name)
    newest = commits[-1]
    if newest.name == found.name:
        raise CommitRefused(f"{found.path} is the newest checkpoint: a run resumes from it as it is")
    old, _ = read_manifest(store, found.name)
    about = {"from": newest.name, "to": found.name}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    made = replace(old, epoch=newest.epoch + 1, created=created, meta={**old.meta, "rolled_back": about})
    try:
        store.put(f"commits/{made.name}.json", encode(made))
    except KeyExists:
        raise CommitExists(f"{store.describe(f'commits/{made.name}.json')} was just made by another process; look again") from None
    except OSError as error:
        # As after a commit whose folder was not synced, it may exist now and be gone after a power cut.
        text = f"could not commit in {store.describe()}: {error.strerror or error}; `vescale-ray ckpt ls` shows whether it was made"
        raise SaveFailed(text) from error
    return find(store, made.name)
