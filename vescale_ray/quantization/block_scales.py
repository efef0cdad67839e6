"""One number per block: the largest magnitudes of a region's blocks, and scales spread over its elements."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_ray.block_grid import Region


def spread(scales: Tensor, region: Region) -> Tensor:
    """Expand the scales of whole bands so that they broadcast against ``(bands, rows, cols)``."""
    columns = region.columns
    if columns == 1:
        return scales.view(-1, 1, 1)
    wide = scales.view(-1, columns, 1).expand(-1, -1, region.block_cols).reshape(-1, columns * region.block_cols)
    return wide[:, None, : region.cols]


def largest_of(x: Tensor, region: Region) -> Tensor:
    """Return the largest magnitude of each block of ``x`` ``(bands, rows, cols)``, in order; NaN if a block holds NaN."""
    by_column = x.abs().amax(dim=1)
    columns = region.columns
    missing = columns * region.block_cols - region.cols
    if missing:
        by_column = torch.nn.functional.pad(by_column, (0, missing))
    return by_column.view(-1, region.block_cols).amax(dim=1)
