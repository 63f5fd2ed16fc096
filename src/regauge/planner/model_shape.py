"""A transformer's shape, from config.json: parameters and FLOPs without the model.

The counts are tested against the real modules on the meta device. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from regauge.models.io_spec import ModelHead
from regauge.models.weight_shapes import CAUSAL, FAMILIES, UNGATED, count_elements, list_weights
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.models.weight_shapes import ModelWeights

Head = Literal["none", "lm", "masked-lm"]
"""Output layer: none (vectors, classes), all positions, or masked positions alone."""


@dataclass(frozen=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    window: int | None = None
    """Positions that a sliding layer attends to; None without sliding layers."""
    sliding_layers: int = 0
    extra_positions: int = 0
    """Relative positions that a query is multiplied with, besides the tokens (DeBERTa)."""

    @property
    def width(self) -> int:
        """Query width: heads x head_dim, which may differ from the hidden width."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Key width, and value width."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelShape:
    """A transformer's sizes, and parameter counts by part."""

    family: str
    layers: int
    hidden: int
    ffn: int
    vocab: int
    attention: AttentionShape
    is_gated: bool = False
    """The feed-forward layer has two input matrices (SwiGLU, GeGLU)."""
    experts: int = 1
    """Feed-forward layers beside each other in a layer (MoE)."""
    active_experts: int = 1
    """Those that a token passes."""
    embedding_width: int = 0
    """Token embedding width; 0 if it is the hidden width."""
    embedding_parameters: int = 0
    """Token, position and type embedding parameters, with their norm and projection."""
    vector_parameters: int = 0
    """Bias and norm parameters in one layer."""
    norm_parameters: int = 0
    head_parameters: int = 0
    """Output layer parameters, without a tied matrix."""
    head_matmul: int = 0
    """Output layer parameters used in matrix products, without vocab x width."""
    other_parameters: int = 0
    """Parameters in other layers: an interaction network, a second encoder, a class pooler."""

    @property
    def layer_matmul(self) -> int:
        """One layer's parameters in matrices, with all experts."""
        return self.used_matmul(self.experts)

    @property
    def active_matmul(self) -> int:
        """One layer's parameters used in a token's matrix products."""
        return self.used_matmul(1)

    def used_matmul(self, tokens: int) -> int:
        """Return one layer's matrix parameters that some tokens use, each with other experts."""
        attention = self.hidden * (2 * self.attention.width + 2 * self.attention.kv_width)
        expert = (3 if self.is_gated else 2) * self.hidden * self.ffn
        return attention + expert * min(self.experts, tokens * self.active_experts)

    def cache_bytes(self, context: float, value_bytes: int) -> float:
        """Return a row's key and value bytes for `context` tokens in all layers."""
        values = 2 * self.attention.kv_width * self.attention_span(math.ceil(context))
        return self.layers * values * value_bytes

    @property
    def layer_parameters(self) -> int:
        return self.layer_matmul + self.vector_parameters

    @property
    def logit_matmul(self) -> int:
        """Parameters in the logit product: vocab x width."""
        return self.vocab * (self.embedding_width or self.hidden)

    def parameters(self, head: Head = "none") -> int:
        """Return the parameter count; a tied matrix counts once."""
        body = self.embedding_parameters + self.layers * self.layer_parameters
        output = 0 if head == "none" else self.head_parameters
        return body + self.norm_parameters + output + self.other_parameters

    def attention_span(self, length: int) -> float:
        """Return the mean number of positions a token attends to, over the layers.

        A causal mask is ignored here: `flops` counts 12 L h S for comparison with published MFU.
        """
        window = self.attention.window
        if window is None or not self.layers:
            return float(length + self.attention.extra_positions)
        share = self.attention.sliding_layers / self.layers
        return (1 - share) * length + share * min(window, length)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return a model's shape from its config.json dictionary.

    Raises DataError if the model type is unknown, or if a size is missing.
    """
    from regauge.planner.other_shapes import OTHER_FAMILIES

    if isinstance(text := config.get("text_config"), dict):  # texts pass only this part
        config = text
    kind = str(config.get("model_type"))
    if kind not in FAMILIES and kind not in OTHER_FAMILIES:
        raise DataError(
            f"the planner does not know the model type '{kind}'",
            did_you_mean(kind, sorted({*FAMILIES, *OTHER_FAMILIES})),
        )
    try:
        if kind in OTHER_FAMILIES:
            return OTHER_FAMILIES[kind](config)
        weights = list_weights(config, ModelHead("causal" if kind in CAUSAL else "masked"))
        return _describe_shape(config, weights)
    except KeyError as error:
        raise DataError(
            f"config.json has no {error}, which the planner needs for '{kind}'",
            "add the key to config.json",
        ) from None


def _describe_shape(config: Mapping[str, Any], weights: ModelWeights) -> ModelShape:
    kind, sizes = config["model_type"], weights.sizes
    shape = ModelShape(
        family=kind,
        layers=sizes.layers,
        hidden=sizes.hidden,
        ffn=sizes.ffn,
        vocab=config["vocab_size"],
        attention=AttentionShape(
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            is_causal=kind in CAUSAL,
            window=_find_window(config),
            sliding_layers=_count_sliding_layers(config, sizes.layers),
        ),
        is_gated=kind not in UNGATED,
        embedding_width=config.get("embedding_size", 0) if kind == "electra" else 0,
        embedding_parameters=count_elements(weights.embeddings),
        norm_parameters=count_elements(weights.final),
        head_parameters=count_elements(weights.head_shapes),
        head_matmul=sum(math.prod(size) for size in weights.head.values() if len(size) > 1),
    )
    vectors = count_elements(weights.block) - shape.layer_matmul
    return replace(shape, vector_parameters=vectors)


def _find_window(config: Mapping[str, Any]) -> int | None:
    if config["model_type"] == "modernbert":
        return int(config.get("local_attention", 128))
    if config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window")
    return int(window) if window else None


def _count_sliding_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers have a sliding window.

    `layer_types` decides if present. In ModernBERT, one in 3 layers does not slide; in Gemma 2 and
    3, one in 2 and in 6. Mistral slides in every layer.
    """
    kind = config["model_type"]
    if _find_window(config) is None:
        return 0
    if kind == "modernbert":
        return layers - -(-layers // int(config.get("global_attn_every_n_layers", 3)))
    if kinds := config.get("layer_types"):
        return sum(name == "sliding_attention" for name in kinds)
    if pattern := config.get("sliding_window_pattern") or PATTERNS.get(kind):
        return layers - layers // int(pattern)
    if "max_window_layers" in config:
        return max(layers - int(config["max_window_layers"]), 0)
    return layers


PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Model type -> one in this many layers lacks a window."""
