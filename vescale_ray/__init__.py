"""Elastic fully sharded data parallelism on Ray; shards follow the blocks of optimizers and quantizers.

This package does not import Ray. The public names below are imported on first use, so ``import vescale_ray`` (and
``vescale-ray --help``) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.compat import check_version
from vescale_ray.version import __version__

# In a source checkout, the sub-packages controller/, workers/, checkpoint/ and deploy/ lie beside this folder; in a wheel, inside it.
# `ray job submit --working-dir .` and plain pytest need these lines to find them.
_root = Path(__file__).resolve().parent.parent
if (_root / "controller" / "__init__.py").is_file() and (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

check_version()

_PUBLIC = {
    "Block": "vescale_ray.geometry",
    "Fp8Block": "vescale_ray.quantization",
    "compute_in_fp8": "vescale_ray.quantization",
    "RaggedShard": "vescale_ray.dtensor.placement",
    "RaggedDTensor": "vescale_ray.dtensor",
    "distribute_tensor": "vescale_ray.dtensor",
    "DBuffer": "vescale_ray.dbuffer",
    "fully_shard": "vescale_ray.fsdp",
    "FSDPModule": "vescale_ray.fsdp",
    "MixedPrecisionPolicy": "vescale_ray.fsdp",
    "OffloadPolicy": "vescale_ray.fsdp",
    "CPUOffloadPolicy": "vescale_ray.fsdp",
    "register_fsdp_forward_method": "vescale_ray.fsdp",
    "share_comm_ctx": "vescale_ray.fsdp",
    "explain": "vescale_ray.fsdp",
    "parallelize_experts": "vescale_ray.expert_parallel",
    "train": "vescale_ray.controller.driver.training",
    "TrainResult": "vescale_ray.controller.driver.training",
    "RunFailed": "vescale_ray.controller.driver.training",
    "BadInput": "vescale_ray.errors",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from vescale_ray.controller.driver.training import RunFailed, TrainResult, train
    from vescale_ray.dbuffer import DBuffer
    from vescale_ray.dtensor.placement import RaggedShard
    from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
    from vescale_ray.errors import BadInput
    from vescale_ray.expert_parallel import parallelize_experts
    from vescale_ray.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        explain,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from vescale_ray.geometry import Block
    from vescale_ray.quantization import Fp8Block, compute_in_fp8


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
