"""Checkpoints that are saved on N ranks and loaded on M, verified block by block, committed all or nothing.

Each rank writes its shard as one safetensors object; a manifest, created exclusively and last, is the commit. Tensors are
described as 1-D intervals, so that a load onto other ranks or another layout is interval arithmetic and reads no byte
twice. The format is in ``docs/checkpoint-format.md``.

Layers, each in its file: ``store`` (the seam) and its back ends ``posix``, ``s3``, ``fsspec_store``, ``memory``, ``faulty``; ``digest``;
``layout`` (a rank's object) and ``manifest`` (the commit object); ``shard``, ``commits``, ``reader``, ``compare``, ``scrub``,
``retention`` (what is done with them); ``tensors``, ``state``, ``rng``, ``api`` and ``loading`` with ``names``, ``matching``,
``materialize``, ``saver`` with ``staging``, ``handle`` and ``voting`` (a training script's state); ``interval``; ``foreign`` and, on it,
``huggingface`` with ``safetensors_file``, ``dcp`` with ``dcp_export``, ``dcp_state`` and ``dcp_files`` (other programs' formats). May
import ``vescale_ray.geometry``, torch, numpy, xxhash, and inside a back end its client library; neither Ray nor fsdp.
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
from .faulty import Fault, FaultyStore
from .foreign import Imported
from .fsspec_store import FsspecStore
from .huggingface import Exported, export_hf, import_hf
from .layout import ShardPiece
from .loading import Loaded, load
from .matching import StoredTensor
from .memory import MemoryStore
from .names import NameTable
from .posix import PosixStore
from .reader import Checkpoint, ReadPlan
from .reader import open_checkpoint as open
from .retention import GcReport, gc
from .rng import capture_rng, derive_rng, restore_rng
from .s3 import S3Store
from .s3_calls import S3Options
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
    "Fault",
    "FaultyStore",
    "ForeignFileError",
    "FsspecStore",
    "GcReport",
    "Imported",
    "Loaded",
    "MemoryStore",
    "NameTable",
    "NoCheckpoint",
    "ObjectStore",
    "PosixStore",
    "Problem",
    "ReadPlan",
    "S3Options",
    "S3Store",
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
