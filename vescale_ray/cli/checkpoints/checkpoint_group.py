"""The command group ``vescale-ray ckpt``."""

from __future__ import annotations

import click

from vescale_ray.cli.checkpoints.checkpoint_commands import diff, gc, ls, pin, show, unpin, verify
from vescale_ray.cli.checkpoints.checkpoint_conversions import export_dcp, import_dcp, import_hf
from vescale_ray.cli.checkpoints.export_hf import export_hf
from vescale_ray.cli.checkpoints.rollback_command import rollback
from vescale_ray.cli.common import CommandGroup


@click.group(cls=CommandGroup)
def ckpt() -> None:
    """Inspect, compare, convert, pin and delete checkpoints.

    PATH: a run's name, its folder, a folder of checkpoints, or a URL; PATH@NAME is one checkpoint of it.
    """


for command in (ls, show, verify, diff, gc, pin, unpin, export_hf, import_hf, export_dcp, import_dcp, rollback):
    ckpt.add_command(command)
