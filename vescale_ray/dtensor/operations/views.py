"""True views of ragged tensors, and random numbers of which every rank keeps its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from vescale_ray.dtensor.operations.fallback import Cls, take_first_ranks
from vescale_ray.dtensor.operations.schema import meta_like
from vescale_ray.dtensor.spec import LocalSharding, sharding_of, wrap
from vescale_ray.dtensor.transfer import view_of


def random_in_place(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run uniform_, normal_, ..: every rank draws the whole tensor and keeps its part. With equal seeds the values are those of one
    device, for any layout. It needs memory for one whole tensor at a time. Replicas take the first replica's values.
    """
    x = args[0]
    if not isinstance(x, cls) or any(isinstance(v, Tensor) for v in (*args[1:], *kwargs.values())):
        return NotImplemented
    sharding = sharding_of(x._spec)
    full = x._local_tensor.new_empty(sharding.shape)
    func(full, *args[1:], **kwargs)
    _keep_part(x._local_tensor, full, sharding)
    return x


def random_like(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, cls) or "out" in kwargs:
        return NotImplemented
    sharding = sharding_of(x._spec)
    full = func(x._local_tensor.new_empty(sharding.shape), *args[1:], **{k: v for k, v in kwargs.items() if k != "memory_format"})
    local = full.new_empty(sharding.local_shape)
    _keep_part(local, full, sharding)
    return wrap(cls, local, x._spec)


def _keep_part(local: Tensor, full: Tensor, sharding: LocalSharding) -> None:
    local.copy_(view_of(full, sharding))
    if local.is_meta:
        return
    cut = sharding.cut_dims()
    take_first_ranks(local, sharding.mesh, [dim for dim in range(sharding.mesh.ndim) if dim not in cut])


def reshape(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run view, squeeze, unsqueeze: row-major elements keep their order, so the part is the same interval of the new shape."""
    x = args[0]
    if not isinstance(x, cls) or (len(args) > 1 and isinstance(args[1], torch.dtype)):
        return NotImplemented
    sharding = sharding_of(x._spec)
    shape = tuple(func(meta_like(sharding.shape, x.dtype), *args[1:], **kwargs).shape)
    target = sharding if shape == tuple(sharding.shape) else sharding.reshaped(shape)
    if target is None:
        return NotImplemented
    return _view(cls, x, torch.ops.aten.view.default(x._local_tensor, target.local_shape), target)


def reinterpret(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run view_as_real, view_as_complex: the last dimension holds a number's two parts, and stays on one rank."""
    x = args[0]
    if not isinstance(x, cls):
        return NotImplemented
    sharding = sharding_of(x._spec)
    shape = tuple(func(meta_like(sharding.shape, x.dtype)).shape)
    last = len(sharding.shape) - 1
    if len(shape) == last and (len(sharding.placement.dims) > last or any(type(p) is Shard and p.dim == last for p in sharding.placements)):
        return NotImplemented
    return _view(cls, x, func(x._local_tensor), sharding.resized(shape, () if len(shape) > last else (last,)))


def _view(cls: Cls, x: Any, local: Tensor, sharding: LocalSharding) -> Any:
    result: Any = wrap(cls, local, sharding.spec(local.dtype))
    # An alias made below the dispatcher would count its writes separately.
    result._written_through = (x._local_tensor, *getattr(x, "_written_through", ()))
    return result
