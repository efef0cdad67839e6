"""Writes to shards that live in the buffers into which they are gathered, while they are gathered."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from tests.fsdp.test_fsdp_resident import CPU, Blocks, given, pair, pytestmark  # noqa: F401 (marks this file)
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, run_gloo
from vescale_ray.fsdp.buffers import memory
from vescale_ray.fsdp.buffers.address_range import protect
from vescale_ray.fsdp.buffers.memory import MAPPED_BYTES, Buffer
from vescale_ray.fsdp.layouts.phases import Residency

LOCAL = r"'layers.1 .*written through their local tensors.*reshard\(\)"


def _sharded(model: Any) -> list[nn.Parameter]:
    """The sharded parameters in the order of ``model.parameters()``, also while the modules have the gathered ones."""
    groups = [unit_of(one).groups[0] for one in (*model.layers, model)]
    return [param.sharded for group in groups for param in group.params]


def _plain(model: Any) -> Any:
    """An unsharded copy with the same values."""
    alone = Blocks()
    alone.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    return alone


# -- local tensors ---------------------------------------------------------------------------------------------------------


def local_writes(rank: int, world: int) -> None:
    """All units stay gathered. Ranks write to their own parts, and the gathered memory is used again."""
    x = given(rank, 0)
    uses: list[tuple[Callable[[Any, torch.Tensor], Any], int]] = [
        (lambda model, out: model(x), 1),
        (lambda model, out: out.sum().backward(), world),  # the last layer's gradients are under way as backward reaches the written one
        (lambda model, out: model.layers[1].unshard(), 1),
    ]
    for use, writers in uses:
        for remedy in ("reset_iter_state", "reshard"):
            ours, _ = pair(reshard_after_forward=False)
            out = ours(x)
            if rank < writers:
                with torch.no_grad():
                    _sharded(ours)[2].to_local().mul_(2.0)
                with pytest.raises(RuntimeError, match=LOCAL):
                    use(ours, out)
            ours.reset_iter_state()
            if remedy == "reshard":
                ours(x)
                ours.layers[1].reshard()
                with torch.no_grad():
                    _sharded(ours)[2].to_local().mul_(2.0)
            seen = ours(x).detach()
            assert (seen - out).abs().max() > 0.01
            torch.testing.assert_close(seen, _plain(ours)(x).detach(), rtol=1e-5, atol=1e-6)


def writes_of_all(rank: int, world: int) -> None:
    """If all ranks make the same write while everything stays gathered, the next forward and backward see it."""
    ours, _ = pair(reshard_after_forward=False)
    alone = _plain(ours)
    x = given(0, 0)

    def both(write: Callable[[list[Any]], Any]) -> None:
        with torch.no_grad():
            ours(x)
            write(_sharded(ours))
            write(list(alone.parameters()))
        torch.testing.assert_close(ours(x), alone(x), rtol=1e-4, atol=1e-5)

    kinds: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}, {"fused": True}]
    for options in kinds:

        def step(parameters: list[Any], options: dict[str, Any] = options) -> None:
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * 100)
            torch.optim.AdamW(parameters, lr=0.01, **options).step()
            for parameter in parameters:
                parameter.grad = None

        both(step)
    both(lambda parameters: torch._foreach_mul_(parameters, 0.5))
    both(lambda parameters: [p.detach().mul_(1.5) for p in parameters])
    both(lambda parameters: [p.copy_(p * 0.9) for p in parameters])
    staged = StateDictStager().stage(ours.state_dict())  # as DCP's async_save does first; it trusts a tensor's claim to have memory
    for name, value in ours.state_dict().items():
        assert torch.equal(staged[name].to_local(), value.to_local())
    state = {name: p.full_tensor() * 1.1 for name, p in ours.state_dict().items()}
    alone.load_state_dict(state)
    with torch.no_grad():
        ours(x)
        for value in ours.state_dict().values():  # these are the shards; taking the state dict has handed them out
            value.to_local().copy_(value.detach().mul(1.1).to_local())
    torch.testing.assert_close(ours(x), alone(x), rtol=1e-4, atol=1e-5)


# -- gathered tensors ------------------------------------------------------------------------------------------------------


class Writes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x.detach())
        with torch.no_grad():
            self.weight.mul_(1.0)
        return out


def gathered_writes(rank: int, world: int) -> None:
    """After the error all groups are sharded, the step can be abandoned, and training goes on."""
    from vescale_ray.fsdp import fully_shard

    mixed: Any = nn.Sequential(nn.Linear(257, 257), nn.Linear(257, 257, dtype=torch.float64))
    fully_shard(mixed).unshard()
    with torch.no_grad():
        for parameter in mixed.parameters():
            parameter.mul_(1.0)
    with pytest.raises(RuntimeError, match="gathered parameters of"):
        mixed.reshard()
    assert [group.residency for group in unit_of(mixed).groups] == [Residency.SHARDED] * 2
    mixed.reshard()

    root: Any = fully_shard(nn.Sequential(Writes(257, 257)), reshard_after_forward=True)
    for _ in range(2):  # the same error twice, not that of an unfinished forward
        with pytest.raises(RuntimeError, match="gathered parameters of"):
            root(given(rank, 0))

    ours, _ = pair(reshard_after_forward=False)
    for give_up_first in (False, True):
        out = ours(given(rank, 0))
        with torch.no_grad():
            ours.layers[1][0].bias.mul_(1.0)
        if not give_up_first:
            with pytest.raises(RuntimeError, match=r"gathered parameters of 'layers.1"):
                out.sum().backward()
        ours.reset_iter_state()
        ours(given(rank, 0)).sum().backward()

    # The check covers parameters that a backward with create_graph keeps gathered for the next one.
    x = given(rank, 0).requires_grad_()
    out = ours(x)
    with torch.no_grad():
        ours.layers[1][0].bias.mul_(1.0)
    with pytest.raises(RuntimeError, match=r"gathered parameters of 'layers.1"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_processes()
def test_writes_while_gathered_reach_all_ranks_or_raise(rank: int, world: int) -> None:
    local_writes(rank, world)
    writes_of_all(rank, world)
    gathered_writes(rank, world)


# -- saving ----------------------------------------------------------------------------------------------------------------


@on_processes(2)
def test_background_dcp_save_holds_a_single_step(rank: int, world: int, tmp_path: Path) -> None:
    """DCP saves in the background, beginning while the root is gathered; training goes on meanwhile."""
    ours, _ = pair()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(given(rank, 0)).sum().backward()
    optimizer.step()
    expected = _plain(ours)
    with torch.no_grad():
        ours(given(rank, 1))
    saving = dcp.async_save(ours.state_dict(), checkpoint_id=str(tmp_path))
    for index in range(3):
        ours(given(rank, index)).sum().backward()
        optimizer.step()
    saving.result()  # type: ignore[union-attr]
    state = ours.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path))
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name].full_tensor(), value)
    torch.testing.assert_close(ours(given(rank, 2)), expected(given(rank, 2)), rtol=1e-5, atol=1e-6)


# -- exceptions ------------------------------------------------------------------------------------------------------------


@on_processes(2, timeout=20)
def test_model_dropped_mid_backward_does_not_block_the_next(rank: int, world: int) -> None:
    """A backward raises while gathers and reductions are running.

    The model is dropped without a reset, and a new one is built.
    """
    memory.MAPPED_BYTES = 0
    torch.manual_seed(0)

    def build() -> Any:
        from vescale_ray.fsdp import fully_shard

        model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    x = torch.ones(2, 1024)
    for at in (1, 2, 3):
        model = build()
        model(x).sum().backward()  # the second step follows the recorded order

        def fail(*_: Any) -> None:
            raise ValueError("as it happens")

        model[at].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        with pytest.raises(ValueError, match="as it happens"):
            model(x).sum().backward()
        del model
    model = build()
    model(x).sum().backward()
    assert model[0].weight.grad is not None


# -- limits of the kernel --------------------------------------------------------------------------------------------------


def without_mappings(rank: int, world: int) -> str:
    """Use up all but a few of the memory mappings that the kernel allows."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    with open("/proc/self/maps", "rb") as maps:
        left = limit - sum(1 for _ in maps)
    room = mmap.mmap(-1, left * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(room, dtype=torch.uint8).data_ptr()
    for page in range(1, left - 12, 2):  # each such page is a mapping and splits the rest
        protect(address + page * mmap.PAGESIZE, mmap.PAGESIZE, 0)
    said, held = "", []
    try:
        for _ in range(20):
            held.append(Buffer(MAPPED_BYTES, CPU, stays=(mmap.PAGESIZE, 2 * mmap.PAGESIZE)))
    except MemoryError as error:
        said = str(error)
    protect(address, left * mmap.PAGESIZE, mmap.PROT_READ)  # joins all into one mapping again
    return said


def test_running_out_of_mappings_raises_naming_the_limit() -> None:
    (said,) = run_gloo(1, without_mappings)
    assert "mappings that the kernel allows" in said and "sysctl vm.max_map_count" in said
