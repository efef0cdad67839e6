"""Going back: an older checkpoint becomes the newest one again, as another commit of the same data in a higher epoch.

Nothing is deleted: the checkpoints of the steps that are given up stay until a rule of the retention lets them go, which keeps the data as
long as any commit refers to it. One object is created, exclusively: there is no moment at which half of it is done, and whoever
resumes afterwards, however often, goes on from there.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from .commits import Commit, find, ls, read_manifest
from .errors import CommitExists, CommitRefused, SaveFailed
from .manifest import encode
from .store import KeyExists, Root, store_of


def roll_back(root: Root, name: str) -> Commit:
    """Make the checkpoint called ``name`` the newest one of ``root``; the new commit, whose ``meta`` says ``rolled_back``.

    Nobody may be saving there: a run that still goes on would have its next checkpoints refused.

    Raises:
        NoCheckpoint, CheckpointCorrupt, OSError: as :func:`vescale_ray.checkpoint.open`; its data is not read.
        CommitRefused: it is the newest one already. CommitExists: somebody else has just committed. SaveFailed: the storage refused.
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
        raise CommitExists(f"{store.describe(f'commits/{made.name}.json')} has just been made by somebody else; look again") from None
    except OSError as error:
        # As after a commit whose folder could not be synced: it is there now, and may not be after a power cut.
        text = f"could not commit in {store.describe()}: {error.strerror or error}; whether it was made, `vescale-ray ckpt ls` can tell"
        raise SaveFailed(text) from error
    return find(store, made.name)
