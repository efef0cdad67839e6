"""A gloo worker thread that needs the interpreter's lock while the process ends does not abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import hashlib, sys
import torch, torch.distributed as dist
from vescale_ray import gloo

data = b"x" * (1 << 28)
gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
work = dist.all_reduce(torch.ones(1), async_op=True)
computed = work.get_future().then(lambda _: eval(sys.argv[1]))
print("the script has ended", flush=True)
"""


@pytest.mark.parametrize(
    "work",
    [
        pytest.param("hashlib.sha256(data).digest()", id="computes without the lock, then takes it"),
        pytest.param("sum(n for n in range(10**7))", id="competes for the lock"),
    ],
)
def test_process_ends_while_a_gloo_worker_needs_the_interpreter(work: str) -> None:
    command = [sys.executable, "-c", SCRIPT, work]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the script has ended\n"), done.stderr[-2000:]
