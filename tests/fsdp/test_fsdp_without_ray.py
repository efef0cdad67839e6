"""A checkout needs no Ray and no installation: it imports, and trains under torchrun, in any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKER = """
import sys
class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name == "ray" or name.startswith("ray."):
            raise ImportError("ray is blocked in this test")
sys.meta_path.insert(0, NoRay())
"""

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from vescale_ray import MixedPrecisionPolicy, explain, fully_shard, gloo
from vescale_ray.optim import AdamW, clip_grad_norm_

try:
    import ray
except ImportError:
    pass
else:
    raise SystemExit("the blocker does not work")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 36), nn.Tanh(), nn.Linear(36, 7))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)  # makes the process group, since there is none
assert gloo.worker_threads(dist.group.WORLD) == (0 if torch.accelerator.is_available() else 1)
optimizer = AdamW(model.parameters(), lr=1e-2)
x = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for _ in range(20):
    loss = model(x).square().mean()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
if dist.get_rank() == 0:
    print(explain(model))
    print("trained", dist.get_world_size())
    import vescale_ray
    for name in vescale_ray.__all__: getattr(vescale_ray, name)
    import vescale_ray.planner, vescale_ray.optim, vescale_ray.checkpoint, vescale_ray.models.llama, vescale_ray.data.sources.corpus
    import vescale_ray.controller.http.metrics, vescale_ray.deploy
    import vescale_ray.reporting.report, vescale_ray.config, vescale_ray.cli, vescale_ray.workers.trainer
    print("imported")
dist.destroy_process_group()
"""


def environment(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_torchrun_script_trains_where_ray_cannot_be_imported(tmp_path):
    (tmp_path / "checkpoint.py").write_text("raise SystemExit('the user\\'s own checkpoint.py was imported')")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 2" in done.stdout and "imported" in done.stdout
    assert "3 units" in done.stdout
