"""AdamW8bit: its format depends on the tensor alone, a step follows the formula, and updates stay near FP32's.

Nothing is communicated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.optim.optim_support import State, Weights, full_state, noise, same, sharded, straddles, train
from tests.ranks import on_threads, run_threads
from vescale_ray import Block, RaggedShard, distribute_tensor
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.optim import AdamW8bit
from vescale_ray.optim.eight_bit.adamw8bit import block_of
from vescale_ray.optim.eight_bit.codec import dynamic_values, root_values

# Tails in rows and columns, experts and a convolution's filter; FP32 states for an embedding, a vector and a small matrix.
SHAPES = {
    "wq_weight": (96, 64),
    "wide_weight": (70, 97),
    "experts": (4, 32, 48),
    "odd_experts": (3, 33, 50),
    "filters": (70, 8, 3, 3),
    "bias": (5000,),
    "small": (8, 8),
}
BLOCKS: list[Any] = [256, 1000, Block.tile(32, 32), Block.tile(7, 30), Block.rows(8)]
HOW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}


# ------------------------------------------------------------------------------------------------------ one step, by hand


def blocks_by_hand(shape: tuple[int, ...], block: Any) -> list[list[int]]:
    """Elements of each block, found by enumerating indices."""
    experts = shape[0] if len(shape) == 3 else 1
    rows = shape[-2] if len(shape) == 3 else shape[0]
    cols = math.prod(shape) // experts // rows
    found: list[list[int]] = []
    for expert in range(experts):
        base = expert * rows * cols
        if isinstance(block, int):
            found += [list(range(base + k, base + min(k + block, rows * cols))) for k in range(0, rows * cols, block)]
            continue
        r, c = block.row_count, block.col_count or cols
        for top in range(0, rows, r):
            for left in range(0, cols, c):
                here = [(i, j) for i in range(top, min(top + r, rows)) for j in range(left, min(left + c, cols))]
                found.append([base + i * cols + j for i, j in here])
    return found


class ByHand:
    """8-bit AdamW in numpy float64, straight from the formulas, block by block."""

    def __init__(self, start: np.ndarray, block: Any) -> None:
        self.p, self.blocks = start.astype(np.float64).reshape(-1), blocks_by_hand(start.shape, block)
        self.maps = [dynamic_values(True).numpy().astype(np.float64), root_values().numpy().astype(np.float64)]
        self.m, self.s = np.zeros_like(self.p), np.zeros_like(self.p)
        self.t = 0

    def step(self, grad: np.ndarray, lr: float, weight_decay: float) -> None:
        self.t += 1
        g = grad.astype(np.float64).reshape(-1)
        m = 0.9 * self.m + 0.1 * g
        v = 0.999 * self.s**2 + 0.001 * g * g
        self.p -= lr * weight_decay * self.p
        self.p -= lr * (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
        self.m, self.s = self._stored(m, self.maps[0]), self._stored(np.sqrt(v), self.maps[1])

    def _stored(self, x: np.ndarray, values: np.ndarray) -> np.ndarray:
        result = np.empty_like(x)
        for block in self.blocks:
            scale = np.abs(x[block]).max()
            nearest = np.abs(values[None, :] - (x[block] / scale)[:, None]).argmin(axis=1)
            result[block] = values[nearest] * scale
        return result


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_steps_match_the_formulas_for_every_block_and_tail(block: Any) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name not in ("bias", "small")}
    model = Weights(shapes)
    optimizer = AdamW8bit(model.named_parameters(), block=block, **HOW)
    by_hand = {name: ByHand(p.detach().numpy().copy(), block) for name, p in model.named_parameters()}
    for step in range(1, 4):
        train(model, optimizer, range(step, step + 1))
        for name, shape in shapes.items():
            by_hand[name].step(noise(shape, name, step).numpy(), 0.02, 0.3)
    for name, param in model.named_parameters():
        state, hand = optimizer.state[param], by_hand[name]
        assert state["exp_avg_code"].dtype == torch.uint8 and state["exp_avg_scale"].numel() == len(hand.blocks)
        np.testing.assert_allclose(param.detach().numpy().reshape(-1), hand.p, rtol=2e-5, atol=2e-6, err_msg=name)


# ------------------------------------------------------------------------------- the same states on every number of ranks


def trained_state(rank: int, world: int, block: Any, ranks: int, dtype: torch.dtype) -> tuple[State, set[str]]:
    model = sharded(SHAPES, ranks, AdamW8bit.block_policy(block), dtype)
    optimizer = AdamW8bit(model.named_parameters(), block=block, **HOW)
    train(model, optimizer, range(1, 4))
    return full_state(model, optimizer), straddles(model)


@pytest.mark.parametrize(("block", "dtype"), [(b, torch.float32) for b in BLOCKS] + [(256, torch.bfloat16)], ids=str)
def test_states_and_parameters_are_bitwise_equal_on_1_to_4_ranks(block: Any, dtype: torch.dtype) -> None:
    alone = trained_state(0, 1, block, 0, dtype)[0]
    assert alone["wq_weight/exp_avg_sq_code"].dtype == np.uint8 and "bias/exp_avg" in alone and "small/exp_avg" in alone
    cut: set[str] = set()
    for world in (1, 2, 3, 4):
        for state, partly in run_threads(world, trained_state, block, world, dtype):
            assert not same(state, alone), f"differ at {world} ranks: {same(state, alone)}"
            cut |= partly
    assert {"wq_weight", "experts"} & cut, "no matrix lies on two ranks: this test shows nothing"


def _empty_shards(rank: int, world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    model = Weights({"w": (128, 64)})
    full = model.get_parameter("w").detach()
    model.w = nn.Parameter(distribute_tensor(full, mesh, [RaggedShard((0,), (0, 1, 0, 3))], src_data_rank=None))
    optimizer = AdamW8bit([model.get_parameter("w")], block="tile 32x32", **HOW)
    train(model, optimizer, range(1, 3))
    assert optimizer.state[model.get_parameter("w")]["exp_avg_scale"].to_local().shape[0] == (0, 1, 0, 3)[rank]
    assert optimizer.state[model.get_parameter("w")]["step"] == 2
    return full_state(model, optimizer)


def test_ranks_with_empty_shards_step_and_match_one_process() -> None:
    model = Weights({"w": (128, 64)})
    optimizer = AdamW8bit(model.parameters(), block="tile 32x32", **HOW)
    train(model, optimizer, range(1, 3))
    for state in run_threads(4, _empty_shards):
        assert not same(state, full_state(model, optimizer))


def _with_other_dimensions(rank: int, world: int, block: Any) -> State:
    """Replicas, experts and columns on another mesh dimension, and torch's own Shard(0)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    shapes = {"replicated": (128, 64), "experts": (4, 32, 48), "columns": (96, 128), "torchs": (128, 64)}
    model = Weights(shapes)
    places: dict[str, Any] = {
        "replicated": [Replicate(), RaggedShard((0,), (1, 3))],
        "experts": [RaggedShard((0, 1), (1, 1)), Shard(0)],
        "columns": [RaggedShard((0,), (1, 2)), Shard(1)],
    }
    for name, placements in places.items():
        setattr(model, name, nn.Parameter(distribute_tensor(getattr(model, name).detach(), mesh, placements, src_data_rank=None)))
    model.torchs = nn.Parameter(torch_distribute(model.get_parameter("torchs").detach(), mesh["a"], [Shard(0)], src_data_rank=None))
    optimizer = AdamW8bit(model.parameters(), block=block, **HOW)
    for step in (1, 2):
        for name, param in model.named_parameters():
            full = noise(shapes[name], name, step)
            give = distribute_tensor if isinstance(param, RaggedDTensor) else torch_distribute
            param.grad = give(full, param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined, operator]
        optimizer.step()
    with pytest.raises(ValueError, match=r"shape \(96, 128\).*not between blocks of \(32, 48\).*block_policy"):
        AdamW8bit([model.get_parameter("columns")], block="tile 32x48")
    return full_state(model, optimizer)


@pytest.mark.parametrize("block", ["tile 32x32", 16])
def test_states_on_2d_meshes_equal_those_of_the_whole_tensor(block: Any) -> None:
    model = Weights({"replicated": (128, 64), "experts": (4, 32, 48), "columns": (96, 128), "torchs": (128, 64)})
    optimizer = AdamW8bit(model.parameters(), block=block, **HOW)
    train(model, optimizer, range(1, 3))
    for state in run_threads(4, _with_other_dimensions, block):
        assert not same(state, full_state(model, optimizer))


@pytest.mark.parametrize("block", [90, "tile 5x24"])
@on_threads(4)
def test_parallel_experts_may_be_cut_before_a_short_last_block(rank: int, world: int, block: Any) -> None:
    """Two of four experts on each rank of one dimension, and a cut after 15 of an expert's 16 rows on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placements = [RaggedShard((0, 1), (15, 17)), Shard(0)]
    model, whole = Weights({"experts": (4, 16, 24)}), Weights({"experts": (4, 16, 24)})
    model.experts = nn.Parameter(distribute_tensor(model.get_parameter("experts").detach(), mesh, placements, src_data_rank=None))
    optimizers = [AdamW8bit(one.parameters(), block=block, min_8bit_numel=256, **HOW) for one in (model, whole)]
    for step in (1, 2):
        grad = noise((4, 16, 24), "experts", step)
        model.experts.grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
        whole.experts.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].state[model.experts]["exp_avg_scale"].local_interval()[1] > 0
    assert not same(full_state(model, optimizers[0]), full_state(whole, optimizers[1]))


# ---------------------------------------------------------------------------------------------------------- near FP32's


def largest_updates(shape: tuple[int, int], block: Any, sigma: float, sparse: bool, steps: int = 200) -> tuple[float, float]:
    """(largest update of ours / of torch's AdamW, relative distance of the last 20 updates), for rows of log-normal sizes."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(sigma * torch.randn(shape[0], 1, generator=generator))
    ours, theirs = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
    optimizers = [
        AdamW8bit([ours], lr=1.0, weight_decay=0.0, block=block),
        torch.optim.AdamW([theirs], lr=1.0, weight_decay=0.0),
    ]
    largest, apart, norm = [0.0, 0.0], 0.0, 0.0
    for step in range(steps):
        grad = torch.randn(shape, generator=generator) * size
        if sparse:
            grad *= torch.rand(shape[0], 1, generator=generator) > 0.9
        for k, (param, optimizer) in enumerate(zip((ours, theirs), optimizers, strict=True)):
            param.data.zero_()
            param.grad = grad.clone()
            optimizer.step()
            largest[k] = max(largest[k], param.abs().max().item())
        if step >= steps - 20:
            apart += (ours - theirs).square().sum().item()
            norm += theirs.square().sum().item()
    return largest[0] / largest[1], math.sqrt(apart / norm)


SPARSE = "90 % of the rows without gradient"
UPDATED: list[Any] = [1024, Block.tile(16, 128), Block.rows(32), Block.tensor()]
BOTH_WAYS = (1024, Block.tile(16, 128))


@pytest.mark.parametrize(
    ("block", "sparse"),
    [
        *(pytest.param(block, False, id=f"{block}-dense") for block in UPDATED),
        *(pytest.param(b, True, id=f"{b}-{SPARSE}", marks=[] if b in BOTH_WAYS else [pytest.mark.slow]) for b in UPDATED),
    ],
)
def test_largest_update_is_at_most_twice_fp32s_for_uneven_rows(block: Any, sparse: bool) -> None:
    ratio, distance = largest_updates((256, 64), block, 1.0, sparse)
    assert ratio <= 2.0 and distance <= 0.2, (ratio, distance)
    ratio, distance = largest_updates((256, 64), block, 4.0, sparse)
    assert ratio <= 2.0, "rows over e**16 of size in one block"


def test_updates_stay_within_published_bounds_of_fp32_each_step() -> None:
    # Thresholds of bitsandbytes' tests/test_optim.py: 50 steps, lr 1e-3, g ~ 0.01 N(0, 1), equal parameters before each step.
    ours, theirs = nn.Parameter(noise((256, 256), "p", 0)), nn.Parameter(noise((256, 256), "p", 0))
    optimizers = (AdamW8bit([ours], lr=1e-3, block=256), torch.optim.AdamW([theirs], lr=1e-3))
    errors, relative = [], []
    for step in range(1, 51):
        grad = 0.01 * noise((256, 256), "p", step)
        before = theirs.detach().clone()
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()  # type: ignore[attr-defined]
        error = (ours - theirs).abs()
        errors.append(error.mean().item())
        relative.append((error / theirs.abs().clamp(min=1e-9)).mean().item())
        assert not torch.equal(before, theirs)
        ours.data.copy_(theirs.data)
    assert sum(errors) / len(errors) < 6e-5 and sum(relative) / len(relative) < 1.2e-3


@pytest.mark.parametrize("block", [1024, Block.tile(32, 32)], ids=str)
def test_states_take_2_01_bytes_for_each_parameter(block: Any) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = AdamW8bit(model.parameters(), block=block)
    state = optimizer.state[model.weight]
    assert sum(t.nbytes for t in state.values()) / model.weight.numel() <= 2.01
    assert {t.dtype for t in state.values()} == {torch.uint8, torch.float32} and all(type(t) is torch.Tensor for t in state.values())


def test_fp32_states_are_torchs_adamw_bit_for_bit() -> None:
    shapes = {"embed_weight": (64, 80), "bias": (777,), "small": (9, 9)}
    model, plain = Weights(shapes), Weights(shapes)
    ours = AdamW8bit([("embed.weight", model.embed_weight), ("bias", model.bias), ("small", model.small)], **HOW)
    theirs = torch.optim.AdamW(plain.parameters(), **HOW)
    train(model, ours, range(1, 5))
    train(plain, theirs, range(1, 5))
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other), name
        assert all(torch.equal(ours.state[param][kind], theirs.state[other][kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))


def test_nan_gradient_spoils_its_own_block_only() -> None:
    param = nn.Parameter(noise((64, 64), "p", 0))
    optimizer = AdamW8bit([param], block="tile 32x32")
    param.grad = noise((64, 64), "p", 1)
    param.grad[3, 40] = math.nan
    optimizer.step()
    assert optimizer.state[param]["exp_avg_scale"].isnan().tolist() == [[False, True], [False, False]]
    assert param[3, 40].isnan() and param.isnan().sum() == 1
    param.grad = noise((64, 64), "p", 2)
    optimizer.step()
    assert param[:32, 32:].isnan().all() and not param[:, :32].isnan().any()


# ------------------------------------------------------------------------------------------------ construction and refusals


@on_threads(3)
def test_cut_inside_a_block_is_refused_and_policy_prevents_it(rank: int, world: int) -> None:
    shapes = {"w": (100, 60), "v": (70, 97)}
    uncut = sharded(shapes, world, lambda name, p: Block.rows(1))
    inside = r"parameter w of shape \(100, 60\): a shard boundary lies at element \d+, inside a block \(tile 32x32"
    with pytest.raises(ValueError, match=inside):
        AdamW8bit(uncut.named_parameters(), block=Block.tile(32, 32))
    with pytest.raises(ValueError, match=r"block_policy=AdamW8bit.block_policy\('tile 32x32'\)"):
        AdamW8bit(uncut.named_parameters(), block="tile 32x32")
    AdamW8bit(uncut.parameters(), block=None)
    optimizer = AdamW8bit([uncut.get_parameter("w")], block=None)
    with pytest.raises(ValueError, match="inside a block"):
        optimizer.add_param_group({"params": [uncut.get_parameter("v")], "block": "rows 69"})
    assert len(optimizer.param_groups) == 1 and uncut.get_parameter("v") not in optimizer.state, "a refused group must not be half there"
    assert AdamW8bit.block_policy("rows 8")("output.weight", nn.Parameter(torch.zeros(512, 512))) == Block.rows(8), "whatever its name"


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((4096, 4096), 1024, Block.rows(1)),
        ((2880, 2880), 1024, Block.rows(16)),
        ((200, 33), 1024, Block.rows(200)),
        ((128, 2880, 5760), 1024, Block.rows(8)),
        ((4, 33, 50), 1024, Block.rows(33)),
        ((512, 64), Block.tile(32, 32), Block.rows(32)),
        ((512, 64), "rows 16", Block.rows(16)),
        ((70, 8, 3, 3), 64, Block.tensor()),
        ((70, 8, 3, 3), None, None),
        ((10, 10), 64, None),
        ((100000,), 64, None),
    ],
)
def test_block_of_gives_the_block_that_sharding_keeps_whole(shape: tuple[int, ...], block: Any, expected: Block | None) -> None:
    assert block_of("layers.0.w", shape, block) == expected


def test_embeddings_and_heads_alone_keep_fp32_states_by_name() -> None:
    for name in ("tok_embeddings", "model.embed_tokens", "transformer.wte", "lm_head", "head", "output"):
        assert block_of(f"{name}.weight", (512, 512)) is None, name
    for name in ("layers.0.attention.output.dense", "layers.3.wo", "blocks.1.head_mix", "layers.0.head"):
        assert block_of(f"{name}.weight", (512, 512)) is not None, name
    assert block_of("", (512, 512)) is not None


def test_bad_arguments_are_refused_in_a_sentence() -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    for options, message in (
        ({"block": 0}, "block = 0: give a number of elements"),
        ({"block": "tile 32"}, "block = 'tile 32'"),
        ({"block": Block.element()}, "block = .*element"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW8bit([param], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parameter #0.0 is on the meta device.*to_empty"):
        AdamW8bit([nn.Parameter(torch.zeros(64, 64, device="meta"))])
    with pytest.raises(ValueError, match="is torch.int64"):
        AdamW8bit([nn.Parameter(torch.zeros(64, 64, dtype=torch.int64), requires_grad=False)])
    with pytest.raises(ValueError, match="is torch.float64: AdamW8bit computes in FP32"):
        AdamW8bit([nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))])
    optimizer = AdamW8bit([param])
    param.grad = torch.zeros(64, 64).to_sparse()
    with pytest.raises(RuntimeError, match="gradient of parameter #0.0 is sparse"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 0
