"""Checkpoints that are saved on N ranks and loaded on M, verified block by block, committed all or nothing.

Each rank writes its shard as one safetensors object; a manifest, created exclusively and last, is the commit. Tensors are
described as 1-D intervals, so that a load onto other ranks or another layout is interval arithmetic and reads no byte
twice. The format is in ``docs/checkpoint-format.md``.

Layers, each in its file: ``store`` (the seam) and ``posix``; ``digest``; ``layout`` (a rank's object) and ``manifest`` (the
commit object); ``staging``, ``shard``, ``commits``, ``reader``, ``scrub``, ``retention`` (what is done with them); ``tensors``,
``state``, ``rng``, ``voting``, ``handle``, ``api``, ``saver`` and ``interval`` (a training script's state, and how often to save it).
May import ``vescale_ray.geometry``, torch, numpy, xxhash; neither Ray nor fsdp.
"""

from .api import Loaded, load, save
from .commits import Commit, commit, latest, ls
from .errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CommitExists,
    CommitRefused,
    NoCheckpoint,
    SaveAborted,
    SaveFailed,
    SaveSkipped,
)
from .faults import FAULT_ENV, FAULT_POINTS, fault_point
from .handle import SaveHandle
from .interval import Interval, choose_interval, daly_interval, expected_mtbf
from .layout import ShardPiece
from .posix import PosixStore
from .reader import Checkpoint, ReadPlan, StoredTensor
from .reader import open_checkpoint as open
from .retention import NO_GRACE, GcReport, Grace, Retention, gc, pin, pins, unpin
from .rng import capture_rng, derive_rng, restore_rng
from .saver import Saver
from .scrub import Problem, VerifyReport, verify
from .shard import Vote, new_attempt, write_shard
from .store import ObjectStore

__all__ = [
    "FAULT_ENV",
    "FAULT_POINTS",
    "NO_GRACE",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Commit",
    "CommitExists",
    "CommitRefused",
    "GcReport",
    "Grace",
    "Interval",
    "Loaded",
    "NoCheckpoint",
    "ObjectStore",
    "PosixStore",
    "Problem",
    "ReadPlan",
    "Retention",
    "SaveAborted",
    "SaveFailed",
    "SaveHandle",
    "SaveSkipped",
    "Saver",
    "ShardPiece",
    "StoredTensor",
    "VerifyReport",
    "Vote",
    "capture_rng",
    "choose_interval",
    "commit",
    "daly_interval",
    "derive_rng",
    "expected_mtbf",
    "fault_point",
    "gc",
    "latest",
    "load",
    "ls",
    "new_attempt",
    "open",
    "pin",
    "pins",
    "restore_rng",
    "save",
    "unpin",
    "verify",
    "write_shard",
]
