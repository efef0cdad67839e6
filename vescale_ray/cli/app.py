"""The command line: ``vescale-ray init train demo status top dash doctor stop rescale ls ckpt data k8s plan``.

Exit codes: 0 done; 1 failed; 2 bad input; 130 interrupted. An error is one line with the remedy; --debug shows the traceback.
Commands import torch, Ray and pydantic when they run, so ``vescale-ray --help`` needs none of them.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vescale_ray import __version__
from vescale_ray.cli.checkpoints.checkpoint_group import ckpt
from vescale_ray.cli.common import BAD_INPUT, FAILED, INTERRUPTED, OK, CommandGroup, Failed, check_place, folder_of, option_told
from vescale_ray.cli.data_commands import data
from vescale_ray.cli.export_commands import dash, export
from vescale_ray.cli.init_command import init
from vescale_ray.cli.kubernetes_commands import k8s
from vescale_ray.cli.plan_command import plan
from vescale_ray.errors import BadInput, one_line

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.controller.protocol import ScheduledAction
    from vescale_ray.reporting.report import Summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args  # accepted anywhere, because people append it to the command that failed
    args = [arg for arg in args if arg != "--debug"]
    try:
        code = cli.main(args=args, prog_name="vescale-ray", standalone_mode=False)
        return code if isinstance(code, int) else OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return BAD_INPUT
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            if told := option_told(error):
                return _fail(told, BAD_INPUT)
            alike = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.75)  # click would suggest --help for --model
            error = click.NoSuchOption(error.option_name, possibilities=alike, ctx=error.ctx)
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "vescale-ray"
        return _fail(f"{' '.join(error.format_message().split())} (see {where} --help)", BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        if debug:
            traceback.print_exc()
        return _fail(_error_line(error) + ("" if debug else _hint(error)), BAD_INPUT if _is_bad_input(error) else FAILED)


def _fail(message: str, code: int) -> int:
    _log(f"vescale-ray: {message}", err=True)
    return code


def _log(line: str, *, err: bool = False) -> None:
    """Write a line to the job's log. A full disk below the log, or a closed pipe, must not end the run or change the exit code."""
    with suppress(OSError):
        click.echo(line, err=err)


def _error_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        # The words of a system or store error are enough; its class and number add nothing.
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    text = one_line(text)  # a terminal would obey control characters in names
    return text if _is_expected(error) and text else f"{type(error).__name__}: {text}"


def _hint(error: BaseException) -> str:
    return "" if _is_expected(error) else " (--debug shows the traceback)"


def _is_expected(error: BaseException) -> bool:
    """Return whether the error's message was written for the user."""
    ours = isinstance(error, Failed | BadInput) or type(error).__module__.startswith("vescale_ray")
    return ours or (isinstance(error, OSError) and bool(error.strerror))


def _is_bad_input(error: BaseException) -> bool:
    # A checkpoint of another model means that the user gave the wrong folder; checkpoint/ does not know this CLI's exit codes.
    wrong = {"CheckpointMismatch", "ForeignFileError"}
    return isinstance(error, BadInput) or any(kind.__name__ in wrong for kind in type(error).__mro__)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="vescale-ray")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Train with fully sharded data parallelism on Ray, while workers come and go.

    Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
    """


cli.add_command(ckpt)
cli.add_command(dash)
cli.add_command(data)
cli.add_command(export)
cli.add_command(init)
cli.add_command(k8s)
cli.add_command(plan)


# ------------------------------------------------------------------------------------------------------------------- runs


@cli.command()
@click.argument("file", metavar="RUN.yaml")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(file: str, overrides: tuple[str, ...]) -> int:
    """Train the run that RUN.yaml describes; resume it if it has a checkpoint.

    Example: vescale-ray train run.yaml train.steps=500 elastic.workers=2
    """
    from vescale_ray.config import ConfigError, load_config

    if "=" in file and not Path(file).exists():
        raise ConfigError(f"{file}: give the run's YAML file first, then the overrides")
    config = load_config(file, overrides)
    check_place(Path(file), config, overrides)
    return _train(config)[0]


@cli.command()
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def demo(overrides: tuple[str, ...]) -> int:
    """Train a small Llama on 3 local workers, kill one, grow back; takes a few minutes on 2 cores.

    Trains on the sources of this Python's standard library: no download. Overrides as for train.
    """
    from vescale_ray.cli.demo import demo_config, demo_schedule, shortcomings
    from vescale_ray.runfolder import RunFolder

    config = demo_config(overrides)
    code, summary = _train(config, demo_schedule(config))
    if summary is not None:
        problems = shortcomings(summary, RunFolder(config.run_folder).read_events())
        if problems:
            raise Failed("the demo failed: " + "; ".join(problems))
    return code


def _train(config: RunConfig, schedule: Sequence[ScheduledAction] = ()) -> tuple[int, Summary | None]:
    """Run to the end with progress shown, draw the picture and print the table; return the summary if the run is done."""
    from vescale_ray.controller.driver import training
    from vescale_ray.reporting import report
    from vescale_ray.runfolder import RunFolder

    folder = RunFolder(config.run_folder)
    resume = f"vescale-ray train {folder.config_path}"

    def warn(warning: str) -> None:
        _log(f"vescale-ray: warning: {warning}", err=True)

    try:
        result = training.conduct(config, tell=warn, schedule=schedule, on_start=_log)
    except KeyboardInterrupt:
        return _fail(f"interrupted twice: no last checkpoint; nothing is left running; resume with: {resume}", INTERRUPTED), None
    if result.interrupted:
        return _fail(f"interrupted; nothing is left running; resume at step {result.step} with: {resume}", INTERRUPTED), None
    if not result.done:
        _log(f"stopped; resume at step {result.step} with: {resume}")
        return OK, None
    try:
        if folder.last_metrics() is not None:
            report.draw(folder)
    except ModuleNotFoundError:
        _log("no picture: matplotlib is not installed (pip install 'vescale-ray[plots]')", err=True)
    except Exception as error:
        warn(f"no picture: {_error_line(error)}")
    try:
        summary = report.summarize(folder)
        table = report.table(folder, summary)
    except Exception as error:  # The run is done even if its report fails; Kubernetes would restart a run that counts as failed.
        warn(f"all {result.step} steps are done, but there is no report: {_error_line(error)}")
        return OK, None
    _log("\n" + table)
    return OK, summary


# ------------------------------------------------------------------------------------------------------------- living runs


@cli.command()
@click.argument("run_folder", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(run_folder: str | None, as_json: bool) -> int:
    """Show what a run does now, or how it ended. Without RUN_FOLDER: the newest run under ./runs."""
    from vescale_ray.cli import client

    folder = folder_of(run_folder)
    state: dict[str, Any] = folder.read_state() or {}
    try:
        live = client.request(folder, "status", timeout_s=3)
        alive: bool | None = True
        note: str | None = None
    except client.RunNotAlive as error:
        live, alive, note = {}, None if error.elsewhere else False, str(error)
    except client.CommandRefused as error:
        live, alive, note = {}, False, str(error)
    merged = {"folder": str(folder.path), "alive": alive, **state, **live}
    if as_json:
        click.echo(json.dumps(merged))
        return OK
    if note is not None:
        click.echo(note)
        if merged.get("error"):
            click.echo(f"error: {one_line(merged['error'])}")
        return OK
    from vescale_ray.reporting.event_words import loss_words
    from vescale_ray.reporting.report import goodput_line

    where = f"{merged.get('state')}, step {merged.get('step')} of {merged.get('steps')}"
    click.echo(f"{merged.get('run')}: {where}, loss {loss_words(merged)}")
    spares = f", {merged.get('spares')} of {merged['spares_target']} spares" if merged.get("spares_target") else ""
    speed = f"{merged.get('tokens_per_second') or 0:,.0f} tokens/s"
    click.echo(f"workers {merged.get('world')}{spares}, generation {merged.get('generation')}, {speed}")
    for worker, slow in sorted((merged.get("stragglers") or {}).items()):
        slots = (merged.get("slots") or {}).get(str(slow["rank"]))
        click.echo(
            f"slow: worker {worker} (rank {slow['rank']}) takes {slow['factor']:.1f} times as long for a slot as the others since step "
            f"{slow['since_step']}" + (f", and does {slots} of {sum(merged['slots'].values())} slots" if slots else "")
        )
    if merged.get("goodput"):
        click.echo(f"time: {goodput_line(merged['goodput'])}")
    if merged.get("checkpoint_step") is not None:
        click.echo(f"newest checkpoint: step {merged['checkpoint_step']}")
    if merged.get("checkpoint_interval_text"):
        click.echo(f"checkpoint interval: {merged['checkpoint_interval_text']}")
    click.echo(f"metrics {(folder.read_control() or {}).get('url')}/metrics, folder {folder.path}")
    return OK


@cli.command()
@click.argument("run_folder", required=False)
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print one picture and return; implied without a terminal.")
def top(run_folder: str | None, interval: float, once: bool) -> int:
    """Watch a running job: speed, loss, workers, use of time, events. Ctrl-C ends the display, not the job.

    Without RUN_FOLDER: the newest run under ./runs.
    """
    from rich.console import Console

    from vescale_ray.cli import client
    from vescale_ray.cli import top as screen

    if not interval < 86_400:
        raise BadInput(f"--interval {interval:g}: give seconds, less than a day")

    try:
        end = screen.show(folder_of(run_folder), interval, Console(), once=once)
    except client.RunNotAlive as error:
        raise Failed(str(error)) from None
    except KeyboardInterrupt:
        return OK
    if end:
        click.echo(end)
    return OK


@cli.command()
@click.argument("run_folder", required=False)
def stop(run_folder: str | None) -> int:
    """End a run after a checkpoint. Without RUN_FOLDER: the newest run under ./runs."""
    from vescale_ray.cli import client

    folder = folder_of(run_folder)
    client.request(folder, "stop", {})
    click.echo(f"{folder.path}: stopping; resume it with: vescale-ray train {folder.config_path}")
    return OK


@cli.command()
@click.argument("workers", type=click.IntRange(min=1))
@click.argument("run_folder", required=False)
def rescale(workers: int, run_folder: str | None) -> int:
    """Continue the run with WORKERS workers. Without RUN_FOLDER: the newest run under ./runs."""
    from vescale_ray.cli import client

    folder = folder_of(run_folder)
    try:
        answer = client.request(folder, "rescale", {"workers": workers})
    except client.CommandRefused as error:
        raise BadInput(f"rescale to {workers}: {error}") from None
    click.echo(f"{folder.path}: " + str(answer.get("message") or f"rescaling to {workers} workers"))
    return OK


@cli.command()
@click.argument("file", required=False, metavar="[RUN.yaml]")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per check.")
def doctor(file: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check whether this machine is fit to run; with RUN.yaml also the run's storage, port and Ray cluster.

    Exit code 1 if something would make a run fail.
    """
    from vescale_ray.config import load_config
    from vescale_ray.controller.driver.doctor import examine

    signs = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    worst = OK
    for finding in examine(load_config(file, overrides) if file else None):
        if as_json:
            click.echo(json.dumps(finding.to_json()))
        else:
            click.echo(f"{signs[finding.verdict]}  {finding.check:<14}  {finding.text}")
            if finding.remedy:
                click.echo(f"{'':22}-> {finding.remedy}")
        worst = FAILED if finding.verdict == "fail" else worst
    return worst


@cli.command()
@click.argument("runs", default="runs")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(runs: str, as_json: bool) -> int:
    """List the runs under RUNS (default ./runs), the newest last."""
    from vescale_ray.runfolder import RunFolderError, list_runs

    if not Path(runs).is_dir() and runs != "runs":
        raise BadInput(f"{Path(runs).absolute()}: no such folder")
    code = OK
    for folder in list_runs(runs):
        try:
            state = folder.read_state() or {}
        except (RunFolderError, OSError) as error:  # a damaged run must not hide the others
            state = {"state": "UNREADABLE", "error": _error_line(error)}
            code = _fail(_error_line(error), FAILED)
        if as_json:
            click.echo(json.dumps({"folder": str(folder.path), **state}))
            continue
        started = state.get("started")
        try:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if isinstance(started, (int, float)) else "-"
        except (ValueError, OverflowError, OSError):  # not a valid time
            when = "-"
        line = f"{state.get('state', 'NEW')!s:<13}  {state.get('step', 0)}/{state.get('steps', '?')} steps  {folder.path}"
        click.echo(f"{when:<16}  {line if line.isprintable() else ascii(line)[1:-1]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
