"""The table of a run file that describes the model; nothing here imports torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from regauge.config import Settings


class Model(Settings):
    """An architecture of transformers, from scratch by its dimensions or from saved weights."""

    architecture: str | None = None
    """Model type of transformers, such as `bert` or `llama`: random weights."""
    config: dict[str, Any] = {}
    """Fields of the architecture's transformers configuration, such as `hidden_size`."""
    path: str | None = None
    """Weights to start from: a run's output folder, a transformers folder, or a hub name."""
    weights: Literal["saved", "random"] = "saved"
    """Whether a path gives its weights, or only its dimensions."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of hidden values that are dropped in training."""
    dropout_kind: Literal["counter", "native"] = "counter"
    """`counter`: the same bits on every device and world; `native`: the framework's own."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention of transformers: fused, or written out."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.architecture is None) == (self.path is None):
            raise ValueError("a model has one origin: set either architecture or path")
        if self.path is not None and self.config:
            raise ValueError("model.config describes a model from scratch; drop it or model.path")
        return self
