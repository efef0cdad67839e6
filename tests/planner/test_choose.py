"""choose_sharding, its cost model, and ``vescale-ray plan``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from vescale_ray.cli import main
from vescale_ray.errors import BadInput
from vescale_ray.geometry import Block
from vescale_ray.planner import HARDWARE, Blocks, Lever, Policy, choose_sharding, plan_layout
from vescale_ray.planner.codes import Codes
from vescale_ray.planner.cost import plan_model, predict_memory
from vescale_ray.planner.hardware import MISALIGNED, collective_time
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.placement.layout import TensorSpec
from vescale_ray.planner.request import size_of
from vescale_ray.planner.step_time import predict_time

H100 = HARDWARE["h100"]


def test_best_option_is_the_fastest_fit_and_all_have_reasons() -> None:
    choice = choose_sharding("llama-3-70b", 512, policy=Policy(optimizer="adamw"))
    assert choice.best is not None and choice.options[0] is choice.best
    room = choice.hardware.memory * 0.9
    fitting = [o for o in choice.options if o.memory.total <= room]
    assert choice.best in fitting
    assert choice.best.time.step <= min(o.time.step for o in fitting) * 1.02
    assert all(o.group * o.replicas == 512 for o in choice.options)
    assert all(o.reason and "\n" not in o.reason for o in choice.options)
    for option in choice.options:
        assert ("needs" in option.reason) == (option.memory.total > room)
    assert {o.lever.layers for o in choice.options} == {1, 2, 4} and len({o.group for o in choice.options}) >= 6


def test_model_that_never_fits_gets_least_memory_and_remedy() -> None:
    choice = choose_sharding("deepseek-v3", 64, policy=Policy(optimizer="adamw"))
    assert choice.best is None
    assert re.search(r"nothing fits: the least is [\d.]+ GiB with .*, more devices", choice.notes[0])


def test_block_policy_picks_an_option_of_under_3_percent_padding() -> None:
    choice = choose_sharding("gpt-oss-120b", 2048, HARDWARE["b200"], Policy(optimizer="adamw8bit", blocks=Blocks(128, "experts")))
    assert choice.best is not None and choice.best.padding_ratio < 0.03
    padded = [o for o in choice.options if o.group == 2048 and o.lever == Lever()]
    assert padded[0].padding_ratio > 0.3 and "padding" in padded[0].reason or "needs" in padded[0].reason


def test_memory_by_kind_matches_values_worked_out_by_hand() -> None:
    """Llama-3-8B over 8 ranks, worked out by hand: 8 030 261 248 parameters; a layer has 218 112 000, the head 525 340 672."""
    shapes = model_shapes("llama-3-8b")
    plan = plan_model(shapes, 8)
    memory = predict_memory(plan, Policy(tokens=1024))
    share = 8_030_261_248 / 8
    assert memory.master == pytest.approx(4 * share, rel=1e-3) == pytest.approx(memory.gradients, rel=1e-3)
    assert memory.optimizer == pytest.approx(8 * share, rel=1e-3)
    assert memory.gathered == pytest.approx(2 * (525_340_672 + 218_112_000), rel=1e-3), "two neighbours at a time"
    staging = 2 * 4 * 525_340_672 / 6
    assert memory.gradient_buffers == pytest.approx(2 * 525_340_672 + staging, rel=2e-3), "BF16 gradients of the larger one, and two chunks"
    wide = predict_memory(plan, Policy(tokens=1024, compute_dtype=torch.float32))
    assert wide.gradient_buffers == pytest.approx(4 * 525_340_672, rel=2e-3), "no chunk is cast"
    chosen = predict_memory(plan, Policy(tokens=1024, staging=32 << 20))
    assert chosen.gradient_buffers == pytest.approx(2 * 525_340_672 + 2 * (32 << 20), rel=2e-3), "two chunks of the size asked for"
    whole = predict_memory(plan, Policy(tokens=1024, staging=4 << 30))
    assert whole.gradient_buffers == pytest.approx((2 + 4) * 525_340_672, rel=2e-3), "all in one chunk"
    coded = plan_model(shapes, 8, codes=Codes(Block.tile(128, 128)))
    fp8 = predict_memory(coded, Policy(tokens=1024, quantize=Block.tile(128, 128)))
    layer = 218_103_808 * (1 + 4 / 128**2)
    assert fp8.codes == pytest.approx(32 * layer / 8, rel=1e-3) and memory.codes == 0, "layers without norms, and their scales"
    assert fp8.gathered == pytest.approx(memory.gathered + layer, rel=1e-3), "values as before, and the codes of a layer"
    assert fp8.gradient_buffers == pytest.approx(memory.gradient_buffers, rel=1e-3)
    sent = predict_time(plan, Policy(), H100).sent - predict_time(coded, Policy(quantize=Block.tile(128, 128)), H100).sent
    assert sent == pytest.approx(2 * 32 * 7 / 8 * (2 * 218_103_808 - layer), rel=1e-3), "two gathers of 32 layers, to seven of eight ranks"
    for wrong, said in (
        ({"compute_dtype": torch.float8_e4m3fn}, "give torch.bfloat16, and quantize="),
        ({"quantize": Block.rows(3)}, "tile"),
    ):
        with pytest.raises(BadInput, match=said):
            Policy(**wrong)  # type: ignore[arg-type]
    one = predict_memory(plan_model(shapes, 1), Policy(compute_dtype=torch.float32))
    assert one.gathered == one.gradient_buffers == 0, "nothing travels"
    one = predict_memory(plan_model(shapes, 1), Policy())
    assert one.gathered == pytest.approx(memory.gathered, rel=1e-3) and one.gradient_buffers == 0, "parameters are cast"
    states = {o: predict_memory(plan, Policy(optimizer=o)).optimizer / share for o in ("adamw", "adamw8bit", "muon", "sgd")}  # type: ignore[arg-type]
    assert states["adamw"] == pytest.approx(8, rel=1e-3) and states["sgd"] == pytest.approx(4, rel=1e-3)
    matrices = 1 - 2 * 525_336_576 / 8_030_261_248
    assert states["muon"] == pytest.approx(8 - 4 * matrices, rel=0.01)
    assert states["adamw8bit"] == pytest.approx(8 - 6 * matrices, rel=0.01)


def test_the_plan_says_where_keeping_casts_pays() -> None:
    """A step casts the shard twice, and once if the cast is kept; a cast reads and writes 6 bytes for each element."""
    share = 8_030_261_248 / 8
    few, many = Policy(tokens=1024), Policy(tokens=65536)  # with few tokens nothing hides the gathers
    plan = choose_sharding("llama-3-8b", 8, "h200", few)
    assert plan.best is not None and plan.best.memory.casts == 0
    kept = replace(few, keep_cast=True)
    assert predict_memory(plan.best.plan, kept).casts == pytest.approx(2 * share, rel=1e-3)
    saved = plan.best.time.step - predict_time(plan.best.plan, kept, HARDWARE["h200"]).step
    assert saved == pytest.approx(6 * share / HARDWARE["h200"].memory_bandwidth, rel=0.01)
    assert plan.notes == (f"keep_cast takes {saved / plan.best.time.step:.1%} of a step's time away, for 1.9 GiB of casts that are kept",)
    assert choose_sharding("llama-3-8b", 8, "h200", many).notes == ()
    assert choose_sharding("llama-3-8b", 8, "h200", replace(few, compute_dtype=torch.float32)).notes == ()
    (note,) = choose_sharding("llama-3-8b", 8, "h200", replace(many, keep_cast=True)).notes
    assert note == "keep_cast saves only 0.0% of a step's time, and takes 1.9 GiB: leave it out if memory is short"


def test_a_plan_of_gpt_oss_counts_one_unit_of_gradients() -> None:
    """In BF16, and two chunks of a sixth in FP32; two copies in FP32 would be 23.9 GiB."""
    memory = predict_memory(plan_model(model_shapes("gpt-oss-120b"), 1024), Policy())
    unit = 2 * 3_213_080_192
    assert memory.gathered == pytest.approx(2 * unit, rel=1e-3)
    assert memory.gradient_buffers == pytest.approx(unit + 2 * (512 << 20), rel=1e-3) and memory.gradient_buffers < 7 * 2**30
    assert memory.total < 33 * 2**30


def test_the_plan_tells_the_scales_among_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3-8b", "--devices", "8", "--group", "8", "--optimizer", "adamw8bit", "--dtype", "fp8"]
    main(words)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("codes "))
    assert re.search(r"GiB\s+\(0\.20 MiB of them scales\)$", line), line
    main([*words, "--json"])
    told = json.loads(capsys.readouterr().out)["options"][0]["units"]
    scales = {unit["name"]: unit["scale_bytes"] for unit in told if unit["fp8"]}
    assert scales == {"layer": pytest.approx(4 * 218_103_808 / 128**2 / 8, abs=128)} and any(not unit["fp8"] for unit in told)


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4)).requires_grad_(False)
    module = nn.ModuleDict({"layers": layers})
    memory = predict_memory(plan_model(model_shapes(module), 4), Policy())
    assert memory.gradients == memory.optimizer == memory.gradient_buffers == 0 < memory.master


def test_collective_time_models_latency_bandwidth_and_alignment() -> None:
    inside = collective_time(8e9, 8, H100)
    assert inside == pytest.approx(8e9 * 7 / 8 / (450e9 * 0.8), rel=0.01)
    across = collective_time(8e9, 64, H100)
    assert across == pytest.approx(8e9 * 7 / 8 / (8 * 50e9 * 0.8), rel=0.01)
    assert collective_time(0, 64, H100) == collective_time(1e9, 1, H100) == 0
    tiny = collective_time(1024, 1024, H100)
    assert 5e-5 < tiny < 2e-4, "latency alone"
    assert collective_time(8e9, 64, H100, rank_bytes=1000) == pytest.approx(MISALIGNED * across, rel=0.01)
    plan = plan_model(model_shapes("gpt-oss-20b"), 24)
    assert all(b.shard_numel * 2 % 128 == 0 for u in plan.units for b in u.plan.buffers), "ours never pays it"


def test_step_time_grows_with_tokens_and_covers_its_parts() -> None:
    shapes = model_shapes("llama-3-8b")
    plan = plan_model(shapes, 64)
    small, large = (predict_time(plan, Policy(tokens=n), H100) for n in (512, 65536))
    assert large.compute == pytest.approx(128 * small.compute)
    assert small.exposed > large.exposed and small.gather == large.gather
    for time in (small, large):
        assert time.step >= max(time.compute, time.gather + time.reduce - 1e-9 if time is small else 0)
        assert time.exposed <= time.gather + time.reduce + time.replicate
    sent = 63 * plan.shard_numel * (2 + 2 + 4)
    assert small.sent == sent, "gathered twice in BF16, reduced once in FP32"
    chunks, one = (predict_time(plan, Policy(tokens=512, staging=size), H100) for size in (8 << 20, 4 << 30))
    assert chunks.reduce > small.reduce > one.reduce and chunks.sent == one.sent == sent, "each chunk is a call"
    replicated = predict_time(plan, Policy(tokens=512), H100, replicas=4)
    assert replicated.replicate > 0 and replicated.sent > sent


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("llama-3-8b", 0), "0 devices: give at least 1"),
        (("llama-3-8b", 8, "tpu"), "hardware 'tpu' is unknown: use one of a100"),
        (("lama-3-8b", 8), "did you mean llama-3-8b?"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple, says: str) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        choose_sharding(*arguments)


def test_a_group_must_divide_the_devices() -> None:
    with pytest.raises(BadInput, match="a shard group of 3 does not divide 8 devices"):
        choose_sharding("llama-3-8b", 8, groups=[3])
    with pytest.raises(BadInput, match="optimizer 'adam' is unknown"):
        Policy(optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="0 tokens"):
        Policy(tokens=0)
    with pytest.raises(BadInput, match="a staging buffer of 0 bytes"):
        Policy(staging=0)
    with pytest.raises(BadInput, match="a staging buffer of 512 bytes is less than 128 bytes for each of 8 ranks: give at least 1024"):
        choose_sharding("llama-3-8b", 8, policy=Policy(staging=512))


def test_sizes_are_read_as_people_write_them() -> None:
    assert [size_of(t) for t in ("80GiB", "80G", "1.5TB", "512 MiB", "1024")] == [80 << 30, 80 * 10**9, 1_500_000_000_000, 512 << 20, 1024]
    for bad in ("", "80Q", "-1GiB", "0", "GiB"):
        with pytest.raises(BadInput, match="is not a size: give it as 80GiB"):
            size_of(bad)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_tables_and_writes_json_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    asked = ["--model", "gpt-oss-120b", "--devices", "256", "--memory", "40GiB", "--optimizer", "muon"]
    code, out, err = run(capsys, *asked, "--html", str(page))
    assert code == 0 and not err
    for word in ("116,829,156,672 parameters", "->", "256 ranks", "gradient buffers", "why", "needs", "met"):
        assert word in out
    html = page.read_text()
    memory, *layouts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    assert len(layouts) >= 3 and "rank 0" in html and "padding" in html and memory.get("aria-label") == "memory by kind"
    bars = [float(bar.get("width", "")) for bar in memory.iter("rect") if bar.get("y") == "30"]
    code, out, err = run(capsys, *asked, "--json")
    told = json.loads(out)
    assert code == 0 and told["fits"] and told["best"] == told["options"][0]
    assert told["best"]["shard_group"] * told["best"]["replicas"] == 256
    kinds = told["best"]["memory_bytes"]
    small = json.loads(run(capsys, *asked, "--json", "--staging", "32MiB")[1])["best"]["memory_bytes"]
    assert small["gradient_buffers"] < kinds["gradient_buffers"]
    total = kinds.pop("total")
    assert total == sum(kinds.values())
    assert [bar / sum(bars) for bar in bars] == [pytest.approx(size / total, abs=1e-4) for size in kinds.values()]
    assert {u["name"] for u in told["best"]["units"]} == {"embed", "layer (experts)", "head"}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "lama", "--devices", "8"], 2, "model 'lama' is unknown"),
        (["--model", "llama-3-8b", "--devices", "0"], 2, "0 devices: give at least 1"),
        (["--model", "llama-3-8b", "--devices", "8", "--optimizer", "adam"], 2, "did you mean adamw?"),
        (["--model", "llama-3-8b", "--devices", "8", "--dtype", "fp4"], 2, "dtype 'fp4' is unknown"),
        (["--model", "llama-3-8b", "--devices", "8", "--blocks", "-2"], 2, "blocks of -2 rows"),
        (["--model", "llama-3-8b", "--devices", "8", "--memory", "lots"], 2, "memory 'lots' is not a size"),
        (["--model", "llama-3-8b", "--devices", "8", "--memory", "80"], 2, "memory '80' is 80 bytes: give it as 80GiB"),
        (["--model", "llama-3-8b", "--devices", "8", "--staging", "lots"], 2, "staging 'lots' is not a size: give it as 256MiB"),
        (["--model", "llama-3-8b", "--devices", "8", "--staging", "1000"], 2, "each of 8 ranks: give at least 1024"),
        (["--model", "llama-3-8b", "--devices", "8", "--html", "/no/such/folder/x.html"], 2, "can't be written"),
        (["--model", "llama-3-8b", "--devices", "8", "--expert-parallel", "4"], 2, "over 4 ranks: llama-3-8b has no experts"),
        (["--model", "gpt-oss-20b", "--devices", "6", "--expert-parallel", "6"], 2, "it does not divide the 32 experts of a layer"),
        (["--model", "gpt-oss-20b", "--devices", "10", "--expert-parallel", "4"], 2, "10 ranks are not a multiple of 4; use 8 or another"),
        (["--model", "gpt-oss-20b", "--devices", "8", "--expert-parallel", "0"], 2, "over 0 ranks: give at least 1"),
        (["--model", "gpt-oss-20b", "--devices", "8", "--expert-parallel", "4", "--experts", "separate"], 2, "are not stacks"),
        (["--model", "kimi-k2", "--devices", "8"], 1, ""),
    ],
)
def test_plan_command_reports_bad_input_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str) -> None:
    got, out, err = run(capsys, *arguments)
    assert got == code and says in err
    assert err.count("\n") == (1 if code == 2 else 0) and "Traceback" not in err
    assert ("nothing fits" in out) == (code == 1)


SAME = """
import json
from vescale_ray.planner import choose_sharding, model_shapes, Policy, Blocks, plan_unit, Lever
from vescale_ray.planner.choice_report import as_json
policy = Policy(optimizer="adamw8bit", blocks=Blocks(128, "experts"), strided=True)
told = as_json(choose_sharding("qwen3-30b-a3b", 96, "h200", policy))
unit = max(model_shapes("deepseek-v3", experts="separate").units, key=lambda u: u.numel * u.count)
told["more"] = [plan_unit(unit, n, Blocks(16), lever=Lever(1, "per block")).fingerprint for n in (64, 1000)]
print(json.dumps(told))
"""


def test_plans_are_equal_in_another_process_and_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "4242"}
    done = subprocess.run([sys.executable, "-c", SAME], env=environment, capture_output=True, text=True, timeout=100, check=True)
    exec(SAME, {})
    assert done.stdout == capsys.readouterr().out


def test_plan_descriptions_name_the_differing_tensor() -> None:
    mine = plan_layout([TensorSpec("a", (8, 8)), TensorSpec("b", (8, 8))], 2)
    theirs = plan_layout([TensorSpec("a", (8, 8)), TensorSpec("b", (8, 9))], 2)
    assert mine.fingerprint != theirs.fingerprint
    differ = [(x, y) for x, y in zip(mine.description, theirs.description, strict=True) if x != y]
    assert any(x.startswith("b: [8, 8]") and y.startswith("b: [8, 9]") for x, y in differ)
