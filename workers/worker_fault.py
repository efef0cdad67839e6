"""The reason why a worker left its generation early, from the exception that ended it."""

from __future__ import annotations

from vescale_ray.checkpoint import CheckpointError
from vescale_ray.errors import BadInput
from vescale_ray.quantization.fp8 import NonFiniteWeights
from vescale_ray.workers.messages import FaultKind, WorkerFault
from vescale_ray.workers.network.process_groups import GroupFailed, describe, is_collective_error


def fault_of(error: BaseException) -> WorkerFault:
    """Return the fault of a generation that ``error`` ended. Afterwards the error holds no frames, which would keep the group's sockets
    open."""
    return WorkerFault(_kind(error), describe(error))


def _kind(error: BaseException) -> FaultKind:
    if isinstance(error, BadInput):
        return FaultKind.INPUT
    if isinstance(error, CheckpointError):
        return FaultKind.DATA
    if isinstance(error, NonFiniteWeights):
        return FaultKind.NUMBERS
    if isinstance(error, GroupFailed) or is_collective_error(error):
        return FaultKind.PEER
    return FaultKind.OWN
