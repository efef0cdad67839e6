"""Random generator states of a process as JSON, and seeds for another number of ranks."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..arguments import of_type


def capture_rng() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's default generators (CPU, and the current CUDA device if CUDA is in use).

    Raises:
        ValueError: NumPy's generator was replaced by one of another type.
    """
    version, words, gauss = random.getstate()
    sort = np.random.get_state(legacy=False)["bit_generator"]
    if sort != "MT19937":
        raise ValueError(f"NumPy's default generator is a {sort}, whose state is not stored: set_bit_generator(MT19937(seed)) first")
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, _pack(np.array(words, dtype="<u4")), None if gauss is None else float(gauss).hex()],
        "numpy": [name, _pack(np.asarray(keys, dtype="<u4")), int(position), int(has_gauss), float(cached).hex()],
        "torch": _pack(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _pack(torch.cuda.get_rng_state().numpy())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the generators to a captured state: all of them or, if one cannot be restored, none.

    Raises:
        ValueError: the state is not a result of :func:`capture_rng`.
    """
    cuda = None
    try:
        of_type("it", state, Mapping, "it must be a dict")
        version, words, gauss = state["python"]
        python = (version, tuple(int(w) for w in _unpack(words, "<u4")), None if gauss is None else float.fromhex(gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy = (name, _unpack(keys, "<u4").astype(np.uint32), position, has_gauss, float.fromhex(cached))
        cpu = torch.from_numpy(_unpack(state["torch"], "u1").copy())
        if "cuda" in state and torch.cuda.is_available():
            cuda = torch.from_numpy(_unpack(state["cuda"], "u1").copy())
        if not 0 <= int(position) <= 624:  # numpy does not check it, and would read beyond its words
            raise ValueError(f"NumPy's position is {position}, of 624 words")
        # Try separate generators first, so that those in use never change in part.
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(cpu)
        if cuda is not None:
            torch.Generator("cuda").set_state(cuda)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"the state of the random generators cannot be restored ({reason}); give what capture_rng() returned") from error
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def derive_rng(*parts: object) -> int:
    """Seed all generators from ``parts`` (commit, rank), the same for the same parts; returns the seed.

    It serves loads on another number of ranks, where no saved state fits and every rank needs its own.
    """
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return seed


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
