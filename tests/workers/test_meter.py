"""Usage figures of a step: waiting seconds, bytes by kind, failed steps, and the model's operations."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.workers.fleet import Fleet, State
from tests.workers.tiny import Run, slow_down, tiny
from vescale_ray.config import RunConfig
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner import HARDWARE
from vescale_ray.workers.messages import StepRecord, Usage
from vescale_ray.workers.monitoring import flops


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with Fleet(3) as fleet:
        yield fleet


def plain(config: RunConfig) -> Llama:
    m = config.model
    return Llama(LlamaConfig(m.dim, m.layers, m.heads, m.kv_heads, m.ffn, max_seq=config.data.seq_len, tie=m.tie))


def step_slowly(state: State, seconds: float) -> tuple[StepRecord, Usage]:
    """Make a step in which each of this rank's slots takes ``seconds`` longer."""
    trainer = state["trainer"]
    usual = trainer._losses
    slow_down(state, seconds)
    record = trainer.step(settle=state["snapshots"].settle)
    trainer._losses = usual
    state["snapshots"].after_step(trainer)
    return record, trainer.usage


def facts(state: State) -> tuple[Usage, int, int]:
    """The usage, the bytes of the snapshots' buffers, and the elements between tensors in the layouts."""
    from vescale_ray.fsdp import explain

    trainer = state["trainer"]
    groups = [group for unit in explain(trainer.model).units for group in unit.groups]
    elements = sum(end - start for group in groups for p in group.parameters for start, end in [p.ranges[trainer.rank]])
    return trainer.usage, state["snapshots"].nbytes, sum(group.shard_numel for group in groups) - elements


def test_bytes_by_kind_add_up_to_the_model_s_at_every_world_size(text: str, three: Fleet) -> None:
    config = tiny(text)
    shapes = [parameter.numel() for parameter in plain(config).parameters()]
    numel = sum(shapes)
    run = Run(three, config)
    run.fresh([0, 1, 2])
    for world in (3, 2):
        run.train(run.records[max(run.records)].step + 2 if run.records else 2)
        told = three.run(run.members, facts)
        assert len(told) == world
        total = {kind: sum(usage.memory[kind] for usage, _, _ in told.values()) for kind in told[0][0].memory}
        assert set(total) == {"parameters", "gradients", "optimizer", "padding", "codes", "casts", "buffers"}
        assert total["codes"] == 0, "nothing is gathered in FP8"
        assert total["parameters"] == total["gradients"] == 4 * numel
        assert total["optimizer"] == 8 * numel + 4 * len(shapes) * world, "two states, and a step count on every rank"
        for usage, copies, between in told.values():
            assert usage.memory["padding"] == 2 * 4 * between, "of parameters and of gradients"
            assert usage.memory["buffers"] >= 4 * 256 * 32, "the root's embedding was gathered"
            own = (usage.memory["parameters"] + usage.memory["optimizer"]) * 0.9
            assert copies > 4 * own, "two steps, of its own and of another rank"
        assert not any(usage.device_memory or usage.peak_flops for usage, _, _ in told.values()), "this is no accelerator"
        if world == 3:
            three.run(run.members, park)
            run.resume([0, 1, 2], [0, 1])
    run.end()
    # With BF16 compute there is no copy of the shards in that dtype: they are cast where they are gathered.
    run = Run(three, tiny(text, train_param_dtype="bfloat16", elastic_snapshot_every=0))
    run.fresh([0, 1])
    run.train(1)
    told = three.run(run.members, facts)
    assert sum(usage.memory["parameters"] for usage, _, _ in told.values()) == 4 * numel
    assert sum(usage.memory["gradients"] for usage, _, _ in told.values()) == 4 * numel
    run.end()


def park(state: State) -> None:
    from tests.workers.tiny import leave

    leave(state)


def test_phases_sum_to_step_time_and_show_waits_for_a_slow_rank(text: str, three: Fleet) -> None:
    pause = 0.3
    run = Run(three, tiny(text, elastic_snapshot_every=1))
    run.fresh([0, 1, 2])
    run.train(2)
    told = three.run_each({0: (0.0,), 1: (pause,), 2: (0.0,)}, step_slowly)
    rounds = 2  # 5 slots on 3 ranks
    for rank, (record, usage) in told.items():
        assert set(usage.waited) == {"all_gather", "reduce_scatter", "all_reduce", "peer_copy", "step_end"}
        assert sum(usage.phases.values()) == pytest.approx(record.seconds, abs=1e-6)
        assert usage.phases["comm"] == pytest.approx(sum(usage.waited.values()), abs=1e-9)
        assert set(usage.phases) == {"data", "forward_backward", "comm", "optimizer", "other"}
        if rank == 1:
            assert usage.phases["forward_backward"] >= rounds * pause
        else:
            # At least half of the pause, because on a busy machine these ranks are late, too.
            assert usage.phases["comm"] >= 0.5 * rounds * pause and usage.phases["comm"] > told[1][1].phases["comm"]
            assert sum(usage.waited[kind] for kind in ("all_gather", "reduce_scatter")) > 0.5 * pause, "the rounds' own collectives"
    run.end()


def step_with(state: State, poison: bool) -> tuple[StepRecord, float, float]:
    """Make a step, with NaN in the head's weights if ``poison``.

    Returns the record, the change of the parameters, and the seconds for which Muon waited.
    """
    trainer = state["trainer"]
    parameters = list(trainer.model.parameters())
    with torch.no_grad():
        if poison:
            trainer.model.head.weight.fill_(math.nan)
        before = [p.to_local().clone() for p in parameters]
    record = trainer.step()
    with torch.no_grad():
        moved = sum(float((p.to_local() - b).nan_to_num().abs().sum()) for p, b in zip(parameters, before, strict=True))
    return record, moved, trainer.usage.waited["all_to_all"]


def test_clipped_and_skipped_steps_are_reported_on_every_rank(text: str, three: Fleet) -> None:
    run = Run(three, tiny(text, train_optimizer="muon", train_grad_clip=1e-3))
    run.fresh([0, 1])
    fine, bad = (three.run_each({0: (poison,), 1: (poison,)}, step_with) for poison in (False, True))
    run.end()
    for record, moved, waited in fine.values():
        assert record.clipped and not record.skipped and moved > 0 and 0 < waited < record.seconds
    for record, moved, waited in bad.values():
        assert record.skipped and math.isnan(record.loss) and math.isnan(record.grad_norm)
        assert moved == waited == 0, "no parameter was changed, nothing exchanged"
    run = Run(three, tiny(text, train_grad_clip=1e3))
    run.fresh([0, 1])
    assert not any(record.clipped or record.skipped for record in run.train(2))
    run.end()


@pytest.mark.parametrize("tie", [False, True])
def test_the_model_s_operations_are_those_that_torch_counts(text: str, tie: bool) -> None:
    config = tiny(text, model_tie=tie, model_kv_heads=1, model_ffn=40)
    model, seq = plain(config), config.data.seq_len
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(3, seq, dtype=torch.int64))
        logits.sum().backward()
    assert flops.token_flops(model, seq) * 3 * seq == counter.get_total_flops()


def test_flops_of_a_custom_model_count_its_weight_matrices() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert flops.token_flops(model, 3) * 2 * 3 == counter.get_total_flops()


def test_known_peaks_are_the_planners_and_unknown_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "b200": "NVIDIA B200"}
    for key, name in names.items():
        assert flops.known_peak(name, "bfloat16") == HARDWARE[key].flops
        single, tensor = flops.known_peak(name, "float32"), flops.known_peak(name, "bfloat16")
        assert single is not None and tensor is not None and 10 < tensor / single < 35
        with monkeypatch.context() as context:
            context.setattr(torch, "get_float32_matmul_precision", lambda: "high")
            wide = flops.known_peak(name, "float32")
            assert wide is not None and wide == pytest.approx(tensor / 2, rel=0.03), "TF32 is half as fast as BF16"
    assert flops.known_peak("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert flops.known_peak("NVIDIA GeForce RTX 4090", "bfloat16") is None
    assert flops.peak_flops(torch.device("cpu"), "float32") is None
