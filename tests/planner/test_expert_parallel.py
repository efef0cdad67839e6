"""The plan of a model whose experts ranks share: memory and bytes against figures worked out by hand."""

from __future__ import annotations

import json

import pytest

from vescale_ray.cli import main
from vescale_ray.geometry import ExpertShares
from vescale_ray.planner import HARDWARE, Policy, choose_sharding
from vescale_ray.planner.cost import plan_model, predict_memory
from vescale_ray.planner.hardware import exchange_time
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.step_buffers import Travel, device_buffers, host_buffers
from vescale_ray.planner.step_time import predict_time

H100 = HARDWARE["h100"]
EXPERTS, REST = 128 * 3 * 2048 * 768, 48 * 19_140_864 + 311_164_928 + 311_166_976
"""Elements of Qwen3 30B-A3B: the experts of one of 48 layers, and all others: layers, embedding, head and norm."""


def test_shares_of_experts_divide_ranks_and_stacks() -> None:
    shares = ExpertShares.of(12, 8)
    assert (shares.parts, shares.holders) == (4, 3) and ExpertShares.of(3, 8) == ExpertShares(3, 1)
    assert [(shares.position_of(r), r % shares.parts) for r in (0, 3, 4, 11)] == [(0, 0), (0, 3), (1, 0), (2, 3)]
    assert all(shares.rank_at(shares.position_of(r), r % shares.parts) == r for r in range(12))
    assert shares.shape_of_part((8, 5, 3)) == (2, 5, 3) and shares.shape_of_stack((2, 5, 3)) == (8, 5, 3)


def test_memory_and_bytes_are_those_worked_out_by_hand() -> None:
    """32 ranks, 8 of which share the experts: 4 ranks gather an eighth of the experts of a layer, and 32 ranks all others."""
    shapes, tokens = model_shapes("qwen3-30b-a3b"), 1024
    policy = Policy(tokens=tokens, expert_parallel=8)
    plan = plan_model(shapes, 32, expert_parallel=8)
    part = EXPERTS // 8
    memory = predict_memory(plan, policy)
    assert memory.master == pytest.approx(4 * (REST + 48 * EXPERTS) / 32, rel=1e-3) == pytest.approx(memory.gradients, rel=1e-3)
    assert memory.optimizer == pytest.approx(2 * memory.master, rel=1e-3)
    time, alone = predict_time(plan, policy, H100), predict_time(plan_model(shapes, 32), Policy(tokens=tokens), H100)
    rows = tokens * 8 * 2048 * 2
    sent = (2 + 2 + 4) * (REST * 31 / 32 + 48 * part * 3 / 4) + 48 * 6 * rows * 7 / 8
    assert time.sent == pytest.approx(sent, rel=1e-3)
    assert alone.sent == pytest.approx((2 + 2 + 4) * (REST + 48 * EXPERTS) * 31 / 32, rel=1e-3) and alone.exchange == 0
    assert time.compute == pytest.approx(alone.compute, rel=1e-3), "each rank computes as many rows as before"
    assert time.exchange == pytest.approx(48 * 6 * (rows * 7 / 8 / (450e9 * 0.8) + 3 * 3e-6), rel=1e-3) and time.exposed > time.exchange
    kept = predict_time(plan, Policy(tokens=tokens, expert_parallel=8, recompute=False), H100)
    assert kept.exchange == pytest.approx(time.exchange * 4 / 6), "nothing is sent again"


def test_rows_travel_between_nodes_if_more_ranks_share() -> None:
    assert exchange_time(8e9, 1, H100) == exchange_time(0, 8, H100) == 0
    assert exchange_time(8e9, 8, H100) == pytest.approx(8e9 * 7 / 8 / (450e9 * 0.8), rel=0.01)
    assert exchange_time(8e9, 32, H100) == pytest.approx(8e9 * 24 / 32 / (50e9 * 0.8), rel=0.01)


def test_a_unit_stays_gathered_while_one_inside_it_computes() -> None:
    layers, depths = [[Travel(5, 5)], [Travel(7, 7)]] * 3, [0, 1] * 3
    assert device_buffers(layers, [], depths) == (5 + 7 + 5, 7) and device_buffers(layers, []) == (5 + 7, 7)
    assert host_buffers(layers, [], depths) == (5 + 7 + 5, 5 + 7)
    coded = [[Travel(5, 0, received=2)], [Travel(7, 0, received=3)]] * 2
    assert device_buffers(coded, [], depths[:4]) == (17 + 3, 0) and host_buffers(coded, [], depths[:4]) == (17 + 2 + 3, 0)


def test_groups_are_multiples_of_the_ranks_that_share() -> None:
    choice = choose_sharding("gpt-oss-20b", 48, policy=Policy(expert_parallel=16))
    assert sorted({o.group for o in choice.options}) == [16, 48] and {o.lever.layers for o in choice.options} == {1}


def test_the_command_shows_the_units_of_experts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")  # pytest-xdist sets 80
    asked = ["plan", "--model", "qwen3-30b-a3b", "--devices", "32", "--expert-parallel", "8"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "8 ranks share the experts" in out and "layer (experts): experts, 1 of 8 parts over 4 ranks" in out
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    ranks = {u["name"]: (u["ranks"], u["parts"]) for u in told["best"]["units"]}
    assert told["expert_parallel"] == 8 and ranks["layer (experts): experts"] == (4, 8) and ranks["layer (experts)"] == (32, 1)
