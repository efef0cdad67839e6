"""Arguments that fully_shard can't judge: errors of the user's functions, ignored parameters, other dtypes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp.test_fsdp_hooked import Plain
from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray import fully_shard


class Bad(Exception):
    pass


def fails(*arguments: Any) -> Any:
    """A user's function that fails for matrices."""
    if arguments[-1].dim() >= 2:
        raise Bad("out of range")


def net() -> Any:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].experts = nn.Parameter(torch.ones(2, 4, 4))
    return model


def callbacks(rank: int, world: int) -> None:
    for name, fqn in (("shard_placement_fn", "0.weight"), ("block_policy", "0.weight"), ("allow_gaps", "1.experts")):
        model = net()
        before = dict(model.named_parameters())
        with pytest.raises(Bad) as error:
            fully_shard(model, **dict[str, Any]({name: fails}))
        assert str(error.value) == "out of range"
        assert error.value.__notes__ == [f"{name} raised this for parameter {fqn!r}; fully_shard changed nothing"]
        assert all(before[key] is param for key, param in model.named_parameters()) and type(model) is nn.Sequential
        fully_shard(model)(torch.ones(2, 4)).sum().backward()


def test_an_error_of_the_users_function_names_the_parameter() -> None:
    run_threads(2, callbacks)


class Late(Plain):
    """A weight whose hooks fail for the time being."""

    failing = ""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        if self.failing == "fsdp_pre_all_gather":
            raise Bad("not yet")
        return super().fsdp_pre_all_gather(mesh)

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        if self.failing == "fsdp_post_all_gather":
            raise Bad("not yet")
        return super().fsdp_post_all_gather(*args, **kwargs)


def failing_hooks(rank: int, world: int) -> None:
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(Late(torch.eye(4)))
        fully_shard(model[1])
        fully_shard(model)
        Late.failing = name
        with pytest.raises(Bad) as error:
            model(torch.ones(2, 4))
        assert error.value.__notes__ == [f"{name} raised this for parameter '1.weight'"]
        Late.failing = ""
        model.reset_iter_state()
        model(torch.ones(2, 4)).sum().backward()


def test_an_error_of_a_gather_hook_names_the_parameter() -> None:
    run_gloo(2, failing_hooks)


def ignored(rank: int, world: int) -> None:
    def told(model: Any, *calls: tuple[Any, Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for module, params in calls:
                fully_shard(module, ignored_params=params)
            assert {one.filename for one in caught} <= {__file__}
            model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
        return [str(one.message) for one in caught]

    # All parameters of the model for each unit, as trainers do; replaced after the call, as a model on the meta device is.
    model = net()
    whole = {model[0].bias, model[1].bias}
    assert told(model, (model[0], whole), (model, whole)) == []
    model = net()
    fully_shard(model, ignored_params={model[0].bias})
    model[0].bias = nn.Parameter(torch.ones(4))
    assert told(model) == []

    model, other = net(), net()
    assert told(model, (model[0], {other[0].bias}), (model, None)) == [
        "ignored_params of unit '0' holds a parameter of shape (4,) and torch.float32, which is not in the model: give parameters that the "
        "model has when fully_shard is called"
    ]
    late = "which an earlier fully_shard has sharded already: give it to that call, too"
    model = net()
    original = model[0].bias
    assert told(model, (model[0], None), (model, {original})) == [
        f"ignored_params holds a parameter of shape (4,) and torch.float32, {late}"
    ]
    model = net()
    fully_shard(model[0])
    assert told(model, (model, {model[0].bias})) == [f"ignored_params holds parameter '0.bias', {late}"]


def test_ignored_parameters_that_have_no_effect_cause_a_warning() -> None:
    run_gloo(2, ignored)


class Mixed(nn.Module):
    """A linear layer beside a parameter of another dtype."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(width, width), dtype
        value = torch.arange(width * width).sin().view(width, width)
        if dtype.is_complex:
            self.table = nn.Parameter(torch.polar(torch.ones(width, width), value).to(dtype))
        else:
            self.table = nn.Parameter((value * 100).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.table.dtype == self.dtype
        table = self.table if self.dtype.is_complex else self.table.float() / 100
        return (self.linear(x).to(table.dtype) @ table).abs().square().mean()


def trains_mixed(rank: int, world: int, width: int, dtype: torch.dtype) -> None:
    plain: Any = nn.Sequential(Mixed(width, dtype))
    filled(plain[0].linear)
    ours: Any = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(ours[0], mp_policy=policy)
    fully_shard(ours, mp_policy=policy)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (ours, plain)]
    for step in range(3):
        xs = [torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + one)) for one in range(world)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours(xs[rank]).backward()
        (sum(plain(x) for x in xs) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.dtype == q.dtype
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-5)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(nn.Sequential(Mixed(width, dtype)), mp_policy=policy)(xs[0].bfloat16()).backward()


@pytest.mark.usefixtures("usual_threshold")
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.complex64, 6), (torch.complex64, 300), (torch.complex128, 300), (torch.int8, 300), (torch.int64, 6), (torch.bool, 6)],
)
def test_complex_and_integer_parameters_train_as_in_one_process(width: int, dtype: torch.dtype) -> None:
    run_threads(2, trains_mixed, width, dtype)


class Both(nn.Module):
    """Two heads on one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.models = nn.ModuleList(nn.Sequential(self.encoder, nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.models[which](x)
        return out


@on_threads(2)
def test_models_that_share_a_unit_train_under_one_root(rank: int, world: int) -> None:
    def sharded() -> Any:
        made = filled(Both(), 3, 0.3)
        for unit in (made.encoder, *made.models):
            fully_shard(unit)
        return made

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    ours = sharded()
    ours.models[0](x).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"initialized for 0\nFSDP requires .*If two models share 0, apply fully_shard to a module that holds both"
    ):
        ours.models[1](x)
    ours, alone = fully_shard(sharded()), filled(Both(), 3, 0.3)
    for which in (0, 1, 0):
        for model in (ours, alone):
            model(x, which).square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=name)
