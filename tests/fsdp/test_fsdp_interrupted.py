"""A forward that KeyboardInterrupt or another exception outside ``Exception`` ends: torch calls no hook then."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.fsdp.towers import Tower, alike, inputs, seeded, shard_tower
from tests.ranks import on_threads


class Interrupted(Tower):
    """Raises ``fails`` before the layer with the index ``at``, or after the last one."""

    fails: type[BaseException] | None = None
    at = 0

    def forward(self, x):
        for index, layer in enumerate([*self.layers, nn.Identity()]):
            if self.fails is not None and index == self.at:
                raise self.fails
            x = layer(x)
        return x


@pytest.mark.parametrize("grad", [True, False])
@on_threads(2)
def test_a_forward_after_an_interrupted_one_trains(rank, world, grad):
    ours, alone = shard_tower(seeded(Interrupted)), seeded(Interrupted)
    for fails, at in ((KeyboardInterrupt, 0), (KeyboardInterrupt, 1), (SystemExit, len(ours.layers))):
        ours.fails, ours.at = fails, at
        with torch.set_grad_enabled(grad), pytest.raises(fails):
            ours(inputs(rank, world))
        ours.fails = None
        alike(ours, alone, rank, world)
        ours.zero_grad()
        alone.zero_grad()


@on_threads(2)
def test_an_interrupted_gather_leaves_no_forward_behind(rank, world):
    ours, alone = shard_tower(seeded(Tower)), seeded(Tower)
    handle = ours.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()), prepend=True)
    with pytest.raises(KeyboardInterrupt):
        ours(inputs(rank, world))
    handle.remove()
    alike(ours, alone, rank, world)


class Threaded(Tower):
    """Runs its layers in another thread."""

    def forward(self, x):
        results = [x]
        for layer in self.layers:
            thread = threading.Thread(target=lambda layer=layer: results.append(layer(results[-1])))
            thread.start()
            thread.join()
        return results[-1]


@on_threads(2)
def test_units_in_other_threads_belong_to_the_running_forward(rank, world):
    ours, alone = shard_tower(seeded(Threaded)), seeded(Threaded)
    for _ in range(2):
        alike(ours, alone, rank, world)
        ours.zero_grad()
        alone.zero_grad()
