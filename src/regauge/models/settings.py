"""Model settings: the `[model]` table in a run file; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from regauge.config import Settings


class InitFrom(Settings):
    """An earlier run, or a model, whose weights a run starts from (warm start)."""

    path: str
    """Run folder, or transformers folder."""
    step: Literal["final", "latest", "best"] | int = "final"
    """The run's final model, or one of its checkpoints."""
    optimizer: Literal["reset", "keep"] = "reset"
    """`reset`: new optimizer state; `keep`: that run's optimizer state."""
    schedule: Literal["restart", "continue"] = "restart"
    """`restart`: new learning rate schedule; `continue`: one schedule over both runs."""


class Lora(Settings):
    """LoRA adapters for linear layers, with peft; all other weights are frozen."""

    rank: int = Field(default=16, ge=1, le=65536)
    """Rank of the weight update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate for adapter inputs."""
    targets: tuple[str, ...] = ()
    """Linear layers by name or end of path, such as `q_proj`; by default all in the blocks."""


class Model(Settings):
    """A transformers model, built from dimensions or saved weights."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "path": ("architecture", "config"),
        "init_from": ("architecture", "config", "path"),
        "architecture": ("path", "init_from"),
    }

    architecture: str | None = None
    """transformers model type, such as `bert` or `llama`; weights are initialized randomly."""
    config: dict[str, Any] = {}
    """Fields of the transformers configuration, such as `hidden_size`."""
    path: str | None = None
    """Initial weights: output folder of a run, transformers folder, or Hugging Face Hub name."""
    init_from: InitFrom | None = None
    """Earlier run to start from, usually with other data; it also sets `path`."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`pretrained`: the weights at `path`; `random`: only its dimensions, with random weights."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Hidden state dropout rate in training; by default 0 with `architecture`, and the configured
    rates with `path`."""
    dropout_kind: Literal["counter", "native"] = "counter"
    """`counter`: equal bits on every device and world size; `native`: torch's dropout."""
    attention: Literal["auto", "sdpa", "chunked", "eager"] = "auto"
    """`sdpa`: fused; `chunked`: matrix products over few rows at a time; `eager`: as in
    transformers; `auto`: chosen for the device."""
    lora: Lora | None = None
    """Train LoRA adapters instead of the weights."""
    trainable_layers: Literal["all", "none"] | Annotated[int, Field(ge=0)] = Field(
        default="all", union_mode="left_to_right"
    )
    """Trained part of the encoder: all, none, or this many final blocks. Heads are always
    trained."""

    @model_validator(mode="before")
    @classmethod
    def _copy_path_from_init_from(cls, table: Any) -> Any:
        origin = table.get("init_from") if isinstance(table, dict) else None
        if isinstance(origin, dict) and "path" in origin:
            return {"path": origin["path"], **table}
        return table

    @model_validator(mode="before")
    @classmethod
    def _set_dropout_from_scratch(cls, table: Any) -> Any:
        if isinstance(table, dict) and table.get("architecture") and table.get("dropout") is None:
            return {**table, "dropout": 0.0}
        return table

    @model_validator(mode="after")
    def _check_one_source(self) -> Model:
        if (self.architecture is None) == (self.path is None):
            raise ValueError("a model needs exactly one of architecture and path; set one")
        if self.path is not None and self.config:
            raise ValueError("model.config has no effect with model.path; remove one of them")
        if self.lora is not None and self.trainable_layers != "all":
            raise ValueError("model.lora trains adapters only; remove model.trainable_layers")
        return self


DEFAULT_NEW_TOKENS = 64
"""Tokens of an answer if neither the settings nor an artifact give a number."""


class Generation(Settings):
    """How a causal model generates text."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per answer; by default the artifact's limit, else 64."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 generates the most likely tokens (greedy). Otherwise logits are divided by it, and tokens
    are drawn. With `top_p` or `top_k`, the default is 1, as in OpenAI's API."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draws from the smallest set of tokens whose probabilities sum to this number (nucleus)."""
    top_k: int = Field(default=0, ge=0)
    """Draws from this many most likely tokens; 0 for no limit."""
    seed: int = Field(default=0, ge=0)
    """Random seed; a draw depends on it, the record number and the token number."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer and are not part of it."""

    @model_validator(mode="before")
    @classmethod
    def _draw_from_a_part(cls, table: Any) -> Any:
        """Let `top_p` and `top_k` draw tokens if no temperature is set."""
        if not isinstance(table, dict) or table.get("temperature") is not None:
            return table
        is_drawn = table.get("top_p", 1) != 1 or table.get("top_k", 0) != 0
        return {**table, "temperature": 1.0} if is_drawn else table

    @model_validator(mode="after")
    def _check_temperature(self) -> Generation:
        for name in ("top_p", "top_k"):
            if not self.is_sampled and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect at temperature 0; set temperature")
        return self

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    def find_stop(self, text: str) -> int | None:
        """Return where the first stop text starts, or None."""
        return min((index for stop in self.stop if (index := text.find(stop)) >= 0), default=None)

    def cut_text(self, text: str) -> str:
        """Return the text before its first stop text."""
        return text[: self.find_stop(text)]


GREEDY = Generation()


class GenerationTable(Settings):
    """Call options in run file form, so that messages name their keys."""

    generation: Generation = GREEDY
    """How a causal model generates text."""


class Interactions(Settings):
    """A ranking model's feature interaction network (DCN-v2), which computes scores."""

    cross_layers: int = Field(default=2, ge=0)
    """Number of cross layers (explicit feature interactions); 0 for none."""
    rank: int | None = Field(default=None, ge=1)
    """Cross layer weight rank; by default full rank."""
    experts: int = Field(default=1, ge=1)
    """Low-rank experts per cross layer."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """`parallel`: deep network next to the cross layers; `stacked`: on top of them."""
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (128, 64)
    """Hidden layer widths of the deep network; empty for none."""
    buckets: int = Field(default=10_000, ge=1)
    """Hash buckets per categorical feature; each bucket has one embedding."""
    width: int = Field(default=16, ge=1)
    """Embedding width for categorical features."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> Interactions:
        if not self.cross_layers and not self.hidden:
            raise ValueError("the network has no layers; set cross_layers or hidden")
        if self.experts > 1 and self.rank is None:
            raise ValueError("experts need low-rank cross layers; set rank")
        return self
