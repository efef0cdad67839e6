"""``vescale-ray ckpt rollback``: make a run continue from an earlier checkpoint.

This is a separate command, not an option of ``train``: tools that restart jobs repeat the entrypoint, and would roll back each time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from vescale_ray.cli.checkpoints.checkpoint_output import Watched, bar
from vescale_ray.cli.checkpoints.checkpoint_paths import run_folder_of, split, store_at
from vescale_ray.cli.common import OK, Failed
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Commit

SHOWN = 8


@click.command("rollback")
@click.argument("path")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def rollback(path: str, step: int | None, as_json: bool) -> int:
    """Make the run continue from an earlier checkpoint: that of STEP in PATH, or PATH@NAME. The run must have ended.

    All of its data is verified first. Nothing is deleted: later checkpoints stay until the retention rules delete them.
    """
    from vescale_ray import checkpoint

    root, name = split(path)
    if (step is None) == (name is None):
        raise BadInput(f"{path}: say which checkpoint, by its step or as PATH@NAME; `vescale-ray ckpt ls {path}` lists them")
    store = store_at(root)
    folder = run_folder_of(path.rpartition("@")[0] if name else path)
    with folder.claim() if folder is not None else nullcontext():
        commits = checkpoint.ls(store)
        name = name or _of_step(str(root), commits, step or 0)
        total = next((one.bytes for one in commits if one.name == name), 0)
        with bar("verifying", total, as_json) as advance:
            report = checkpoint.verify(Watched(store, advance), name)
        if report.problems:
            raise Failed(f"{root}: {name} is damaged, nothing was changed: " + "; ".join(str(problem) for problem in report.problems))
        try:
            made = checkpoint.roll_back(store, name)
        except checkpoint.CommitRefused as error:
            raise BadInput(str(error)) from None
        if folder is not None:
            folder.append_event({"event": "rolled_back", "step": made.step, "commit": made.name, "to": name, "from": commits[-1].name})
    if as_json:
        click.echo(json.dumps({"path": str(root), "commit": made.name, "step": made.step, "to": name, "from": commits[-1].name}))
    else:
        then = f"; go on with: vescale-ray train {folder.config_path}" if folder is not None else ""
        click.echo(f"{root}: the run goes on from step {made.step} ({made.name}, the data of {name}), not from {commits[-1].name}{then}")
    return OK


def _of_step(root: str, commits: Sequence[Commit], step: int) -> str:
    """Return the newest whole checkpoint of this step."""
    whole = [one for one in commits if one.problem is None]
    found = [one.name for one in whole if one.step == step]
    if found:
        return found[-1]
    damaged = next((one for one in commits if one.step == step), None)
    if damaged is not None:
        raise BadInput(f"{root}: the checkpoint of step {step}, {damaged.name}, can't be loaded: {damaged.problem}")
    there = sorted({one.step for one in whole})
    near = sorted(sorted(there, key=lambda one: abs(one - step))[:SHOWN])
    more = f", and {len(there) - len(near)} others" if len(there) > len(near) else ""
    raise BadInput(f"{root}: no checkpoint of step {step}; there are those of {', '.join(map(str, near)) or 'no step'}{more}")
