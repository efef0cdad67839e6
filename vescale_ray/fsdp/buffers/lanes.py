"""The streams and the buffer pool that all units of one root share."""

from __future__ import annotations

import torch

from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.communication.comm import Lane


class Lanes:
    """The side streams and the buffer pool. :func:`share_comm_ctx` lets several roots share one object."""

    def __init__(self, device: torch.device) -> None:
        # High priority: a collective that is ready should not wait behind compute kernels.
        self.gather = Lane(device, priority=-1)
        self.reduce = Lane(device, priority=-1)
        self.pool = Pool(device, self.gather)
