"""Initial values of a model: from weights, by the model's own method, from its factory, or part by part. The same at every world size.

    model.hf with weights        each rank reads the ranges of its shards. With model.lora it does so in every generation
    model.hf without weights     a part of the model gets memory at a time, and transformers fills it. A part is a unit, or the largest
                                 module without a unit
    init_parameter, init_buffer  a model fills one whole parameter or buffer at a time
    model.factory                otherwise each worker calls it on the CPU

Random values depend on ``run.seed``, and on the name of the parameter or part unless the factory draws them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vescale_ray import checkpoint
from vescale_ray.checkpoint.bridges.pieces import FileLayout
from vescale_ray.checkpoint.huggingface_layout import check_weights, file_layout, persistent_buffers, read_buffers
from vescale_ray.compat.core import TorchDispatchMode
from vescale_ray.errors import BadInput, one_line
from vescale_ray.models import hf, lora
from vescale_ray.models.unit_selection import select_units
from vescale_ray.optim.parameters import local_of
from vescale_ray.workers.building.model_factory import initial_tensors

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint
    from vescale_ray.config import RunConfig


def seed_of(*parts: int | str) -> int:
    """63 bits that depend on every part, the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def buffer_values(config: RunConfig, model: nn.Module) -> dict[str, Tensor]:
    """Return, on the CPU, the values of the buffers of ``model``, which is on the meta device.

    Raises:
        BadInput: the weights of ``model.hf`` lack a buffer, or can't be read.
    """
    if config.model.hf is None:
        buffers, fill_buffer = dict(model.named_buffers()), getattr(model, "init_buffer", None)
        if buffers and not callable(fill_buffer):
            remedy = "give the model a method init_buffer(name, full), or compute the buffers in forward"
            return {name: value.clone() for name, value in initial_tensors(config, model, buffers.items(), remedy).items()}
        values = {name: torch.empty_like(buffer, device="cpu") for name, buffer in buffers.items()}
        for name, value in values.items():
            model.init_buffer(name, value)  # type: ignore[operator]
        return values
    values = hf.buffer_values(model)
    if persistent_buffers(model) and (weights := weights_of(config)) is not None:
        with _named(weights):
            stored = read_buffers(weights, layout_of(config, model), persistent_buffers(model))
        for name, value in stored.items():
            values[name].copy_(value)
    if lacking := hf.unfilled(values):
        raise BadInput(_no_values(config, "buffer", lacking[0]))
    return values


def _no_values(config: RunConfig, what: str, name: str) -> str:
    return (
        f"model.hf = {config.model.hf}: transformers gives the {what} {name} no initial values on the meta device; give a folder with "
        "weights, as save_pretrained writes them, or train it with model.factory"
    )


@torch.no_grad()
def fill(config: RunConfig, model: Any, pristine: Callable[[], nn.Module], beat: Callable[[], None]) -> None:
    """Fill this rank's shards of the parameters of ``model``, except the base of ``model.lora`` (:func:`load_base`). Not a collective:
    another rank may take minutes longer.

    Args:
        pristine: builds the model again, unsharded and on the meta device.
        beat: called from time to time.

    Raises:
        BadInput: the weights do not fit the model.
    """
    weights = weights_of(config)
    if weights is not None and config.model.lora is None:
        _read(weights, config, model, beat)
    parameters = dict(model.named_parameters())
    if config.model.lora is not None:
        fresh = lora.initial_adapters(pristine(), partial(seed_of, config.run.seed))
    else:
        fresh = _fresh(config, model, pristine, parameters, beat) if weights is None else iter(())
    for name, full in fresh:
        parameters[name].copy_(full.to(parameters[name].device))
        beat()


@torch.no_grad()
def load_base(config: RunConfig, model: Any, expected: str | None, beat: Callable[[], None]) -> str | None:
    """Fill the frozen base of ``model.lora`` from ``model.hf``. Its weights are no part of the state. Not a collective.

    Args:
        expected: hash of the weights that the adapters were trained on; None if they are new.

    Returns:
        The hash of the weights (:func:`vescale_ray.checkpoint.fingerprint`). Without ``model.lora``, None; nothing is read.

    Raises:
        BadInput: the files are gone, or hold other weights than those that the adapters were trained on.
    """
    if config.model.lora is None:
        return None
    weights = weights_of(config)
    if weights is None:
        raise BadInput(f"model.hf = {config.model.hf}: its safetensors weights are gone, and adapters need them; restore the folder")
    with _named(weights):
        found = checkpoint.fingerprint(weights)
    if expected is not None and found != expected:
        raise BadInput(other_base(config, "the state"))
    _read(weights, config, model, beat)
    return found


def base_of(opened: Checkpoint) -> str | None:
    """Return the hash of the weights with which the adapters of a checkpoint were trained."""
    scalars = opened.aux(0)
    return scalars.get("base") if isinstance(scalars, Mapping) else None


def other_base(config: RunConfig, state: str) -> str:
    """Return a sentence that says that the base is not the one on which the adapters in ``state`` were trained."""
    return (
        f"model.hf = {config.model.hf}: its weights are not those with which the adapters of {state} were trained; name their folder, or "
        "set checkpoint.resume=never to begin anew"
    )


def _read(weights: str, config: RunConfig, model: Any, beat: Callable[[], None]) -> None:
    others = [*(name for name, _ in model.named_buffers()), *lora.PARAMETERS]
    with _named(weights):
        layout = layout_of(config, model)
        checkpoint.import_hf(weights, model, layout=layout, exclude=others, cast=True, alone=True, progress=lambda _: beat())
    for name, parameter in model.named_parameters():
        shard = local_of(parameter)
        # Unlike a mask, the smallest and the largest number take no memory. If there is a NaN, both are NaN.
        if not lora.is_adapter(name) and shard.numel() and not torch.stack(shard.aminmax()).isfinite().all():
            raise BadInput(f"model.hf = {weights}: {name} holds Inf or NaN; download the folder again, or save it anew")


def weights_of(config: RunConfig) -> str | None:
    """Return the folder of the run's initial weights, or None."""
    folder = config.model.hf
    return folder if folder is not None and hf.open_folder(folder).has_weights else None


def layout_of(config: RunConfig, model: nn.Module) -> FileLayout:
    """Return the layout of the weights of ``model.hf`` in files, by the parameters' names in ``model``, sharded or not."""
    assert config.model.hf is not None
    return file_layout(hf.build(hf.open_folder(config.model.hf))).renamed(lora.base_names(model))


def check_weights_of(config: RunConfig, model: nn.Module) -> None:
    """Check that the run's initial weights, if there are any, are those of ``model``, which is on the meta device; and that transformers
    fills all parameters, if there are none.

    Raises:
        BadInput: they do not fit, a file is missing or damaged, or a parameter has no initial values.
    """
    if (weights := weights_of(config)) is not None:
        with _named(weights):
            check_weights(weights, layout_of(config, model), dict(model.named_parameters()))
    elif config.model.hf is not None:
        with torch.no_grad(), _Written() as written:
            for part, whole in _parts(model, {id(unit) for unit in select_units(model, config.model.units)}):
                hf.initialize(model, part, recurse=whole)
        lacking = next((name for name, parameter in model.named_parameters() if parameter not in written), None)
        if lacking is not None:
            raise BadInput(_no_values(config, "parameter", lacking))


class _Written(TorchDispatchMode):
    """Collect the tensors that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Tensor):
                self._storages.add(given.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


@contextmanager
def _named(weights: str) -> Iterator[None]:
    try:
        yield
    except (checkpoint.CheckpointMismatch, checkpoint.ForeignFileError) as error:
        text = one_line(error).removeprefix(weights).lstrip(":/ ")
        mismatch = isinstance(error, checkpoint.CheckpointMismatch)
        remedy = "give the config.json and the weights of one model" if mismatch else "download the folder again, or save it anew"
        raise BadInput(f"model.hf = {weights}: {text}{'' if ';' in text else f'; {remedy}'}") from None


def _fresh(
    config: RunConfig, model: Any, pristine: Callable[[], nn.Module], shapes: dict[str, Any], beat: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and initial values, whole, on the CPU."""
    if callable(getattr(model, "init_parameter", None)):
        for name, parameter in shapes.items():
            full = torch.empty(parameter.shape, dtype=parameter.dtype)
            model.init_parameter(name, full, torch.Generator().manual_seed(seed_of(config.run.seed, name)))
            yield name, full
        return
    if config.model.factory is not None:
        remedy = "give the model a method init_parameter(name, full, generator), which fills one parameter at a time"
        yield from initial_tensors(config, model, shapes.items(), remedy, beat).items()
        return
    built = pristine()
    names, done = {id(parameter): name for name, parameter in built.named_parameters()}, set[str]()
    for part, whole in _parts(built, {id(unit) for unit in select_units(built, config.model.units)}):
        own = {name: names[id(p)] for name, p in part.named_parameters(recurse=whole) if names[id(p)] not in done}
        if not own:
            continue
        part.to_empty(device="cpu", recurse=whole)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed_of(config.run.seed, next(iter(own.values()))))
            hf.initialize(built, part, recurse=whole)
        for local, name in own.items():
            yield name, part.get_parameter(local).detach()
        done |= set(own.values())
        part.to(device="meta")


def _parts(module: nn.Module, units: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield disjoint parts of a model: units and the largest modules without units, as a whole, and the others without their children."""
    if id(module) in units or not any(id(inner) in units for inner in module.modules()):
        yield module, True
        return
    for child in module.children():
        yield from _parts(child, units)
    yield module, False

