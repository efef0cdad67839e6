"""``ckpt export-hf --fp8``: the tensors of a model's files that become FP8 codes with scales, and their description in ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ray.errors import BadInput
from vescale_ray.models.fp8_folder import description

if TYPE_CHECKING:
    from torch import nn

    from vescale_ray.checkpoint.bridges.pieces import FileLayout
    from vescale_ray.config import TrainSection
    from vescale_ray.quantization import Fp8Block


@dataclass(frozen=True)
class Fp8Files:
    """The FP8 tensors of an export.

    Attributes:
        form: format of the tensors.
        names: names of the tensors in the files.
        kept: the model's tensors that the policy quantizes, but for which the files have no FP8 layout.
        modules: modules whose weights are not in FP8, for ``config.json``.
    """

    form: Fp8Block
    names: tuple[str, ...]
    kept: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` of ``config.json``."""
        return description((self.form.rows, self.form.columns), self.modules)

    @property
    def note(self) -> str | None:
        """One line on the tensors of :attr:`kept`; None if there are none."""
        if not self.kept:
            return None
        more = f" and {len(self.kept) - 3} more" if len(self.kept) > 3 else ""
        return (
            f"not in FP8: {', '.join(self.kept[:3])}{more}; only linear layers, and experts whose matrices the files hold one by one, have "
            f"an FP8 layout in transformers"
        )


def fp8_files(model: nn.Module, layout: FileLayout, train: TrainSection | None) -> Fp8Files:
    """Choose the FP8 tensors of an export: those that ``train.quantize`` names, or all matrices but routers, embeddings and the head.

    transformers reads FP8 weights of linear layers, and of modules named ``experts`` if all their parameters are matrices in FP8.

    Args:
        model: on the meta device; its names are those of ``layout``.
        train: section of the run; None, or without ``quantize``: the default.

    Raises:
        BadInput: nothing can be quantized.
    """
    from vescale_ray.optim.fp8_policy import fp8_policy
    from vescale_ray.quantization import Fp8Block

    given = train.quantize if train is not None else None
    form = Fp8Block() if given is None else Fp8Block.parse(given)
    try:
        policy = fp8_policy(model, form, train.quantize_keep if train is not None and given is not None else None)
    except ValueError as error:
        raise BadInput(f"--fp8: {error}") from None
    wanted = {name for name, parameter in model.named_parameters() if policy(name, parameter) is not None}
    pieces: dict[str, list[str]] = {}
    for file_name, piece in layout.pieces.items():
        pieces.setdefault(piece.name, []).append(file_name)
    fits = _readable(model, lambda name: name in wanted and all(len(layout.pieces[one].shape) == 2 for one in pieces.get(name, [])))
    taken = sorted(wanted & fits & pieces.keys())
    if not taken:
        raise BadInput(f"--fp8: the model has no linear layer or expert that {given or 'it'} quantizes; leave it out")
    names = tuple(file_name for name in taken for file_name in pieces[name])
    kept = tuple(sorted((wanted & pieces.keys()) - fits))
    return Fp8Files(form, names, kept, _modules_without(model, layout, set(taken)))


def _readable(model: nn.Module, matrix: Callable[[str], bool]) -> set[str]:
    """Return the names of parameters that transformers reads in FP8.

    Args:
        matrix: returns whether a parameter is wanted in FP8, and is stored in the files as matrices."""
    from torch import nn

    found: set[str] = set()
    for name, module in model.named_modules():
        own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        if type(module) is nn.Linear:
            found |= {one for one in own if one.endswith(".weight") and matrix(one)}
        elif name.endswith(".experts") and all(matrix(one) for one in own):
            found |= set(own)
    return found


def _modules_without(model: nn.Module, layout: FileLayout, taken: set[str]) -> tuple[str, ...]:
    """Return the modules with a matrix that is not in FP8, by their names in the files. A module without tensors in the files has its name
    in the model."""
    found: set[str] = set()
    in_files = {piece.name for piece in layout.pieces.values()}
    for file_name, piece in layout.pieces.items():
        owner = piece.name.rpartition(".")[0]
        if piece.name not in taken and len(piece.shape) > 1:
            found.add(owner if owner.endswith(".experts") else file_name.rpartition(".")[0])
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied head
        if name not in in_files and parameter.dim() > 1 and ".lora_" not in name:
            found.add(name.rpartition(".")[0])
    return tuple(sorted(found))
