"""fully_shard above tensor parallelism, on other dimensions of one mesh, against a single process and torch's fully_shard."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.fsdp.towers import filled, seeded
from tests.fsdp.transformer import apart, full
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.fsdp import explain, fully_shard
from vescale_ray.geometry import Block
from vescale_ray.optim import clip_grad_norm_

WIDTH, HIDDEN, LAYERS = 12, 24, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


SEQUENCE_PLAN = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


def with_tp(how, mesh, dp, plan=PLAN, **options):
    model = seeded(Net)
    for layer in model.layers:
        if plan is SEQUENCE_PLAN:
            layer.scale.requires_grad_(False)  # tensor parallelism would have to sum its gradient
        parallelize_module(layer, mesh["tp"], dict(plan))
        how(layer, mesh=mesh[dp], **options)
    return how(model, mesh=mesh[dp], **options)


def batch(step, rank, world):
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.chunk(world)[rank]


def tensor_parallel(rank, world, shape, names, options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dp = names[:-1] if len(names) > 2 else names[0]
    place, ways = rank // shape[-1], world // shape[-1]
    ours, alone = with_tp(fully_shard, mesh, dp, **options), seeded(Net)
    others = {"ours": ours, "alone": alone}
    if len(names) == 2 and "block_policy" not in options:
        others["torch"] = with_tp(torch_fully_shard, mesh, dp, **options)
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in others.items()}
    losses = {}
    for step in range(2):
        for name, model in others.items():
            x = batch(step, 0, 1) if name == "alone" else batch(step, place, ways)
            losses[name] = model(x).float().square().mean()
            losses[name].backward()
        norms = {name: float(clip_grad_norm_(model.parameters(), 0.5)) for name, model in others.items()}
        for name in others:
            assert norms[name] == pytest.approx(norms["alone"], rel=1e-5 if not options.get("mp_policy") else 2e-2), name
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    bound = 5e-2 if "mp_policy" in options else 1e-5
    expected = dict(alone.named_parameters())
    for name, param in ours.named_parameters():
        assert isinstance(param, RaggedDTensor) and param.shape == expected[name].shape
        assert apart(full(param), expected[name]) <= bound, name
        if "torch" in others:
            assert apart(full(param), full(others["torch"].get_parameter(name))) <= bound, name
    up = ours.layers[0].up.weight
    assert up.placements[-1] == Shard(0) and up.device_mesh.ndim == len(shape)
    assert up.to_local().numel() <= HIDDEN * WIDTH // shape[-1]
    assert "up.weight" in str(explain(ours))
    return True


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS = {
    "bf16": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
    "blocks": {"block_policy": lambda name, p: Block.rows(3) if p.dim() == 2 else None},
}


@pytest.mark.parametrize("way", WAYS)
def test_fully_shard_above_tp_equals_a_single_process_and_torch(way):
    assert all(run_threads(4, tensor_parallel, (2, 2), ("dp", "tp"), WAYS[way]))


def test_replicas_above_tp_equal_a_single_process():
    assert all(run_threads(8, tensor_parallel, (2, 2, 2), ("replicate", "shard", "tp"), {}))


@on_processes(4)
def test_checkpoints_above_tp_on_gloo_load_into_other_meshes(rank, world, tmp_path):
    """The same on processes, with rows sharded too, so that gradients of norms are partial sums; then checkpoints across meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, alone = with_tp(fully_shard, mesh, "dp", SEQUENCE_PLAN), seeded(Net)
    (ours(batch(0, rank, 4)).square().mean() / 2).backward()  # the losses of the two tensor-parallel ranks add up
    alone(batch(0, 0, 1)).square().mean().backward()
    for name, p in ours.named_parameters():
        if p.requires_grad:
            assert apart(full(p.grad), alone.get_parameter(name).grad) <= 1e-5, name
    dcp.save({"model": ours.state_dict()}, checkpoint_id=str(tmp_path))
    wide = fully_shard(Net())
    state = {"model": wide.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    wide.load_state_dict(state["model"])
    back = with_tp(fully_shard, mesh, "dp")
    with torch.no_grad():
        for p in back.parameters():
            p.zero_()
    state = {"model": back.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    for name, p in alone.named_parameters():
        assert torch.equal(full(wide.get_parameter(name)), p), name
        assert torch.equal(full(back.get_parameter(name)), p), name


class Global(nn.Module):
    """Parameters and activations are DTensors on the whole mesh."""

    def __init__(self, mesh, placements):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(distribute_tensor(torch.randn(HIDDEN, WIDTH, generator=generator), mesh, placements))
        self.down = nn.Parameter(distribute_tensor(torch.randn(WIDTH, HIDDEN, generator=generator), mesh, placements[:-1] + [Shard(1)]))

    def forward(self, x):
        return torch.tanh(x @ self.up.t()) @ self.down.t()


def global_mesh(rank, world, shape, names, dims, **only_ours):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [Replicate()] * (len(names) - 1) + [Shard(0)]
    ways = ((fully_shard, only_ours), (torch_fully_shard, {}))
    ours, theirs = cast(list[nn.Module], [how(Global(mesh, placements), mesh=mesh, dp_mesh_dims=dims, **more) for how, more in ways])
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    spread = [Shard(0)] * (len(names) - 1) + [Replicate()]
    for model in (ours, theirs):
        for _ in range(2):
            model(distribute_tensor(x, mesh, spread)).square().mean().backward()
    for name, p in theirs.named_parameters():
        mine = ours.get_parameter(name)
        assert apart(full(mine.grad), full(p.grad)) <= 1e-5, name
        assert torch.equal(full(mine), full(p))
    torch.optim.AdamW(ours.parameters()).step()
    return True


@on_threads(4)
def test_whole_mesh_parameters_may_stay_with_neighbours(rank, world):
    """FSDP2 does not support an int for ``reshard_after_forward`` together with ``dp_mesh_dims`` yet."""
    assert global_mesh(rank, world, (4, 1), ("dp", "tp"), DataParallelMeshDims(shard="dp"), reshard_after_forward=2)


CASES = [
    ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp")),
    pytest.param((2, 2, 2), ("replicate", "dp", "tp"), DataParallelMeshDims(shard="dp", replicate="replicate"), marks=pytest.mark.slow),
    pytest.param((2, 2, 2), ("dp", "cp", "tp"), DataParallelMeshDims(shard=("dp", "cp")), marks=pytest.mark.slow),
    ((2, 2), ("dp", "tp"), DataParallelMeshDims(replicate="dp")),
]


@pytest.mark.parametrize(("shape", "names", "dims"), CASES)
def test_whole_mesh_with_named_dp_dimensions_equals_torch(shape, names, dims):
    world = shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1)
    assert all(run_threads(world, global_mesh, shape, names, dims))


class Odd(nn.Module):
    """Sizes that neither two tensor-parallel nor two data-parallel ranks divide."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5)
        filled(self, 3, 1 / 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def odd_model(how, mesh, names, choose):
    model = parallelize_module(Odd(), mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return how(model, mesh=mesh[names[:-1]] if len(names) > 2 else mesh[names[0]], shard_placement_fn=choose)


CHOICES = {"none": None, "first dimension": lambda p: Shard(0)}


@pytest.mark.parametrize(
    ("shape", "names", "choice"),
    [
        ((2, 2), ("dp", "tp"), "none"),
        pytest.param((2, 2), ("dp", "tp"), "first dimension", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), ("replicate", "shard", "tp"), "none", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("usual_threshold")
@on_threads(lambda shape: math.prod(shape))
def test_tensor_parallelism_that_cuts_unevenly_equals_torch(rank, world, shape, names, choice):
    choose = CHOICES[choice]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    built = [odd_model(how, mesh, names, choose) for how in (fully_shard, torch_fully_shard)]
    ours, theirs = built
    x = torch.randn(world, 4, 5, generator=torch.Generator().manual_seed(1))[rank // mesh["tp"].size()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in built]
    for _ in range(3):
        norms = []
        for model, optimizer in zip(built, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
        assert apart(norms[0], norms[1]) <= 1e-5
        for name, p in theirs.named_parameters():
            mine = ours.get_parameter(name)
            assert apart(full(mine.grad), full(p.grad)) <= 1e-5 and apart(full(mine), full(p)) <= 1e-4, name
    whole = {name: full(p).detach().clone() for name, p in theirs.named_parameters()}
    for state, assign in ((ours.state_dict(), False), (whole, True)):
        fresh = odd_model(fully_shard, mesh, names, choose)
        fresh.load_state_dict(state, assign=assign)
        assert apart(fresh(x), theirs(x)) <= 1e-4
        for name, expected in whole.items():
            assert apart(full(fresh.get_parameter(name)), expected) <= 1e-4, name


@on_threads(4)
def test_parameters_that_do_not_fit_the_mesh_are_refused(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, dims = [Replicate(), Shard(0)], DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match="does not go with the data-parallel mesh"):
        fully_shard(parallelize_module(seeded(Layer), mesh["tp"], dict(PLAN)))
    odd = nn.Module()
    odd.weight = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"Shard\(0\) from its uneven tensor parallelism and .* from block_policy"):
        fully_shard(odd, mesh=mesh["dp"], block_policy=lambda n, p: Block.rows(1))
    with pytest.raises(ValueError, match="'nope' .* not found in mesh.mesh_dim_names"):
        fully_shard(Global(mesh, whole), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="nope"))
    with pytest.raises(ValueError, match="must be DTensors on the whole mesh, but 'scale' is a plain tensor"):
        fully_shard(Layer(), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="Expected Replicate"):
        fully_shard(Global(mesh, [Shard(0), Replicate()]), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="same mesh"):
        fully_shard(Global(mesh["tp"], [Shard(0)]), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="must have mesh_dim_names when dp_mesh_dims is provided"):
        fully_shard(Layer(), dp_mesh_dims=dims)


@on_processes(2)
def test_a_compiled_layer_above_tp_trains_as_an_eager_one(rank, world):
    """All parameters but a unit's first begin inside its gathered buffer."""
    trained = []
    for compiled in (False, True):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = with_tp(fully_shard, mesh, "dp")
        if compiled:
            model.layers[1].compile(backend="aot_eager")
        for step in range(2):
            model(batch(step, 0, 1)).square().mean().backward()
        trained.append([full(p.grad) for p in model.parameters()])
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
