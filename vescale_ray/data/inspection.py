"""Report on a configuration's data: counts of each source, its share of a run, and a decoded sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vescale_ray.config.data_section import DataSection
from vescale_ray.data.dataset import Dataset, SampleOrder
from vescale_ray.data.mixture import Mixture
from vescale_ray.data.text.encoders import load_tokenizer


@dataclass(frozen=True)
class SourceReport:
    """One source, or one evaluation set.

    Attributes:
        key: key of the configuration that names it.
        about: its description, without its hash.
        share: its share of the samples; None for an evaluation set.
        epochs: how often the run uses each of its samples; None for an evaluation set.
        bytes_per_token: mean bytes of text of a token, if known.
        sample: text of the first sample in the run's order, or its token ids if no tokenizer is given.
    """

    key: str
    about: dict[str, Any]
    share: float | None
    epochs: float | None
    bytes_per_token: float | None
    sample: str


def inspect(keys: DataSection, dataset: Any, sets: Mapping[str, Dataset], seed: int, samples: int) -> list[SourceReport]:
    """Report on each source of a run's data set, and on each evaluation set.

    Args:
        samples: number of samples that the run uses.
    """
    order = dataset.order(seed)
    tokenizer = load_tokenizer(keys.tokenizer)[0] if keys.tokenizer is not None else None
    if isinstance(dataset, Mixture):
        shares = (dataset.shares.counts / dataset.shares.period).tolist()
        trained = list(zip(dataset.names, dataset.sources, order.orders, shares, strict=True))
    else:
        trained = [("data.corpus", dataset, order, 1.0)]
    found = [_report(key, source, own, tokenizer, share, share * samples / source.num_samples) for key, source, own, share in trained]
    return found + [_report(f"data.eval.{name}", one, one.order(seed), tokenizer) for name, one in sets.items()]


def _report(
    key: str, source: Dataset, order: SampleOrder, tokenizer: Any, share: float | None = None, epochs: float | None = None
) -> SourceReport:
    about = {name: value for name, value in source.describe().items() if name != "sha256"}
    ids = source.batch(order.ids(0, 1))[0][0].tolist()
    if source.unit == "bytes":
        sample = bytes(ids).decode(errors="replace") if max(ids) < 256 else str(ids)
    else:
        sample = str(ids) if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=False))
    return SourceReport(key, about, share, epochs, source.bytes_per_token, sample)
