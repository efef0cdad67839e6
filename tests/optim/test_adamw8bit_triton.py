"""Triton's interpreter runs the kernel: codes, scales and FP32 parameters equal the torch path's bit for bit, NaN included.

On a GPU `make gpu-check` compares the compiled kernel, BF16 and the time. (The interpreter truncates where BF16 should be rounded.)
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
def test_triton_kernel_equals_the_torch_path_bit_for_bit() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "tests.optim.triton_interpreter"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this version of Triton's interpreter can't run with this version of NumPy")
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
