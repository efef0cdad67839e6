"""Linear layers with FP8 products against FP64 products of the quantized operands."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from benchmarks.gpu_step import stepper  # type: ignore[import-not-found]
from tests.fsdp.transformer import part
from tests.ranks import run_gloo, run_threads
from vescale_ray import Fp8Block, compute_in_fp8, fully_shard
from vescale_ray.quantization.fp8 import dequantize, quantize, scale_values
from vescale_ray.quantization.operands import Operand, for_gpu, operand
from vescale_ray.quantization.products import Fp8Linear, _on_hopper, check_device, multiply
from vescale_ray.quantization.products_mx import multiply_mx

FORMS = [Fp8Block(), Fp8Block(scales="power_of_two"), Fp8Block(32, 32, "power_of_two")]


def row(form: Fp8Block) -> Fp8Block:
    return Fp8Block(1, form.columns, form.scales)


def oracle(x: torch.Tensor, form: Fp8Block, *, tiles: bool) -> torch.Tensor:
    """The values of ``x`` after quantization, in FP64."""
    chosen = form if tiles else row(form)
    codes, scales = quantize(x.contiguous(), chosen)
    spread = scale_values(scales).double().repeat_interleave(chosen.rows, 0)[: x.shape[0]]
    return codes.double() * spread.repeat_interleave(chosen.columns, 1)[:, : x.shape[1]]


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """FP32 sums of a product: an error relative to the largest entries, not to each."""
    assert (a.double() - b).norm() <= 2e-6 * b.norm()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_operands_have_the_codes_and_scales_of_quantize(form: Fp8Block) -> None:
    for shape in ((300, 200), (1, 5), (128, 256)):
        for tiles in (True, False):
            codes, scales = quantize(wild(*shape), form if tiles else row(form))
            found = operand(wild(*shape), form, tiles=tiles)
            assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(found.scales, scale_values(scales))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_and_gradients_equal_fp64_of_the_operands(form: Fp8Block) -> None:
    layer, x, dy = nn.Linear(200, 300), wild(7, 20, 200, seed=1).requires_grad_(), wild(7, 20, 300, seed=2)
    with torch.no_grad():
        layer.weight.copy_(wild(300, 200, seed=3))
    assert compute_in_fp8(layer, lambda name, p: form) == [""]
    y = layer(x)
    y.backward(dy)
    flat, dys = x.detach().view(-1, 200), dy.view(-1, 300)
    w = oracle(layer.weight.detach(), form, tiles=True)
    close(y.detach().view(-1, 300) - layer.bias.detach(), oracle(flat, form, tiles=False) @ w.t())
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    close(x.grad.view(-1, 200), oracle(dys, form, tiles=False) @ w)
    close(layer.weight.grad, oracle(dys.t(), form, tiles=False) @ oracle(flat.t(), form, tiles=False).t())
    torch.testing.assert_close(layer.bias.grad, dys.sum(0), rtol=1e-5, atol=1e-3)


def test_gathered_weights_are_quantized_again_without_loss() -> None:
    for seed in range(5):
        for form in FORMS:
            codes, scales = quantize(wild(300, 200, seed=seed), form)
            again = operand(dequantize(codes, scales, form, dtype=torch.bfloat16), form, tiles=True)
            one = Operand(codes, scale_values(scales), form.rows, form.columns)
            if form.scales == "power_of_two":
                assert torch.equal(values_of(again), values_of(one))
            else:
                assert torch.equal(again.codes.view(torch.uint8), codes.view(torch.uint8))
                assert ((again.scales - scales).abs() <= 2**-8 * scales).all()


def values_of(a: Operand) -> torch.Tensor:
    spread = a.scales.repeat_interleave(a.rows, 0)[: a.codes.shape[0]].repeat_interleave(a.side, 1)
    return a.codes.double() * spread[:, : a.codes.shape[1]]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_make_the_results_of_their_block_nan(bad: float) -> None:
    a, b = torch.ones(3, 300), torch.ones(2, 300)
    a[1, 290] = bad
    form = Fp8Block()
    out = multiply(operand(a, form, tiles=False), operand(b, form, tiles=True), torch.float32)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], torch.full((2, 2), 300.0))


def test_no_tokens_give_an_empty_result_and_zero_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 4)
    compute_in_fp8(layer, lambda name, p: Fp8Block())
    monkeypatch.setattr("vescale_ray.quantization.products.multiply", None)  # no device multiplies empty operands
    x = torch.zeros(0, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 8)
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_inputs_of_one_dimension_are_rows() -> None:
    layer, x = nn.Linear(40, 8), wild(40)
    compute_in_fp8(layer, lambda name, p: Fp8Block(16, 16))
    assert layer(x).shape == (8,)
    assert torch.equal(layer(x), layer(x[None])[0])


@pytest.mark.parametrize("x", [torch.ones(3, 16), torch.ones(3, 33), torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(3, 32).long()])
def test_inputs_that_do_not_fit_the_weight_are_refused(x: torch.Tensor) -> None:
    """The blocks of 16 features alone would fit a weight of 32."""
    layer = nn.Linear(32, 8)
    compute_in_fp8(layer, lambda name, p: Fp8Block(16, 16))
    with pytest.raises(RuntimeError, match=r"an input of shape \(3, \d+\) and torch.\w+ for a weight of shape \(8, 32\) and torch.float32"):
        layer(x)


def test_frozen_weights_get_no_gradient_and_autocast_works() -> None:
    layer = nn.Linear(64, 32)
    compute_in_fp8(layer, lambda name, p: Fp8Block())
    layer.weight.requires_grad_(False)
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad is None and x.grad is not None and x.grad.dtype == torch.float32


def tower() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 96, bias=False), nn.Tanh(), nn.Linear(96, 8))
    generator = torch.Generator().manual_seed(3)  # ranks are threads, which share torch's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def policy(name: str, parameter: nn.Parameter) -> Fp8Block | None:
    return Fp8Block(32, 32, "power_of_two") if parameter.dim() == 2 and parameter.shape[0] > 8 else None


@pytest.mark.parametrize("world", [1, 3])
def test_sharded_training_equals_one_process(world: int) -> None:
    run_threads(world, trains_alike)


def trains_alike(rank: int, world: int) -> None:
    model, one = tower(), tower()
    for each in (model, one):
        assert compute_in_fp8(each, policy) == ["0", "2"]
    for layer in (model[0], model[2], model):
        fully_shard(layer, quantize_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for step in range(3):
        batch = torch.randn(60, 48, generator=torch.Generator().manual_seed(step))
        model(part(batch, rank, world)).square().mean().backward()
        for r in range(world):  # the weight gradient's blocks run along the tokens of a rank
            one(part(batch, r, world)).square().mean().backward()
        for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            b.grad /= world
            error = (a.grad.full_tensor() - b.grad).norm() / b.grad.norm()  # type: ignore[attr-defined]
            # After a step, sums in another order can move an element to the next code.
            assert error <= (1e-6 if step == 0 else 0.01), f"{name} in step {step}: {error}"
        for stepped in (optimizer, reference):
            stepped.step()
            stepped.zero_grad()


def losses_of_the_benchmark(rank: int, world: int) -> list[list[float]]:
    steps = [stepper(system, torch.device("cpu"), compiled=False) for system in ("ours", "ours_fp8")]
    return [[step().item() for _ in range(3)] for step in steps]


def test_the_gpu_benchmark_trains_in_fp8_as_in_bf16() -> None:
    """A GPU times the same model with 1.14 billion parameters."""
    ((plain, coded),) = run_gloo(1, losses_of_the_benchmark)
    assert coded == pytest.approx(plain, rel=0.02) and coded != plain and coded[-1] < coded[0]


def test_compiled_layers_give_the_same_numbers() -> None:
    layer, x = nn.Linear(160, 96), torch.randn(20, 160)
    compute_in_fp8(layer, lambda name, p: Fp8Block())
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for one in (layer, compiled):
        one(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(compiled.weight.grad, layer.weight.grad)


def in_both_orders(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Codes and scales of two matrices, whose factors are exact, and of their transposes."""
    orders = (operand(one, Fp8Block(16, 16), tiles=False) for x in (a * -2, b * 4) for one in (x, x.t()))
    return [tensor for found in orders for tensor in (found.codes, found.scales)]


def test_compiled_operands_with_smaller_last_blocks_are_whole() -> None:
    """56 columns are 3.5 blocks of 16. Inductor's loops for the CPU went over 3, if the cut was before the cast."""
    a, b = wild(32, 56).bfloat16(), wild(32, 56, seed=1).bfloat16()
    for got, expected in zip(torch.compile(in_both_orders)(a, b), in_both_orders(a, b), strict=True):
        assert torch.equal(got.double(), expected.double())


def cublaslt(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    kind_a: object,
    scale_b: torch.Tensor,
    kind_b: object,
    *,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Assert what torch's ``scaled_mm`` demands of block scales on Hopper (ScaledBlas.cpp, torch 2.13), and return the product."""
    m, k, n = *a.shape, b.shape[1]
    assert k % 16 == 0 and n % 16 == 0 and m % 4 == 0 and a.is_contiguous() and b.t().is_contiguous()
    blocks = -(-k // 128)
    for scale, count, kind in ((scale_a, m, kind_a), (scale_b, n, kind_b)):
        if kind == F.ScalingType.BlockWise1x128:
            assert scale.shape == (count, blocks) and scale.stride(0) == 1 and (blocks == 1 or scale.stride(1) == count)
        else:
            four = -(-blocks // 4) * 4
            assert scale.shape == (four, -(-count // 128)) and scale.stride(0) == 1 and (scale.shape[1] == 1 or scale.stride(1) == four)
    assert kind_a == F.ScalingType.BlockWise1x128

    def whole(codes: torch.Tensor, scale: torch.Tensor, kind: object) -> torch.Tensor:
        by_row = scale if kind == F.ScalingType.BlockWise1x128 else scale.t()[:, :blocks].repeat_interleave(128, 0)[: codes.shape[0]]
        return codes.double() * by_row.double().repeat_interleave(128, 1)[:, :k]

    return (whole(a, scale_a, kind_a) @ whole(b.t(), scale_b, kind_b).t()).to(output_dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 512), (7, 300, 200), (1, 130, 40), (130, 5, 640)])
def test_gpu_operands_have_the_layout_that_cublaslt_demands(m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", cublaslt)
    x, w, form = wild(m, k), wild(n, k, seed=1), Fp8Block()
    rows = operand(x, form, tiles=False)
    for other in (operand(w, form, tiles=True), operand(w, form, tiles=False), operand(wild(k, n), form, tiles=True).transposed()):
        close(_on_hopper(for_gpu(rows), for_gpu(other), torch.float32), values_of(rows) @ values_of(other).t())


@pytest.mark.parametrize("mx", [False, True])
def test_compiled_graphs_hold_products_as_one_operation(mx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own operation does not compile for smaller last blocks, nor for the products of a weight gradient and of MX operands."""
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(str(module.graph))
        return module.forward

    form, multiplied = Fp8Block(scales="power_of_two"), multiply_mx if mx else _on_hopper
    rows = for_gpu(operand(wild(7, 200), form, tiles=False))
    others = [for_gpu(operand(wild(300, 200), form, tiles=tiles)) for tiles in (True, False)]
    compiled = torch.compile(lambda a, b: multiplied(a, b, torch.bfloat16), backend=backend, fullgraph=True)
    monkeypatch.setattr(F, "scaled_mm", mx_cublaslt if mx else cublaslt)
    for other in others:
        assert torch.equal(compiled(rows, other), multiplied(rows, other, torch.bfloat16))
    assert len(graphs) == 2 and all("fp8_product" in graph for graph in graphs)
    compiled = torch.compile(lambda a, b: multiplied(a, b, torch.bfloat16), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows, others[0]), multiplied(rows, others[0], torch.bfloat16))


def mx_cublaslt(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    kind_a: object,
    scale_b: torch.Tensor,
    kind_b: object,
    order_a: object,
    order_b: object,
    *,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Assert what torch's ``scaled_mm`` demands of MX operands (ScaledBlas.cpp, torch 2.13), and return the product."""
    k, n = b.shape
    assert k % 32 == 0 and n % 16 == 0 and a.is_contiguous() and b.t().is_contiguous()
    assert kind_a == kind_b == F.ScalingType.BlockWise1x32 and order_a == order_b == F.SwizzleType.SWIZZLE_32_4_4

    def whole(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        down, across = -(-codes.shape[0] // 128), -(-k // 128)
        assert scale.is_contiguous() and scale.dtype == torch.float8_e8m0fnu and scale.numel() == down * 128 * across * 4
        outer = torch.arange(codes.shape[0])[:, None].expand(-1, k // 32)
        inner = torch.arange(k // 32)[None, :].expand(len(outer), -1)
        tile = outer // 128 * across + inner // 4
        offset = outer % 128 % 32 * 16 + outer % 128 // 32 * 4 + inner % 4  # as cuBLAS's documentation has it
        return codes.double() * scale.double()[tile * 512 + offset].repeat_interleave(32, 1)

    return (whole(a, scale_a) @ whole(b.t(), scale_b).t()).to(output_dtype)


@pytest.mark.parametrize("form", [form for form in FORMS if form.power], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 512), (7, 300, 200), (1, 130, 40), (130, 5, 640)])
def test_mx_operands_have_the_layout_that_cublaslt_demands(m: int, n: int, k: int, form: Fp8Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", mx_cublaslt)
    x, w = wild(m, k), wild(n, k, seed=1)
    rows = operand(x, form, tiles=False)
    for other in (operand(w, form, tiles=True), operand(w, form, tiles=False), operand(wild(k, n), form, tiles=True).transposed()):
        expected = values_of(rows) @ values_of(other).t()
        close(multiply_mx(rows, other, torch.float32), expected)
        if form.columns == 128:
            close(multiply_mx(for_gpu(rows), for_gpu(other), torch.float32), expected)


def test_mx_products_with_inf_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", mx_cublaslt)
    a, b = torch.ones(3, 300), torch.ones(2, 300)
    a[1, 290] = float("inf")
    form = Fp8Block(scales="power_of_two")
    out = multiply_mx(operand(a, form, tiles=False), operand(b, form, tiles=True), torch.float32)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], torch.full((2, 2), 300.0))


def test_torch_takes_mx_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors of the same layout run torch's own checks, which torch 2.13 has."""
    scaled_mm = F.scaled_mm

    def faked(*given: object, output_dtype: torch.dtype) -> torch.Tensor:
        with FakeTensorMode():
            there = [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda") if isinstance(one, torch.Tensor) else one
                for one in given
            ]
            out = scaled_mm(*there, output_dtype=output_dtype)  # type: ignore[arg-type,misc]
        return torch.empty(out.shape, dtype=out.dtype)

    monkeypatch.setattr(F, "scaled_mm", faked)
    rows, tiles = (operand(wild(m, 200), FORMS[2], tiles=tiles) for m, tiles in ((7, False), (300, True)))
    found = multiply_mx(rows, tiles, torch.bfloat16)
    assert (found.shape, found.dtype) == ((7, 300), torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "form", "said"),
    [
        ((8, 0), Fp8Block(), r"^GPU \(compute capability 8.0\) has no products of FP8 blocks: they need a Hopper or Blackwell GPU"),
        ((12, 0), Fp8Block(), r"^GPU \(compute capability 12.0\) has no products of FP8 blocks"),
        ((9, 0), Fp8Block(32, 32), r"products in FP8 32x32: .* multiplies tiles of 128x128; give Fp8Block\(128, 128\)"),
        ((10, 3), Fp8Block(), r"products in FP8 128x128: .* with power-of-two scales; give Fp8Block\(128, 128, 'power_of_two'\)"),
        ((10, 0), Fp8Block(16, 16, "power_of_two"), "multiplies tiles of a multiple of 32 columns"),
    ],
)
def test_devices_without_such_products_are_refused(
    capability: tuple[int, int], form: Fp8Block, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    with pytest.raises(ValueError, match=said):
        check_device(torch.device("cuda"), form)
    check_device(torch.device("cpu"), form)


def test_devices_take_what_they_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    for capability, forms in (((9, 0), FORMS[:2]), ((10, 0), FORMS[1:])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for form in forms:
            check_device(torch.device("cuda"), form)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model = tower()
    with pytest.raises(ValueError, match=r"products of '0.weight' in FP8 1x128: the input gradient needs square tiles"):
        compute_in_fp8(model, lambda name, p: Fp8Block(1, 128))
    with pytest.raises(ValueError, match="gives no linear layer of the model a format"):
        compute_in_fp8(model, lambda name, p: None)
    with pytest.raises(TypeError, match="the model is a list: give the module itself"):
        compute_in_fp8([model], policy)  # type: ignore[arg-type]
    for wrong, what in ((128, "a int"), (Fp8Block, "the class Fp8Block")):
        with pytest.raises(TypeError, match=f"the policy gave {what} for '0.weight': it must return an Fp8Block"):
            compute_in_fp8(model, lambda name, p, wrong=wrong: wrong)  # type: ignore[misc,arg-type]
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    with pytest.raises(ValueError, match=r"^mps has no products of FP8 blocks: they need a Hopper or Blackwell GPU"):
        check_device(torch.device("mps"))
    there = nn.Linear(8, 8, device="meta")
    with FakeTensorMode():
        there.weight = nn.Parameter(torch.empty(8, 8, device="mps"))
    with pytest.raises(ValueError, match="^mps has no products of FP8 blocks"):
        compute_in_fp8(there, lambda name, p: Fp8Block())


def test_weights_that_are_dtensors_are_refused() -> None:
    run_threads(2, refuses_dtensors)


def refuses_dtensors(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    layer = parallelize_module(nn.Linear(32, 64), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="'weight' is a DTensor: call compute_in_fp8 before"):
        compute_in_fp8(layer, lambda name, p: Fp8Block())
    late = nn.Linear(32, 64)
    compute_in_fp8(late, lambda name, p: Fp8Block())
    with pytest.raises(TypeError, match="tensor parallelism has no FP8 products"):
        parallelize_module(late, mesh, ColwiseParallel())(torch.randn(4, 32))
