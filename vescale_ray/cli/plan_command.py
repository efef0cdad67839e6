"""``vescale-ray plan``: the choice of a sharding for a model and a number of devices, or the memory of a job file's run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from vescale_ray.cli.common import FAILED, OK, lasting_path
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from vescale_ray.planner.choose import Choice

_OF_BOTH = ("job", "devices", "hardware", "memory", "as_json", "html_file")
"""Parameters that a job file does not set."""


@click.command()
@click.argument("job", nargs=-1, metavar="[RUN.yaml [KEY=VALUE]...]")
@click.option("--model", help="A known model (llama-3-70b, gpt-oss-120b, deepseek-v3, ..), a config.json, or pkg.mod:factory.")
@click.option("--devices", type=int, help="Total number of devices. [default: elastic.workers of RUN.yaml]")
@click.option("--hardware", default="h100", show_default=True, help="a100, h100, h800, h200 or b200.")
@click.option("--memory", default=None, metavar="SIZE", help="Memory of one device, for example 80GiB. Default: the hardware's.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adamw8bit, muon or sgd.")
@click.option(
    "--dtype", default="bf16", show_default=True, help="Gathered parameters: fp32, bf16, or fp8 (codes of matrices, computed in BF16)."
)
@click.option("--reduce", default="fp32", show_default=True, help="Dtype of the gradients' reduce-scatter: fp32, bf16 or fp8.")
@click.option("--staging", default=None, metavar="SIZE", help="Each of the two buffers in which a reduction casts gradients.")
@click.option(
    "--group", "groups", type=int, multiple=True, help="Ranks that share the parameters; may be given several times. Default: all divisors."
)
@click.option("--blocks", "rows", type=int, default=None, metavar="ROWS", help="Rows that no shard boundary separates; 0: whole matrices.")
@click.option("--blocks-on", default="matrices", show_default=True, help="matrices or experts.")
@click.option("--experts", default="fused", show_default=True, help="fused (stacks [E, n, m]) or separate.")
@click.option(
    "--expert-parallel", type=int, default=1, show_default=True, metavar="N", help="Neighbouring ranks that share the experts of a layer."
)
@click.option("--strided", is_flag=True, help="The model tolerates experts that are strided views.")
@click.option("--tokens", type=int, default=8192, show_default=True, help="Tokens per device and micro-batch.")
@click.option("--recompute/--keep-activations", default=True, show_default=True, help="Activations in backward.")
@click.option("--keep-cast", is_flag=True, help="Each rank keeps its shard in the compute dtype between all-gathers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--html", "html_file", default=None, metavar="FILE", callback=lasting_path, help="Write a page with pictures, too.")
@click.pass_context
def plan(
    context: click.Context,
    /,
    job: tuple[str, ...],
    model: str | None,
    devices: int | None,
    hardware: str,
    memory: str | None,
    as_json: bool,
    html_file: str | None,
    **options: Any,
) -> int:
    """Choose the shard group, replicas, layers per unit and buffers for a model, and say why the others lose.

    With a job file: the memory of its run, and an estimate of its time. The file and KEY=VALUE set everything but the devices.

    Needs neither devices nor the model's weights. Exit code 1 if nothing fits.

    Examples: vescale-ray plan --model gpt-oss-120b --devices 1024 --memory 80GiB --optimizer muon;
    vescale-ray plan run.yaml train.optimizer=muon --devices 16
    """
    from vescale_ray.planner import choice_report
    from vescale_ray.planner.request import choose

    if job:
        for parameter in context.command.params:
            if parameter.name not in _OF_BOTH and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
                raise BadInput(f"{parameter.opts[0]} with a job file: the file sets it; give KEY=VALUE after {job[0]}")
        choice = _of_job(job[0], job[1:], devices, hardware, memory)
    elif model is None or devices is None:
        raise BadInput("nothing to plan: give --model and --devices, or a job file")
    else:
        choice = choose(model, devices, hardware=hardware, memory=memory, **options)
    if html_file is not None:
        from vescale_ray.cli.pages.plan_page import render

        try:
            Path(html_file).write_text(render(choice), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{html_file}: can't be written ({error.strerror})") from None
    if as_json:
        click.echo(json.dumps(choice_report.as_json(choice)))
    else:
        click.echo(choice_report.as_text(choice, shutil.get_terminal_size((140, 24)).columns))
    return OK if choice.best is not None else FAILED


def _of_job(file: str, overrides: tuple[str, ...], devices: int | None, hardware: str, memory: str | None) -> Choice:
    from vescale_ray.config import load_config
    from vescale_ray.planner.request import machine_of
    from vescale_ray.workers.building.job_plan import choose_for_job

    config = load_config(file, overrides)
    return choose_for_job(config, config.elastic.workers if devices is None else devices, machine_of(hardware, memory))
