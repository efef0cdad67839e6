"""Objects that a caller of :func:`vescale_ray.train` gives in place of a model factory and of data files.

The configuration, which is plain text, only names them: ``model.factory: given:Net``, ``data.corpus: given://Samples``. A run with such a
name resumes only if the caller gives the objects again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FACTORY, CORPUS = "given:", "given://"
"""Prefixes of the names of given objects in ``model.factory`` and in ``data.corpus``."""
STREAM = "stream"
"""Key under which a worker's configuration holds the identity of the run's data."""


@dataclass(frozen=True)
class Given:
    """Objects of the caller.

    Attributes:
        model: factory of the model, called as ``model.factory`` is.
        dataset: the data set; see :class:`vescale_ray.data.given_dataset.GivenDataset`.
        pickled: model and dataset as the workers receive them.
    """

    model: Callable[..., Any] | None = None
    dataset: Any = None
    pickled: bytes = b""
