"""The rescaling checks of ``make gpu-check``, as far as they run on a CPU, so that they keep working between GPU runs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_rescale import Skip, check_abort, check_generations, check_moves, check_offload, check_refused  # type: ignore[import-not-found]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
CPU = torch.device("cpu")


def test_cpu_passes_group_and_move_checks_and_skips_gpu_checks() -> None:
    assert "4 groups in one process; losses differ from a calm run's by 0.0e+00" in check_generations(CPU)
    assert "every bit kept" in check_moves(CPU)
    for check in (check_abort, check_offload, check_refused):
        with pytest.raises(Skip, match="needs a GPU"):
            check(CPU)
