"""``vescale-ray dash`` and ``vescale-ray export``: a run for people and tools elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from vescale_ray.cli.common import OK, folder_of, lasting_path
from vescale_ray.errors import BadInput


@click.command()
@click.argument("run_folder", required=False)
@click.option("--out", type=click.Path(dir_okay=False), callback=lasting_path, help="File to write. Default: RUN_FOLDER/dash.html.")
@click.option("--prometheus", metavar="URL", help="Take the data from a Prometheus that has scraped the run, not from the run's folder.")
@click.option("--run", "name", help="With --prometheus: the run's name.")
@click.option("--hours", type=click.FloatRange(min=0.01), default=24.0, show_default=True, help="With --prometheus: hours up to now.")
@click.option("--namespace", help="With --prometheus: label namespace of one of several runs with this name.")
@click.option("--cluster", help="With --prometheus: label cluster of one of several runs with this name.")
def dash(
    run_folder: str | None,
    out: str | None,
    prometheus: str | None,
    name: str | None,
    hours: float,
    namespace: str | None,
    cluster: str | None,
) -> int:
    """Write one HTML page of a run: throughput, memory, loss, workers, use of time. It works offline.

    Without RUN_FOLDER: the newest run under ./runs.
    """
    from vescale_ray.cli.pages import dash as gather
    from vescale_ray.cli.pages.run_page import render

    where = {label: value for label, value in (("cluster", cluster), ("namespace", namespace)) if value is not None}
    if prometheus is None:
        if name is not None or where:
            raise BadInput("--run, --namespace and --cluster go with --prometheus URL; without it, give the run's folder")
        folder = folder_of(run_folder)
        page, path = gather.from_folder(folder), Path(out or folder.path / "dash.html").absolute()
    else:
        if run_folder is not None or name is None:
            raise BadInput("with --prometheus URL give the run's name as --run NAME, and no folder")
        page, path = gather.from_prometheus(prometheus, name, hours, where), Path(out or f"{name}.html").absolute()
    try:
        path.write_text(render(page), encoding="utf-8", errors="backslashreplace")  # names of files need not be valid text
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror or error})") from None
    click.echo(f"wrote {path}")
    return OK


@click.command()
@click.argument("run_folder", required=False)
@click.option("--out", type=click.Path(dir_okay=False), callback=lasting_path, help="File to write. Default: RUN_FOLDER/metrics.parquet.")
def export(run_folder: str | None, out: str | None) -> int:
    """Write the metrics of a run as a Parquet table: a row for each executed step.

    Without RUN_FOLDER: the newest run under ./runs.
    """
    from vescale_ray.reporting.parquet import to_parquet

    folder = folder_of(run_folder)
    path = Path(out or folder.path / "metrics.parquet").absolute()
    try:
        rows = to_parquet(folder, path)
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror or error})") from None
    click.echo(f"wrote {path}: {rows} steps")
    return OK
