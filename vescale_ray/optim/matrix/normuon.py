"""NorMuon: rows of the orthogonalized update are made equally large (Li et al. 2025, arXiv 2510.05491).

    v <- beta2 v + (1 - beta2) mean_row(U^2)        one number per row, kept on the row's rank
    U <- U / (sqrt(v) + 1e-8) * |U| / |U / ..|       the matrix's norm stays as Newton-Schulz made it

Rows are never cut, so v needs no communication. The two norms of a matrix are summed over its ranks, in one small all-reduce per step
for all matrices. (dion takes the norms on local shards, so its result depends on the number of ranks.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.communication import wait_notes
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import sharding_of
from vescale_ray.optim.matrix.exchange import Exchange
from vescale_ray.optim.matrix.matrices import Holding, MatrixSpan

_EPS = 1e-8


class RowMoments:
    """The second moments of a step's rows, and the factor of each matrix; by job, on this rank."""

    KEY = "row_second_moment"
    """Name of the state of a parameter [.., m, n]: [.., m], FP32; each row's entry is on the row's rank."""

    @staticmethod
    def check(spans: Sequence[MatrixSpan], held: Holding, name: str) -> None:
        """Raise ValueError if a rank's part ends inside a row."""
        cols = spans[0].cols if spans else 1
        bad = next((end for _, end in held.intervals if end % cols), None)
        if bad is not None:
            raise ValueError(
                f"normuon needs whole rows, but {name} is cut after element {bad}, inside a row of {cols}: shard it with "
                f"block_policy=lambda name, p: Block.rows(1)"
            )

    @staticmethod
    def zeros(parameter: Tensor) -> Tensor:
        """Return the initial state of ``parameter``, sharded like it."""
        shape = tuple(parameter.shape[:-1])
        if isinstance(parameter, RaggedDTensor):
            sharding = sharding_of(parameter._spec)
            cols = max(1, parameter.shape[-1])
            counts = [(end - start) // cols for start, end in sharding.placement.intervals(sharding.section)]
            ragged = RaggedShard.of_intervals(sharding.section[:-1], counts)
            placements = tuple(ragged if i == sharding.mesh_dim else p for i, p in enumerate(parameter.placements))
            local_shape = ragged.local_shape(tuple(sharding.section[:-1]), sharding.rank)
            local = torch.zeros(local_shape, dtype=torch.float32, device=parameter._local_tensor.device)
            return RaggedDTensor.from_local(local, parameter.device_mesh, placements, shape=shape)
        if isinstance(parameter, DTensor):
            local = torch.zeros(parameter._local_tensor.shape[:-1], dtype=torch.float32, device=parameter._local_tensor.device)
            size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
            return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride)
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)

    @classmethod
    def of(
        cls, exchange: Exchange, updates: Mapping[int, Tensor], moments: Mapping[int, Tensor], beta2: Mapping[int, float]
    ) -> RowMoments | None:
        """Return new moments and factors for this rank's updates, or None if no parameter of the exchange uses NorMuon. Collective.

        Args:
            updates: flat BF16 updates, by job.
            moments: flat moments of this rank's rows, by parameter.
            beta2: the decay, by parameter.
        """
        jobs = exchange.itinerary.jobs
        wanted = [i for i, job in enumerate(jobs) if job.param in beta2]
        if not wanted:
            return None
        found: dict[int, tuple[Tensor, Tensor]] = {}
        norms = torch.zeros(len(wanted), 2, dtype=torch.float64, device=exchange.home)
        for k, i in enumerate(wanted):
            if i in updates:
                job = jobs[i]
                rows = updates[i].view(-1, job.span.cols)
                where = job.local(exchange.rank)
                held = moments[job.param][where.start // job.span.cols : where.stop // job.span.cols]
                squares = rows.double().square()
                new = held.lerp(squares.mean(dim=1).float(), 1 - beta2[job.param])
                found[i] = (held, new)
                norms[k, 0], norms[k, 1] = squares.sum(), _normalized(rows, new).double().square().sum()
        if exchange.itinerary.world > 1:
            norms = norms.to(exchange.device)
            with wait_notes.counted("all_reduce"):
                dist.all_reduce(norms, group=exchange.group)
            norms = norms.to(exchange.home)
        factors = (norms[:, 0] / norms[:, 1]).sqrt().nan_to_num(nan=1.0, posinf=1.0).float()
        return cls(exchange, {i: (*found[i], factors[k]) for k, i in enumerate(wanted) if i in found})

    def __init__(self, exchange: Exchange, rows: dict[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        self._exchange, self._rows = exchange, rows

    def covers(self, index: int) -> bool:
        return index in self._rows

    def scaled(self, index: int, update: Tensor) -> Tensor:
        """Return the normalized update of a job, flat, FP32, and write the new moments into the state."""
        held, new, factor = self._rows[index]
        held.copy_(new)
        rows = update.view(-1, self._exchange.itinerary.jobs[index].span.cols)
        return (_normalized(rows, new) * factor).view(-1)


def _normalized(rows: Tensor, moments: Tensor) -> Tensor:
    return rows.float() / (moments.sqrt() + _EPS).unsqueeze(1)
