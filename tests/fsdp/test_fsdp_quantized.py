"""Weights that are gathered in FP8, against one process that quantizes whole weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from tests.fsdp.quantized import Model, Reference, gathered, model_of, policy, rounded, sharded, whole_values
from tests.fsdp.towers import grads, same
from tests.fsdp.transformer import full, part
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import checkpoint as ckpt
from vescale_ray.block_grid import Grid
from vescale_ray.communication.point_to_point import Messages
from vescale_ray.dtensor import distribute_tensor as ragged
from vescale_ray.emulation import emulated_world
from vescale_ray.fsdp import Sharding, explain, fully_shard
from vescale_ray.fsdp.layouts import wire
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.geometry import Block
from vescale_ray.optim import AdamW8bit, Muon
from vescale_ray.quantization import Fp8Block
from vescale_ray.quantization.fp8 import NonFiniteWeights, dequantize, quantize

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def batch(step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    return part(torch.randn(120, 64, generator=torch.Generator().manual_seed(50 + step)), rank, world)


def groups(model: Any) -> list[Any]:
    return [g for unit in (*model.layers, model) for g in unit_of(unit).groups]


def code_wires(model: Any) -> list[CodeWire]:
    return [g.gathered.wire for g in groups(model) if isinstance(g.gathered.wire, CodeWire)]


def test_dequantization_in_few_kernels_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators take this path."""
    monkeypatch.setattr(wire, "PIECEWISE", set())
    run_threads(3, gathers_quantized, "bfloat16")


@pytest.mark.parametrize(("world", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "bfloat16"), (4, "float32"), (5, "bfloat16")])
def test_gathered_weights_equal_gather_then_quantize(world: int, dtype: str) -> None:
    run_threads(world, gathers_quantized, dtype)


def gathers_quantized(rank: int, world: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    model = sharded(model_of(), mp_policy=MixedPrecisionPolicy(param_dtype=kind))
    masters = whole_values(model)
    for group in groups(model):
        if isinstance(group.gathered.wire, CodeWire):
            assert group.division.part_numel % 128 == 0 and group.gathered.wire.parts.part_bytes % 128 == 0
    with gathered(model) as seen:
        assert seen.keys() == masters.keys()
        for name, value in seen.items():
            assert torch.equal(value, rounded(name, masters[name], kind)), name
        for unit in model.layers:
            for group in unit_of(unit).groups:
                if isinstance(group.gathered.wire, CodeWire):
                    check_codes(group, rank, {p.name: masters[f"layers.{list(model.layers).index(unit)}.{p.name}"] for p in group.params})


def check_codes(group: Any, rank: int, masters: dict[str, torch.Tensor]) -> None:
    """Compare this rank's bytes with its share of the whole tensors' codes and scales."""
    sent = group.gathered.wire
    assert sent._part is not None
    for name, master in masters.items():
        form = policy(name, master)  # type: ignore[arg-type]
        assert form is not None
        codes, scales = quantize(master, form)
        piece = sent.parts.piece(name, rank)
        start, end = group.layout.local_range(name, rank)
        if piece is None:
            assert start == end
            continue
        grid = Grid.of(master.shape, form.block)
        first, last = grid.band_of(start) * grid.columns, (grid.band_of(end - 1) + 1) * grid.columns
        assert torch.equal(sent._part[piece.codes], codes.view(torch.uint8).view(-1)[start:end])
        assert torch.equal(sent._part[piece.scales].view(form.scale_dtype), scales.view(-1)[first:last])


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "reshard": (3, {}),
    "keep gathered": (2, {"reshard_after_forward": False}),
    "neighbours": (4, {"reshard_after_forward": 2}),
    "bf16": (2, {"mp_policy": BF16}),
    "replicas": (4, {"mesh": ("replicate", "shard")}),
    "zero1": (2, {"sharding": Sharding.zero1()}),
    "part of the optimizer's ranks": (4, {"mesh": ("a", "b"), "sharding": Sharding(("b",), ("a", "b"), ("a", "b"))}),
}


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 2) for name in VARIANTS), ("reshard", 1)])
@on_threads(lambda name: VARIANTS[name][0])
def test_training_equals_one_process_with_rounded_weights(rank: int, world: int, name: str, accumulate: int) -> None:
    options = dict(VARIANTS[name][1])
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=options["mesh"])
    elif "sharding" in options:
        options["mesh"] = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    narrow = options.get("mp_policy") is BF16
    model = sharded(model_of(recompute=accumulate == 2), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = Reference(torch.bfloat16 if narrow else torch.float32)
    for step in range(3):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            model(batch(10 * step + micro, rank, world)).float().square().mean().backward()
        reference.backward([batch(10 * step + micro) for micro in range(accumulate)])
        same(grads(model), {n: p.grad for n, p in reference.master.named_parameters()}, 0.05 if narrow else 1e-4)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    same(whole_values(model), dict(reference.master.named_parameters()), 0.05 if narrow else 1e-3)


class Counted(nn.Module):
    """Weights of whole tiles, as in a large model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def counted(quantized: bool) -> Any:
    model: Any = Counted()
    how = (lambda name, param: Fp8Block() if param.dim() == 2 else None) if quantized else None
    for unit in (*model.layers, model):
        fully_shard(unit, mp_policy=BF16, quantize_policy=how)
    return model


@on_processes(2)
def test_the_wire_carries_half_of_bf16s_bytes(rank: int, world: int) -> None:
    nbytes: list[int] = []
    send = Messages.send

    def counting(self: Messages, sent: torch.Tensor, target: int) -> None:
        nbytes.append(sent.numel() * sent.element_size())
        send(self, sent, target)

    Messages.send = counting  # type: ignore[method-assign]  # this process is the rank's own
    figures = []
    for quantized in (False, True):
        model = counted(quantized)
        with torch.no_grad():
            model(torch.randn(2, 512))
            nbytes.clear()
            model(torch.randn(2, 512))
        figures.append((sum(nbytes), len(nbytes)))
        assert any(p.dim() == 2 and p.numel() for p in model.parameters())
    (plain, plain_count), (coded, coded_count) = figures
    assert plain == 3 * 512 * 513 // 2 * 2 and plain_count == 3
    assert coded <= 0.51 * plain and coded_count == 6, "weights and biases of a layer are two messages, started together"


@pytest.mark.parametrize("world", [8, 64, 256])
def test_the_wire_carries_half_of_bf16s_bytes_to_many_ranks(world: int) -> None:
    """The weight has 12 rows of tiles."""
    with emulated_world(world) as wire:
        model: Any = fully_shard(nn.Linear(4096, 1536, bias=False), mp_policy=BF16, quantize_policy=lambda *_: Fp8Block())
        with torch.no_grad():
            model(torch.randn(1, 4096))
        assert {name for name, *_ in wire.log} == {"all-gather", "all-reduce"}
        assert sum(nbytes for _, nbytes, *_ in wire.log) <= 0.51 * 2 * 4096 * 1536


@on_threads(2)
def test_codes_are_made_once_per_optimizer_step(rank: int, world: int) -> None:
    model = sharded(model_of())
    assert not any(wire.cuts_tiles for wire in code_wires(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = {id(g): 0 for g in groups(model) if isinstance(g.gathered.wire, CodeWire)}
    for group in groups(model):
        if id(group) in made:
            group.gathered.wire.renew = functools.partial(renew_counted, made, id(group), group.gathered.wire.renew)
    for step in range(3):
        for micro in range(2):
            model(batch(step + micro, rank, world)).square().mean().backward()
        with torch.no_grad():
            model(batch(7, rank, world))
        assert set(made.values()) == {step + 1}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.layers[0].up.mul_(2)
    with gathered(model) as seen:
        assert torch.equal(seen["layers.0.up"], rounded("layers.0.up", whole_values(model)["layers.0.up"]))


@on_threads(2)
def test_models_from_the_meta_device_quantize_the_loaded_values(rank: int, world: int) -> None:
    with torch.device("meta"):
        empty = Model()
    model, whole = sharded(empty, to_empty=True), model_of()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            ours.copy_(ragged(theirs.detach(), ours.device_mesh, ours.placements))
    with gathered(model) as seen:
        assert all(torch.equal(seen[name], rounded(name, value.detach())) for name, value in whole.named_parameters())


def renew_counted(made: dict[int, int], key: int, renew: Any, *given: Any, **named: Any) -> None:
    made[key] += 1
    renew(*given, **named)


@on_threads(5)
def test_a_write_to_one_shard_reaches_the_tiles_that_ranks_share(rank: int, world: int) -> None:
    model = sharded(model_of())
    assert all(wire.cuts_tiles for wire in code_wires(model))
    model(batch(0, rank, world))
    masters = whole_values(model)
    for at in range(world):  # only this rank's version of the parameters changes
        if rank == at:
            model.layers[0].up.to_local().mul_(2.0 + at)
            model.layers[1].dense.weight.to_local().mul_(3.0 + at)
        changed = whole_values(model)
        with gathered(model) as seen:
            assert all(torch.equal(seen[name], rounded(name, value)) for name, value in changed.items())
    assert not torch.equal(masters["layers.0.up"], changed["layers.0.up"])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@on_threads(3)
def test_inf_and_nan_stop_every_rank_with_the_name(rank: int, world: int, value: float) -> None:
    model = sharded(model_of())
    before = model(batch(0, rank, world)).detach()
    with torch.no_grad():
        if rank == 1:
            local = model.layers[1].up.to_local().view(-1)
            kept = local[0].clone()
            local[0] = value
        model.layers[1].up.mul_(1)  # the ranks gather again only after a write that all of them make
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"Inf or NaN in 'layers.1.up' \(1 tile\): .* lower the learning rate"):
            model(batch(0, rank, world))
    with torch.no_grad():
        if rank == 1:
            local[0] = kept
        model.layers[1].up.mul_(1)
    model.reset_iter_state()
    assert torch.equal(model(batch(0, rank, world)), before)


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
@on_threads(2)
def test_skipped_steps_keep_inf_out_of_the_weights(rank: int, world: int, nonfinite: str) -> None:
    model = sharded(model_of())
    optimizer = AdamW8bit(list(model.named_parameters()), lr=1e-3, block=256, min_8bit_numel=512, nonfinite=nonfinite)
    for step, factor in enumerate((1.0, torch.inf, 1.0)):
        if step == 2 and nonfinite == "propagate":
            with pytest.raises(NonFiniteWeights, match="Inf or NaN in"):
                model(batch(step, rank, world))
            return
        (model(batch(step, rank, world)).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 1


@on_threads(4)
def test_the_byte_buffer_lives_only_until_dequantization(rank: int, world: int) -> None:
    model = sharded(model_of(), mp_policy=BF16)
    (group,) = (g for g in unit_of(model.layers[0]).groups if isinstance(g.gathered.wire, CodeWire))
    model(batch(0, rank, world))
    pool = group.gathered.pool
    model.layers[0].unshard(async_op=True)
    held = pool.bytes_held()
    assert group.gathered._parts is not None and group.gathered._parts.nbytes == world * group.gathered.wire.parts.part_bytes
    group.wait()
    assert group.gathered._parts is None and group.gathered.flat.dtype == torch.bfloat16
    model.layers[0].reshard()
    pool.trim()
    assert pool.bytes_held() < held


@on_processes(2)
def test_explain_predicts_the_buffers_of_a_step(rank: int, world: int) -> None:
    model = counted(quantized=True)
    for _ in range(3):
        model(torch.randn(8, 512)).float().square().mean().backward()
    told = explain(model).memory
    peak = unit_of(model).lanes.pool.peak_bytes
    assert abs(told["gathered"] + told["gradient_buffers"] - peak) <= 0.05 * peak


@on_threads(3)
def test_explain_shows_formats_codes_scales_and_bytes(rank: int, world: int) -> None:
    model = sharded(model_of(), mp_policy=BF16)
    report = explain(model)
    unit = next(u for u in report.units if u.name == "layers.0")
    coded, plain = (next(g for g in unit.groups if bool(g.scale_bytes) == quantized) for quantized in (True, False))
    group = next(g for g in unit_of(model.layers[0]).groups if isinstance(g.gathered.wire, CodeWire))
    assert {p.name: p.form for p in coded.parameters} == {"up": "FP8 16x24", "down": "FP8 16x16 power of two", "dense.weight": "FP8 32x32"}
    assert coded.shard_bytes == group.gathered.wire.parts.part_bytes and coded.gathered_bytes == 2 * group.layout.numel
    assert not any(p.form for p in plain.parameters)
    assert report.memory["codes"] == sum(g.gathered.wire.parts.part_bytes for g in groups(model) if isinstance(g.gathered.wire, CodeWire))
    assert "codes and" in str(report) and "scales) dequantized to" in str(report) and "FP8 16x24" in str(report)


@on_threads(4)
def test_a_tile_larger_than_its_tensor_is_one_tile_with_a_note(rank: int, world: int) -> None:
    model: Any = fully_shard(nn.Linear(64, 48, bias=False), quantize_policy=lambda name, param: Fp8Block(128, 128))
    (unit,) = explain(model).units
    assert unit.groups[0].notes == (
        "weight: Block.tile(128, 128) is larger than the tensor of 48 rows: one block",
        "tiles that shard boundaries cut: 1; each all-gather follows an exchange of their largest magnitudes",
    )
    assert unit.groups[0].notes[0] in str(explain(model))
    whole = full(model.weight)
    model.unshard()
    assert torch.equal(model.weight.detach(), dequantize(*quantize(whole)))


@on_processes(4)
def test_checkpoints_hold_the_master_and_resharding_keeps_bits(rank: int, world: int, tmp_path: Any) -> None:
    """The second model has other ranks, replicas and a coarser block."""
    saved = sharded(model_of())
    ckpt.save({"model": saved}, str(tmp_path), 1, timeout_s=20)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    loaded = sharded(Model(), mesh=mesh, block_policy=lambda name, param: Block.rows(24) if param.dim() > 1 else None)
    with gathered(loaded):
        pass
    ckpt.load({"model": loaded}, str(tmp_path))
    masters = whole_values(saved)
    assert all(torch.equal(value, masters[name]) for name, value in whole_values(loaded).items())
    with gathered(loaded) as seen:
        assert all(torch.equal(value, rounded(name, masters[name])) for name, value in seen.items())


@pytest.mark.parametrize("kind", ["adamw8bit", "muon"])
@on_threads(3)
def test_block_optimizers_train_alike_on_any_ranks(rank: int, world: int, kind: str) -> None:
    block = AdamW8bit.block_policy(256, 1) if kind == "adamw8bit" else lambda name, param: Block.rows(24) if param.dim() > 1 else None
    single = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    models = [sharded(model_of(), block_policy=block), sharded(model_of(), block_policy=block, mesh=single)]
    for model in models:
        named = [(n, p) for n, p in model.named_parameters()]
        if kind == "adamw8bit":
            optimizer: Any = AdamW8bit(named, lr=1e-3, block=256, min_8bit_numel=1)
        else:
            optimizer = Muon([p for n, p in named if p.dim() == 2], lr=1e-3)
        for step in range(2):
            model(batch(step, rank, world)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(whole_values(models[0]), whole_values(models[1]), 1e-3)


@pytest.mark.parametrize(
    ("policy", "options", "kind", "says"),
    [
        (
            lambda n, p: Fp8Block(),
            {},
            ValueError,
            r"gave FP8 128x128 .* 'bias' of shape \(48,\) is a vector: .*; return None for it",
        ),
        (lambda n, p: Fp8Block, {}, TypeError, "quantize_policy gave the class Fp8Block for 'weight': it must return an Fp8Block"),
        (lambda n, p: 128, {}, TypeError, "quantize_policy gave a int for 'weight'"),
        (lambda n: None, {}, TypeError, r"quantize_policy takes \(n\): give a function of \(name, parameter\)"),
        (7, {}, TypeError, "quantize_policy = 7 can't be called"),
        (
            lambda n, p: Fp8Block() if p.dim() == 2 else None,
            {"shard_placement_fn": lambda p: Shard(0)},
            ValueError,
            r"'weight' has Shard\(0\) from shard_placement_fn and FP8 128x128 from quantize_policy",
        ),
    ],
)
@on_threads(2)
def test_bad_quantize_policies_are_refused_in_one_line(rank: int, world: int, policy: Any, options: Any, kind: Any, says: str) -> None:
    model = nn.Linear(64, 48)
    with pytest.raises(kind, match=says) as caught:
        fully_shard(model, quantize_policy=policy, **options)
    assert "\n" not in str(caught.value) and type(model) is nn.Linear


@on_threads(2)
def test_integer_weights_with_a_format_are_refused_by_name(rank: int, world: int) -> None:
    model = nn.Linear(64, 48)
    model.table = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ValueError, match=r"'table' of shape \(4, 4\) is of torch.int32: .*; return None for it"):
        fully_shard(model, quantize_policy=lambda name, param: Fp8Block() if param.dim() == 2 else None)


def always(form: Fp8Block) -> Callable[[str, nn.Parameter], Fp8Block]:
    return lambda name, param: form


@on_threads(4)
def test_parts_of_parallel_weights_have_the_wholes_tiles(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(4, 72, 64, generator=torch.Generator().manual_seed(1))
    for dim, form in ((0, Fp8Block(16, 24)), (1, Fp8Block(12, 24)), (2, Fp8Block(16, 16))):
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))  # type: ignore[arg-type]
        ours: Any = fully_shard(model, mesh=mesh["dp"], quantize_policy=always(form))
        ours.unshard()
        expected = dequantize(*quantize(whole, form), form).chunk(2, dim)[mesh.get_local_rank("tp")]
        assert torch.equal(ours.weight.to_local(), expected)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(1)]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'weight' of shape \(4, 72, 64\) is cut by .* not between tiles of 16 x 24: return a tile"):
        fully_shard(model, mesh=mesh["dp"], quantize_policy=always(Fp8Block(16, 24)))
