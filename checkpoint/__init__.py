"""Checkpoints that are saved on N ranks and loaded on M, verified block by block, committed all or nothing.

Each rank writes its shard as one safetensors object; a manifest, created exclusively and last, is the commit. Tensors are
described as 1-D intervals, so that a load onto other ranks or another layout is interval arithmetic and reads no byte
twice. The format is in ``docs/checkpoint-format.md``.

Layers, each in its file: ``store`` (the seam) and ``posix``; ``digest``; ``layout`` (a rank's object) and ``manifest`` (the
commit object); ``shard``, ``commits``, ``reader``, ``compare``, ``scrub``, ``retention`` (what is done with them); ``tensors``,
``state``, ``rng``, ``api`` and ``loading`` with ``names``, ``matching``, ``materialize`` (a training script's state); ``foreign`` and,
on it, ``huggingface`` with ``safetensors_file``, ``dcp`` with ``dcp_state``, ``dcp_files``, ``dcp_export`` (other programs' formats).
May import ``vescale_ray.geometry``, torch, numpy, xxhash; neither Ray nor fsdp.
"""

from .api import SaveHandle, save
from .commits import Commit, commit, latest, ls
from .compare import CheckpointDiff, Difference, diff
from .dcp import DcpReader, import_dcp
from .dcp_export import DcpExported, export_dcp
from .errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CommitExists,
    CommitRefused,
    ExportFailed,
    ForeignFileError,
    NoCheckpoint,
    SaveFailed,
)
from .faults import FAULT_ENV, FAULT_POINTS, fault_point
from .foreign import Imported
from .huggingface import Exported, export_hf, import_hf
from .layout import ShardPiece
from .loading import Loaded, load
from .matching import StoredTensor
from .names import NameTable
from .posix import PosixStore
from .reader import Checkpoint, ReadPlan
from .reader import open_checkpoint as open
from .retention import GcReport, gc
from .rng import capture_rng, derive_rng, restore_rng
from .scrub import Problem, VerifyReport, verify
from .shard import Vote, new_attempt, write_shard
from .store import ObjectStore

__all__ = [
    "FAULT_ENV",
    "FAULT_POINTS",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointDiff",
    "CheckpointError",
    "CheckpointMismatch",
    "Commit",
    "CommitExists",
    "CommitRefused",
    "DcpExported",
    "DcpReader",
    "Difference",
    "ExportFailed",
    "Exported",
    "ForeignFileError",
    "GcReport",
    "Loaded",
    "NameTable",
    "NoCheckpoint",
    "Imported",
    "ObjectStore",
    "PosixStore",
    "Problem",
    "ReadPlan",
    "SaveFailed",
    "SaveHandle",
    "ShardPiece",
    "StoredTensor",
    "VerifyReport",
    "Vote",
    "capture_rng",
    "commit",
    "derive_rng",
    "diff",
    "export_dcp",
    "export_hf",
    "fault_point",
    "gc",
    "import_dcp",
    "import_hf",
    "latest",
    "load",
    "ls",
    "new_attempt",
    "open",
    "restore_rng",
    "save",
    "verify",
    "write_shard",
]
