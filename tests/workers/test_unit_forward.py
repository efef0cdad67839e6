"""Units that are recomputed in backward, compiled, or both: the same training, and code that outlives a generation."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.fleet import Fleet, State
from tests.workers.tiny import Run, text_of, tiny, write_text
from tests.workers.tiny_models import DropoutModel
from vescale_ray import gloo
from vescale_ray.config import RunConfig
from vescale_ray.workers.building.compile_ahead import calls_of, compile_units
from vescale_ray.workers.building.model_building import Blank, NextModel, build_model
from vescale_ray.workers.building.unit_forward import KEPT, UnitCompiler, recomputed
from vescale_ray.workers.messages import StepRecord
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.trainer import Trainer

CPU = torch.device("cpu")
BODY = {"model_units": ["body"], "data_eval_samples": 4}
WIDE = {"model_dim": 256, "model_ffn": 320}
"""Matrices that are large enough for the linear layers which write gradients into the buffer."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone, and no compiled code from an earlier test."""
    torch.compiler.reset()
    gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    process_groups.dissolve()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(_traced, torch.compile))


def trace_only(state: State) -> None:
    """Let torch.compile trace and differentiate, without inductor's code, which takes half a minute."""
    setattr(torch, "compile", functools.partial(_traced, torch.compile))  # noqa: B010


def _traced(compile_: Any, forward: Any, *, options: Any = None, **how: Any) -> Any:
    return compile_(forward, backend="aot_eager", **how)


def graphs(state: State | None = None) -> int:
    """Number of graphs that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def trainer_of(config: RunConfig, compiler: UnitCompiler | None = None) -> Trainer:
    trainer = Trainer(config, 0, 1, 1, CPU, text_of(config), Blank(config, compiler=compiler))
    trainer.initialize()
    return trainer


def losses(trainer: Trainer, steps: int = 3) -> list[float]:
    return [trainer.step().loss for _ in range(steps)]


# ------------------------------------------------------------------------------------------------- activation checkpointing


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", [{}, WIDE, {**WIDE, "train_param_dtype": "bfloat16"}], ids=["", "wide", "wide, bfloat16"])
def test_recomputed_units_train_to_the_same_bits_and_names(text: str, changes: dict[str, Any]) -> None:
    found = {}
    for how in ("none", "selective", "full"):
        trainer = trainer_of(tiny(text, train_activation_checkpointing=how, train_slots=2, **changes))
        with Counted() as counted:
            curve = losses(trainer, 2)
        found[how] = curve, [(name, p.to_local().clone()) for name, p in trainer.model.named_parameters()], counted.calls
        trainer.close()
    for how in ("selective", "full"):
        assert found[how][0] == found["none"][0]
        for (name, value), (expected_name, expected) in zip(found[how][1], found["none"][1], strict=True):
            assert name == expected_name and torch.equal(value, expected)
    products, roots = ({how: calls[name] for how, (*_, calls) in found.items()} for name in ("mm", "rsqrt"))
    # 2 steps of 2 slots and 2 layers with 7 products and 2 norms each. Only the wide FP32 layers need the last product again.
    assert products["full"] - products["none"] == 2 * 2 * 2 * (7 if changes == WIDE else 6)
    assert products["selective"] == products["none"] > 0
    assert roots["full"] - roots["none"] == 2 * 2 * 2 * 2 == roots["selective"] - roots["none"]


def test_selective_checkpointing_keeps_products_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes them with operations of their own. Here one is called as in a compiled graph."""
    calls: list[torch.dtype] = []

    def scaled_mm(*_: Any, output_dtype: torch.dtype) -> Tensor:
        calls.append(output_dtype)
        return torch.ones(16, 16, dtype=output_dtype)

    def forward(x: Tensor) -> Tensor:
        codes, scales = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
        product = torch.ops.vescale_ray.fp8_product(codes, codes, scales, scales, [False, False], False, torch.float32)
        out: Tensor = (x * product).sin()
        return out

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    for selective, expected in ((True, 1), (False, 2)):
        calls.clear()
        recomputed(forward, selective=selective)(torch.ones(16, 16, requires_grad=True)).sum().backward()
        assert len(calls) == expected
    assert torch.ops.aten._scaled_mm_v2.default in KEPT


# ------------------------------------------------------------------------------------------------------------- compilation


@pytest.mark.usefixtures("alone", "traced")
def test_compiled_units_train_as_uncompiled_ones(text: str) -> None:
    plain = trainer_of(tiny(text, train_slots=2))
    expected, heldout = losses(plain), plain.evaluate()
    plain.close()
    for how in ("none", "selective", "full"):
        torch.compiler.reset()
        before = graphs()
        trainer = trainer_of(tiny(text, train_compile=True, train_activation_checkpointing=how, train_slots=2))
        names = [name for name, _ in trainer.model.named_parameters()]
        assert losses(trainer) == pytest.approx(expected, rel=1e-5) and trainer.evaluate() == pytest.approx(heldout, rel=1e-5), how
        assert names == [name for name, _ in build_model(tiny(text)).named_parameters()]
        assert graphs() - before == 1, f"{how}: both layers share one graph, and an evaluation needs none"
        assert trainer.take_problems() == []
        trainer.close()


@pytest.mark.parametrize("how", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_rescales_compile_nothing_and_release_the_model(text: str, how: str) -> None:
    config = tiny(text, train_compile=True, train_activation_checkpointing=how)
    with Fleet(2) as fleet:
        run = Run(fleet, config)
        fleet.run([0, 1], trace_only)
        run.fresh([0, 1])
        run.train(2, rescale=True)
        assert set(fleet.run([0, 1], graphs).values()) == {1}
        for members in ([0], [0, 1]):
            before = run.members
            assert not any(any(alive.values()) for alive in run.end().values())
            run.resume(before, members)
            run.train(len(run.records) + 2, rescale=True)
        assert set(fleet.run([0, 1], graphs).values()) == {1}, "5 slots and 2 workers: one of them has a round without a slot"
        run.end()
        plain = Run(fleet, tiny(text))
        plain.fresh([0, 1])
        plain.train(6)
        assert run.losses() == pytest.approx(plain.losses(), rel=1e-5)
        plain.end()


@pytest.mark.usefixtures("alone", "traced")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_units_compiled_ahead_are_not_compiled_again(text: str, dtype: str) -> None:
    config = tiny(text, train_compile=True, model_layers=3, train_param_dtype=dtype, train_slots=2)
    next_model = NextModel(config)
    blank = next_model.prepare()
    assert blank is not None and len(calls_of(config, blank.model)) == 1
    before = graphs()
    compile_units(config, CPU, blank)
    assert graphs() - before == 1
    trainer = Trainer(config, 0, 1, 1, CPU, text_of(config), next_model.take())
    trainer.initialize()
    plain = trainer_of(tiny(text, model_layers=3, train_param_dtype=dtype, train_slots=2))
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5 if dtype == "float32" else 1e-3)
    assert graphs() - before == 1
    for one in (trainer, plain):
        one.close()


class BrokenModel(DropoutModel):
    """A model whose unit reads a value of a tensor, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Reader()  # type: ignore[assignment]


class Reader(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) < 1e30 else x


class FailingModel(DropoutModel):
    def __init__(self) -> None:
        super().__init__()
        self.body = Failing()  # type: ignore[assignment]


class Failing(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"{x.shape[1]} tokens are an odd number")


def of_this(model: str, **changes: Any) -> dict[str, Any]:
    return {**BODY, "model_factory": f"tests.workers.test_unit_forward:{model}", **changes}


@pytest.mark.usefixtures("alone", "traced")
def test_unit_that_breaks_the_graph_gives_one_warning_and_trains(text: str) -> None:
    plain = trainer_of(tiny(text, **of_this("BrokenModel")))
    expected = losses(plain)
    config = tiny(text, **of_this("BrokenModel", train_compile=True))
    compiler = UnitCompiler(config)
    for _ in range(2):
        trainer = trainer_of(config, compiler)
        assert losses(trainer) == pytest.approx(expected, rel=1e-5)
        trainer.close()
    (problem,) = compiler.take_problems()
    assert problem.startswith("train.compile = true: Reader breaks the graph and is compiled in pieces, which is slower: change Reader.")
    assert "set train.compile=false" in problem and len(problem) < 500 and "\n" not in problem
    assert compiler.take_problems() == []
    plain.close()


@pytest.mark.usefixtures("alone")
def test_unit_that_does_not_compile_gives_one_warning_and_trains(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(forward: Any, **how: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("no C++ compiler was found")

        return run

    plain = trainer_of(tiny(text))
    monkeypatch.setattr(torch, "compile", broken)
    trainer = trainer_of(tiny(text, train_compile=True))
    assert losses(trainer) == losses(plain)
    (problem,) = trainer.take_problems()
    assert problem.startswith("train.compile = true: Layer cannot be compiled and runs uncompiled, which is slower: change Layer.forward")
    assert "no C++ compiler was found" in problem
    for one in (trainer, plain):
        one.close()


@pytest.mark.usefixtures("alone", "traced")
def test_errors_of_a_compiled_model_are_its_own(text: str) -> None:
    trainer = trainer_of(tiny(text, **of_this("FailingModel", train_compile=True)))
    with pytest.raises(ValueError, match="16 tokens are an odd number"):
        trainer.step()
    assert trainer.take_problems() == []
    trainer.close()


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("deterministic", [False, True])
def test_inductors_code_trains_as_the_uncompiled_model(text: str, deterministic: bool) -> None:
    curves: list[list[StepRecord]] = []
    for compiled in (False, True):
        trainer = trainer_of(tiny(text, train_compile=compiled, elastic_deterministic=deterministic))
        curves.append([trainer.step() for _ in range(4)])
        assert trainer.take_problems() == []
        trainer.close()
    for ours, theirs in itertools.zip_longest(*curves):
        assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4)
