"""The peak of live tensor bytes in a step on the CPU: torch's own count, plus the resident part of the buffers that vescale-ray maps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from vescale_ray.fsdp.buffers.memory import MAPPED_BYTES, Pool


def peak_of_live_tensors(step: Callable[[], Any]) -> int:
    """Peak of the live bytes in a step, beyond those before it: parameters, and AdamW's two states of them."""
    mapped: list[tuple[int, int]] = [(0, 0)]

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(pool: Pool, *args: Any, **options: Any) -> Any:
            result = method(pool, *args, **options)
            mapped.append((time.time_ns(), pool.bytes_held(MAPPED_BYTES)))
            return result

        return call

    methods = {name: getattr(Pool, name) for name in ("provide", "release", "take", "written", "give_back", "settle", "trim")}
    for name, method in methods.items():
        setattr(Pool, name, noted(method))
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            step()
    finally:
        for name, method in methods.items():
            setattr(Pool, name, method)
    events = [(e.start_ns(), e.nbytes()) for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = events + [(moment, after - before) for (_, before), (moment, after) in itertools.pairwise(mapped)]
    return max(itertools.accumulate(change for _, change in sorted(changes)))
