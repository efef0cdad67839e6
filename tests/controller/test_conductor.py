"""The conductor's loop where Ray could not be brought to it in time: with a crew whose clock and reports are the test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.recorded import Recorded, recorded
from tests.controller.runs import tiny
from vescale_ray.config import ElasticSection
from vescale_ray.controller import conductor as subject
from vescale_ray.controller import policy
from vescale_ray.controller.autoscaling import Autoscaling, GrowthNote
from vescale_ray.controller.budget import Budget, Cause, Limits
from vescale_ray.controller.checkpoint_stats import CheckpointStats
from vescale_ray.controller.conductor import GIVER_S, TICK_S, Conductor
from vescale_ray.controller.connectivity import NOBODY, Admission, Connectivity
from vescale_ray.controller.crew import Lost
from vescale_ray.controller.durable_state import DurableState, LaunchedGeneration
from vescale_ray.controller.exit_deadlines import ExitDeadlines, Surroundings, WorkerView
from vescale_ray.controller.hang import LEAST_S, HangWatch
from vescale_ray.controller.policy import Kept
from vescale_ray.controller.protocol import Bounds, Ending, RunState, Source, World
from vescale_ray.controller.saves import SaveResult, Saves
from vescale_ray.controller.steering import PLANNED_S, Steering
from vescale_ray.controller.step_stats import StepStats
from vescale_ray.controller.straggler import StragglerNote
from vescale_ray.workers.messages import Evaluated, Fault, FaultKind, Filled, Origin, Phase, Report, Saved, Stepped, Ticket, WorkerInfo

TICKET = Ticket(7, 1)
WORLD = World(TICKET, ("a", "b"), Source(Origin.MEMORY, 40))
PEER = Fault(FaultKind.PEER, "gloo: connection closed")


def report(worker: str, phase: Phase, ticket: Ticket = TICKET, fault: Fault | None = None) -> Report:
    return Report(worker, ticket, phase, 40, (), (), fault, 0)


class Crew:
    """Workers that report what the test says; time passes by a tick for each round of the loop."""

    def __init__(self, *reports: Report) -> None:
        self.reports = {one.worker: one for one in reports}
        self.now = 50.0
        self.fenced: list[tuple[float, tuple[str, ...]]] = []
        self.hired = self.hiring = 0
        self.on_the_way: list[str] = []
        self.starve: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        """Who was ended, and is not dead yet; when that was."""

    def clock(self) -> float:
        return self.now

    def alive(self, worker: str) -> bool:
        return worker in self.reports

    def report(self, worker: str) -> Report | None:
        return self.reports.get(worker)

    def doomed(self, worker: str) -> bool:
        return worker not in self.reports or worker in self.ended

    def silent(self, seconds: float) -> list[str]:
        return []

    def starved(self, workers: Any) -> dict[str, float]:
        return {worker: self.starve.pop(worker) for worker in workers if worker in self.starve}

    def ready(self) -> tuple[str, ...]:
        return tuple(self.reports)

    def warming(self) -> tuple[str, ...]:
        return tuple(w for w in self.on_the_way if w not in self.reports)

    def fence(self, workers: Any, ticket: Ticket) -> None:
        self.fenced.append((self.now, tuple(workers)))

    def adopt(self, known: Any) -> None:
        pass

    asking_outline = False

    def ask_outline(self, workers: Any) -> None:
        pass

    def hire(self, avoid: Any = ()) -> None:
        self.hired += 1
        self.on_the_way.append(f"new{self.hired}")


class Stage:
    """A conductor with ``crew``; ``each_round`` is told of the time that has passed."""

    def __init__(self, crew: Crew, leavers: tuple[str, ...] = (), filled: bool = False, **elastic: Any) -> None:
        self.crew, self.each_round = crew, lambda passed: None
        self.broken: list[tuple[float, list[str]]] = []
        made: Any = Conductor.__new__(Conductor)
        self.leaving: frozenset[str] = frozenset()
        """Whose node is about to go."""
        steering = SimpleNamespace(leavers=list(leavers), steer=lambda world: None, outside=lambda living: [], hire_failures=[], nodes=None)
        steering.hear_of_drains, steering.fleeting = lambda members: False, []
        steering.nodes = SimpleNamespace(draining={}, avoided=frozenset())
        steering.connectivity = Connectivity(ElasticSection(workers=2, **elastic))
        steering.cut_off = lambda members, leavers: NOBODY
        steering.leaving = lambda workers: self.leaving & set(workers)
        steering.stragglers = SimpleNamespace(leaving=lambda *about: frozenset())
        made._crew, made._steering, made._gone, made._inherited = crew, steering, {}, None
        made._saves = Saves("nowhere", None, lambda step: {}, None)  # type: ignore[arg-type]
        stats = SimpleNamespace(has_stepped=False, workers={}, rescale=None, step=40, state=RunState.RESCALING, waiting=False)
        stats.steps, stats.checkpoints = StepStats(), CheckpointStats()
        made._log, made._fence_s = SimpleNamespace(stats=stats, record=lambda *a, **k: None), 0.0
        made._generation = SimpleNamespace(all_filled=filled, world=WORLD)
        made._hangs, made._exit_deadlines = HangWatch(), SimpleNamespace(late=lambda *about: {}, silence_s=1.5)
        made._keeper = SimpleNamespace(abandon=lambda: None, layouts=SimpleNamespace(told=True, ahead=lambda worlds: None))
        made._keeper.writes, made._keeper.held_step = lambda workers: False, lambda workers: 40 if workers else -1
        steering.untried, steering.free_hemmed = frozenset(), lambda avoid: None
        made._cut_short = None
        made._evidence = SimpleNamespace(failed=lambda *about: None)
        made._config = SimpleNamespace(elastic=ElasticSection(workers=2, **elastic), train=SimpleNamespace(steps=60))
        made._spec = SimpleNamespace(bounds=Bounds())
        made._budget, made._state, made._remember = Budget(Limits(3, 20, 20)), DurableState("r", 7), lambda: None
        made.desk = desk = SimpleNamespace(stop=None, target=2, reason="drain", want=self._want)
        desk.explain, desk.end = lambda reason: setattr(desk, "reason", reason), lambda reason: setattr(desk, "stop", desk.stop or reason)
        made._tick, made._break = self._tick, lambda world, inside: self.broken.append((crew.now, list(inside)))
        made._plan_ahead = lambda world: None
        self.conductor = made

    def with_log(self, folder: Path, state: RunState, step: int = 40) -> Recorded:
        """A real log, of a run that is in this state; what a broken generation does to it is real, too."""
        run = recorded(folder, run_id="r")
        run.open(replace(WORLD, source=Source(Origin.MEMORY, step)))
        for worker in WORLD.members:
            run.generation.filled(worker, Filled(TICKET, step, Origin.MEMORY, {}))
        run.log.record("state", before="PENDING", state=str(state))
        self.conductor._log, self.conductor._generation, self.conductor._publisher = run.log, run.generation, run.publisher
        del self.conductor._break
        return run

    def _tick(self) -> list[Any]:
        self.crew.now += TICK_S
        self.each_round(self.crew.now - 50.0)
        assert self.crew.now < 150.0, "the loop does not end"
        return []

    def _want(self, workers: int, reason: str) -> None:
        self.conductor.desk.target, self.conductor.desk.reason = workers, reason

    def lose(self, worker: str, cause: Cause) -> None:
        del self.crew.reports[worker]
        self.conductor._gone[worker] = Lost(worker, None, "its node does not answer", cause)


def test_who_answers_nothing_is_ended_only_when_its_machine_was_asked_whether_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not for 3 of the seconds: it has as many more."""
    crew = Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING))
    crew.starve["b"] = 3.0
    stage = Stage(crew, filled=True)
    watch, ended = stage.conductor._hangs, []
    watch.begin(TICKET, 2)
    for step in range(1, 20):
        for _ in WORLD.members:
            watch.stepped(TICKET, step, 0.1)
    monkeypatch.setattr(subject.time, "monotonic", lambda: crew.now)

    def end(crew: Any, log: Any, world: Any, hung: Any) -> None:
        ended.append((crew.now, dict(hung)))
        for worker in WORLD.members:
            crew.reports[worker] = report(worker, Phase.PARKED, fault=PEER)

    monkeypatch.setattr(subject, "end_hung", end)
    stage.conductor._evidence.hung = lambda report: None

    def play(passed: float) -> None:
        for worker in "ab" if passed < 1 else "a":
            watch.heard(replace(crew.reports[worker], waiting=True), crew.now)

    stage.each_round = play
    stage.conductor._watch(WORLD)
    ((when, hung),) = ended
    assert set(hung) == {"b"} and when - 51.0 == pytest.approx(LEAST_S + 3.0, abs=4 * TICK_S) and not crew.starve


@pytest.mark.fault("W15")
def test_a_leaver_whose_machine_stops_before_it_has_given_its_shards_is_not_waited_for() -> None:
    """No connection breaks: the members would wait in the move until the bound of the collectives is over."""
    crew = Crew(report("a", Phase.FORMING), report("b", Phase.FORMING), report("l", Phase.GIVING))
    stage = Stage(crew, ("l",))

    def play(passed: float) -> None:
        if passed > 1.0 and "l" in crew.reports:
            stage.lose("l", Cause.NODE)
        if stage.broken:
            for worker in "ab":
                crew.reports[worker] = report(worker, Phase.PARKED, fault=PEER)

    stage.each_round = play
    ending = stage.conductor._watch(WORLD)
    ((when, inside),) = stage.broken
    assert when - 51.0 == pytest.approx(GIVER_S, abs=3 * TICK_S) and inside == ["a", "b"]
    assert not ending.lost and set(ending.faults) == {"a", "b"}
    assert (stage.conductor._budget.nodes, stage.conductor._budget.crashes) == (1, 0), "it was a node, and nobody's crash"


def test_a_last_checkpoint_that_a_storage_never_takes_is_waited_for_as_long_by_a_controller_that_was_restarted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller that had ordered it would have given it up; the next one took its writers for members that train, for ever."""
    crew = Crew(report("a", Phase.SAVING), report("b", Phase.SAVING))
    stage = Stage(crew, filled=True)
    conductor, ended, steered = stage.conductor, [], []
    conductor._inherited, bounds = TICKET, Bounds(save=30.0)
    conductor._exit_deadlines = ExitDeadlines(ElasticSection(workers=2), bounds)
    conductor._steering.steer, conductor._evidence.hung = steered.append, lambda report: None

    def end(crew: Any, log: Any, world: Any, hung: Any) -> None:
        ended.append((crew.now - 50.0, dict(hung)))
        for worker in hung:
            stage.lose(worker, Cause.HANG)

    monkeypatch.setattr(subject, "end_hung", end)
    ending = conductor._watch(WORLD)
    ((when, hung),) = ended
    assert when == pytest.approx(30.0, abs=3 * TICK_S) and not steered and set(ending.lost) == {"a", "b"}
    assert set(hung.values()) == {"it still writes a checkpoint after 30 s"}

    crew = Crew(report("a", Phase.SAVING), report("b", Phase.SAVING))
    stage = Stage(crew, filled=True)

    def play(passed: float) -> None:
        for worker in "ab":
            crew.reports[worker] = report(worker, Phase.FINISHED if passed > (10.0 if worker == "a" else 20.0) else Phase.SAVING)

    stage.each_round, stage.conductor._inherited = play, TICKET
    ending = stage.conductor._watch(WORLD)
    assert ending.clean and ending.finished and not stage.broken and crew.now - 50.0 == pytest.approx(20.0, abs=3 * TICK_S)


@pytest.mark.parametrize(("stop", "step", "state"), [(None, 60, "CHECKPOINTING"), ("SIGTERM", 40, "STOPPING"), (None, 40, "RESCALING")])
def test_a_controller_that_is_restarted_while_the_last_checkpoint_is_written_says_so(
    tmp_path: Path, stop: str | None, step: int, state: str
) -> None:
    """It said RESCALING for as long as that took. What is kept of a run that has failed is no last checkpoint."""
    crew = Crew(report("a", Phase.SAVING), report("b", Phase.SAVING))
    stage = Stage(crew)
    run, seen = stage.with_log(tmp_path, RunState.RESCALING, step), []
    stage.conductor.desk.stop, stage.conductor._inherited = stop, TICKET

    def play(passed: float) -> None:
        seen.append(run.stats.state)
        if passed > 1.0:
            for worker in "ab":
                crew.reports[worker] = report(worker, Phase.PARKED if stop else Phase.FINISHED)

    stage.each_round = play
    assert stage.conductor._watch(WORLD).clean
    assert str(seen[-1]) == str(run.stats.state) == state


def test_a_leaver_that_fails_before_it_has_given_its_shards_is_not_waited_for() -> None:
    """The members waited for it to come, for as long as a collective may take; and then all of them were taken for hung."""
    crew = Crew(report("a", Phase.FORMING), report("b", Phase.FORMING), report("l", Phase.GIVING))
    stage = Stage(crew, ("l",))

    def play(passed: float) -> None:
        if passed > 1.0:
            crew.reports["l"] = report("l", Phase.PARKED, fault=Fault(FaultKind.OWN, "MemoryError: no room for a batch"))
        if stage.broken:
            for worker in "ab":
                crew.reports[worker] = report(worker, Phase.PARKED, fault=PEER)

    stage.each_round = play
    stage.conductor._watch(WORLD)
    ((when, _),) = stage.broken
    assert when - 51.0 == pytest.approx(GIVER_S, abs=3 * TICK_S)
    assert stage.conductor._budget.total == {Cause.ERROR: 1} and "no room for a batch" in stage.conductor._budget.errors[0]


def test_a_worker_that_hangs_is_ended_once_and_told_of_once_however_long_it_takes_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten reports of one hang, each of which stopped the controller for half a second, where its node told nothing of its death."""
    crew = Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING))
    stage = Stage(crew, filled=True)
    stage.conductor._hangs = SimpleNamespace(verdict=lambda *about: {"b": "it stands"}, ended=lambda hung: None, forming_s=5.0)
    stage.conductor._evidence.hung = lambda report: None
    reports = []

    def end(crew: Any, log: Any, world: Any, hung: Any) -> None:
        reports.append(dict(hung))
        crew.ended |= dict.fromkeys(hung, crew.now)

    monkeypatch.setattr(subject, "end_hung", end)

    def play(passed: float) -> None:
        if "b" in crew.reports and crew.now - crew.ended.get("b", crew.now) > 1.0:
            stage.lose("b", Cause.HANG)
            crew.reports["a"] = report("a", Phase.PARKED, fault=PEER)

    stage.each_round = play
    stage.conductor._watch(WORLD)
    assert len(reports) == 1 and set(reports[0]) == {"b"}


def test_a_worker_that_leaves_its_generation_in_the_moment_in_which_it_is_ended_is_lost() -> None:
    """It was made a member of the next one, which then failed as well."""
    crew = Crew(report("a", Phase.PARKED, fault=PEER), report("b", Phase.TRAINING))
    stage = Stage(crew)

    def late(since: float, inside: dict[str, WorkerView], rest: Surroundings) -> dict[str, str]:
        assert (list(inside), rest.out, rest.complete) == (["b"], 1, True) or crew.ended
        if since > 3.0 and not crew.ended:
            crew.ended["b"] = crew.now
            crew.reports["b"] = report("b", Phase.PARKED, fault=PEER)
        return {}

    def play(passed: float) -> None:
        if "b" in crew.reports and crew.now - crew.ended.get("b", crew.now) > 0.3:
            stage.lose("b", Cause.HANG)

    asked: list[list[str]] = []
    stage.conductor._keeper.held_step = lambda workers: asked.append(workers) or 40
    stage.conductor._exit_deadlines.late, stage.each_round = late, play
    ending = stage.conductor._watch(WORLD)
    assert ending.living == ("a",) and set(ending.lost) == {"b"}
    assert all(workers == ["a"] for workers in asked), "not what the one still has that may have to be ended"


@pytest.mark.parametrize("told", [True, False], ids=["it has told so", "its word was lost with it"])
def test_a_leaver_that_is_lost_when_it_has_given_its_shards_is_missed_by_nobody(told: bool) -> None:
    crew = Crew(report("a", Phase.FORMING), report("b", Phase.FORMING), report("l", Phase.GIVING))
    stage = Stage(crew, ("l",))

    def play(passed: float) -> None:
        if told and 0.4 < passed < 0.6:
            crew.reports["l"] = report("l", Phase.PARKED)
        if passed > 1.0 and "l" in crew.reports:
            stage.lose("l", Cause.NODE)
        if passed > (5.0 if told else 1.0 + GIVER_S / 2):
            stage.conductor._generation.all_filled = True
        if passed > 8.0:
            for worker in "ab":
                crew.reports[worker] = report(worker, Phase.PARKED)

    stage.each_round = play
    ending = stage.conductor._watch(WORLD)
    assert ending.clean and not stage.broken and stage.conductor._budget.tries == 0


def test_an_order_that_a_killed_controller_gave_to_all_but_a_leaver_is_taken_back() -> None:
    """The members would wait for that leaver for all the time that forming the move's group may take: 30 s."""
    before = replace(TICKET, generation=6)
    crew = Crew(report("a", Phase.FORMING), report("b", Phase.FORMING), report("l", Phase.PARKED, before))
    stage = Stage(crew, ("l",))
    stage.conductor._wait = lambda until, seconds: True
    stage.conductor._tick = lambda: [subject.Heard(one) for one in crew.reports.values()]
    assert stage.conductor._adopted() == WORLD
    assert crew.fenced == [(50.0, ("a", "b", "l"))]
    crew.fenced.clear()
    crew.reports["l"] = report("l", Phase.GIVING)
    stage.conductor._adopted()
    assert not crew.fenced


@pytest.mark.parametrize(
    ("a", "b", "moved"),
    [
        (Phase.TRAINING, Phase.TRAINING, True),
        (Phase.TRAINING, Phase.FINISHED, True),
        (Phase.SAVING, Phase.PARKED, True),
        (Phase.FORMING, Phase.FORMING, False),
        # Who has its part trains, and waits in its first step for who has not: it may be that one which waits for the leaver.
        (Phase.TRAINING, Phase.FORMING, False),
    ],
)
def test_a_controller_that_is_restarted_misses_no_leaver_of_a_move_that_is_over(a: Phase, b: Phase, moved: bool) -> None:
    """Its durable state names them until something else is written down."""
    crew = Crew(report("a", a), report("b", b))
    stage = Stage(crew, ("gone",))
    stage.conductor._wait = lambda until, seconds: True
    stage.conductor._tick = lambda: [subject.Heard(one) for one in crew.reports.values()]
    stage.conductor._adopted()
    assert stage.conductor._steering.leavers == ([] if moved else ["gone"])


@pytest.mark.parametrize("b", [report("b", Phase.PARKED, fault=PEER), None], ids=["failed", "says nothing"])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_step_of_the_generation_says_that_the_move_is_over_whatever_a_member_says_now(b: Report | None, stepped: bool) -> None:
    """Of a member that had no processor for a while nothing was heard; that the leaver, gone for hours, was missed broke the generation."""
    crew = Crew(*(one for one in (report("a", Phase.TRAINING), b) if one is not None))
    stage = Stage(crew, ("gone",))
    stage.conductor._log.stats.has_stepped = stepped
    stage.conductor._wait = lambda until, seconds: True
    stage.conductor._tick = lambda: [subject.Heard(one) for one in crew.reports.values()]
    stage.conductor._adopted()
    assert stage.conductor._steering.leavers == ([] if stepped else ["gone"])


def test_a_restarted_controller_asks_the_next_where_one_does_not_know_what_layouts_follow_from() -> None:
    crew = Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING))
    stage = Stage(crew)
    conductor = stage.conductor
    conductor._keeper.layouts.told = False
    del conductor._plan_ahead
    unasked, planned = ["a", "b"], []

    def ask(workers: Any) -> None:
        if unasked and not crew.asking_outline:
            unasked.pop(0)
            crew.asking_outline = True

    def wait(until: Callable[[], bool], seconds: float) -> bool:
        for _ in range(10):
            if until():
                planned.append(list(unasked))
                return True
            crew.asking_outline = False  # "I don't know"
        return False

    crew.ask_outline = ask  # type: ignore[method-assign]
    conductor._wait, conductor._tick = wait, list
    conductor._crew.alive = lambda worker: False  # nothing is waited for but the answers to that
    conductor._adopted()
    assert planned == [[]]


@pytest.mark.parametrize("generation", [6, 7])
def test_a_restarted_controller_waits_for_no_checkpoint_of_a_generation_that_is_over(generation: int) -> None:
    """Every worker tells it its last vote, those of the others were given up long since: none was begun for ten minutes."""
    stage = Stage(Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING)))
    conductor, ticket = stage.conductor, Ticket(generation, 1)

    def tick() -> list[Any]:
        conductor._saves.heed(Saved(ticket, f"r-g{generation}-s40", 40, generation, 0, 2, "{}", None, 0.1))
        return [subject.Heard(one) for one in stage.crew.reports.values()]

    conductor._tick, conductor._wait = tick, lambda until, seconds: True
    conductor._adopted()
    assert conductor._saves.busy == (generation == 7)


@pytest.mark.parametrize(
    ("deaths", "elastic", "comes"),
    [(2, {"replace_lost": True}, True), (3, {"grow": True}, True), (100, {"replace_lost": True}, False), (1, {}, False)],
    ids=["two die", "three die", "all die", "nobody is hired anew"],
)
@pytest.mark.fault("W16")
def test_who_dies_on_the_way_to_a_run_that_waits_for_it_is_hired_anew_as_often_as_in_the_beginning(
    deaths: int, elastic: dict[str, Any], comes: bool
) -> None:
    """One such death ended the run, with "no replacement came in time"."""
    crew = Crew(report("a", Phase.PARKED))
    stage = Stage(crew, **elastic)
    stage.conductor._steering.hire_failures += ["of an hour ago"] * 10
    if not elastic:
        crew.on_the_way.append("spare")

    def play(passed: float) -> None:
        if not crew.on_the_way:
            return
        if len(stage.conductor._steering.hire_failures) < deaths:
            crew.on_the_way.pop()
            stage.conductor._steering.hire_failures.append("its process died")
        else:
            crew.reports["fresh"] = report("fresh", Phase.IDLE)

    stage.each_round = play
    assert stage.conductor._await(Ending(("a",)), 2, 1 if elastic else 0) is comes
    limit = ElasticSection(workers=2).max_recoveries_without_progress
    assert crew.hired == (deaths + 1 if comes else limit + 1 if elastic else 0)


def test_a_lone_worker_that_hangs_is_given_time_where_nobody_would_take_its_place(tmp_path: Path) -> None:
    def watch(**changes: Any) -> HangWatch:
        config = tiny(tmp_path, "lone", elastic_workers=1, **changes)
        built: list[HangWatch] = []

        def keep(*about: Any) -> HangWatch:
            built.append(HangWatch(*about))
            return built[-1]

        def keeper(*about: Any) -> Any:
            assert about[-1] == 6, "no older checkpoint is one to go back to"
            return SimpleNamespace(layouts=SimpleNamespace(planned=None))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subject, "Keeper", keeper)
            for name in ("Desk", "Steering", "ExitDeadlines"):
                patch.setattr(subject, name, lambda *about: None)
            patch.setattr(subject, "HangWatch", keep)
            spec = SimpleNamespace(run_id="r", bounds=Bounds(), oldest=6)
            run = Recorded(config)
            Conductor(spec, config, None, run.log, run.publisher, None, DurableState("r", 0, epoch=1), None)  # type: ignore[arg-type]
        return built[0]

    assert not watch().replaced
    for changes in ({"elastic_replace_lost": True}, {"elastic_grow": True}, {"elastic_spares": 1, "elastic_max_workers": 2}):
        assert watch(**changes).replaced


def test_a_worker_that_is_lost_between_a_stop_and_its_boundary_does_not_keep_the_rest_from_stopping(tmp_path: Path) -> None:
    """The run failed, with what its workers held, on the way from STOPPING to RESCALING."""
    crew = Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING))
    stage = Stage(crew)
    run = stage.with_log(tmp_path, RunState.STOPPING)
    stage.conductor.desk.stop = "SIGTERM"

    def play(passed: float) -> None:
        if passed > 1.0 and "b" in crew.reports:
            stage.lose("b", Cause.KILLED)
        if crew.fenced:
            crew.reports["a"] = report("a", Phase.PARKED, fault=PEER)

    stage.each_round = play
    ending = stage.conductor._watch(WORLD)
    assert ending.living == ("a",) and set(ending.lost) == {"b"} and crew.fenced
    assert run.stats.state is RunState.STOPPING and run.stats.rescale is None


@pytest.mark.parametrize("state", [RunState.STOPPING, RunState.STARTING, RunState.RESCALING, RunState.RUNNING])
def test_a_run_whose_last_step_is_done_is_done_whatever_it_was_at_then(tmp_path: Path, state: RunState) -> None:
    """A stop may meet the last step; of a run with one step left the first word may be that it is done. Both failed."""
    stage = Stage(Crew(report("a", Phase.FINISHED), report("b", Phase.FINISHED)))
    run = stage.with_log(tmp_path, state, 60)
    stage.conductor._keeper.save = lambda workers: SaveResult("r-h8-s60", 60, 8, 0.1, Kept("c60", "/c60", 60))
    outcome = stage.conductor._complete(Ending(("a", "b"), finished=True))
    assert outcome is not None and (outcome.state, outcome.step, outcome.checkpoint) == ("DONE", 60, "/c60")
    assert run.stats.state is RunState.DONE


def decided(stage: Stage) -> list[policy.Decision]:
    """What is decided from now on, with all that is waited for, until a generation begins or the run ends."""
    made: list[policy.Decision] = []
    ended = Ending(tuple(w for w in WORLD.members if stage.crew.alive(w)), {"b": "its process died"}, {}, False, {"b": "killed"})
    waited = False
    while not made or isinstance(made[-1], policy.Await):
        assert len(made) < 5, made
        made.append(stage.conductor._decide(ended, waited))
        if isinstance(made[-1], policy.Await):
            waited = not stage.conductor._await(ended, made[-1].workers, made[-1].hire)
    return made


@pytest.mark.fault("W8")
def test_a_leaver_that_still_lives_takes_part_again_where_a_worker_that_was_to_stay_is_lost_in_the_move() -> None:
    """Three were to become two. The run failed, or waited for a replacement without end, with two warm workers there."""
    crew = Crew(report("a", Phase.FORMING), report("b", Phase.FORMING), report("l", Phase.GIVING))
    stage = Stage(crew, ("l",), min_workers=2)

    def play(passed: float) -> None:
        if passed > 1.0 and "b" in crew.reports:
            stage.lose("b", Cause.KILLED)
            for worker in "al":
                crew.reports[worker] = report(worker, Phase.PARKED, fault=PEER)

    stage.each_round = play
    stage.conductor._watch(WORLD)
    assert stage.conductor.desk.target == 2
    assert decided(stage) == [policy.Go(("a", "l"))]
    assert crew.hired == 0


def test_a_leaver_whose_node_is_about_to_go_takes_part_again_only_where_it_can_not_be_done_without() -> None:
    for fewest, members in ((1, ("a",)), (2, ("a", "l"))):
        crew = Crew(report("a", Phase.PARKED, fault=PEER), report("l", Phase.PARKED, fault=PEER))
        stage = Stage(crew, ("l",), min_workers=fewest)
        stage.leaving = frozenset("l")
        stage.conductor._watch(WORLD)
        assert stage.conductor.desk.target == fewest
        assert decided(stage) == [policy.Go(members)]


def test_a_run_that_grows_by_itself_hires_one_worker_where_one_is_missing_to_the_fewest_and_goes_on_with_it() -> None:
    """It wanted fewer than it may have, waited for more, had them, wanted fewer: another hiring with each round, for ever."""
    crew = Crew(report("a", Phase.PARKED, fault=PEER))
    stage = Stage(crew, min_workers=2, grow=True)
    stage.each_round = lambda passed: crew.reports.update({w: report(w, Phase.IDLE, Ticket(0, 0)) for w in crew.on_the_way})
    stage.conductor._watch(WORLD)
    made = decided(stage)
    assert crew.hired == 1 and made == [policy.Await(2, 1), policy.Go(("a", "new1"))]


def test_who_is_being_hired_counts_as_there_when_another_is_lost() -> None:
    crew = Crew(report("a", Phase.PARKED, fault=PEER))
    crew.hiring = 1
    stage = Stage(crew)
    stage.conductor._watch(WORLD)
    assert stage.conductor.desk.target == 2


def completing(folder: Path, kept: int | None, *living: str) -> tuple[Stage, Any]:
    """What comes of the last checkpoint of a run of 60 steps, that is of step ``kept``; ``living``: who is left after it."""
    stage = Stage(Crew(report("a", Phase.FINISHED), report("b", Phase.FINISHED)))
    stage.with_log(folder, RunState.RUNNING, 60)

    def save(workers: Any) -> SaveResult | None:
        for worker in {"a", "b"} - set(living):
            stage.lose(worker, Cause.KILLED)
        return None if kept is None else SaveResult("r-h8", kept, 8, 0.1, Kept(f"c{kept}", f"/c{kept}", kept))

    stage.conductor._keeper.save = save
    return stage, stage.conductor._complete(Ending(("a", "b"), finished=True))


def test_a_run_is_not_done_with_a_checkpoint_of_an_earlier_step(tmp_path: Path) -> None:
    """With a copy every third step, and a worker lost in the last checkpoint: of the last step nobody has its part. It was called DONE."""
    stage, outcome = completing(tmp_path, 59, "a")
    assert outcome is None, "training goes back to what is left"
    assert stage.conductor._budget.crashes == 1 and stage.conductor.desk.target == 1, "those that are left go on"


def test_a_state_that_is_incomplete_after_the_last_step_counts_as_no_failure_more(tmp_path: Path) -> None:
    """The loss that it comes from was counted when the generation ended."""
    stage, outcome = completing(tmp_path, None, "a", "b")
    assert outcome is None and stage.conductor._budget.tries == 0


@pytest.mark.parametrize(("out_s", "state"), [(20.0, "begun"), (1e9, "FAILED"), (1e9, "STOPPED")], ids=["comes back", "stays away", "stop"])
@pytest.mark.fault("S6")
def test_where_nobody_holds_a_state_a_storage_that_is_out_of_reach_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, out_s: float, state: str
) -> None:
    """The loss of two neighbours in the moment of an outage ended the run, and its last words were those of a socket."""
    crew = Crew(report("a", Phase.PARKED))
    crew.unwish = lambda: None  # type: ignore[attr-defined]
    stage = Stage(crew)
    conductor, told, launched = stage.conductor, [], []
    monkeypatch.setattr(subject.time, "monotonic", lambda: crew.now)
    stage.conductor._spec = SimpleNamespace(bounds=Bounds(storage=60.0))
    conductor._log.record = lambda name, **about: told.append((name, about))

    def source(members: Any, holders: Any) -> Source:
        if crew.now - 50.0 < out_s:
            raise OSError(5, f"s3://bucket: no answer to request {crew.now}")
        return Source(Origin.CHECKPOINT, 30)

    def launch(*about: Any) -> World:
        launched.append(about)
        raise RuntimeError("begun")

    conductor._keeper.source, conductor._keeper.seated = source, lambda members, *about: members
    conductor._launch, conductor._remember = launch, lambda **how: None
    conductor._budget, conductor._state = Budget(Limits(3, 20, 20)), DurableState("r", 7, LaunchedGeneration.of(WORLD))
    conductor._steering.nodes.start, conductor._adopted = lambda: None, lambda: WORLD
    conductor._watch = lambda world: Ending(("a",), {"b": "its process died"})
    conductor._halt = lambda ended: "STOPPED"
    conductor._give_up = lambda ended, error, refused: (error, refused)
    if state == "STOPPED":
        stage.each_round = lambda passed: setattr(conductor.desk, "stop", "asked to" if passed > 10.0 else None)
    if state == "begun":
        with pytest.raises(RuntimeError, match="begun"):
            conductor._conduct()
        ((members, leavers, chosen),) = launched
        assert (members, leavers, chosen.step) == (("a",), (), 30) and 20.0 <= crew.now - 50.0 < 23.0
    elif state == "FAILED":
        error, refused = conductor._conduct()
        assert "no worker holds a state" in error and "s3://bucket: no answer to" in error and not refused
        assert 60.0 < crew.now - 50.0 < 65.0
    else:
        assert conductor._conduct() == "STOPPED" and crew.now - 50.0 < 11.0, "whoever stops it need not wait"
    assert [name for name, _ in told if name != "waiting"] == ["storage_unreachable"], "told of once"


def test_an_evaluation_that_was_lost_with_a_worker_is_made_up_and_none_is_made_twice(tmp_path: Path) -> None:
    stage = Stage(Crew(report("a", Phase.PARKED)))
    run = stage.with_log(tmp_path, RunState.RESCALING)
    conductor = stage.conductor
    conductor._config = tiny(tmp_path, "evaluated", train_steps=60, train_eval_every=20, data_eval_samples=8)
    conductor._spec = SimpleNamespace(source=Source(Origin.CHECKPOINT, 20), bounds=Bounds())
    run.generation.evaluated(Evaluated(TICKET, 40, 1.5, 8))
    due = [step for step in (0, 1, 20, 21, 40, 60) if conductor._evaluation_due(step)]
    assert due == [0, 60], "that of step 20 was made before the checkpoint that the run has begun with, that of 40 is there"
    run.stats.heldout.clear()
    assert [step for step in (39, 40, 41) if conductor._evaluation_due(step)] == [40]


def running(filled: bool = True, stepped: bool = True, **stats: Any) -> tuple[Any, Any]:
    """The log and the generation of a run that trains."""
    log = SimpleNamespace(stats=SimpleNamespace(has_stepped=stepped, state=RunState.RUNNING, stragglers={}, **stats))
    return log, SimpleNamespace(all_filled=filled)


@pytest.mark.parametrize(
    ("writes", "took_s", "waits_s"),
    [
        *[("a worker", None, 30.0), ("a commit", 40.0, 80.0), ("a commit", 1e4, 300.0), ("", None, 0.0)],
        # Layouts: a controller that was just restarted knows none, and numbered the ranks as if all parts were equal.
        *[("plans", None, 3.0), ("no plans", None, PLANNED_S)],
    ],
)
def test_a_change_that_can_wait_lets_a_checkpoint_be_written_and_a_drain_does_not(
    monkeypatch: pytest.MonkeyPatch, writes: str, took_s: float | None, waits_s: float
) -> None:
    """Each change gave up the checkpoint that was being written: with one a minute, and a minute's writing, there was never any."""
    crew: Any = Crew(*(replace(report(w, Phase.TRAINING), writing=writes == "a worker" and w == "b") for w in "ab"))
    asked: list[str | None] = []
    steering: Any = Steering.__new__(Steering)
    steering._crew, steering.leavers, steering.asked, steering.hire_failures, steering.failed_hires = crew, [], None, [], 0
    steering._saves, steering._put_off, steering._aim, steering._save_now = SimpleNamespace(busy=writes == "a commit"), None, 0, False
    steering.refusals, steering.untried, steering._let_in, steering._short = [], frozenset(), frozenset(), False
    steering.fleeting, steering._trained, steering._unplanned = [], frozenset(), None
    steering._planned = lambda before, after: writes not in ("plans", "no plans") or (writes == "plans" and crew.now > 53.0)
    crew.hemmed = lambda avoided: []
    steering._drained, steering.nodes = frozenset(), SimpleNamespace(draining={}, avoided=frozenset())
    steering._spec, steering._network = SimpleNamespace(bounds=Bounds()), lambda workers: None
    steering.connectivity = SimpleNamespace(admit=lambda ready, members, network: Admission(tuple(ready)))
    steering._desk = SimpleNamespace(stop=None, target=1, reason="manual", want=lambda *about: None, explain=lambda reason: None)
    steering._log, steering._generation = running(checkpoints=CheckpointStats(seconds=took_s), lost=0)
    steering._config = SimpleNamespace(elastic=ElasticSection(workers=2))
    steering._cadence = SimpleNamespace(news=lambda *about: None, due=lambda *about: False)
    crew.places = SimpleNamespace(wishes=(), unplaced=())
    steering.autoscaling = Autoscaling(ElasticSection(workers=2), GrowthNote(), 0.0)
    steering.stragglers = SimpleNamespace(unwanted=lambda *about: (frozenset(), []))
    steering._use_room = steering._record = lambda *about: None
    steering._ask_to_park = lambda world, stop, reason=None: asked.append(reason)
    monkeypatch.setattr("vescale_ray.controller.steering.time.monotonic", lambda: crew.now)
    while not asked:
        steering.steer(WORLD)
        crew.now += TICK_S
    assert crew.now - TICK_S - 50.0 == pytest.approx(waits_s, abs=2 * TICK_S)
    steering._put_off, crew.now = None, 50.0
    steering.leaving = lambda workers: frozenset("b")
    steering.steer(WORLD)
    steering._config, steering._desk.target = SimpleNamespace(elastic=ElasticSection(workers=2, min_workers=2, replace_lost=True)), 2
    crew.reports["new"] = report("new", Phase.IDLE)
    steering.steer(WORLD)
    assert asked == [None, "drain", None], "whose node goes does not wait, nor for a replacement that is there"


@pytest.mark.parametrize(("warming", "hiring", "wanted"), [("", 0, 2), ("x", 0, 3), ("xy", 0, 4), ("x", 1, 4), ("xy", 3, 5)])
@pytest.mark.fault("N7")
def test_a_drain_leaves_alone_whoever_is_on_the_way(warming: str, hiring: int, wanted: int) -> None:
    """Of three that were to be five one had to go as the two were still warming: the run stayed at two, and they were sent away."""
    crew: Any = Crew(*(report(w, Phase.TRAINING) for w in "abc"))
    crew.on_the_way, crew.hiring = list(warming), hiring
    told: list[tuple[int, str]] = []
    steering: Any = Steering.__new__(Steering)
    steering._crew, steering.leavers, steering.asked = crew, [], None
    steering._config = SimpleNamespace(elastic=ElasticSection(workers=3))
    steering._desk = SimpleNamespace(stop=None, target=5, reason="manual", want=lambda *about: told.append(about))
    steering._log, steering._generation = running()
    steering._save_if_due = steering.hear_of_drains = lambda about: False
    steering.fleeting, steering._trained, steering._let_in, steering._save_now = [], frozenset(), frozenset(), False
    steering.leaving = lambda workers: frozenset("c")
    steering._ask_to_park = lambda world, stop, reason=None: told.append((0, reason))
    steering.steer(replace(WORLD, members=("a", "b", "c")))
    assert told == [(wanted, "manual" if warming or hiring else "drain"), (0, "drain")], "those on their way were not asked for by a drain"


@pytest.mark.parametrize(
    ("origin", "phase", "stepped", "cut"),
    [
        (Origin.CHECKPOINT, Phase.FORMING, False, True),
        (Origin.FRESH, Phase.FORMING, False, True),
        (Origin.MEMORY, Phase.FORMING, False, False),
        # A controller that was just restarted has heard of nobody that it has its state; the run's first generation trains for days.
        (Origin.FRESH, Phase.TRAINING, False, False),
        (Origin.FRESH, Phase.FORMING, True, False),
    ],
)
def test_a_stop_does_not_wait_for_a_large_state_to_be_read(origin: Origin, phase: Phase, stepped: bool, cut: bool) -> None:
    """It waited for all of it, and for a step: with a grace of a minute the run was killed in that, after eleven it was FAILED."""
    crew: Any = Crew(report("a", Phase.FORMING), report("b", phase))
    stage = Stage(crew)
    conductor, states = stage.conductor, []
    conductor._enter = states.append
    recorded_events: list[str] = []
    conductor._log.record, conductor._log.stats.has_stepped = lambda name, **about: recorded_events.append(name), stepped

    def each(passed: float) -> None:
        if passed > 1:
            conductor.desk.stop = "SIGTERM"
        if crew.fenced and passed > 3 or passed > 20:
            crew.reports |= {w: report(w, Phase.PARKED, fault=PEER) for w in "ab"}

    stage.each_round = each
    ended = conductor._watch(replace(WORLD, source=Source(origin, 40)))
    assert ended.living == ("a", "b")
    assert [tuple(who) for _, who in crew.fenced] == ([("a", "b")] if cut else [])
    assert (states[:1] == [RunState.STOPPING]) is cut
    assert (conductor._budget.tries == 0) is cut, "a stop is no failure"
    assert "checkpoint_load_failed" not in recorded_events


@pytest.mark.parametrize(("spare", "parks"), [("ready", True), ("not reached", False), ("warming", False), ("leaving", False)])
def test_a_drain_counts_those_that_can_take_a_place_at_once(spare: str, parks: bool) -> None:
    """Of four, three at the least, two had to go, and one was there to come: training stayed on the node until it died."""
    crew: Any = Crew(*(report(w, Phase.TRAINING) for w in "abcd"))
    if spare == "warming":
        crew.on_the_way = ["x"]
    else:
        crew.reports["x"] = report("x", Phase.IDLE)
    crew.hiring = 0
    told: list[str] = []
    crew.ask = lambda members, ticket, flag: told.append("checkpoint") or True
    crew.hemmed, crew.age = lambda avoided: [], lambda worker: 1.0
    crew.places = SimpleNamespace(wishes=(), unplaced=())
    steering: Any = Steering.__new__(Steering)
    steering._crew, steering.leavers, steering.asked = crew, [], None
    steering._config = SimpleNamespace(elastic=ElasticSection(workers=4, min_workers=3, replace_lost=True))
    steering._desk = SimpleNamespace(stop=None, target=4, reason="manual", want=lambda *about: None, explain=lambda reason: None)
    steering._log, steering._generation = running()
    steering._save_if_due = lambda about: None
    steering.hear_of_drains = lambda about: True
    steering.fleeting, steering._trained, steering._save_now = [], frozenset(), False
    steering._let_in = frozenset("" if spare == "not reached" else "x")
    steering.leaving = lambda workers: frozenset("cdx" if spare == "leaving" else "cd")
    steering.let_go = lambda worker: None
    steering.nodes, steering._aim, steering._short = SimpleNamespace(avoided=frozenset()), 4, False
    steering._admitted = lambda ready, world: ready
    steering.autoscaling = Autoscaling(ElasticSection(workers=4), GrowthNote(), 0.0)
    steering.stragglers = SimpleNamespace(unwanted=lambda *about: (frozenset(), []))
    steering._use_room = steering._record = lambda *about: None
    steering.hire_failures, steering.refusals, steering.failed_hires = [], [], 0
    steering._spec = SimpleNamespace(bounds=Bounds())
    steering._put_off, steering._planned = None, lambda before, after: True
    steering._ask_to_park = lambda world, stop, reason=None: told.append(reason)
    steering.steer(replace(WORLD, members=("a", "b", "c", "d")))
    assert told == (["drain"] if parks else ["checkpoint"])


def test_warm_workers_that_die_before_they_join_are_hired_less_and_less_often(tmp_path: Path) -> None:
    """A spare that something ended soon after it was warm was hired again at once, and so on for ever."""
    crew: Any = Crew(*(report(w, Phase.TRAINING) for w in "ab"))
    stage = Stage(crew)
    run = stage.with_log(tmp_path, RunState.RUNNING)
    conductor, steering = stage.conductor, stage.conductor._steering
    info = WorkerInfo("s", 1, 1, "node", "h", "cpu", 1.0)
    news: list[Any] = []
    crew.pump = lambda seconds: news
    crew.kill, crew.info = lambda reasons: None, lambda worker: None
    conductor.desk.heed = conductor._keeper.collect = lambda: None
    conductor._observed = lambda: run.seen
    steering.hire_failed = steering.hire_failures.append
    for worker, about in (("s", info), ("a", info), ("x", None)):
        news[:] = [Lost(worker, about, f"{worker} died")]
        Conductor._tick(conductor)
    assert steering.fleeting == ["s died"] and steering.hire_failures == ["x died"], "a member that is lost says nothing of spares"
    assert run.stats.lost == 2, "who never came up is not lost: checkpoints are made no more often for that"


@pytest.mark.fault("N8")
def test_what_parked_workers_hold_is_kept_where_the_node_of_one_is_to_go_while_they_wait_for_another(tmp_path: Path) -> None:
    """Nobody trained, and the notice was not heard: the node went with the only copies."""
    crew: Any = Crew(*(report(w, Phase.PARKED) for w in "ab"))
    stage = Stage(crew, min_workers=3, replace_lost=True)
    conductor, saved, heard = stage.conductor, list[Any](), list[Any]()
    conductor._log.stats.checkpoints.step = 30
    conductor._keeper.held_step = lambda workers: 41
    conductor._keeper.save = saved.append
    conductor._steering.hear_of_drains = heard.append

    writes = [False]
    conductor._keeper.writes = lambda workers: writes[0]

    def each(passed: float) -> None:
        stage.leaving = frozenset("b" if passed > 2 else "")
        writes[0] = 2 < passed < 6
        if passed > 4:
            crew.reports["c"] = report("c", Phase.IDLE)

    stage.each_round = each
    assert conductor._await(Ending(("a", "b"), {"c": "its process died"}, {}, False, {}), 3, 1)
    assert saved == [["a", "b"]] and set(heard) == {("a", "b")}
    assert crew.now - 50.0 >= 6.0, "who still writes would be taken for one that holds nothing, and refuse to join"


@pytest.mark.parametrize("controllers", [21, 23, 24])
def test_a_run_whose_controllers_come_to_nothing_keeps_what_its_workers_hold(tmp_path: Path, controllers: int) -> None:
    """They had trained on. All of them were ended with what they held since the last checkpoint."""
    crew: Any = Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING))
    crew.unwish = lambda: None
    stage = Stage(crew)
    conductor, saved, written = stage.conductor, [], list[DurableState]()
    stage.with_log(tmp_path, RunState.RESCALING)
    conductor._budget = Budget(Limits(3, 20, 20), controllers=controllers, high=40)
    conductor._state = DurableState("r", 7, LaunchedGeneration.of(WORLD), highest_step=40)
    conductor._store = SimpleNamespace(write=lambda state: written.append(state) or state)
    del conductor._remember
    conductor.desk.requested, conductor.desk.actions = 0, 0
    conductor._steering.autoscaling = SimpleNamespace(note=GrowthNote())
    conductor._steering.stragglers = SimpleNamespace(note=StragglerNote())
    conductor._steering.nodes.start = lambda: None
    conductor._adopted = lambda: WORLD

    def steer(world: World) -> None:
        assert conductor.desk.stop
        # The step that ends at the boundary is news; then the state is written again.
        conductor._hear(report("a", Phase.TRAINING))
        conductor._remember()
        crew.reports |= {w: report(w, Phase.PARKED) for w in "ab"}

    stepped = Stepped(TICKET, SimpleNamespace(step=41, seconds=0.1, alone_seconds=0.0), 0.0, {}, None)  # type: ignore[arg-type]
    conductor._generation.stepped = lambda worker, item: True
    conductor._steering.stepped = lambda record: None
    conductor._hear = lambda one: Conductor._hear(conductor, replace(one, items=((1, stepped),)))
    conductor._steering.steer = steer
    conductor._keeper.newest = lambda: Kept("c30", "/c30", 30)
    conductor._keeper.held_step = lambda holders: 41 if holders else -1
    conductor._keeper.save = saved.append
    conductor._evidence.write = lambda *about: None
    outcome = conductor._conduct()
    assert outcome.state == "FAILED" and outcome.error.startswith(f"the controller was restarted {controllers} times")
    assert saved == ([("a", "b")] if controllers < 24 else []), "the fourth that tries would come to nothing as well"
    # Where it is killed in that, the next one neither goes on nor calls the run stopped.
    last = written[-1]
    assert last.stop_reason is None
    if controllers < 24:
        assert (last.controller_restarts, last.highest_step) == (controllers, 41)
    again = subject.budget_of(tiny(tmp_path, "books"), replace(last, epoch=9), last.highest_step)
    assert again.controllers == controllers + 1 and again.verdict is not None


def test_leavers_stay_until_the_next_generation_has_made_a_step() -> None:
    """Until then its first copies are on their way: a worker that is lost meanwhile would be lost with what only leavers hold."""
    gone: list[str] = []
    steering: Any = Steering.__new__(Steering)
    steering.leavers, steering.asked, steering.let_go, steering._trained = ["l", "m"], TICKET, gone.append, frozenset()
    steering.fleeting = []
    for filled, stepped, left in ((False, False, 2), (True, False, 2), (True, True, 0)):
        steering._log, steering._generation = running(filled, stepped)
        steering.steer(WORLD)
        assert len(steering.leavers) == left
    assert gone == ["l", "m"]


def test_a_failure_that_an_earlier_life_of_the_controller_has_counted_counts_once() -> None:
    """While the run waited for a replacement each restart of its controller counted it again, and a lost node as a crash."""
    first = Stage(Crew(report("a", Phase.PARKED, fault=PEER), report("b", Phase.TRAINING)), min_workers=2, replace_lost=True)
    first.lose("b", Cause.NODE)
    first.conductor._watch(WORLD)
    written: list[DurableState] = []
    first.conductor._remember = lambda: written.append(first.conductor._state)
    first.crew.reports["c"] = report("c", Phase.IDLE, Ticket(0, 0))
    first.conductor._await(Ending(("a",)), 2, 0)
    again = Stage(Crew(report("a", Phase.PARKED, fault=PEER)))
    again.conductor._state, again.conductor._budget = written[0], first.conductor._budget
    ending = again.conductor._watch(WORLD)
    assert set(ending.lost) == {"b"}
    assert (again.conductor._budget.nodes, again.conductor._budget.crashes) == (1, 0) and again.conductor._budget.total == {Cause.NODE: 1}
    other = replace(WORLD, ticket=Ticket(8, 1))
    again.crew.reports["a"] = report("a", Phase.PARKED, other.ticket, PEER)
    again.conductor._watch(other)
    assert again.conductor._budget.crashes == 1, "of another generation"


@pytest.mark.parametrize("heard", [True, False], ids=["the answer came", "the answer came late"])
def test_a_change_that_was_asked_for_is_no_failure_though_the_answer_to_the_asking_came_late(tmp_path: Path, heard: bool) -> None:
    stage = Stage(Crew(report("a", Phase.PARKED), report("b", Phase.PARKED)))
    run = stage.with_log(tmp_path, RunState.RUNNING)
    stage.conductor.desk.reason = "manual"
    if heard:
        run.generation.begin_rescale("drain", 2)
        run.enter(RunState.RESCALING)
    assert stage.conductor._watch(WORLD).clean
    assert run.stats.rescale is not None and run.stats.rescale.reason == ("drain" if heard else "manual")


def test_a_change_whose_controller_is_killed_before_the_next_generation_stands_is_no_failure(tmp_path: Path) -> None:
    """The workers had stopped at the boundary that they were asked to; the next controller took that for a failure, as did the alerts."""
    stage = Stage(Crew(report("a", Phase.PARKED), report("b", Phase.PARKED)))
    run = stage.with_log(tmp_path, RunState.RESCALING)
    stage.conductor._inherited, stage.conductor.desk.reason = TICKET, "manual"
    assert stage.conductor._watch(WORLD).clean
    assert run.stats.rescale is not None and run.stats.rescale.reason == "manual"


def test_a_change_that_the_last_step_comes_before_is_none(tmp_path: Path) -> None:
    stage = Stage(Crew(report("a", Phase.FINISHED), report("b", Phase.FINISHED)))
    run = stage.with_log(tmp_path, RunState.RESCALING)
    run.generation.begin_rescale("manual", 2)
    stage.conductor._keeper.save = lambda workers: SaveResult("r-h8-s60", 60, 8, 0.1, Kept("c60", "/c60", 60))
    stage.conductor._complete(Ending(("a", "b"), finished=True))
    told = [event["event"] for event in run.folder.read_events()]
    assert "rescale_abandoned" in told and "rescaled" not in told


@pytest.mark.parametrize(("asked", "hired"), [(1, 2), (3, 3)])
def test_a_rescale_that_comes_while_the_first_workers_are_awaited_is_heeded_at_once(asked: int, hired: int) -> None:
    """The run went on waiting for as many as it was begun with, for three minutes."""
    crew = Crew()
    stage = Stage(crew)
    crew.prepare_store = lambda: None  # type: ignore[attr-defined]
    stage.conductor._state = replace(stage.conductor._state, epoch=1)

    def play(passed: float) -> None:
        if passed > 1.0:
            crew.reports["new1"] = report("new1", Phase.IDLE, Ticket(0, 0))
        if passed > 2.0:
            stage.conductor.desk.target = asked
        if passed > 3.0 and asked > 2:
            crew.reports.update({w: report(w, Phase.IDLE, Ticket(0, 0)) for w in crew.on_the_way})

    stage.each_round = play
    assert stage.conductor._gather() is None
    assert crew.now - 50.0 < 4.0 and crew.hired == hired and len(crew.ready()) == asked
