"""``train.zero_stage``: the parts of the state that it divides, by the memory of a worker. Other tests train with each stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.fleet import Fleet
from tests.workers.tiny import Run, State, tiny, write_text
from vescale_ray.fsdp import held_bytes


def held(state: State) -> dict[str, int]:
    return held_bytes(state["trainer"].model)


@pytest.mark.parametrize("stage", [3, 2, 1])
def test_only_stage_1_keeps_whole_gradients_over_slots(tmp_path: Path, stage: int) -> None:
    """A worker gets more slots when others are lost. The memory of its gradients must not grow then."""
    peaks = {}
    with Fleet(2) as fleet:
        for slots in (2, 6):
            run = Run(fleet, tiny(write_text(tmp_path), train_zero_stage=stage, train_slots=slots, train_slot_batch=1, model_layers=6))
            run.fresh([0, 1])
            run.train(2)
            found = fleet.run([0], held)[0]
            peaks[slots], parameters = found["buffers"], 2 * found["parameters"]
            run.end()
    if stage == 1:
        assert peaks[6] > 0.9 * parameters + peaks[2] / 2, (peaks, parameters)
    else:
        assert peaks[6] == peaks[2], (peaks, parameters)
    assert (peaks[2] > parameters) == (stage < 3), "only with stage 3 are parameters freed"
