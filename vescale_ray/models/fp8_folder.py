"""The ``quantization_config`` of a model's folder whose weights are in FP8 with one scale per block, as DeepSeek-V3's.

"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vescale_ray.errors import BadInput

KEY = "quantization_config"
_REMEDY = "save the model in bfloat16 with transformers, and give that folder"


def block_size_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block, from the content of ``config.json``; None if its ``quantization_config`` is missing or null.

    Raises:
        BadInput: it describes another format than FP8 codes with one scale per block.
    """
    given = config.get(KEY)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method != "fp8":
        what = f"quant_method {method!r}" if method is not None else repr(given)[:100]
        raise BadInput(f"{KEY}: {what} can't be read, only fp8 with weight_block_size; {_REMEDY}")
    size = given.get("weight_block_size")
    if size is None:
        raise BadInput(f"{KEY}: has no weight_block_size; only fp8 weights with one scale per block can be read; {_REMEDY}")
    if not isinstance(size, Sequence) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise BadInput(f"{KEY}: weight_block_size {size!r} is not two positive numbers, such as [128, 128]; {_REMEDY}")
    experts = given.get("expert_dtype", "fp8")
    if experts != "fp8":
        raise BadInput(f"{KEY}: experts in {experts!r} can't be read, only fp8; {_REMEDY}")
    return size[0], size[1]


def description(block: tuple[int, int], kept: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of weights in blocks of this size.

    Args:
        kept: modules with matrices that are not in FP8.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(kept),
    }
