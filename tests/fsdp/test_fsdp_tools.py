"""Tools around a sharded model see the same as with torch's ``fully_shard``: torch.compile, logs, profilers, memory trackers."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.ranks import on_processes, run_gloo
from vescale_ray import optim
from vescale_ray.fsdp import fully_shard

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def sharded(how: Any, blocks: int = 4, backend: Any = None) -> Any:
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    for block in model:
        if backend is not None:
            block.compile(backend=backend, fullgraph=True)
        how(block)
    return how(model)


def compiled_frames(how: Any) -> tuple[int, int]:
    """Number of compilations of equal blocks in two steps, and of the engine's frames while a compiled function runs."""
    import torch._dynamo.testing
    from torch._dynamo.convert_frame import register_bytecode_hook

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    model = sharded(how, backend=counter)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
    torch._dynamo.reset()
    files: list[str] = []
    handle = register_bytecode_hook(lambda code, _: files.append(code.co_filename))
    model = sharded(how, blocks=2)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    torch.compile(step, backend="eager")(torch.ones(2, WIDTH))
    handle.remove()
    assert any(file == __file__ for file in files)
    return counter.frame_count, sum("/vescale_ray/" in file for file in files)


def compiled_training(how: Any, rank: int, dtype: torch.dtype) -> list[float]:
    """Losses of four steps of compiled blocks, each of which is one graph, and the squares of the parameters after them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = sharded(functools.partial(how, mp_policy=policy), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * rank + 2 * step + micro))
            loss = (model(x.to(dtype)).float() - 1).square().mean()
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.full_tensor().double().square().sum().item() for p in model.parameters())]


def compiled_optimizer(how: Any) -> tuple[float, float]:
    """Sums of the parameters after two steps, compiled and not. All but a unit's first parameter begin inside its buffer."""
    sums = []
    for compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = sharded(how, blocks=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            step()
            optimizer.zero_grad()
        sums.append(sum(p.full_tensor().square().sum().item() for p in model.parameters()))
    return sums[0], sums[1]


@on_processes(1)
def test_one_graph_of_a_whole_model_is_refused_with_the_remedy(rank: int, world: int) -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"leave out fullgraph=True; a unit .*, layer.compile"):
        torch.compile(sharded(fully_shard), backend="eager", fullgraph=True)(torch.ones(2, WIDTH))
    sharded(fully_shard, backend="eager")(torch.ones(2, WIDTH)).sum().backward()


OPTIMIZERS: dict[str, Any] = {
    "flat": lambda model: optim.Flat(model.parameters(), lr=0.1),
    **{name: functools.partial(optim.build_optimizer, config=name, log=None) for name in ("adamw8bit", "muon", "shampoo")},
}


def compiled_as_eager(rank: int, world: int) -> dict[str, bool]:
    """Return, by optimizer, True if two compiled steps give the bits of two eager ones."""
    same = {}
    for name, build in OPTIMIZERS.items():
        models = []
        for compiled in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            models.append(sharded(fully_shard, blocks=1))
            optimizer = build(models[-1])
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for _ in range(2):
                models[-1](torch.ones(2, WIDTH)).sum().backward()
                step()
                optimizer.zero_grad()
        ours, eager = ([p.full_tensor() for p in model.parameters()] for model in models)
        same[name] = all(map(torch.equal, ours, eager))
    return same


def test_compiled_steps_of_own_optimizers_equal_eager_ones() -> None:
    assert run_gloo(2, compiled_as_eager) == [dict.fromkeys(OPTIMIZERS, True)] * 2


def labels(how: Any) -> tuple[set[str], Counter[str]]:
    """Ranges that a profiler sees in a step, and the count of each log line."""
    seen: Counter[str] = Counter()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen[record.getMessage()] += 1

    model = sharded(how, blocks=2)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    logger, handler = logging.getLogger("torch.distributed.fsdp"), Handler()  # the logger that TORCH_LOGS=fsdp enables
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x).sum().backward()
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    return {event.key for event in profile.key_averages() if event.key.startswith("FSDP::")}, seen


def tracked(how: Any) -> dict[str, int]:
    """Bytes in the second step by kind of tensor, from torch's memory tracker for FSDP2."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    model = sharded(how, blocks=2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.ones(2, WIDTH)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((x,))
    with tracker:
        for step in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
    assert {str(state) for stats in tracker.memory_tracking.values() for state in stats.snapshots} >= {
        f"_FSDPModState.{name}" for name in ("BEF_PRE_FW", "AFT_POST_FW", "BEF_PRE_BW", "AFT_PRE_BW", "BEF_POST_BW", "AFT_POST_BW")
    }
    model(x).sum().backward()  # the model still trains
    assert all(p.grad is not None for p in model.parameters())
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "name", kind): peak[kind] for kind in peak}


def looks(rank: int, world: int) -> dict[str, Any]:
    return {
        name: (compiled_frames(how), labels(how), tracked(how), compiled_optimizer(how) if how is fully_shard else None)
        for name, how in (("ours", fully_shard), ("torch's", torch_fully_shard))
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return dict(run_gloo(2, looks)[0])


def compiled_both(rank: int, world: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    return compiled_training(fully_shard, rank, dtype), compiled_training(torch_fully_shard, rank, dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_compiled_blocks_train_as_under_torchs_fully_shard(dtype: torch.dtype, bound: float) -> None:
    for ours, theirs in run_gloo(2, compiled_both, dtype):
        assert ours == pytest.approx(theirs, rel=bound) and ours[6] < ours[0]


def test_identical_blocks_share_their_compilations(seen: dict[str, Any]) -> None:
    assert seen["ours"][0][0] == seen["torch's"][0][0] < 4


def test_optimizer_step_on_parameters_of_one_buffer_compiles(seen: dict[str, Any]) -> None:
    compiled, not_compiled = seen["ours"][3]
    assert abs(compiled - not_compiled) <= 1e-4 * not_compiled


def test_backward_in_a_compiled_function_leaves_hooks_uncompiled(seen: dict[str, Any]) -> None:
    assert seen["ours"][0][1] == 0


def test_profilers_and_logs_show_a_step_under_the_names_of_torch(seen: dict[str, Any]) -> None:
    (ours, our_log), (theirs, their_log) = seen["ours"][1], seen["torch's"][1]
    of_copies = {"FSDP::all_gather_copy_out (0)", "FSDP::all_gather_copy_out (1)"}
    of_casts = {"FSDP::cast_forward_inputs", "FSDP::cast_forward_outputs"}
    waits = {name for name in theirs if "rs_wait" in name or "accumulate" in name}
    root = {name for name in theirs if name.startswith("FSDP::") and " (" not in name and " for " not in name}
    assert theirs - of_copies - of_casts - waits - root <= ours
    assert {"FSDP::root_pre_forward", "FSDP::root_post_backward_callback", "FSDP::backward_prefetch for 0"} <= ours
    assert {line: count for line, count in our_log.items() if "(" in line} == {line: n for line, n in their_log.items() if "(" in line}
    assert our_log["FSDP::root_pre_forward"] == our_log["FSDP::root_post_backward"] == 1


def test_torchs_memory_tracker_of_sharded_models_works(seen: dict[str, Any]) -> None:
    ours, theirs = seen["ours"][2], seen["torch's"][2]
    for kind in ("INP", "BUFFER"):
        assert ours[kind] == theirs[kind]
    assert 0.9 * theirs["OPT"] <= ours["OPT"] <= 1.1 * theirs["OPT"]
    assert 0.5 * theirs["Total"] <= ours["Total"] <= 1.1 * theirs["Total"]


def messages_under_way(rank: int, world: int) -> tuple[int, set[str]]:
    """Recorded ranges of a backward, and those of gloo's operations, which may end in the next backward."""
    model = sharded(fully_shard, blocks=2)
    model(torch.ones(2, WIDTH)).sum().backward()  # waits at once for the collectives of its checks
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, WIDTH)).sum().backward()
    model(torch.ones(2, WIDTH)).sum().backward()
    recorded = {event.key for event in profile.key_averages()}
    return sum(name.startswith("FSDP::") for name in recorded), {name for name in recorded if "gloo:" in name or "c10d::" in name}


def test_a_profile_has_no_operation_that_ends_after_it() -> None:
    """torch's profiler would write the operation's end into freed memory, and corrupt the heap."""
    for labelled, messages in run_gloo(2, messages_under_way):
        assert labelled > 5 and not messages
