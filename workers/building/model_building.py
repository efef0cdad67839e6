"""Build a worker's model: unsharded on the meta device, ahead of the generation that needs it, then sharded, with its optimizer.

Only :func:`build_sharded` needs a process group. The rest is the same for every rank and world size, so a worker does it while it is idle.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from vescale_ray.config import VOCAB
from vescale_ray.errors import BadInput
from vescale_ray.expert_parallel import check_experts, experts_of, parallelize_experts
from vescale_ray.models import hf, lora
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.models.unit_selection import select_units
from vescale_ray.workers.building.initial_values import buffer_values
from vescale_ray.workers.building.model_factory import model_on_meta
from vescale_ray.workers.building.unit_forward import UnitCompiler, set_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from vescale_ray.config import RunConfig
    from vescale_ray.config.model_section import LoraSettings
    from vescale_ray.workers.network.rank_mesh import RankMeshes

_log = logging.getLogger(__name__)

COPIED_SECONDS = 0.5
"""If a model takes more seconds than this to build, the worker builds it once and copies it for each generation. (A Llama takes
milliseconds.)"""


def build_model(config: RunConfig) -> nn.Module:
    """Return the unsharded model of ``config.model``, on the meta device.

    Raises:
        ValueError: the folder or the factory gives no model, or raises. With ``elastic.deterministic``, also if an optimizer other than
            AdamW would step 16-bit parameters.
    """
    model = config.model
    with torch.device("meta"):
        if model.hf is not None:
            return _build_hf(model.hf, model.lora)
        if model.factory is None:
            sizes = LlamaConfig(
                dim=model.dim,
                layers=model.layers,
                heads=model.heads,
                kv_heads=model.kv_heads,
                ffn=model.ffn,
                vocab=config.data.vocab or VOCAB,
                max_seq=config.data.seq_len,
                rope_theta=model.rope_theta,
                tie=model.tie,
            )
            return Llama(sizes)
    built = model_on_meta(config)
    if hf.is_hf(built):
        hf.use_no_cache(built)
    if config.elastic.deterministic and config.train.optimizer != "adamw":
        short = next((name for name, p in built.named_parameters() if p.requires_grad and p.dtype.itemsize < 4), None)
        if short is not None:
            raise ValueError(
                f"elastic.deterministic = true with train.optimizer = {config.train.optimizer}: {short} has fewer than 32 bits per "
                "element, so its rounding depends on its place in the shard; make the parameters float32 "
                "(train.param_dtype = bfloat16 still computes in bfloat16), or use adamw"
            )
    return built


def _build_hf(path: str, keys: LoraSettings | None) -> nn.Module:
    folder = hf.open_folder(path)
    if keys is None:
        return hf.build(folder)
    if not folder.has_weights:
        raise BadInput(f"model.lora with model.hf = {path}: the folder holds no safetensors weights to train on; give one that has them")
    # The base is frozen, so it needs no more bits than its files have.
    built = hf.build(folder, folder.dtype or torch.float32)
    lora.add_adapters(built, keys)
    return built


def communicates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step may run collectives."""
    from vescale_ray.optim import Muon
    from vescale_ray.optim.base import BlockOptimizer

    parts = getattr(optimizer, "optimizers", (optimizer,))
    return any(isinstance(part, Muon | BlockOptimizer) for part in parts)


class Blank:
    """The input of one trainer: the unsharded model on the meta device, and the optimizer of each parameter. It does not depend on rank and
    world size, so that it can be made before they are known.

    Args:
        model: result of :func:`build_model`; None builds it now.
        compiler: compiles the units; None makes one, which does not know what an earlier one has compiled.
        buffers: values of the model's buffers; None computes them.

    Raises:
        ValueError: as :func:`build_model`, or the optimizer fits no parameter.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module | None = None,
        compiler: UnitCompiler | None = None,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        from vescale_ray.optim import OptimizerConfig, route_parameters

        self._config = config
        self.compiler = compiler or UnitCompiler(config)
        self.model = build_model(config) if model is None else model
        self.buffers = buffer_values(config, self.model) if buffers is None else buffers
        """Values of the model's buffers."""
        self.chosen = OptimizerConfig.of(config)
        self.routing = route_parameters(self.model, self.chosen)
        self.quantize = apply_quantization(config, self.model)

    def distribute_experts(self, mesh: DeviceMesh) -> None:
        """Distribute the experts over the ranks of ``mesh``. Their parameters are new ones, so routing and quantization are made again."""
        from vescale_ray.optim import route_parameters

        parallelize_experts(self.model, mesh)
        self.routing = route_parameters(self.model, self.chosen)
        self.quantize = apply_quantization(self._config, self.model)

    def copied(self) -> Blank:
        """Return a new :class:`Blank` with a copy of the model. Raises the error of :func:`copy.deepcopy` if the model cannot be copied."""
        return Blank(self._config, copy.deepcopy(self.model), self.compiler, self.buffers)


class NextModel:
    """Builds the :class:`Blank` of a worker's next generation ahead of time, while the controller plans. Otherwise all ranks would wait for
    it."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._compiler = config, UnitCompiler(config)
        self._ready: Blank | None = None
        self._original: Blank | None = None
        """A model that is slow to build; the blanks are copies of it."""

    def prepare(self) -> Blank | None:
        """Build the blank, if there is none, and return it. :meth:`take` still gives it away.

        This method never raises. It returns None on an error, and the generation that needs the model meets the error again and reports it.
        """
        if self._ready is not None:
            return self._ready
        try:
            if self._original is None:
                began = time.perf_counter()
                made = Blank(self._config, compiler=self._compiler)
                if time.perf_counter() - began < COPIED_SECONDS:
                    self._ready = made
                    return made
                self._original = made
            try:
                self._ready = self._original.copied()
            except Exception:  # a model that cannot be copied is built each time
                self._ready, self._original = self._original, None
        except BaseException:  # a factory may also call sys.exit()
            _log.debug("the model cannot be built ahead", exc_info=True)
        return self._ready

    def take(self) -> Blank | None:
        """Return the blank, for one trainer; None if there is none."""
        taken, self._ready = self._ready, None
        return taken


def apply_quantization(config: RunConfig, model: nn.Module) -> Any:
    """Return the ``quantize_policy`` of the run, and give the model's linear layers FP8 products if ``train.quantize_products`` says so.

    None: everything is gathered in ``train.param_dtype``.

    Raises:
        ValueError: the model has nothing to quantize, a pattern of ``train.quantize_keep`` matches no parameter, or tiles are not square.
    """
    from vescale_ray.optim.fp8_policy import fp8_policy
    from vescale_ray.quantization import Fp8Block, compute_in_fp8

    text = config.train.quantize
    if text is None:
        return None
    try:
        policy = fp8_policy(model, Fp8Block.parse(text), config.train.quantize_keep)
        if config.train.quantize_products:
            compute_in_fp8(model, policy)
        return policy
    except ValueError as error:
        raise ValueError(f"train.quantize = {text}: {error}") from None


def sharding_of(config: RunConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """Arguments of ``fully_shard`` that are the same for all units."""
    from vescale_ray.fsdp import MixedPrecisionPolicy, Sharding

    train = config.train
    dtypes = {name: getattr(torch, name) for name in ("float32", "bfloat16")}
    # A factory may choose the dtype of its parameters. The frozen base of adapters has that of its files, which need not be float32.
    own = train.param_dtype == "float32" and config.model.lora is None
    policy = MixedPrecisionPolicy(
        param_dtype=None if own else dtypes[train.param_dtype],
        reduce_dtype=None if train.reduce_dtype == train.param_dtype else dtypes.get(train.reduce_dtype, torch.float32),
    )
    offload = CPUOffloadPolicy() if train.offload == "cpu" and mesh.device_type != "cpu" else OffloadPolicy()
    sharding = (Sharding.zero1(), Sharding.zero2(), Sharding.zero3())[train.zero_stage - 1]
    given = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload, "sharding": sharding}
    return {**given, "keep_cast": train.keep_cast, "to_empty": True}


def shared_experts(config: RunConfig, model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` whose experts ``train.expert_parallel`` workers share; none without expert parallelism.

    Raises:
        ValueError: the model has no experts, or the workers do not divide them.
    """
    workers = config.train.expert_parallel
    if workers == 1:
        return []
    check_shared_experts(model, workers, f"train.expert_parallel = {workers}")
    return list(experts_of(model).values())


def check_shared_experts(model: nn.Module, workers: int, key: str) -> None:
    """Raise ValueError if ``model`` has no experts, or if ``workers`` workers do not divide them. The message begins with ``key``."""
    if not experts_of(model):
        raise ValueError(
            f"{key}: {type(model).__name__} has no fused experts (vescale_ray.models.moe.Experts, or those of transformers); leave it out"
        )
    try:
        check_experts(model, workers, "workers")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def build_sharded(
    config: RunConfig, device: torch.device, meshes: RankMeshes, blank: Blank, *, filled: bool
) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model sharded over the ranks of ``meshes``, without values, and its optimizer. All optimizer states exist, so they can be
    loaded or given away before a step.

    Raises:
        BadInput: ``device`` has no FP8 products, and ``train.quantize_products`` needs them.
    """
    from vescale_ray.fsdp import FSDPModule, LowPrecisionReduceScatter, fully_shard
    from vescale_ray.optim import build_optimizer
    from vescale_ray.quantization import Fp8Block
    from vescale_ray.quantization.products import check_device

    if config.train.quantize is not None and config.train.quantize_products:
        try:
            check_device(device, Fp8Block.parse(config.train.quantize))
        except ValueError as error:
            raise BadInput(f"train.quantize_products = true: {error}") from None
    model: Any = blank.model
    experts = shared_experts(config, model)
    if meshes.experts is not None:
        blank.distribute_experts(meshes.experts["expert"])
    routing, staging_mb = blank.routing, config.train.reduce_staging_mb
    shared = {**sharding_of(config, meshes.ranks), "block_policy": routing.block_policy, "quantize_policy": blank.quantize}
    units = select_units(model, config.model.units)
    for unit in units:
        set_forward(unit, config, blank.compiler, around=[module for module in unit.modules() if module in experts])
    # Experts are units of their own even if the ranks are too few to share them, so that the layouts differ in the ranks alone.
    for unit in experts:
        over = {**shared, "mesh": meshes.beside_experts}
        fully_shard(unit, reshard_after_forward=config.train.reshard_after_forward, **over)
    for unit in units:
        if unit not in experts:
            fully_shard(unit, reshard_after_forward=config.train.reshard_after_forward, **shared)
    # The root stays unsharded between forward and backward, since its backward begins at once.
    fully_shard(model, reshard_after_forward=False, **shared)
    narrow = LowPrecisionReduceScatter(seed=config.run.seed) if config.train.reduce_dtype == "fp8" else None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if narrow is not None:
                module.set_custom_reduce_scatter(narrow)
            module.set_gradient_divide_factor(1.0)
            module.set_reduce_scatter_staging(None if staging_mb is None else staging_mb << 20, recurse=False)
            module.set_ordered_reduction(config.elastic.deterministic, recurse=False)
            # With experts, each slot may use other parameters, and each rank has other slots.
            module.set_reduce_scatter_unused_params(True, recurse=False)
    _allocate(model, shared["offload_policy"], device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(blank.buffers[name])
    return model, build_optimizer(model, blank.chosen, routing=routing, log=None, zeroed=not filled)


def _allocate(model: nn.Module, offload: OffloadPolicy, device: torch.device) -> None:
    """Give storage to the parameters that have none yet, where their shards live, and to the buffers, on ``device``. Modules that share a
    buffer still do."""
    held = [(module._buffers, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if isinstance(offload, CPUOffloadPolicy) else device)
    placed: dict[Tensor, Tensor] = {}
    for buffers, name, buffer in held:
        if buffer is not None:
            if buffer not in placed:
                placed[buffer] = torch.empty_like(buffer, device=device)
            buffers[name] = placed[buffer]
