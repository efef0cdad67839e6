"""``elastic.deterministic`` gives the same bits at every number of workers, and through every rescale and death."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.workers.fleet import Fleet, State
from tests.workers.tiny import FullState, Run, evaluate, same_bits, slow_down, tiny
from vescale_ray.workers.messages import StepRecord
from vescale_ray.workers.monitoring import pace

Facts = tuple[list[tuple[float, float]], FullState, tuple[float, int]]


def numbers(records: list[StepRecord]) -> list[tuple[float, float]]:
    return [(record.loss, record.grad_norm) for record in records]


def facts(run: Run, steps: int) -> Facts:
    """Losses and norms, every parameter and optimizer state, and the held-out loss, after ``steps`` steps."""
    records = numbers(run.train(steps))
    return records, run.full_state(), run.fleet.run(run.members, evaluate)[run.members[0]]


def check(got: Facts, expected: Facts) -> None:
    assert got[0] == expected[0]
    assert len(got[0]) >= 8 and len({loss for loss, _ in got[0]}) == len(got[0]), "it trains"
    assert same_bits(got[1], expected[1])
    assert got[2] == expected[2]


CLIP = {"train_grad_clip": 0.2}
"""A limit below every gradient norm of these runs, so that each step is clipped."""
MUON = {"train_optimizer": "muon", "train_lr": 0.01, **CLIP}
# This model's matrices have 512 to 1792 elements. With default options all of them would keep FP32 states.
ADAM8 = {"train_optimizer": "adamw8bit", "train_optimizer_options": {"min_8bit_numel": 512, "block": 64}, **CLIP}
ADAM8_AGAIN = {**ADAM8, "train_activation_checkpointing": "full"}
BF16 = {"train_param_dtype": "bfloat16", "train_reduce_dtype": "bfloat16", "model_tie": True}
SHAMPOO, SOAP = {"train_optimizer": "shampoo"}, {"train_optimizer": "soap", "train_threads": 2}
DROPOUT = {"model_factory": "tests.workers.tiny_models:DropoutModel", "model_units": ["body"], "train_grad_clip": 0}
EXPERTS = {"model_factory": "tests.workers.tiny_models:ExpertsModel", "model_units": ["body"], **CLIP}
FP8 = {**ADAM8, "train_quantize": "fp8 12x16", "train_param_dtype": "bfloat16", "train_reduce_dtype": "float32"}
PRODUCTS = {**FP8, "train_quantize": "fp8 16x16", "train_quantize_products": True}
OF_16_BITS = {"model_factory": "tests.workers.tiny_models:of_16_bits", "model_units": ["body"], "train_grad_clip": 0}


ALL: tuple[dict[str, Any], ...] = ({}, MUON, ADAM8_AGAIN, BF16, SHAMPOO, SOAP, DROPOUT, {**MUON, **EXPERTS}, OF_16_BITS, FP8)
# ODD: sizes without common divisors, so that rows begin at any address. SMALL: a model so small that some of eight ranks own little.
ODD = {**MUON, "train_slots": 7, "train_slot_batch": 1, "model_dim": 40, "model_ffn": 57, "data_seq_len": 31}
SMALL = {"model_dim": 4, "model_heads": 1, "model_kv_heads": 1, "model_ffn": 3, "model_layers": 1, "train_slots": 8}
SMALL8 = {**SMALL, **ADAM8, "train_optimizer_options": {"min_8bit_numel": 8, "block": 8}}
EIGHT = {**BF16, "train_slots": 8}
MANY: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = ((ODD, (1, 2, 6, 7)), (SMALL8, (1, 3, 7, 8)), (EIGHT, (1, 6, 8)))


@pytest.mark.parametrize(
    ("changes", "worlds"),
    [
        (MUON, (1, 3)),
        (EXPERTS, (1, 4)),
        pytest.param(PRODUCTS, (1, 3), marks=pytest.mark.slow),
        *(pytest.param(changes, (1, 2, 3, 4, 5), marks=pytest.mark.slow) for changes in ALL),
        *(pytest.param(changes, worlds, marks=pytest.mark.slow) for changes, worlds in MANY),
    ],
    ids=[
        *("muon", "experts", "fp8 products", "all: adamw", "all: muon", "all: 8-bit", "all: bf16", "all: shampoo", "all: soap"),
        *("all: dropout", "all: experts", "all: 16 bits", "all: fp8"),
        *("many: odd sizes", "many: small", "many: bf16"),
    ],
)
@pytest.mark.fault("I1")
def test_every_number_of_workers_computes_the_same_bits(text: str, changes: dict[str, Any], worlds: tuple[int, ...]) -> None:
    config = tiny(text, elastic_deterministic=True, **changes)
    with Fleet(max(worlds)) as fleet:
        run = Run(fleet, config)
        expected: Facts | None = None
        for world in worlds:
            run.fresh(list(range(world)))
            got = facts(run, 8)
            check(got, expected := expected or got)
            is_what_it_says(got, changes)
            run.end()


def is_what_it_says(got: Facts, changes: dict[str, Any]) -> None:
    """Assert that the optimizer keeps its own kind of states, and that every step was clipped if clipping is on."""
    kinds = {kind: data.dtype for (name, kind), data in got[1].items() if name.startswith(("layers.0.", "body."))}
    if changes.get("train_optimizer") == "adamw8bit":
        assert np.dtype("uint8") in kinds.values(), kinds
    if changes.get("train_optimizer") == "muon":
        assert "momentum_buffer" in kinds, kinds
    if clip := changes.get("train_grad_clip"):
        assert min(norm for _, norm in got[0]) > clip


@pytest.mark.parametrize(
    "changes", [ADAM8, *(pytest.param(changes, marks=pytest.mark.slow) for changes in ({}, MUON))], ids=["8-bit", "adamw", "muon"]
)
@pytest.mark.fault("I1")
def test_rescales_and_a_death_leave_no_trace_in_the_bits(text: str, changes: dict[str, Any]) -> None:
    with Fleet(4) as fleet:
        run = Run(fleet, tiny(text, elastic_deterministic=True, **changes))
        run.fresh([0, 1])
        expected = facts(run, 12)
        run.end()
        run.records.clear()
        run.fresh([0, 1, 2])
        run.train(3)
        run.end()
        run.resume([0, 1, 2], [0, 1, 2, 3])
        survivors, _, _ = run.train_with_a_death(9, 1, 6, 0.0)
        run.resume(survivors, survivors)
        run.train(9)
        run.end()
        run.resume(survivors, survivors[:2])
        got = facts(run, 12)
        records = numbers([run.records[index] for index in sorted(run.records)])
        assert {run.records[index].world for index in run.records} == {2, 3, 4}
        check((records, *got[1:]), expected)
        is_what_it_says(expected, changes)


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with Fleet(3) as fleet:
        yield fleet


@pytest.mark.slow
@pytest.mark.fault("W14")
def test_straggler_is_found_and_relieved_without_changing_bits(text: str, three: Fleet) -> None:
    run, steps = Run(three, tiny(text, elastic_deterministic=True, elastic_straggler="relieve")), 16
    run.fresh([0])
    expected = facts(run, steps)
    run.end()
    run.fresh([0, 1, 2])
    three.run([0, 1, 2], watch_for, 0.5)
    three.run([0], slow_down, 0.1)
    got = facts(run, steps)
    views = [record.pace for record in run.records.values() if record.pace is not None]
    assert views[0].shares == (2, 2, 1) and views[-1].shares == (1, 2, 2), views
    # The others wait for the slow worker. If their waiting counted as work, all workers would look equally slow.
    assert views[-1].factors[0] > 1.4 and [since >= 0 for since in views[-1].since] == [True, False, False]
    check(got, expected)
    stood = three.run([1, 2], waited)
    assert min(stood.values()) > steps * 0.1 * 0.8, f"{stood}: one slot of it in each step at least, but for what computing overlapped"
    run.end()


@pytest.mark.slow
def test_changing_slot_shares_mid_run_keeps_samples_and_losses(text: str, three: Fleet) -> None:
    for deterministic in (True, False):
        run = Run(three, tiny(text, elastic_deterministic=deterministic, elastic_snapshot_every=0))
        run.fresh([0, 1, 2])
        expected = facts(run, 8)
        ids = [run.records[index].ids for index in range(8)]
        run.end()
        run.fresh([0, 1, 2])
        for until, shares in ((2, (1, 3, 1)), (4, (1, 1, 3)), (6, (3, 1, 1)), (8, (1, 2, 2))):
            three.run([0, 1, 2], spread_slots, shares)
            run.train(until)
        assert [run.records[index].ids for index in range(8)] == ids
        if deterministic:
            check((numbers([run.records[index] for index in range(8)]), *facts(run, 8)[1:]), expected)
        else:
            np.testing.assert_allclose(run.losses(), [loss for loss, _ in expected[0]], rtol=1e-5)
        run.end()


def watch_for(_: State, seconds: float) -> None:
    """Set the length of the observation window."""
    pace.LEAST_S = seconds


def waited(state: State) -> float:
    return float(state["trainer"].model.waited_s)


def spread_slots(state: State, shares: tuple[int, ...]) -> None:
    state["trainer"].pace.view = replace(state["trainer"].pace.view, shares=shares)


@pytest.mark.slow
def test_bits_differ_across_world_sizes_without_deterministic(text: str) -> None:
    with Fleet(3) as fleet:
        run = Run(fleet, tiny(text))
        run.fresh([0])
        alone = facts(run, 8)
        run.end()
        run.fresh([0, 1, 2])
        assert not same_bits(facts(run, 8)[1], alone[1]), "the tests above show nothing"
