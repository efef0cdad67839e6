"""Compile the FP8 kernels for GPUs that this machine may lack. test_fp8_triton.py runs this in its own process."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vescale_ray.quantization import fp8_triton, products_triton


def ptx(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> str:
    """The kernel's code, if its pointers are multiples of 16."""
    signature, attributes, given = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in constants:
            given[(at,)] = constants[name]
        elif name in types:
            attributes[(at,)] = [["tt.divisibility", 16]]
    options = {"num_warps": 8, "enable_fp_fusion": False, "maxnreg": 128}
    source = ASTSource(kernel, signature, given, attributes)
    text: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return text


def main() -> int:
    pointers = {"table": "*i64", "codes": "*u8", "scales": "*fp32", "largest": "*fp32"}
    tiles = {"FIELDS": 8, "TILES": 1, "ROWS": 128, "COLS": 128, "BLOCK_COLS": 128, "PIECES": 1, "VEC": 8}
    operands = {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "words": "*i32", "scales_t": "*fp32"}
    for capability in (80, 90, 100):
        hardware = capability >= 89
        for power in (False, True):
            scales = {"scales": "*u8"} if power else {}
            cast: dict[str, Any] = {"POWER": power, "HARDWARE": hardware}
            codes = {"KNOWN": True, **tiles, **cast}
            orders = {"SIDE": 128, "VEC": 8, "TILES": power, "ROWS": True, "COLS": True, **cast}
            for text, loads, stores in (
                (ptx(fp8_triton._quantize, {**pointers, **scales, "values": "*fp32"}, codes, capability), "v4.b32", "v2.b32"),
                (ptx(fp8_triton._dequantize, {**pointers, **scales, "values": "*bf16"}, {**tiles, **cast}, capability), "v2.b32", "v4.b32"),
                (ptx(products_triton._operands, operands, orders, capability), "v4.b32", "v4.b32"),
            ):
                assert f"ld.global.{loads}" in text and f"st.global.{stores}" in text, "a thread moves its elements one by one"
                assert ("e4m3x2" in text) == hardware and ".ftz" not in text
    print("compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
