"""The end of a run, for tests of the control loop."""

from __future__ import annotations

from tests.controller.stage import Stage
from vescale_ray.controller import states
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Ending


def committer(stage: Stage, result: SaveResult | None) -> list[tuple[str, ...]]:
    """Give each checkpoint of parked workers this result, and return the list of the workers of each."""
    made: list[tuple[str, ...]] = []

    def save(workers: tuple[str, ...]) -> SaveResult | None:
        made.append(workers)
        return result

    stage.saves(save)
    return made


def completed() -> states.Recovering:
    """All steps are done."""
    return states.Recovering(Ending(("a", "b"), finished=True))


LAST = SaveResult("r-h8-s60", 60, 8, 0.1, CommittedCheckpoint("c60", "/c60", 60))
