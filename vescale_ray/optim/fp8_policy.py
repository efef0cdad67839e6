"""``fp8_policy``: the ``quantize_policy`` of a model, by the roles of its parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vescale_ray.optim.routing import roles_of
from vescale_ray.planner.models.shapes import UNQUANTIZED
from vescale_ray.quantization import Fp8Block


def fp8_policy(
    model: nn.Module,
    form: Fp8Block = Fp8Block(),  # noqa: B008 (frozen)
    keep: Sequence[str] | None = None,
) -> Callable[[str, nn.Parameter], Fp8Block | None]:
    """Return the policy that gives ``form`` to matrices and stacks of experts, for ``fully_shard(.., quantize_policy=..)``.

    Embeddings, heads, norms, vectors and convolutions keep the compute dtype. Call it before the model is sharded.

    Args:
        keep: patterns of names of further parameters that keep the compute dtype; None: routers, gates of shared experts, and adapters
            (:data:`UNQUANTIZED`).

    Raises:
        ValueError: a pattern matches no parameter, or the model has no matrix that could be quantized.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give the module itself, before fully_shard")
    roles = roles_of(model)
    for pattern in keep or ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in roles):
            raise ValueError(f"keep: {pattern!r} matches no parameter; there are {', '.join(list(roles)[:4])}, ..")
    patterns = UNQUANTIZED if keep is None else keep
    # fully_shard passes a parameter's name inside its unit, not in the model, so the key is the parameter itself.
    chosen = WeakIdKeyDictionary(
        {
            parameter: True
            for name, parameter in model.named_parameters()
            if roles[name] in ("matrix", "expert")
            and parameter.is_floating_point()
            and parameter.numel()
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
    )
    if not len(chosen):
        raise ValueError(f"the model has no matrix to quantize: {', '.join(f'{n} is {role}' for n, role in list(roles.items())[:4])}, ..")
    return lambda name, parameter: form if parameter in chosen else None
