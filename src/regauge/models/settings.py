"""The table of a run file that describes the model; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from regauge.config import Settings


class Origin(Settings):
    """The earlier run, or the model, that a run goes on from."""

    path: str
    """Output folder of a run, or a transformers folder."""
    step: Literal["final", "latest", "best"] | int = "final"
    """Which moment of the run: its final model, or a checkpoint that was kept."""
    optimizer: Literal["fresh", "kept"] = "fresh"
    """Whether the optimizer begins anew, or goes on with that run's moments."""
    schedule: Literal["restart", "continue"] = "restart"
    """Whether the learning rate begins anew, or is that of one run of both lengths."""


class Lora(Settings):
    """Low-rank adapters beside linear layers, by peft; they are all that is trained."""

    rank: int = Field(default=16, ge=1)
    """Rank of the product that is added to a layer's weight."""
    alpha: float = Field(default=32.0, gt=0)
    """The product is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the values into an adapter that are dropped in training."""
    targets: tuple[str, ...] = ()
    """Names, or ends of paths, of linear layers, such as `q_proj`; by default all of the blocks."""


class Model(Settings):
    """An architecture of transformers, from scratch by its dimensions or from saved weights."""

    architecture: str | None = None
    """Model type of transformers, such as `bert` or `llama`: random weights."""
    config: dict[str, Any] = {}
    """Fields of the architecture's transformers configuration, such as `hidden_size`."""
    path: str | None = None
    """Weights to start from: a run's output folder, a transformers folder, or a hub name."""
    init_from: Origin | None = None
    """The earlier run to go on from, usually with other data; it is the path as well."""
    weights: Literal["saved", "random"] = "saved"
    """Whether a path gives its weights, or only its dimensions."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of hidden values that are dropped in training."""
    dropout_kind: Literal["counter", "native"] = "counter"
    """`counter`: the same bits on every device and world; `native`: the framework's own."""
    attention: Literal["auto", "sdpa", "chunked", "eager"] = "auto"
    """Fused, as products of some rows at a time, or as its architecture writes it; or as suits."""

    lora: Lora | None = None
    """Train low-rank adapters instead of the weights."""

    @model_validator(mode="before")
    @classmethod
    def _path_of_origin(cls, table: Any) -> Any:
        origin = table.get("init_from") if isinstance(table, dict) else None
        if isinstance(origin, dict) and "path" in origin:
            return {"path": origin["path"], **table}
        return table

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.architecture is None) == (self.path is None):
            raise ValueError("a model has one origin: set either architecture or path")
        if self.path is not None and self.config:
            raise ValueError("model.config describes a model from scratch; drop it or model.path")
        return self


class Interactions(Settings):
    """What a ranker makes of the features of a candidate."""

    crosses: int = Field(default=2, ge=0)
    """Layers of explicit crosses (DCN-v2); 0 leaves them out."""
    rank: int | None = Field(default=None, ge=1)
    """Rank of their weights; by default full."""
    experts: int = Field(default=1, ge=1)
    """How many weights of low rank are mixed."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """Whether the deep network stands beside the crosses, or behind them."""
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (128, 64)
    """Widths of the deep network; none leaves it out."""
    buckets: int = Field(default=10_000, ge=1)
    """Embeddings of each categorical feature, which its values share by their hash."""
    width: int = Field(default=16, ge=1)
    """Width of such an embedding."""

    @model_validator(mode="after")
    def _something_is_left(self) -> Interactions:
        if not self.crosses and not self.hidden:
            raise ValueError("nothing is left of the interactions: set crosses or hidden")
        if self.experts > 1 and self.rank is None:
            raise ValueError("experts are mixed where their rank is low: set rank")
        return self
