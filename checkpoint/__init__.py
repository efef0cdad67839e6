"""Checkpoints that N ranks save and M ranks load, verified block by block, and committed all or nothing.

Each rank writes its shard as one safetensors object. A manifest, created exclusively and last, is the commit. Tensors are described as 1-D
intervals, so that a load onto other ranks or layouts is interval arithmetic and reads no byte twice.
``docs/reference/checkpoint-format.md`` describes the format.

The layers are: ``store`` (the interface) and its back ends ``posix``, ``s3``, ``fsspec_store``, ``memory``, ``faulty``; ``digest``;
``layout`` (a rank's object) and ``manifest`` (the commit object); the operations ``shard``, ``copies``, ``commits``, ``reader``,
``compare``, ``scrub``, ``proof``, ``retention``, ``rollback``; a training script's state in ``tensors``, ``state``, ``plain``, ``entries``,
``scalars``, ``saved_meta``, ``rng``, ``api`` and ``loading`` with ``names``, ``matching``, ``materialize``, ``saver`` with ``staging``,
``handle``, ``accord``, ``voting``, ``bounded`` and ``polling``; ``interval``; other programs' formats in ``foreign``, ``huggingface`` with
``safetensors_file``, and ``dcp`` with ``dcp_export``, ``dcp_state``, ``dcp_files`` and ``dcp_pickle``. The package may import
``vescale_ray.geometry``, ``vescale_ray.lasting``, torch, numpy, xxhash, and in a back end its client library, but neither Ray nor fsdp.
"""

from .api import save
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
    SaveAborted,
    SaveFailed,
    SaveSkipped,
)
from .faults import FAULT_ENV, FAULT_POINTS, fault_point
from .faulty import Fault, FaultyStore
from .foreign import Imported
from .fsspec_store import FsspecStore
from .handle import SaveHandle
from .huggingface import Exported, export_hf, import_hf
from .interval import Interval, choose_interval, daly_interval, expected_mtbf
from .layout import ShardPiece
from .loading import Loaded, load
from .matching import StoredTensor
from .memory import MemoryStore
from .names import NameTable
from .posix import PosixStore
from .read_plan import ReadPlan
from .reader import Checkpoint
from .reader import open_checkpoint as open
from .retention import NO_GRACE, GcReport, Grace, Retention, gc, pin, pins, unpin
from .rng import capture_rng, derive_rng, restore_rng
from .rollback import roll_back
from .s3 import S3Store
from .s3_calls import S3Options
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
    "Grace",
    "Imported",
    "Interval",
    "Loaded",
    "MemoryStore",
    "NameTable",
    "NoCheckpoint",
    "ObjectStore",
    "PosixStore",
    "Problem",
    "ReadPlan",
    "Retention",
    "S3Options",
    "S3Store",
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
    "diff",
    "expected_mtbf",
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
    "pin",
    "pins",
    "restore_rng",
    "roll_back",
    "save",
    "unpin",
    "verify",
    "write_shard",
]
