"""The shape of a transformer, from its config.json: parameters and FLOPs without the model.

The counts are tested against the real modules on the meta device. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError

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
    is_tied: bool = True
    """The output layer shares the matrix of the token embeddings."""
    embedding_width: int = 0
    """Width of the token embeddings; 0 if it is the hidden width."""
    embedding_parameters: int = 0
    """Parameters of the token, position and type embeddings, with their norm and projection."""
    vector_parameters: int = 0
    """Parameters of the biases and norms of one layer."""
    norm_parameters: int = 0
    """Parameters of the final norm."""
    pooler_parameters: int = 0
    """Parameters of the pooler, which models with an output layer do not have."""
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
        pooler = self.pooler_parameters if head == "none" else 0
        return body + self.norm_parameters + pooler + output + self.other_parameters

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
    if kind not in READERS:
        raise DataError(
            f"the planner does not know the model type '{kind}'",
            did_you_mean(kind, sorted(READERS)),
        )
    try:
        return READERS[kind](config)
    except KeyError as error:
        raise DataError(
            f"config.json has no {error}, which the planner needs for '{kind}'",
            "add the key to config.json",
        ) from None


def _bert(config: Mapping[str, Any]) -> ModelShape:
    hidden, ffn, layers = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
    )
    kind, vocab = config["model_type"], config["vocab_size"]
    width = config.get("embedding_size") or hidden
    tables = vocab + config["max_position_embeddings"] + config.get("type_vocab_size", 2)
    projection = (width + 1) * hidden if width != hidden else 0
    heads = config["num_attention_heads"]
    return ModelShape(
        family=kind,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocab=vocab,
        attention=AttentionShape(heads, heads, hidden // heads),
        embedding_width=width,
        embedding_parameters=tables * width + 2 * width + projection,
        vector_parameters=4 * hidden + ffn + hidden + 4 * hidden,
        pooler_parameters=0 if kind == "electra" else hidden * (hidden + 1),
        head_parameters=hidden * width + 3 * width + vocab,
        head_matmul=hidden * width,
    )


def _distilbert(config: Mapping[str, Any]) -> ModelShape:
    hidden, ffn, heads = config["dim"], config["hidden_dim"], config["n_heads"]
    vocab = config["vocab_size"]
    return ModelShape(
        family="distilbert",
        layers=config["n_layers"],
        hidden=hidden,
        ffn=ffn,
        vocab=vocab,
        attention=AttentionShape(heads, heads, hidden // heads),
        embedding_parameters=(vocab + config["max_position_embeddings"] + 2) * hidden,
        vector_parameters=4 * hidden + ffn + hidden + 4 * hidden,
        head_parameters=hidden * hidden + 3 * hidden + vocab,
        head_matmul=hidden * hidden,
    )


def _modernbert(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
    )
    vocab, every = config["vocab_size"], config.get("global_attn_every_n_layers", 3)
    full = -(-layers // every)
    return ModelShape(
        family="modernbert",
        layers=layers,
        hidden=hidden,
        ffn=config["intermediate_size"],
        vocab=vocab,
        attention=AttentionShape(
            heads,
            heads,
            hidden // heads,
            window=config.get("local_attention", 128),
            sliding_layers=layers - full,
        ),
        is_gated=True,
        embedding_parameters=vocab * hidden + hidden,
        vector_parameters=2 * hidden,
        norm_parameters=0,
        head_parameters=hidden * hidden + hidden + vocab,
        head_matmul=hidden * hidden,
    )


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = config["n_embd"], config["n_head"]
    ffn = config.get("n_inner") or 4 * hidden
    return ModelShape(
        family="gpt2",
        layers=config["n_layer"],
        hidden=hidden,
        ffn=ffn,
        vocab=config["vocab_size"],
        attention=AttentionShape(heads, heads, hidden // heads, is_causal=True),
        embedding_parameters=(config["vocab_size"] + config["n_positions"]) * hidden,
        vector_parameters=4 * hidden + ffn + hidden + 4 * hidden,
        norm_parameters=2 * hidden,
    )


def _llama(config: Mapping[str, Any]) -> ModelShape:
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    default_dim = 256 if kind.startswith("gemma") else hidden // heads
    attention = AttentionShape(
        heads,
        kv_heads,
        config.get("head_dim") or default_dim,
        is_causal=True,
        window=_window(config),
        sliding_layers=_sliding_layers(config),
    )
    has_bias = config.get("attention_bias", False) or kind == "qwen2"
    biases = attention.width + 2 * attention.kv_width if has_bias else 0
    biases += hidden if config.get("attention_bias", False) else 0
    norms = (4 if kind in FOUR_NORMS else 2) * hidden
    norms += 2 * attention.head_dim if kind in HEAD_NORMS else 0
    vocab = config["vocab_size"]
    is_tied = config.get("tie_word_embeddings", kind.startswith("gemma"))
    return ModelShape(
        family=kind,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        vocab=vocab,
        attention=attention,
        is_gated=True,
        is_tied=is_tied,
        embedding_parameters=vocab * hidden,
        vector_parameters=biases + norms,
        norm_parameters=hidden,
        head_parameters=0 if is_tied else vocab * hidden,
    )


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window")
    return int(window) if window else None


def _sliding_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers with a sliding window.

    `layer_types` decides if present. In Gemma 2 and 3, one of 2 and of 6 layers does not slide;
    Mistral slides in every layer.
    """
    layers = int(config["num_hidden_layers"])
    if _window(config) is None:
        return 0
    kinds = config.get("layer_types")
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    if pattern := config.get("sliding_window_pattern") or PATTERNS.get(config["model_type"]):
        return layers - layers // int(pattern)
    if "max_window_layers" in config:
        return max(layers - int(config["max_window_layers"]), 0)
    return layers


PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Layers of which one has no window, by model type."""
FOUR_NORMS = ("gemma2", "gemma3_text")
HEAD_NORMS = ("qwen3", "gemma3_text")
READERS: Mapping[str, Callable[[Mapping[str, Any]], ModelShape]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _bert),
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "gpt2": _gpt2,
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _llama
    ),
}
"""The reader of each model type of transformers."""
