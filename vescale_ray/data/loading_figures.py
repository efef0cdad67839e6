"""Figures of a worker's reading of its data set, for metrics and warnings. A data set that lies in memory has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vescale_ray.data.block_dataset import BlockDataset
from vescale_ray.data.mixture import Mixture


def figures_of(dataset: Any) -> dict[str, int]:
    """Return the figures of all sources of ``dataset`` together; empty if none of them is read in blocks.

    ``waiting_tokens``: tokens in memory, with those of the current window. ``read_bytes``: bytes of all tokens ever read.
    ``skipped_files`` and ``skipped_records``: what :class:`vescale_ray.data.sources.files.Skipped` counts.
    """
    blocks = [one for _, one in _sources(dataset)]
    if not blocks:
        return {}
    return {
        "waiting_tokens": sum(one.reader.waiting_tokens for one in blocks),
        "read_bytes": sum(one.reader.read_bytes for one in blocks),
        "skipped_files": sum(one.skipped.files for one in blocks if one.skipped is not None),
        "skipped_records": sum(one.skipped.records for one in blocks if one.skipped is not None),
    }


def take_errors(dataset: Any) -> list[str]:
    """Return warnings of data that is left out because it is damaged, since the last call. If the driver has found the damage, too, its
    warning is the same."""
    found = ((name, one.skipped) for name, one in _sources(dataset) if one.skipped is not None)
    return [f"{name}: left out: {text}" for name, skipped in found for text in skipped.take()]


def _sources(dataset: Any) -> Iterator[tuple[str, BlockDataset]]:
    """Return the sources that are read in blocks, with the keys that name them."""
    named = zip(dataset.names, dataset.sources, strict=True) if isinstance(dataset, Mixture) else [("data.corpus", dataset)]
    return ((name, one) for name, one in named if isinstance(one, BlockDataset))
