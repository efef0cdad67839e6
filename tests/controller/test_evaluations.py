"""Losses of named evaluation sets, from a worker's report to events, metrics, checkpoints and words."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.controller.recorded import Recorded, generation, recorded, stepped
from vescale_ray.config import load_config
from vescale_ray.config.sections import ConfigError
from vescale_ray.controller.http.exposition import exposition
from vescale_ray.reporting.event_words import describe_event
from vescale_ray.workers.messages import Evaluated

SETS = {"wiki": (2.0, 13, 2.5), "ids": (math.log(100), 13, None)}
WORLD = generation(1, 0, "w0", "w1")


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    made = recorded(tmp_path).started()
    made.open(WORLD)
    return made


def evaluated(step: int, loss: float = 3.0, samples: int = 13) -> Evaluated:
    return Evaluated(WORLD.ticket, step, loss, samples, SETS)


def test_an_evaluation_is_one_event_with_every_set(run: Recorded) -> None:
    for _ in range(2):  # each rank reports it
        run.generation.evaluated(evaluated(0))
    (event,) = [e for e in run.folder.read_events() if e["event"] == "evaluation"]
    assert (event["loss"], event["samples"], event["step"]) == (3.0, 13, 0)
    assert event["perplexity"] == pytest.approx(math.exp(3)) and event["bpb"] == pytest.approx(3 / math.log(2))
    assert event["sets"]["wiki"] == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "bpb": 2.5, "samples": 13}
    assert event["sets"]["ids"]["perplexity"] == pytest.approx(100) and event["sets"]["ids"]["bpb"] is None
    told = describe_event(event)
    assert told is not None
    assert told[0] == "evaluation: held-out 3.000 (perplexity 20.09, 4.328 bits/byte); " + (
        "wiki 2.000 (perplexity 7.389, 2.500 bits/byte); ids 4.605 (perplexity 100)"
    )


def test_the_next_step_carries_the_losses_of_an_evaluation(run: Recorded) -> None:
    run.generation.evaluated(evaluated(0))
    for index in range(3):
        run.stepped(stepped(WORLD, index, 100.0 + index))
        if index == 1:
            run.generation.evaluated(evaluated(2, loss=2.5))
    lines = list(run.folder.each_metrics())
    assert [line["step"] for line in lines if "evaluation" in line] == [1, 3]
    assert lines[2]["evaluation"]["heldout"]["loss"] == 2.5 and lines[2]["evaluation"]["wiki"]["loss"] == 2.0


def test_checkpoints_and_scrapes_have_each_set_by_name(run: Recorded) -> None:
    run.generation.evaluated(evaluated(0, loss=float("nan")))
    run.stepped(stepped(WORLD, 0, 100.0))
    for one in (run, run.restarted(WORLD)):
        assert one.stats.metrics_of(1) == {"loss": 2.0, "wiki_loss": 2.0, "ids_loss": math.log(100)}
        text = exposition(one.snapshot, "")[0].decode()
        assert 'vescale_eval_loss{run="books",set="wiki"} 2.0' in text and 'vescale_eval_bpb{run="books",set="wiki"} 2.5' in text
        assert 'vescale_eval_perplexity{run="books",set="ids"} 100.0' in text
        assert 'vescale_eval_bpb{run="books",set="ids"}' not in text and 'set="heldout"' not in text, "unknown, and not a number"
        assert json.loads(json.dumps(one.snapshot.to_json()))["evaluations"]["heldout"]["loss"] is None


def test_sets_are_evaluated_without_a_held_out_part(run: Recorded) -> None:
    run.generation.evaluated(evaluated(0, loss=float("nan"), samples=0))
    assert set(run.stats.newest_evaluation) == {"wiki", "ids"} and 0 in run.stats.evaluations
    told = describe_event(run.folder.read_events()[-1])
    assert told is not None and told[0].startswith("evaluation: wiki 2.000")


def test_the_best_checkpoints_go_by_a_set_that_exists() -> None:
    sets = "data.eval={wiki: {corpus: w.parquet}}"
    assert load_config(None, [sets, "checkpoint.keep_metric=wiki_loss"]).checkpoint.keep_metric == "wiki_loss"
    with pytest.raises(ConfigError) as caught:
        load_config(None, [sets, "checkpoint.keep_metric=wikis_loss"])
    assert str(caught.value) == "checkpoint.keep_metric = wikis_loss: give one of loss, heldout_loss, wiki_loss"
