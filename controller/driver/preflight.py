"""Checks of text, model, folders, port, and the checkpoint to resume. They run before Ray starts, because that takes seconds.

All raise ``BadInput`` or a subclass, with one line. :func:`foresee` changes nothing; :func:`check` makes folders.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_ray.config import VOCAB, RunConfig
from vescale_ray.config.given import CORPUS, FACTORY
from vescale_ray.controller.driver.data_checks import check_tokenizer, open_data
from vescale_ray.controller.driver.data_warnings import warnings_of
from vescale_ray.controller.driver.local_ray import address_of, check_address
from vescale_ray.controller.driver.model_checks import check_loss, check_model, check_selective, without_products
from vescale_ray.controller.driver.resumption import changes_since, check_same_base, check_same_stream, choose_commit
from vescale_ray.controller.driver.without_effect import without_effect
from vescale_ray.controller.protocol import RunRefused, StateSource
from vescale_ray.errors import BadInput, one_line
from vescale_ray.lasting import REMEDY, check_lasting, in_temporary_folder
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint, Commit
    from vescale_ray.data.dataset import Dataset

STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
    "adamw8bit": (),
    "shampoo": (),
    "soap": (),
}
"""States of each optimizer per element, by their names in checkpoints. Empty if they depend on the parameter; the workers know them."""


class _Expected(NamedTuple):
    """Content that a checkpoint must have for one parameter."""

    shape: tuple[int, ...]
    states: tuple[str, ...]


@dataclass(frozen=True)
class Foreseen:
    """Findings of the checks that touch no folder. ``config``: configuration with absolute paths; ``stream``: values that determine the
    order of samples; ``expected``: required content of a checkpoint, by parameter; ``bytes_per_token``: mean bytes of text of a token, if
    known; ``warnings``: faults that do not prevent the run."""

    config: RunConfig
    stream: Mapping[str, Any]
    expected: Mapping[str, _Expected]
    bytes_per_token: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preflight:
    """Findings of all checks.

    Attributes:
        config: the configuration with absolute paths, because workers have other working directories.
        source: source of the first generation's state.
        first_generation: number above every generation that has left a checkpoint, so that new checkpoints count as newer.
        stream: values that determine the order of samples.
        oldest: generation of the oldest checkpoint that the run may go back to. With ``checkpoint.resume: never``, earlier checkpoints do
            not belong to it.
        bytes_per_token: mean bytes of text of a token, if known.
        warnings: faults that do not prevent the run.
    """

    config: RunConfig
    source: StateSource
    first_generation: int
    stream: Mapping[str, Any]
    oldest: int = 0
    bytes_per_token: float | None = None
    warnings: tuple[str, ...] = ()


def foresee(config: RunConfig) -> Foreseen:
    """Make all checks that create nothing: folders that outlive the job, addresses, loggers, data and model.

    Raises:
        BadInput: with one line, for the first thing that is wrong.
    """
    warnings = (*_lasting(config), *without_effect(config))
    config = with_model_data(absolute(config))
    check_address(address_of(config))
    _check_port(config.metrics.host, config.metrics.port)
    _check_loggers(config)
    from vescale_ray.data.text.prompts import encoded_prompts

    _check_given(config)
    warnings += tuple(_warnings_of_folder(config))
    dataset, sets = open_data(config)
    if (shown := config.train.completions) is not None:
        encoded_prompts(shown.prompts, config.data.tokenizer, dataset.unit, dataset.vocab)
    warnings += tuple(warnings_of(dataset, sets, config))
    if config.data.vocab is None and dataset.vocab != VOCAB:  # the tokenizer's; a worker builds its model without looking at the data
        config = config.model_copy(update={"data": config.data.model_copy(update={"vocab": dataset.vocab})})
    expected, told = _expected(config)
    return Foreseen(config, stream_of(config, dataset), expected, dataset.bytes_per_token, (*warnings, *told))


def _warnings_of_folder(config: RunConfig) -> Iterator[str]:
    """Warn of misspelled keys in the ``config.json`` of ``model.hf``, and of a default that does not suit its weights."""
    if config.model.hf is not None:
        from vescale_ray.models.config_faults import misspelled
        from vescale_ray.models.hf import CONFIG, open_folder

        folder = open_folder(config.model.hf)
        found = misspelled(folder.config, json.loads((folder.path / CONFIG).read_text(encoding="utf-8")))
        yield from (f"model.hf = {config.model.hf}: {one}" for one in found)
        if folder.has_weights and config.model.lora is None and "lr" not in config.train.model_fields_set:
            yield (
                f"train.lr is not given: {config.train.lr:g} suits training from random weights; give one for fine-tuning all weights, "
                "for example 1e-5"
            )


def _check_given(config: RunConfig) -> None:
    """Refuse a configuration that names objects of a caller if the caller has not given them."""
    factory, corpus = config.model.factory or "", config.data.corpus or ""
    again = "the run was started by vescale_ray.train(); call it again with the same"
    if factory.startswith(FACTORY) and config.given.model is None:
        raise RunRefused(f"model.factory = {factory}: {again} model, or set model.factory")
    if isinstance(corpus, str) and corpus.startswith(CORPUS) and config.given.dataset is None:
        raise RunRefused(f"data.corpus = {corpus}: {again} dataset, or set data.corpus")


def check(config: RunConfig, foreseen: Foreseen | None = None, oldest: int | None = None) -> Preflight:
    """Make all checks: those without folders first (:func:`foresee`, unless done before), then the folders, then the checkpoint to resume.

    Args:
        oldest: for a run that begins anew by itself, ``oldest`` of its first start. Checkpoints that it has saved since are its own.

    Raises:
        BadInput: with one line, for the first thing that is wrong.
    """
    from vescale_ray import checkpoint

    found = foreseen or foresee(config)
    config = found.config
    folder = RunFolder(config.run_folder).create()
    _check_writable(config.checkpoint_root)
    never = config.checkpoint.resume == "never"
    commits = checkpoint.ls(config.checkpoint_root)
    first = max((commit.epoch for commit in commits), default=0) + 1
    least = oldest if oldest is not None else first if never else 0
    chosen, warnings = choose_commit(config, [commit for commit in commits if commit.epoch >= least])
    source, changes = _resume(config, chosen, found.stream, found.expected)
    done = folder.last_metrics()
    if chosen is None and not never and oldest is None and done is not None:
        at = f"{folder.path} has a run of {done.get('step')} steps, but {config.checkpoint_root} holds no checkpoint"
        warnings = (f"{at}: this one starts at step 0",)
    warnings += changes
    if config.model.hf is not None:
        _describe_model(config)
    begins = oldest if oldest is not None else first if never else 0
    return Preflight(config, source, first, found.stream, begins, found.bytes_per_token, warnings)


def _lasting(config: RunConfig) -> Iterator[str]:
    """Warn of folders that other nodes don't see.

    Raises BadInput for folders that are lost with the job, and for a URL as the run's folder."""
    if "://" in config.run.dir:
        raise RunRefused(f"run.dir = {config.run.dir}: run folders are not URLs; {REMEDY}, and the URL as checkpoint.dir")
    check_lasting(f"run.dir = {config.run.dir}", config.run_folder)
    check_lasting(f"checkpoint.dir = {config.checkpoint.dir}", config.checkpoint_root, f"{REMEDY}, or a URL")
    if address_of(config) == "local":  # all processes are on this machine
        return
    for key, path in (("run.dir", str(config.run_folder)), ("checkpoint.dir", config.checkpoint_root)):
        if in_temporary_folder(path) and not (key == "checkpoint.dir" and config.checkpoint.dir is None):
            yield f"{key}: {path} lies in this node's folder for temporary files, which other nodes and a new pod don't see; {REMEDY}"


def absolute(config: RunConfig) -> RunConfig:
    """Return the same configuration with absolute paths, which mean the same in every process."""

    def path(text: str) -> str:
        if "://" in text:
            return text
        given = Path(text).expanduser()
        # The name of a link tells the format, and other files lie beside it: the hub's cache holds links to blobs without a suffix.
        return str(given.parent.resolve() / given.name if given.is_file() else given.resolve())

    checkpoint_dir, tokenizer, hf = config.checkpoint.dir, config.data.tokenizer, config.model.hf
    data = config.data.with_paths(lambda one: one if one == "stdlib" else path(one))
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": path(config.run.dir)}),
            "model": config.model.model_copy(update={"hf": path(hf) if hf else None}),
            "data": data.model_copy(update={"tokenizer": path(tokenizer) if tokenizer else None}),
            "checkpoint": config.checkpoint.model_copy(update={"dir": path(checkpoint_dir) if checkpoint_dir else None}),
        }
    )


def with_model_data(config: RunConfig) -> RunConfig:
    """Return the same configuration with the tokenizer and vocabulary of ``model.hf``, where ``data`` leaves them out.

    Raises:
        BadInput: the folder is no model's, or ``data`` does not fit it.
    """
    if config.model.hf is None:
        return config
    from vescale_ray.models.hf import open_folder

    folder, data = open_folder(config.model.hf), config.data
    where = f"model.hf = {config.model.hf}"
    if folder.positions is not None and data.seq_len > folder.positions:
        raise RunRefused(f"data.seq_len = {data.seq_len}: {where} takes {folder.positions} tokens at most (max_position_embeddings)")
    if data.vocab is not None and data.vocab > folder.vocab:
        raise RunRefused(
            f"data.vocab = {data.vocab}: {where} has embeddings of {folder.vocab} tokens; use the model's tokens, or leave it out"
        )
    update: dict[str, Any] = {"vocab": data.vocab or folder.vocab}
    if data.tokenizer is None and folder.tokenizer is not None:
        update["tokenizer"] = str(folder.tokenizer)
    given = data.tokenizer or update.get("tokenizer")
    if given is not None:
        check_tokenizer(given, folder)
    return config.model_copy(update={"data": data.model_copy(update=update)})


def stream_of(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the values that determine which sample is at each position. A run that resumes must not have changed any of them."""
    return {
        **dataset.identity(),
        "data.seq_len": config.data.seq_len,
        "data.heldout": config.data.heldout,
        "run.seed": config.run.seed,
        "train.slots * train.slot_batch": config.global_batch,
    }


def _check_writable(root: str) -> None:
    from vescale_ray.checkpoint import new_attempt
    from vescale_ray.checkpoint.stores.opening import store_of

    try:
        if "://" in root:
            # An attempt without a commit: if this process is killed before it is deleted, a collection deletes it.
            store, key = store_of(root), f"attempts/{new_attempt()}/preflight.json"
            store.list("commits/")
            store.put(key, b"{}")
            store.delete(key)
        else:
            Path(root).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise RunRefused(f"{root}: can't be written ({reason}); set checkpoint.dir to a folder or URL that can") from None


def _check_port(host: str, port: int) -> None:
    """Refuse an address that this machine does not have. A port in use does not stop the run: the controller, perhaps on another machine,
    takes a free one, with a warning."""
    from vescale_ray.controller.http.metrics import MetricsServer, PortInUse
    from vescale_ray.controller.state.snapshot import Snapshot

    with suppress(PortInUse):
        MetricsServer(host, port, lambda: Snapshot("", ""), None, "").close()


def _check_loggers(config: RunConfig) -> None:
    """Refuse a logger without its package, or W&B online without a key. The controller runs on this machine."""
    wanted = config.metrics.wandb
    if config.metrics.tensorboard and find_spec("tensorboard") is None:
        raise RunRefused("metrics.tensorboard = true: the package tensorboard is not installed; pip install 'vescale-ray[tensorboard]'")
    if wanted is None:
        return
    if find_spec("wandb") is None:
        where = f"metrics.wandb.project = {wanted.project}"
        raise RunRefused(f"{where}: the package wandb is not installed; pip install 'vescale-ray[wandb]'")
    if wanted.mode == "online":
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise RunRefused(
                "metrics.wandb.mode = online: this machine has no key of W&B; run `wandb login`, set WANDB_API_KEY, or use mode=offline"
            )


def _expected(config: RunConfig) -> tuple[dict[str, _Expected], Sequence[str]]:
    """Return shape and optimizer states of each parameter, and warnings, from a model on the meta device, which takes no memory."""
    from vescale_ray.models.lora import is_adapter
    from vescale_ray.models.unit_selection import select_units
    from vescale_ray.optim import OptimizerConfig, route_parameters
    from vescale_ray.optim.build import check_options
    from vescale_ray.workers.building.initial_values import check_weights_of
    from vescale_ray.workers.building.model_building import apply_quantization, build_model, shared_experts
    from vescale_ray.workers.building.model_factory import loss_function

    try:
        model = build_model(config)
        if config.model.loss is not None:
            check_loss(config.model.loss, loss_function(config.model.loss), config.data.vocab or VOCAB)
        select_units(model, config.model.units)
        shared_experts(config, model)
        check_weights_of(config, model)
        warnings = check_model(model, config)
        routing = route_parameters(model, OptimizerConfig.of(config.train))
        check_options(OptimizerConfig.of(config.train))
        policy = apply_quantization(config, model)
        if config.train.quantize_products:
            warnings += without_products(model, policy)
        held = {name: tuple(p.shape) for name, p in model.named_parameters() if config.model.lora is None or is_adapter(name)}
        if config.train.activation_checkpointing == "selective":
            check_selective(model, config)
    except BadInput:
        raise
    except SystemExit as error:
        raise RunRefused(f"model.factory = {config.model.factory}: it ends the process, with {error.code!r}; raise an error") from None
    except ValueError as error:
        raise RunRefused(one_line(error)) from None
    trained = {route.name: STATES[route.optimizer] for route in routing.routes}
    return {name: _Expected(shape, trained.get(name, ())) for name, shape in held.items()}, warnings


def _describe_model(config: RunConfig) -> None:
    """Copy what `ckpt export-hf` needs of ``model.hf`` to the run's folder."""
    from vescale_ray.checkpoint.huggingface_layout import file_layout, persistent_buffers
    from vescale_ray.models import hf
    from vescale_ray.workers.building.initial_values import buffer_values
    from vescale_ray.workers.building.model_building import build_model

    model = build_model(config)
    kept, values = persistent_buffers(model), buffer_values(config, model)
    buffers = {name: values[piece.name] for name, piece in file_layout(model).pieces.items() if piece.name in kept}
    assert config.model.hf is not None
    try:
        hf.write_description(hf.open_folder(config.model.hf), buffers, RunFolder(config.run_folder).model, config.data.tokenizer)
    except OSError as error:
        raise RunRefused(f"model.hf = {config.model.hf}: its files can't be copied to the run's folder ({error.strerror})") from None


def _resume(
    config: RunConfig, newest: Commit | None, stream: Mapping[str, Any], expected: Mapping[str, _Expected]
) -> tuple[StateSource, tuple[str, ...]]:
    """Return the source of a run that resumes from ``newest``, and warnings."""
    if newest is None:
        return StateSource(Origin.FRESH, 0), ()
    from vescale_ray import checkpoint

    opened = checkpoint.open(config.checkpoint_root, newest)
    _check_same_model(opened, config, expected)
    check_same_stream(opened, stream)
    check_same_base(opened, config)
    if newest.step > config.train.steps:
        raise RunRefused(
            f"{newest.path} is of step {newest.step}, beyond train.steps = {config.train.steps}: "
            "raise train.steps or set checkpoint.resume=never"
        )
    source = StateSource(Origin.CHECKPOINT, newest.step, commit=newest.name, path=newest.path)
    return source, tuple(changes_since(opened, config))


def _check_same_model(opened: Checkpoint, config: RunConfig, expected: Mapping[str, _Expected]) -> None:
    where, remedy = opened.commit.path, "; use the model that saved it, another checkpoint.dir, or checkpoint.resume=never"
    stored = opened.tensors
    saved, optimizer = ((opened.meta.get("config") or {}).get("train") or {}).get("optimizer"), config.train.optimizer
    for name, (shape, states) in expected.items():
        if name not in stored:
            raise RunRefused(f"{where} is of another model: it has no {name}{remedy}")
        if tuple(stored[name].shape) != shape:
            raise RunRefused(f"{where} is of another model: {name} has shape {tuple(stored[name].shape)} there, {shape} here{remedy}")
        for kind in states:
            if kind not in stored[name].kinds:
                kept = f"it has no {kind} of {name}"
                other = f"{where} was saved with another optimizer than train.optimizer = {config.train.optimizer}"
                raise RunRefused(f"{other}: {kept}; train with the one that saved it, or set checkpoint.resume=never to begin anew")
    if saved not in (None, optimizer):  # the workers know which states adamw8bit and others have
        other = f"{where} was saved with train.optimizer = {saved}, now it is {optimizer}, which has other states"
        raise RunRefused(f"{other}; train with the one that saved it, or set checkpoint.resume=never to begin anew")
    # An optimizer state with its own shape is a tensor named after its parameter: layers.0.wq.weight/exp_avg_scale.
    more = next((name for name in stored if name.partition("/")[0] not in expected), None)
    if more is not None:
        raise RunRefused(f"{where} is of another model: it has {more}, this model has not{remedy}")
