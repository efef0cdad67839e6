"""Sharded stages in torch's pipelines have the gradients of the whole model in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from tests.fsdp.towers import grads, same, seeded
from tests.ranks import on_processes
from vescale_ray.fsdp import fully_shard

WIDTH, STAGES, MICRO = 12, 2, 4
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def pipeline(rank, world, schedule, chunks, reshard):
    """Run 2 pipeline ranks x 2 data-parallel ranks, with ``chunks`` stages on each pipeline rank.

    ``reshard``: blocks are resharded after forward.
    """
    mesh = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    number = STAGES * chunks
    alone = seeded(lambda: nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(number))))
    built = seeded(lambda: nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(number))))
    mine = [pp.get_local_rank() + STAGES * chunk for chunk in range(chunks)]
    stages = []
    for index in mine:
        for block in built[index]:
            fully_shard(block, mesh=dp, reshard_after_forward=reshard)
        fully_shard(built[index], mesh=dp, reshard_after_forward=False)
        stages.append(PipelineStage(built[index], index, number, torch.device("cpu"), group=pp.get_group()))

    def loss(output, target):
        return (output - target).square().mean()

    run = SCHEDULES[schedule](stages if chunks > 1 else stages[0], MICRO, loss_fn=loss)
    x, y = torch.randn(2, 2 * MICRO * (world // STAGES), WIDTH, generator=torch.Generator().manual_seed(5)).unbind()
    optimizers = [torch.optim.SGD([p for i in mine for p in model[i].parameters()], lr=0.1) for model in (built, alone)]
    everything = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        part = slice(dp.get_local_rank() * 2 * MICRO, (dp.get_local_rank() + 1) * 2 * MICRO)
        last = number - 1 in mine
        args = (x[part],) if 0 in mine else ()
        run.step(*args, **({"target": y[part]} if last else {}))
        loss(alone(x), y).backward()
        for index in mine:
            same(grads(built[index]), grads(alone[index]), 1e-4)
        optimizers[0].step()
        everything.step()
        for model in (built, alone):
            model.zero_grad()


CASES = [("gpipe", 1, True), ("1f1b", 1, True), ("interleaved", 2, True), ("zero bubble", 2, False)]


@on_processes(4)
def test_sharded_stages_train_in_torchs_pipelines(rank, world):
    """Zero-bubble schedules use the weights after forward, so units must not reshard then, as with torch's ``fully_shard``."""
    for case in CASES:
        pipeline(rank, world, *case)
