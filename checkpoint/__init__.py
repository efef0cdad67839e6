"""Checkpoints that N ranks save and M ranks load, verified block by block, and committed all or nothing.

Each rank writes its shard as one safetensors object. A manifest, created exclusively and last, is the commit. Tensors are described as 1-D
intervals, so that a load onto other ranks or layouts is interval arithmetic and reads no byte twice.
``docs/reference/checkpoint-format.md`` describes the format.

The parts, from the bottom up:

    stores/   the interface of an object store and its back ends: POSIX, S3, fsspec, memory
    format/   a rank's object, and the manifest
    commits   makes commits and finds them
    upkeep/   retention, pins, reading back, deletion, the way back to an older checkpoint
    state/, plain_values/    a training script's state as named tensors, and its other values as JSON and bytes
    reading/  planned and verified reads, the load of a state, the comparison of two checkpoints
    api, saving/   the calls that save a state, at once or asynchronously
    bridges/, huggingface*  other programs' formats

The package may import ``vescale_ray.geometry``, ``vescale_ray.lasting``, torch, numpy, xxhash, and in a back end its client library, but
neither Ray nor fsdp.
"""

from .api import save
from .bridges.dcp import DcpReader, import_dcp
from .bridges.dcp_export import DcpExported, export_dcp
from .bridges.foreign import Imported
from .commits import Commit, commit, latest, ls
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
from .format.object_layout import ShardPiece
from .format.shard import Vote, new_attempt, write_shard
from .huggingface import fingerprint, import_hf
from .huggingface_export import Exported, export_hf
from .interval import Interval, choose_interval, daly_interval, expected_mtbf
from .plain_values.rng import capture_rng, derive_rng, restore_rng
from .reading.compare import CheckpointDiff, Difference, diff
from .reading.loading import Loaded, load
from .reading.read_plan import ReadPlan
from .reading.reader import Checkpoint
from .reading.reader import open_checkpoint as open
from .saving.handle import SaveHandle
from .saving.saver import Saver
from .state.matching import StoredTensor
from .state.name_tables import NameTable
from .stores.fsspec_store import FsspecStore
from .stores.memory_store import MemoryStore
from .stores.posix import PosixStore
from .stores.s3 import S3Store
from .stores.s3_options import S3Options
from .stores.store import ObjectStore
from .upkeep.collection import gc
from .upkeep.pins import pin, pins, unpin
from .upkeep.retention import NO_GRACE, GcReport, Grace, Retention
from .upkeep.rollback import roll_back
from .upkeep.scrub import Problem, VerifyReport, verify

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
    "fingerprint",
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
