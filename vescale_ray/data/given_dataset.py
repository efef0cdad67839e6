"""A data set that the caller of :func:`vescale_ray.train` gives as an object with ``__len__`` and ``__getitem__``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from os import PathLike
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from vescale_ray.config.data_section import DataSection
from vescale_ray.data.dataset import Dataset
from vescale_ray.data.order.stream import Ids, SampleStream
from vescale_ray.data.text.chat import IGNORED
from vescale_ray.errors import BadInput

PROBES = 64
"""Samples whose content identifies the data set. They are evenly spaced, the first and the last among them."""
_PROTOCOL = ("num_samples", "heldout_samples", "vocab", "unit", "masked", "batch", "heldout_batch", "order", "read_ahead", "identity")


def dataset_of(given: Any, keys: DataSection) -> Dataset:
    """Return the data set for an object of the caller.

    Raises:
        BadInput: the object can't be used; one line.
    """
    if all(hasattr(given, name) for name in _PROTOCOL):
        width = int(given.batch([0])[0].shape[-1])
        if width != keys.seq_len:
            raise BadInput(f"dataset: its samples have {width} tokens; set data.seq_len to {width}, or give samples of {keys.seq_len}")
        return cast(Dataset, given)
    return GivenDataset(given, keys)


class GivenDataset:
    """Samples of an object, by index. A sample is ``seq_len + 1`` token ids; each predicts the next one. It may also be a pair of
    ``seq_len`` token ids and ``seq_len`` targets. Targets of -100 do not count.

    Index ``i`` gives the same sample in every process and at every call. The last ``data.heldout`` of the samples are held out.

    Args:
        samples: the object. If it has an attribute ``vocab``, ``data.vocab`` may be left out.

    Raises:
        BadInput: there is no training sample, the number of token ids is not known, or one of :data:`PROBES` samples can't be used.
    """

    unit = "ids"
    bytes_per_token = None

    def __init__(self, samples: Any, keys: DataSection) -> None:
        self._samples, self.seq_len = samples, keys.seq_len
        if isinstance(samples, str | PathLike):
            raise BadInput(f"dataset: {samples} is a path; name files in data.corpus, and leave dataset out")
        kind = type(samples).__name__
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise BadInput(f"dataset: a {kind} can't be indexed; give an object with __len__ and __getitem__, or name files in data.corpus")
        vocab = keys.vocab or getattr(samples, "vocab", None)
        if not isinstance(vocab, int | np.integer):
            raise BadInput(f"data.vocab = null: a {kind} does not state its number of token ids; set data.vocab, or an attribute vocab")
        self.vocab = int(vocab)
        self.end_token = int(keys.end_token) if keys.end_token is not None and keys.end_token.isdecimal() else None
        count = len(samples)
        self.heldout_samples = int(count * keys.heldout)
        self.num_samples = count - self.heldout_samples
        if self.num_samples < 1:
            raise BadInput(f"dataset: a {kind} of {count} samples gives no training sample; give more, or lower data.heldout")
        self.masked = self._is_pair(self._at(0))
        self._digest = self._identified(count)

    def batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of training samples (:meth:`vescale_ray.data.dataset.Dataset.batch`)."""
        return self._gather(ids, 0, self.num_samples)

    def heldout_batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of held-out samples, as :meth:`batch` does."""
        return self._gather(ids, self.num_samples, self.heldout_samples)

    def order(self, seed: int) -> SampleStream:
        """Return the order of the training samples."""
        return SampleStream(self.num_samples, seed)

    def read_ahead(self, order: SampleStream, position: int) -> None:
        """Do nothing: the object reads its samples when it is indexed."""

    def describe(self) -> dict[str, str | int | None]:
        """Return a JSON-compatible description of the data."""
        counts = {"samples": self.num_samples, "heldout_samples": self.heldout_samples}
        return {"name": type(self._samples).__name__, "type": "object", **counts, "sha256": self._digest}

    def identity(self) -> Mapping[str, str | int]:
        """Return what determines which sample an id stands for: values by configuration key."""
        return {"data.corpus": self._digest}

    def _gather(self, ids: npt.ArrayLike, first: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = np.asarray(ids, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= samples):
            raise IndexError(f"sample ids {index.min()}..{index.max()}: there are {samples} samples")
        both = np.empty((2, len(index), self.seq_len), dtype=np.int64)
        for row, number in enumerate(index.tolist()):
            both[:, row] = self._sample(first + number)
        return torch.from_numpy(both[0]), torch.from_numpy(both[1])

    def _sample(self, number: int) -> tuple[Ids, Ids]:
        """Return tokens and targets of a sample, after checking them."""
        given = self._at(number)
        if self._is_pair(given) != self.masked:
            raise BadInput(f"dataset[{number}]: only some samples are pairs of tokens and targets; give pairs everywhere or nowhere")
        if self.masked:
            tokens, targets = (self._ids(one, number, self.seq_len) for one in given)
            counted = targets[targets != IGNORED]
        else:
            whole = self._ids(given, number, self.seq_len + 1)
            tokens, targets = whole[:-1], whole[1:]
            counted = targets
        for ids in (tokens, counted):
            if ids.size and (ids.min() < 0 or ids.max() >= self.vocab):
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise BadInput(f"dataset[{number}]: token {wrong} is not in 0..{self.vocab - 1}; set data.vocab, or give other samples")
        return tokens, targets

    def _at(self, number: int) -> Any:
        try:
            return self._samples[number]
        except OSError:
            raise  # the storage may recover
        except Exception as error:
            raise BadInput(f"dataset[{number}] raises {type(error).__name__}: {' '.join(str(error).split())}") from error

    @staticmethod
    def _is_pair(given: Any) -> bool:
        return isinstance(given, tuple | list) and len(given) == 2 and np.ndim(given[0]) == 1

    def _ids(self, given: Any, number: int, length: int) -> Ids:
        try:
            found = np.asarray(given)
        except Exception:
            found = np.empty(0)
        if found.dtype.kind not in "iu" or found.shape != (length,):
            form = f"{found.dtype} of shape {found.shape}" if found.ndim else f"a {type(given).__name__}"
            wanted = f"{length} of them" if self.masked else f"data.seq_len + 1 = {length} of them, or a pair of tokens and targets"
            raise BadInput(f"dataset[{number}] is {form}, not a list of integer token ids; give {wanted}")
        return found.astype(np.int64)

    def _identified(self, count: int) -> str:
        """Return a hash of the number of samples and of :data:`PROBES` samples."""
        digest = hashlib.sha256(f"{count} {self.masked}".encode())
        for number in np.unique(np.linspace(0, count - 1, min(PROBES, count)).astype(np.int64)).tolist():
            tokens, targets = self._sample(number)
            digest.update(tokens.tobytes() + targets[-1 if not self.masked else 0 :].tobytes())
        return digest.hexdigest()
