"""A gloo worker thread that needs the interpreter's lock while the process ends does not abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import hashlib
import torch, torch.distributed as dist
from vescale_ray import gloo

data = b"x" * (1 << 28)
gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
work = dist.all_reduce(torch.ones(1), async_op=True)
# The worker thread computes without the interpreter's lock, and then takes it.
digest = work.get_future().then(lambda _: hashlib.sha256(data).digest())
print("the script has ended", flush=True)
"""


def test_process_ends_while_a_gloo_worker_needs_the_interpreter() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the script has ended\n"), done.stderr[-2000:]
