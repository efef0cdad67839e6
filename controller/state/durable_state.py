"""The durable state of a controller: values that it needs after a restart and can't learn from the workers or the run's events.

``state_store`` writes it and finds it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from vescale_ray.controller.protocol import StateSource, World
from vescale_ray.workers.messages import Origin, Ticket

VERSION = 2
"""Version of the file's format. Raise it when a field is added, removed or changes its meaning."""


@dataclass(frozen=True)
class LaunchedGeneration:
    """The newest generation: its ticket (``number``, ``attempt``), its workers in rank order, and the state that it started from."""

    number: int
    attempt: int
    members: tuple[str, ...]
    origin: str
    step: int

    @classmethod
    def of(cls, world: World) -> LaunchedGeneration:
        return cls(world.ticket.generation, world.ticket.attempt, world.members, str(world.source.origin), world.source.step)

    def world(self) -> World:
        return World(Ticket(self.number, self.attempt), self.members, StateSource(Origin(self.origin), self.step))


@dataclass(frozen=True)
class DurableState:
    """The durable state; a value.

    Attributes:
        run_id: id of the start of the run that wrote this state. Another start takes over only its steps and the numbers that it gave out.
        last_number: highest number that was given out, to a generation or as the epoch of a checkpoint.
        generation: the newest generation; None before the first.
        leavers: workers outside the generation that stay to give their shards away.
        target: number of workers wanted; ``reason``: why the run has another number (one of ``snapshot.REASONS``).
        requested: workers that the last rescale command asked for; 0: there was none.
        actions_done: scheduled actions that were carried out.
        stop_reason: why the run is being stopped; None: it is not.
        steps_before: steps that earlier starts of the run had completed.
        highest_step: largest number of steps that were ever complete.
        crashes, node_losses, controller_restarts: failures in a row without progress (``budget.Budget``).
        failures: all failures of this start of the run, by cause.
        counted_generation: newest generation whose failure is counted in these fields.
        port: port of the HTTP server, so that its address stays the same.
        epoch: how often the controller was started.
        version: format of the file.
    """

    run_id: str
    last_number: int
    generation: LaunchedGeneration | None = None
    leavers: tuple[str, ...] = ()
    target: int = 0
    reason: str = "manual"
    requested: int = 0
    actions_done: int = 0
    stop_reason: str | None = None
    steps_before: int = 0
    highest_step: int = 0
    crashes: int = 0
    node_losses: int = 0
    controller_restarts: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    counted_generation: int = 0
    port: int = 0
    epoch: int = 0
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DurableState:
        """Raises ValueError with one line if the text is damaged or has another version."""
        try:
            tree = json.loads(text)
            if (version := tree["version"]) != VERSION:
                raise ValueError(f"it has version {version}, this controller reads version {VERSION}")
            launched = tree["generation"]
            if launched is not None:
                launched = LaunchedGeneration(**{**launched, "members": tuple(launched["members"])})
                launched.world()
            return cls(**{**tree, "generation": launched, "leavers": tuple(tree["leavers"])})
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None
