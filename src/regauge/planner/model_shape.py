"""The shape of a transformer, from its config.json: parameters and FLOPs without the model.

The counts are tested against the real modules on the meta device. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from regauge.models.io_spec import ModelHead
from regauge.models.weight_shapes import FAMILIES, count_elements, list_weights
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.models.weight_shapes import ModelWeights

Head = Literal["none", "lm", "masked-lm"]
"""Output layer: none (vectors, classes), all positions, or masked positions alone."""


@dataclass(frozen=True)
class AttentionShape:
    """Heads of the attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    window: int | None = None
    """Number of positions that a sliding layer attends to; None if no layer slides."""
    sliding_layers: int = 0

    @property
    def width(self) -> int:
        """Width of the queries: heads x head_dim, which may differ from the hidden width."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer, and its numbers of parameters by part."""

    family: str
    layers: int
    hidden: int
    ffn: int
    vocab: int
    attention: AttentionShape
    is_gated: bool = False
    """The feed-forward layer has two input matrices (SwiGLU, GeGLU)."""
    embedding_width: int = 0
    """Width of the token embeddings; 0 if it is the hidden width."""
    embedding_parameters: int = 0
    """Parameters of the token, position and type embeddings, with their norm and projection."""
    vector_parameters: int = 0
    """Parameters of the biases and norms of one layer."""
    norm_parameters: int = 0
    """Parameters of the final norm."""
    head_parameters: int = 0
    """Parameters of the output layer, without a tied matrix."""
    head_matmul: int = 0
    """Parameters of the output layer that enter matrix products, without vocab x width."""
    other_parameters: int = 0
    """Parameters of other layers: an interaction network, a second encoder, a pooler of classes."""

    @property
    def layer_matmul(self) -> int:
        """Parameters of one layer that enter matrix products."""
        attention = self.hidden * (2 * self.attention.width + 2 * self.attention.kv_width)
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return self.layer_matmul + self.vector_parameters

    @property
    def logit_matmul(self) -> int:
        """Parameters of the product that gives the logits: vocab x width."""
        return self.vocab * (self.embedding_width or self.hidden)

    def parameters(self, head: Head = "none") -> int:
        """Return the number of parameters; a tied matrix counts once."""
        body = self.embedding_parameters + self.layers * self.layer_parameters
        output = 0 if head == "none" else self.head_parameters
        return body + self.norm_parameters + output + self.other_parameters

    def attention_span(self, length: int) -> float:
        """Return the mean number of positions that a token attends to, over the layers.

        A causal mask is ignored here: `flops` counts 12 L h S for comparison with published MFU.
        """
        window = self.attention.window
        if window is None or not self.layers:
            return float(length)
        share = self.attention.sliding_layers / self.layers
        return (1 - share) * length + share * min(window, length)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from the dictionary of its config.json.

    Raises DataError if the model type is unknown, or if a size is missing.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise DataError(
            f"the planner does not know the model type '{kind}'",
            did_you_mean(kind, sorted(FAMILIES)),
        )
    try:
        weights = list_weights(config, ModelHead("causal" if kind in CAUSAL else "masked"))
        return _describe_shape(config, weights)
    except KeyError as error:
        raise DataError(
            f"config.json has no {error}, which the planner needs for '{kind}'",
            "add the key to config.json",
        ) from None


def _describe_shape(config: Mapping[str, Any], weights: ModelWeights) -> ModelShape:
    kind, sizes = config["model_type"], weights.sizes
    head = {name: shape for name, shape in weights.head.items() if not name.startswith("lm_head")}
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
        head_parameters=count_elements(weights.head),
        head_matmul=sum(math.prod(size) for size in head.values() if len(size) > 1),
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
    """Return the number of layers with a sliding window.

    `layer_types` decides if present. In ModernBERT, one of 3 layers does not slide; in Gemma 2 and
    3, one of 2 and of 6. Mistral slides in every layer.
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
"""Layers of which one has no window, by model type."""
UNGATED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "gpt2")
"""Model types whose feed-forward layer has one input matrix."""
CAUSAL = frozenset(FAMILIES) - {*UNGATED, "modernbert"} | {"gpt2"}
"""Model types whose tokens attend to earlier ones alone."""
