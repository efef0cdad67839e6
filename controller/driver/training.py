"""``vescale_ray.train``: a whole run by one call, from a script, a notebook or a Ray job. ``vescale-ray train`` uses the same code."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.config import Given, RunConfig, load_config, parse_config
from vescale_ray.config.given import CORPUS, FACTORY
from vescale_ray.controller.driver import driver, preflight
from vescale_ray.controller.statistics.run_stats import evaluated_sets
from vescale_ray.errors import BadInput, one_line
from vescale_ray.reporting.progress import Progress
from vescale_ray.runfolder import RunFolder

if TYPE_CHECKING:
    from vescale_ray.controller.protocol import ScheduledAction
    from vescale_ray.data.dataset import Dataset

_log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Maximum number of bytes of a model factory and a data set. Each worker gets its own copy."""

Factory = Callable[..., Any]


class RunFailed(RuntimeError):
    """The run began and failed. The message is one line with the reason, and how to resume."""


@dataclass(frozen=True)
class TrainResult:
    """The end of a run that did not fail.

    Attributes:
        folder: the run's folder.
        step: completed steps.
        steps: ``train.steps``.
        losses: ``loss`` of the last step, and of the last evaluation ``heldout_loss`` and ``NAME_loss`` of each set of ``data.eval``.
        checkpoint: path of the last checkpoint.
        done: whether all steps are done.
        reason: why the run ended.
        interrupted: a signal or Ctrl-C has stopped it.
        warnings: problems that did not end the run.
    """

    folder: Path
    step: int
    steps: int
    losses: Mapping[str, float]
    checkpoint: str | None
    done: bool
    reason: str
    interrupted: bool = False
    warnings: tuple[str, ...] = ()


def train(
    config: RunConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    model: Factory | str | None = None,
    dataset: Dataset | Sequence[Any] | Any = None,
    progress: bool = True,
) -> TrainResult:
    """Train as ``config`` says, resume the run if it has a checkpoint, and return when nothing of the run is left.

    The run uses the Ray that this process is connected to. Otherwise it joins ``ray.address`` or ``RAY_ADDRESS``, or starts a local Ray
    that ends with it. The first Ctrl-C or SIGTERM stops the run after a checkpoint, and the call returns. The second raises
    KeyboardInterrupt. Signals are only caught in the main thread.

    Args:
        config: sections of keys as in a YAML file, the path of such a file, or a configuration.
        model: factory of the model in place of ``model.factory``: a class, a function, or ``pkg.mod:name``.
        dataset: training samples in place of ``data.corpus`` and ``data.mixture`` (:class:`vescale_ray.data.given_dataset.GivenDataset`).
        progress: print a line per second and event, or draw a bar on a terminal.

    Raises:
        BadInput: the input can't be used; one line. Raised before a worker starts where possible.
        RunFailed: the run has failed; one line.
        KeyboardInterrupt: a second signal came. Nothing is left running, and there is no last checkpoint.
    """
    return conduct(_with_objects(config, model, dataset), tell=_log.warning, progress=progress)


def conduct(
    config: RunConfig,
    *,
    tell: Callable[[str], object],
    schedule: Sequence[ScheduledAction] = (),
    on_start: Callable[[str], None] = lambda line: None,
    progress: bool = True,
) -> TrainResult:
    """Carry out a run as :func:`train` does.

    Args:
        tell: called with each warning.
        schedule: actions on the run, in the order of steps.
        on_start: called with one line once all checks before Ray's start have passed.
    """
    foreseen = preflight.foresee(config)  # checked before a folder exists
    config = foreseen.config  # absolute paths, so that config.yaml means the same from any folder
    folder = RunFolder(config.run_folder)
    new = not folder.path.exists()

    def begin(ready: preflight.Preflight) -> None:
        for warning in (*foreseen.warnings, *ready.warnings):  # not before, so that a refusal is the only line
            tell(warning)
        on_start(_starting(ready))

    with folder.create().claim(), _written_config(folder, config.to_yaml(), new):
        with Progress(folder, config.train.steps, config.metrics.interval_s) if progress else nullcontext():
            result = driver.run(config, schedule=schedule, on_ready=begin, foreseen=foreseen)
    for warning in result.warnings:
        tell(warning)
    if result.state == "FAILED":
        raise RunFailed(f"the run failed at step {result.step}: {result.error}; resume with: {_resume(config, folder)}")
    return TrainResult(
        folder.path,
        result.step,
        result.steps,
        _losses(folder),
        result.checkpoint,
        result.state == "DONE",
        _reason(folder, result),
        result.interrupted,
        result.warnings,
    )


def _starting(ready: preflight.Preflight) -> str:
    """Return the line that says what starts, and from which state."""
    from vescale_ray.models.hf import open_folder

    config, source = ready.config, ready.source
    begun = f", resuming at step {source.step} from {source.path}" if source.path else ""
    if not source.path and config.model.hf is not None and not open_folder(config.model.hf).has_weights:
        begun = f", from random weights, since {config.model.hf} has none"
    return f"starting {config.elastic.workers} workers: {config.train.steps} steps, folder {config.run_folder}{begun}"


def _read(config: RunConfig | Mapping[str, Any] | str | os.PathLike[str], overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, RunConfig):
        return parse_config(config.model_dump(mode="json"), overrides) if overrides else config
    if isinstance(config, str | os.PathLike):
        return load_config(os.fspath(config), overrides)
    if isinstance(config, Mapping):
        return parse_config(config, overrides)
    kind = type(config).__name__
    raise BadInput(f"config: {kind} is not a configuration; give a mapping of sections, the path of a YAML file, or a RunConfig")


def _with_objects(config: RunConfig | Mapping[str, Any] | str | os.PathLike[str], model: Factory | str | None, dataset: Any) -> RunConfig:
    """Return the configuration with the objects, and with their names in place of ``model.factory`` and ``data.corpus``."""
    if model is not None and not isinstance(model, str) and not callable(model):
        raise BadInput(f"model: {type(model).__name__} can't be called; give a class or function that returns a module, or pkg.mod:name")
    if hasattr(model, "forward") and not isinstance(model, type):
        kind = type(model).__name__
        raise BadInput(f"model: an object of {kind} has its parameters already; give the class {kind}, or a function that builds one")
    overrides, factory = [], None
    if isinstance(model, str):
        overrides.append(f"model.factory={model}")
    elif model is not None:
        path = _path_of(model)
        factory = model if path is None else None
        overrides.append(f"model.factory={path or FACTORY + _name_of(model)}")
    if dataset is not None:
        overrides += [f"data.corpus={CORPUS}{_name_of(type(dataset))}", "data.mixture=null"]
    return _read(config, overrides).with_given(_packed(factory, dataset))


def _path_of(factory: Factory) -> str | None:
    """Return the ``pkg.mod:name`` of a function or class that every process can import; None for others."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not factory:
        return None
    return f"{module}:{name}"


def _name_of(factory: Any) -> str:
    """Return a name for the configuration, made of letters, digits and ``_``."""
    return re.sub(r"\W+", "_", getattr(factory, "__name__", type(factory).__name__)).strip("_") or "model"


def _packed(model: Factory | None, dataset: Any) -> Given:
    """Return the objects as the workers receive them. cloudpickle takes classes and functions of ``__main__`` and of other functions
    along."""
    if model is None and dataset is None:
        return Given()
    from ray import cloudpickle

    for what, one in (("model", model), ("dataset", dataset)):
        try:
            size = len(cloudpickle.dumps(one))
        except Exception as error:
            raise BadInput(
                f"{what}: can't be sent to the workers ({type(error).__name__}: {one_line(error)}); {_REMEDY}"
            ) from None
        if size > MOST_BYTES:
            raise BadInput(f"{what}: {size / 1e9:.1f} GB are too much to be sent to each worker; {_REMEDY}")
    return Given(model, dataset, cloudpickle.dumps((model, dataset)))


_REMEDY = "open files when they are first used and not before, or name them in the configuration"


@contextmanager
def _written_config(folder: RunFolder, text: str, new: bool) -> Iterator[None]:
    """Write ``text`` to the folder's config.yaml; if the run can't begin with it, restore the old one and remove a ``new`` folder."""
    before = folder.config_path.read_text(encoding="utf-8") if folder.config_path.is_file() else None
    folder.write_config(text)
    try:
        yield
    except BadInput:
        if before is None:
            folder.config_path.unlink(missing_ok=True)
            if new:
                folder.discard()
        else:
            folder.write_config(before)
        raise


def _resume(config: RunConfig, folder: RunFolder) -> str:
    return "the same call of vescale_ray.train()" if config.given != Given() else f"vescale-ray train {folder.config_path}"


def _losses(folder: RunFolder) -> dict[str, float]:
    """Return the newest losses, by the names of ``checkpoint.keep_metric``. Those that are not finite are left out."""
    found = {"loss": (folder.last_metrics() or {}).get("loss")}
    evaluations = [event for event in folder.read_events() if event["event"] == "evaluation"]
    if evaluations:
        found |= {f"{name}_loss": figures.get("loss") for name, figures in evaluated_sets(evaluations[-1]).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def _reason(folder: RunFolder, result: driver.RunResult) -> str:
    if result.state == "DONE":
        return "all steps are done"
    stopped = [str(event.get("reason")) for event in folder.read_events() if event["event"] == "run_stopped"]
    return stopped[-1] if stopped else "stopped"
