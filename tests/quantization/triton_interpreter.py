"""Compare the FP8 kernels with the torch path. test_fp8_triton.py runs this in its own process with TRITON_INTERPRET=1.

Triton's interpreter rounds some operations otherwise than a GPU: ``fma`` twice, casts to BF16 and e4m3 towards zero. They are replaced by
exact ones here, so that kernels are tested, not the interpreter.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
import triton.language as tl
from torch import nn
from torch.nn import functional as F
from triton.runtime import interpreter

from tests.quantization.test_fp8_products import cublaslt
from vescale_ray.block_grid import Grid
from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp.layouts import wire
from vescale_ray.fsdp.layouts.code_parts import CodeParts
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.quantization import Fp8Block, compute_in_fp8, fp8, fp8_triton, operands

DTYPES = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.float32: torch.float32}
POWER: Literal["power_of_two"] = "power_of_two"
FORMS = (Fp8Block(), Fp8Block(scales=POWER), Fp8Block(1, 128), Fp8Block(32, 32, POWER), Fp8Block(7, 30), Fp8Block(70, 500))
SHAPES = ((130, 200), (3, 70, 61), (128, 256), (5, 9))
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def exact_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """FP32 multiply-add that rounds once: the sum is rounded to odd in FP64, and then to FP32."""
    with np.errstate(all="ignore"):
        product, addend = np.multiply(x.data, y.data, dtype=np.float64), np.float64(z.data)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1 == 0) & (error != 0) & np.isfinite(total)
        total = np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total)
        return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)


def exact_cast(builder: Any, source: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
    kinds, to = (source.dtype.scalar, dst_type.scalar), interpreter._get_np_dtype(dst_type)
    if all(kind in DTYPES for kind in kinds):
        values = torch.from_numpy(np.ascontiguousarray(source.data)).view(DTYPES[kinds[0]]).to(DTYPES[kinds[1]])
        bits = values.view(torch.uint8 if values.itemsize == 1 else torch.int16) if values.itemsize < 4 else values
        return interpreter.TensorHandle(bits.numpy().view(to), dst_type.scalar)
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle(source.data.astype(to), dst_type.scalar)


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, with a zero tile, subnormal numbers, -0, and an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(6).exp()
    x[..., : shape[-2] // 2, : shape[-1] // 2] *= 1e-30 if seed % 2 else 1.0
    x[..., shape[-2] // 2 :, shape[-1] // 2 :] *= 1e-42
    x[..., :2, :30] = -0.0
    x.view(-1)[-1] = 3e38 if seed % 3 else 1.0
    return x


def same(got: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype, what
    assert torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (got, expected))), what


def on_kernels(whether: bool) -> None:
    for module in (fp8, operands, wire):
        module.on_triton = lambda values: whether  # type: ignore[attr-defined]


def pair(run: Any, casts: tuple[bool, ...] = (False, True)) -> Iterator[tuple[Any, Any]]:
    """The results of the kernels, for each way of casting, and of torch's path."""
    on_kernels(False)
    expected = run()
    for hardware in casts:
        fp8_triton._casts = lambda device, hardware=hardware: hardware  # type: ignore[assignment]
        on_kernels(True)
        yield run(), expected


def check_whole() -> None:
    """Weights of all forms, shapes and dtypes; tiles in one piece and in several."""
    for turn, (form, (seed, shape)) in enumerate(itertools.product(FORMS, enumerate(SHAPES))):
        dtype, to = WIDE[turn % 3], WIDE[turn // 3 % 3]
        weight = wild(*shape, seed=seed).to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)
        fp8_triton.AREA = 1 << (12 if form.columns == 500 else 14)
        for got, expected in pair(lambda weight=weight, form=form, to=to: _there_and_back(weight, form, to), casts=(turn % 2 == 0,)):
            for one, other in zip(got, expected, strict=True):
                same(one, other, (form, shape, dtype, to))
    fp8_triton.AREA = 1 << 14


def _there_and_back(weight: torch.Tensor, form: Fp8Block, dtype: torch.dtype) -> list[torch.Tensor]:
    codes, scales = fp8.quantize(weight, form)
    return [codes, scales, fp8.dequantize(codes, scales, form, dtype=dtype)]


def check_codes() -> None:
    """All codes, and quotients between two of them and next to that, for scales whose reciprocals are not exact."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between, rows = (numbers[1:] + numbers[:-1]) / 2, []
    for scale in (1.0, 7 * 2.0**-20, 2.0**-126, 1.6e-38, 1 / 3, 1.9999999, 0.7853982, 5.4e-20, 5.5e-20, 1e30):
        near = (between * scale, (between * scale).nextafter(torch.tensor(0.0)), (between * scale).nextafter(torch.tensor(math.inf)))
        rows += [F.pad(one, (0, 2), value=448 * scale) for one in near]
    x = torch.stack([*rows, *(-one for one in rows)])
    for got, expected in pair(lambda: fp8.quantize(x, Fp8Block(1, 128))):
        same(got[0], expected[0], "quotients between codes")
    codes = torch.arange(256, dtype=torch.uint8)[None]
    codes[codes & 0x7F == 0x7F] = 0  # no tile of finite numbers has a code of NaN
    scales = torch.tensor([[1.0, 2.0**-120]])
    for got, expected in pair(lambda: fp8.dequantize(codes.view(torch.float8_e4m3fn), scales, Fp8Block(1, 128))):
        same(got, expected, "all codes")


def check_bad() -> None:
    """Scales tell Inf and NaN, and those of other tiles are right."""
    for form in FORMS:
        weight = wild(300, 200, seed=1)
        weight[100, 50], weight[140, 150], weight[290, 10] = math.inf, -math.inf, math.nan
        grid = Grid.of(weight.shape, form.block)
        expected, found = (torch.empty(grid.state_shape, dtype=form.scale_dtype) for _ in range(2))
        codes = torch.empty(weight.numel(), dtype=torch.uint8)
        fp8.quantize_range(weight.view(-1), tuple(grid.regions(0, grid.numel)), form, codes, expected.view(-1))
        fp8_triton.whole_table((300, 200), form.block, form.power).quantize(weight.view(-1), codes, found.view(-1).view(torch.uint8))
        bad = fp8.bad_scales(expected)
        assert bad.sum() == 3 and torch.equal(bad, fp8.bad_scales(found)), form
        same(found[~bad], expected[~bad], form)


def check_wire() -> None:
    """Shards that cut tiles, of several tensors and formats: the bytes that ranks send, and the gathered values."""
    forms = {"a": Fp8Block(32, 32), "b": Fp8Block(scales=POWER), "c": Fp8Block(1, 128), "d": Fp8Block(32, 32)}
    shapes = {"a": (70, 72), "b": (2, 150, 64), "c": (40, 200), "d": (64, 33)}
    specs = [TensorSpec(name, shapes[name], Block.rows(1), torch.float8_e4m3fn) for name in forms]
    whole = {name: wild(*shape, seed=1) for name, shape in shapes.items()}
    for ranks, dtype in ((1, torch.float32), (3, torch.bfloat16)):
        parts = CodeParts(plan_layout(specs, ranks), forms)
        assert (parts.cut_tiles > 0) == (ranks > 1)
        wires, shards = [CodeWire(parts, rank) for rank in range(ranks)], []
        for rank in range(ranks):
            kept = parts.layout.kept(rank)
            shards.append(KeptShard(kept, torch.zeros(kept.numel)))
            for name in kept.offsets:
                shards[-1].tensor(name).copy_(whole[name].view(-1)[slice(*parts.layout.local_range(name, rank))])
        for got, expected in pair(functools.partial(gathered, wires, shards, dtype), casts=(ranks == 3,)):
            same(got[0], expected[0], f"the bytes of {ranks} ranks")
            same(got[1], expected[1], f"the values of {ranks} ranks in {dtype}")


def gathered(wires: list[CodeWire], shards: list[KeptShard], dtype: torch.dtype) -> list[torch.Tensor]:
    """The parts of all ranks, and the parameters' buffer."""
    parts = wires[0].parts
    magnitudes = torch.zeros(parts.cut_tiles)
    for sender, shard in zip(wires, shards, strict=True):
        held = {name: piece for name in parts.forms if (piece := parts.piece(name, sender._rank)) is not None}
        magnitudes = magnitudes.maximum(sender._largest_in_cut_tiles(shard, held))
    sent = torch.zeros(len(wires), parts.part_bytes, dtype=torch.uint8)
    for sender, shard, part in zip(wires, shards, sent, strict=True):
        sender._part = None
        sender.renew(shard, lambda mine: magnitudes, check=True)
        sender.write(part, non_blocking=False)
    flat = torch.zeros(len(wires) * parts.layout.shard_numel, dtype=dtype)
    wires[0].join(sent.view(-1), flat)
    return [sent, flat]


def check_products() -> None:
    """Operands in the layout of cuBLASLt, and linear layers, eager and compiled without a break of the graph."""
    kinds = ((True, True, False), (True, False, True), (False, True, True), (False, True, False), (False, False, True))
    cases = itertools.product(((130, 272), (7, 200), (1, 5)), kinds)
    for turn, ((m, k), (tiles, rows, columns)) in enumerate(cases):
        form, dtype = Fp8Block(scales=POWER) if turn % 2 else Fp8Block(), WIDE[turn % 3]
        x = wild(m, k, seed=m).to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)
        wanted = {"tiles": tiles, "rows": rows, "columns": columns}
        for got, expected in pair(lambda x=x, form=form, wanted=wanted: operands.operands(x, form, **wanted), casts=(turn % 4 > 1,)):
            for one, other in zip(got, map(operands.for_gpu, expected), strict=True):
                same(one.codes, other.codes, (m, k, form, wanted, dtype))
                same(one.scales, other.scales, (m, k, form, wanted, dtype))
                strides = zip(one.scales.stride(), other.scales.stride(), one.scales.shape, strict=True)
                assert one.rows == other.rows and all(a == b or count == 1 for a, b, count in strides)
    F.scaled_mm = cublaslt  # type: ignore[assignment]
    layer = nn.Linear(208, 130, bias=False)
    compute_in_fp8(layer, lambda name, parameter: Fp8Block())
    x, dy = wild(5, 7, 208, seed=2).clamp(-9, 9), torch.ones(1, 1, 1).expand(5, 7, 130)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def run(module: Any) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        layer.weight.grad = None
        out = module(given)
        out.backward(dy)
        return [out.detach(), given.grad, layer.weight.grad]  # type: ignore[list-item]

    for got, expected in pair(lambda: run(layer), casts=(True,)):
        for one, other in zip(got, expected, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()
        for one, other in zip(run(compiled), got, strict=True):
            same(one, other, "compiled")
    graph: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graph.extend(str(one.graph) for one in module.modules() if isinstance(one, torch.fx.GraphModule))
        return module.forward

    torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert "fp8_operands" in "".join(graph)


def main() -> int:
    torch.set_num_threads(1)
    interpreter.InterpreterBuilder.create_fma = exact_fma
    interpreter.InterpreterBuilder.cast_impl = interpreter.InterpreterBuilder.create_fp_to_fp = exact_cast
    for check in (check_whole, check_codes, check_bad, check_wire, check_products):
        began = time.process_time()
        check()
        print(f"{check.__name__}: {time.process_time() - began:.1f} s", file=sys.stderr)
    print("equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
