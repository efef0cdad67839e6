"""``vescale-ray plan``: the choice of a sharding for a model and a number of devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from vescale_ray.cli.common import FAILED, OK, lasting_path
from vescale_ray.errors import BadInput


@click.command()
@click.option(
    "--model", required=True, help="A known model (llama-3-70b, gpt-oss-120b, deepseek-v3, ..), a config.json, or pkg.mod:factory."
)
@click.option("--devices", type=int, required=True, help="Total number of devices.")
@click.option("--hardware", default="h100", show_default=True, help="a100, h100, h800, h200 or b200.")
@click.option("--memory", default=None, metavar="SIZE", help="Memory of one device, for example 80GiB. Default: the hardware's.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adamw8bit, muon or sgd.")
@click.option(
    "--dtype", default="bf16", show_default=True, help="Gathered parameters: fp32, bf16, or fp8 (codes of matrices, computed in BF16)."
)
@click.option("--reduce", default="fp32", show_default=True, help="Dtype of the gradients' reduce-scatter: fp32 or bf16.")
@click.option("--staging", default=None, metavar="SIZE", help="Each of the two buffers in which a reduction casts gradients.")
@click.option(
    "--group", type=int, multiple=True, help="Ranks that share the parameters; may be given several times. Default: all divisors."
)
@click.option("--blocks", type=int, default=None, metavar="ROWS", help="Rows that no shard boundary separates; 0: whole matrices.")
@click.option("--blocks-on", default="matrices", show_default=True, help="matrices or experts.")
@click.option("--experts", default="fused", show_default=True, help="fused (stacks [E, n, m]) or separate.")
@click.option(
    "--expert-parallel", type=int, default=1, show_default=True, metavar="N", help="Neighbouring ranks that share the experts of a layer."
)
@click.option("--strided", is_flag=True, help="The model tolerates experts that are strided views.")
@click.option("--tokens", type=int, default=8192, show_default=True, help="Tokens per device and micro-batch.")
@click.option("--keep-activations", is_flag=True, help="No recomputation in backward.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--html", "html_file", default=None, metavar="FILE", callback=lasting_path, help="Write a page with pictures, too.")
def plan(
    model: str,
    devices: int,
    hardware: str,
    memory: str | None,
    optimizer: str,
    dtype: str,
    reduce: str,
    staging: str | None,
    group: tuple[int, ...],
    blocks: int | None,
    blocks_on: str,
    experts: str,
    expert_parallel: int,
    strided: bool,
    tokens: int,
    keep_activations: bool,
    as_json: bool,
    html_file: str | None,
) -> int:
    """Choose the shard group, replicas, layers per unit and buffers for a model, and say why the others lose.

    Needs neither devices nor the model's weights. Exit code 1 if nothing fits.

    Example: vescale-ray plan --model gpt-oss-120b --devices 1024 --memory 80GiB --optimizer muon
    """
    from vescale_ray.planner import choice_report
    from vescale_ray.planner.request import choose

    choice = choose(
        model,
        devices,
        hardware=hardware,
        memory=memory,
        optimizer=optimizer,
        dtype=dtype,
        reduce=reduce,
        staging=staging,
        groups=group,
        rows=blocks,
        blocks_on=blocks_on,
        experts=experts,
        expert_parallel=expert_parallel,
        strided=strided,
        tokens=tokens,
        recompute=not keep_activations,
    )
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
