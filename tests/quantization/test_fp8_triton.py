"""Triton's interpreter runs the FP8 kernels: codes, scales and values equal the torch path's bit for bit. Their division is right,
and they compile for several GPUs.

On a GPU `make gpu-check` compares the compiled kernels, and times them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")


def run(module: str, says: str, **environment: str) -> None:
    environment = {**os.environ, **environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this version of Triton's interpreter can't run with this version of NumPy")
    assert done.returncode == 0 and done.stdout.strip() == says, done.stderr[-3000:]


@pytest.mark.slow
@needs_triton
def test_fp8_kernels_equal_the_torch_path_bit_for_bit() -> None:
    run("tests.quantization.triton_interpreter", "equal", TRITON_INTERPRET="1")


@pytest.mark.slow
@needs_triton
def test_fp8_kernels_compile_and_move_several_elements(tmp_path: Path) -> None:
    run("tests.quantization.triton_ahead", "compiled", TRITON_CACHE_DIR=str(tmp_path))


def fp32(value: Fraction) -> Fraction:
    """The nearest number with 24 bits of mantissa, the even one of two."""
    unit = Fraction(2) ** (math.frexp(value)[1] - 24)
    return round(value / unit) * unit


def test_one_correction_gives_a_divisions_codes() -> None:
    """Quotients next to a tie of FP32 numbers that itself lies next to a tie of codes: there a corrected quotient could err.

    A corrected quotient is within 2^-22 units of the last place before it is rounded. So it can differ from a division's only if the
    operands' mantissas ``x * 2^j`` and ``scale * tie`` differ by a few units. There are few such operands, and all are tried.
    """
    tried = 0
    for middle in {*range(17, 32, 2), *range(1, 16, 2)}:  # between two codes; below 2^-6 they have fewer bits
        mantissa = middle << 24 - middle.bit_length()
        for tie in (2 * mantissa + 1, 2 * mantissa - 1 if mantissa > 1 << 23 else (1 << 25) - 1):
            for away in (*range(-8, 0), *range(1, 9)):
                for power in (1 << 24, 1 << 25):
                    scale = -away * pow(tie, -1, power) % power
                    x = (scale * tie + away) // power
                    if not all(1 << 23 <= number < 1 << 24 for number in (scale, x)):
                        continue
                    inverse = fp32(Fraction(1, scale))
                    quotient = fp32(x * inverse)
                    remainder = x - scale * quotient
                    assert remainder == 0 or abs(fp32(abs(remainder))) == abs(remainder)
                    assert fp32(quotient + remainder * inverse) == fp32(Fraction(x, scale))
                    tried += 1
    assert tried > 100
