"""Common parts of the command line: exit codes, failure, and groups that suggest the nearest command."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vescale_ray.lasting import check_lasting

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.runfolder import RunFolder

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Failed(Exception):
    """The command failed; the message is one line. Exit code 1."""


def lasting_path(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Callback of a parameter that names an output: refuse a folder that disappears with a Ray job."""
    if value is not None:
        check_lasting(f"{parameter.human_readable_name} = {value}", value)
    return value


_MEANT = {
    **dict.fromkeys(("resume", "run", "finetune", "fine-tune", "fit", "pretrain"), "train"),
    **dict.fromkeys(("merge", "convert"), "export-hf"),
    "tokenize": "prepare",
}
"""Our command for other programs' names."""


class CommandGroup(click.Group):
    """A command group that suggests the nearest command."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = self.list_commands(ctx)
            meant = "train" if args[0].endswith((".yaml", ".yml")) else _MEANT.get(args[0])
            near = [meant] if meant in known else difflib.get_close_matches(args[0], known, n=1)
            if not near:
                raise
            raise click.UsageError(f"no such command {args[0]}: did you mean {near[0]}?", ctx) from error


def option_told(error: click.NoSuchOption) -> str | None:
    """Return the error for an unknown option that is a key of the configuration, if the command takes keys; else None."""
    from vescale_ray.config.peers import our_key

    if error.ctx is None or not any("KEY=VALUE" in (parameter.metavar or "") for parameter in error.ctx.command.params):
        return None
    key = error.option_name.lstrip("-")
    ours = our_key(key) or (key if "." in key else None)
    return ours and f"no such option {error.option_name}: keys are not options; write {ours.partition(' ')[0]}=VALUE behind the file"


def folder_of(path: str | None) -> RunFolder:
    """Return the run's folder at ``path``; None: the newest run under ./runs."""
    from vescale_ray.runfolder import RunFolder, RunFolderError, newest_run

    if path is None:
        return newest_run()
    folder = RunFolder(path)
    if not folder.is_run():
        raise RunFolderError(f"{folder.path}: is not a run's folder; `vescale-ray ls` lists those under ./runs")
    return folder


def check_place(file: Path, config: RunConfig, overrides: Iterable[str]) -> None:
    """Refuse the ``config.yaml`` of a run's folder that was moved or copied, since it names the folder where the run was.

    Raises:
        ConfigError: the run would start anew there, or the wrong one would resume. The message has the overrides that continue it here.
    """
    from vescale_ray.config import ConfigError

    here = file.absolute().parent
    given = {override.partition("=")[0] for override in overrides}
    if file.name != "config.yaml" or given & {"run.dir", "run.name"} or not (here / "run.json").is_file():
        return
    if here.resolve() != config.run_folder.resolve():
        raise ConfigError(
            f"{file}: its folder was moved or copied from {config.run_folder}; to continue this run, add "
            f"{shlex.quote(f'run.dir={here.parent}')} {shlex.quote(f'run.name={here.name}')}"
        )
