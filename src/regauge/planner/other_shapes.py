"""Shapes for model types that only inference plans know, from a config.json.

Their training is not planned: `find_obstacle` says why. Tests compare the parameters with
transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge.planner.model_shape import AttentionShape, ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Config = Mapping[str, Any]


def find_obstacle(kind: str) -> str | None:
    """Return why a model type's training is not planned, or None."""
    if kind not in OTHER_FAMILIES:
        return None
    if kind in UNTRAINED:
        return f"Regauge does not train this way: '{kind}' is {UNTRAINED[kind]}"
    return f"the planner knows '{kind}' for inference alone"


def _shape_decoder(config: Config) -> ModelShape:
    """Return a decoder with Llama's sizes, whose feed-forward layers may be experts."""
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    vocab, vectors = config["vocab_size"], 2 * hidden
    if kind == "qwen3_moe":
        vectors += 2 * head_dim
    return ModelShape(
        family=kind,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        vocab=vocab,
        attention=AttentionShape(
            heads, config.get("num_key_value_heads") or heads, head_dim, is_causal=True
        ),
        is_gated=True,
        experts=experts,
        active_experts=config["num_experts_per_tok"] if experts > 1 else 1,
        embedding_parameters=vocab * hidden,
        vector_parameters=vectors + (experts * hidden if experts > 1 else 0),
        norm_parameters=hidden,
        head_parameters=0 if config.get("tie_word_embeddings", False) else vocab * hidden,
    )


def _shape_neox(config: Config) -> ModelShape:
    """Return a GPT-NeoX or Falcon: norms with biases, and one matrix for all attention inputs."""
    kind, hidden = config["model_type"], config["hidden_size"]
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    kv_heads, ffn, num_norms = heads, config.get("intermediate_size"), 2
    has_bias = config.get("attention_bias", True)
    is_tied = config.get("tie_word_embeddings", kind == "falcon")
    if kind == "falcon":
        has_bias, ffn = config.get("bias", False), config.get("ffn_hidden_size") or 4 * hidden
        is_new = config.get("new_decoder_architecture", False)
        kv_heads = config.get("num_kv_heads") or heads
        kv_heads = kv_heads if is_new else 1 if config.get("multi_query", True) else heads
        is_parallel = config.get("parallel_attn", True)
        norms = config.get("num_ln_in_parallel_attn") or 2
        num_norms = norms if is_new and is_parallel else 1 if is_parallel else 2
    attention = AttentionShape(heads, kv_heads, hidden // heads, is_causal=True)
    ffn = ffn or 4 * hidden
    biases = attention.width + 2 * attention.kv_width + hidden if has_bias else 0
    if kind == "gpt_neox" or has_bias:
        biases += ffn + hidden
    return ModelShape(
        family=kind,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=ffn,
        vocab=vocab,
        attention=attention,
        embedding_parameters=vocab * hidden,
        vector_parameters=2 * hidden * num_norms + biases,
        norm_parameters=2 * hidden,
        head_parameters=0 if is_tied else vocab * hidden,
    )


def _shape_relative_encoder(config: Config) -> ModelShape:
    """Return an MPNet or DeBERTa: an encoder with BERT's sizes and relative positions."""
    kind, hidden = config["model_type"], config["hidden_size"]
    heads, vocab, ffn = (
        config["num_attention_heads"],
        config["vocab_size"],
        config["intermediate_size"],
    )
    width = config.get("embedding_size") or hidden
    tables, others, extra, vectors = vocab * width, 0, 0, 9 * hidden + ffn
    if kind == "mpnet" or config.get("position_biased_input", True):
        tables += config["max_position_embeddings"] * width
    if kind == "mpnet":
        others += config.get("relative_attention_num_buckets", 32) * heads
    else:
        tables += config.get("type_vocab_size", 0) * width
        tables += width * hidden if width != hidden else 0
        vectors -= hidden * (kind == "deberta")  # the keys lack a bias
        positions, projections, others = _count_relative(config)
        extra, vectors = positions, vectors + projections
    return ModelShape(
        family=kind,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=ffn,
        vocab=vocab,
        attention=AttentionShape(heads, heads, hidden // heads, extra_positions=extra),
        embedding_width=width,
        embedding_parameters=tables + 2 * hidden,
        vector_parameters=vectors,
        norm_parameters=others,
        head_parameters=vocab + hidden * width + 3 * width,
        head_matmul=hidden * width,
    )


def _count_relative(config: Config) -> tuple[int, int, int]:
    """Return DeBERTa's positions per query, and position parameters by layer and in all."""
    hidden, is_first = config["hidden_size"], config["model_type"] == "deberta"
    others = 2 * hidden * ("layer_norm" in str(config.get("norm_rel_ebd", "")))
    kernel = config.get("conv_kernel_size") or 0
    others += hidden * hidden * kernel + 3 * hidden if kernel else 0
    if not config.get("relative_attention", False):
        return 0, 0, others
    span = config.get("max_relative_positions") or -1
    span = config["max_position_embeddings"] if span < 1 else span
    buckets = -1 if is_first else config.get("position_buckets") or -1
    positions = 2 * (buckets if buckets > 0 else span)
    kinds = config.get("pos_att_type") or ()
    parts = kinds.split("|") if isinstance(kinds, str) else kinds
    keys, queries = (part in parts for part in ("c2p", "p2c"))
    projections = hidden * hidden * (keys + queries) + hidden * queries
    if not is_first:
        projections = (keys + queries) * (hidden * hidden + hidden)
        projections *= not config.get("share_att_key", False)
    return positions * (keys + queries) // 2, projections, others + positions * hidden


def _shape_t5(config: Config) -> ModelShape:
    """Return T5's encoder; its decoder counts as a head, through which as many tokens pass."""
    hidden, heads = config["d_model"], config["num_heads"]
    vocab, projection = config["vocab_size"], str(config.get("feed_forward_proj", "relu"))
    attention = AttentionShape(heads, heads, config["d_kv"])
    layers, bias = config["num_layers"], config.get("relative_attention_num_buckets", 32) * heads
    encoder = ModelShape(
        family="t5",
        layers=layers,
        hidden=hidden,
        ffn=config["d_ff"],
        vocab=vocab,
        attention=attention,
        is_gated=projection.startswith("gated"),
        embedding_parameters=vocab * hidden,
        vector_parameters=2 * hidden,
        norm_parameters=hidden + bias,
    )
    decoders = config.get("num_decoder_layers") or layers
    matrices = decoders * (encoder.layer_matmul + 4 * hidden * attention.width)
    output = 0 if config.get("tie_word_embeddings", True) else vocab * hidden
    head = matrices + decoders * 3 * hidden + hidden + bias + output
    return replace(encoder, head_parameters=head, head_matmul=matrices)


UNTRAINED = {
    **dict.fromkeys(("mixtral", "qwen3_moe"), "a mixture of experts"),
    "t5": "an encoder with a decoder",
}
"""Model types without a task -> what they are."""
OTHER_FAMILIES: Mapping[str, Callable[[Config], ModelShape]] = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "phi3"), _shape_decoder),
    **dict.fromkeys(("gpt_neox", "falcon"), _shape_neox),
    **dict.fromkeys(("mpnet", "deberta", "deberta-v2"), _shape_relative_encoder),
    "t5": _shape_t5,
}
"""Model type -> its shape from a config.json; raises KeyError if a size is missing."""
