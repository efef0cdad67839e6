"""A run on a real Ray cluster whose workers are replicas of shard groups (HSDP)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.controller.cues import Cue, cues, played
from tests.controller.runs import carry_out, tiny, worst_difference
from vescale_ray import checkpoint
from vescale_ray.cli import client
from vescale_ray.config import RunConfig
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.trainer import Trainer

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]
STEPS, LOST = 40, 15


@pytest.mark.slow
@pytest.mark.fault("W19")
def test_lost_worker_of_2_x_2_costs_no_step_and_no_byte(tmp_path: Path) -> None:
    """The shard of the lost worker is its replica's, so two workers go on, without a copy and without a move."""
    model = {"model_factory": "tests.controller.cues:model", "model_units": ["body"], "data_eval_samples": 0}
    saves = {"checkpoint_every": 10, "checkpoint_keep_last": 4}
    config = tiny(tmp_path, "replicas", elastic_workers=4, train_sharding={"shard_group": 2}, train_steps=STEPS, **model, **saves)
    folder, asked = RunFolder(config.run_folder), list[str]()

    def watch(status: Mapping[str, Any]) -> None:
        if status["state"] == "RUNNING" and not asked:
            asked.append("3")
            with pytest.raises(client.CommandRefused, match="workers = 3 is not a multiple of train.sharding.shard_group: give 2"):
                client.request(folder, "rescale", {"workers": 3})

    # Four workers need two rounds for six slots. The worker dies in the first forward of the step after LOST.
    with cues(Cue("kill", forward=2 * LOST + 1, rank=2)):
        finished = carry_out(config, watch=watch)
        assert played() == 1
    assert finished.result.state == "DONE" and asked, finished.result
    (change,) = finished.of("rescaled")
    assert [change[key] for key in ("from", "to", "reason", "source")] == [4, 2, "failure", "replica"]
    assert (change["steps_replayed"], change["moved_bytes"], change["lower_bound_bytes"]) == (0, 0, 0)
    first, second = finished.of("generation")
    assert second["step"] == LOST and set(second["workers"]) <= set(first["workers"]) - {finished.of("worker_lost")[0]["worker"]}
    assert finished.accounting().exact and finished.accounting().replayed_steps == 0
    assert worst_difference(finished.losses, _of_one_process(config)) < 1e-4
    assert [event["step"] for event in finished.of("checkpoint_saved")] == [10, 20, 30, STEPS]
    for kept in checkpoint.ls(config.checkpoint_root):
        assert checkpoint.verify(config.checkpoint_root, kept.name).objects == 2 + 1, "one object for each shard, and the scalars"
    assert not finished.left_behind


def _of_one_process(config: RunConfig) -> dict[int, float]:
    """Losses of the run in this process alone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process_groups.form("127.0.0.1", store.port, "test/alone", 0, 1, "gloo", 10.0)
    try:
        trainer = Trainer(config, 0, 1, 1, "cpu", load_dataset(config.data))
        trainer.initialize()
        losses = {step: trainer.step().loss for step in range(1, STEPS + 1)}
        trainer.close()
        return losses
    finally:
        process_groups.dissolve()
