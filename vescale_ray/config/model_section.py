"""The section ``model`` of a run's configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vescale_ray.config.sections import Count, Positive, Section

_FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def _patterns_or_auto(value: Any) -> Any:
    # One check for both types, so that a mistake gives one line and not one for each type.
    if value == "auto" or (isinstance(value, list) and value and all(isinstance(one, str) and one for one in value)):
        return value
    raise ValueError("give auto, or a list of patterns of module names, for example [layers.*]")


def _targets(value: Any) -> Any:
    if value == "all-linear" or (isinstance(value, list) and value and all(isinstance(one, str) and one for one in value)):
        return value
    raise ValueError("give all-linear, or a list of names of layers, for example [q_proj, v_proj]")


class LoraSettings(Section):
    """Low-rank adapters of a frozen base."""

    rank: Count = Field(default=8, description="rank of each adapter")
    alpha: Positive = Field(default=16.0, description="the output of an adapter is multiplied by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout of an adapter's input")
    targets: Annotated[str | list[str], BeforeValidator(_targets)] = Field(
        default="all-linear",
        description="last parts of the names of layers: [q_proj, v_proj]; all-linear: all but the head",
    )


class ModelSection(Section):
    """The model to train."""

    kind: Literal["llama"] = Field(default="llama", description="architecture that comes with the package")
    dim: Count = Field(default=128, description="width of the residual stream")
    layers: Count = Field(default=4, description="number of transformer blocks")
    heads: Count = Field(default=4, description="query heads; must divide dim")
    kv_heads: Count = Field(default=2, description="key/value heads; must divide heads")
    ffn: Count = Field(default=384, description="width of the SwiGLU hidden layer")
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary frequencies")
    tie: bool = Field(default=False, description="share the embedding with the output head")
    hf: str | None = Field(
        default=None,
        min_length=1,
        description="folder of a causal language model of `transformers`: its config.json and, to start from them, its safetensors "
        "weights (needs the extra `hf`); replaces `kind`",
    )
    lora: LoraSettings | None = Field(
        default=None,
        description="freeze the weights of `hf`, and train adapters of `peft`: {rank: 8, alpha: 16, dropout: 0, targets: all-linear}",
    )
    factory: str | None = Field(
        default=None,
        pattern=_FUNCTION,
        description="`pkg.mod:fn` that returns a module whose forward takes tokens and returns logits (see your-model.md); replaces `kind`",
    )
    args: dict[str, Any] = Field(default={}, description="arguments of `factory`: {dim: 512}")
    loss: str | None = Field(
        default=None,
        pattern=_FUNCTION,
        description="`pkg.mod:fn` that takes the model's output and the targets (batch, seq_len), and returns the loss summed over the "
        "targets that are not -100; null: cross-entropy of the logits",
    )
    units: Annotated[Literal["auto"] | list[str], BeforeValidator(_patterns_or_auto)] = Field(
        default="auto",
        description="patterns of module names; each match becomes one fully_shard unit. auto: each block of the model's outermost "
        "`nn.ModuleList`",
    )

    @property
    def unused(self) -> list[str]:
        """The keys of ``kind`` that have a value of their own, although ``hf`` or ``factory`` replaces it."""
        sizes = ("dim", "layers", "heads", "kv_heads", "ffn", "rope_theta", "tie")
        replaced = self.hf is not None or self.factory is not None
        return [key for key in sizes if replaced and getattr(self, key) != type(self).model_fields[key].default]
