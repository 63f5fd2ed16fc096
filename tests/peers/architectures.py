"""Architectures that are compared with transformers: the sizes of a tiny model of each."""

from __future__ import annotations

from typing import Any, NamedTuple

POSITIONS = 48
"""Longest text of a model, in tokens."""
SHORT_LIMIT = 12
"""A limit that a folder declares; most of the texts are longer."""
WIDTH, HEADS, LAYERS = 32, 4, 2


class Peer(NamedTuple):
    """An architecture of transformers: its tokenizer, and the fields of its configuration."""

    tokenizer: str
    sizes: dict[str, Any]
    has_types: bool = False
    """Whether its tokenizer returns token types."""


SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": POSITIONS,
}
OFFSET = {**SIZES, "max_position_embeddings": POSITIONS + 2}
"""Position ids start after the padding id, which is 1."""
GROUPED = {**SIZES, "num_key_value_heads": 2}
"""Two query heads share a key-value head."""
WINDOW = 8
"""A sliding window, which most of the texts exceed."""
LAYER_TYPES = ["sliding_attention", "full_attention"]

ENCODERS = {
    "bert": Peer("wordpiece", SIZES, has_types=True),
    "roberta": Peer("bpe", {**OFFSET, "type_vocab_size": 1}),
    "xlm-roberta": Peer("unigram", {**OFFSET, "type_vocab_size": 1}),
    "camembert": Peer("unigram", {**OFFSET, "type_vocab_size": 1}),
    "distilbert": Peer(
        "wordpiece",
        {
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 2 * WIDTH,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "albert": Peer("unigram", {**SIZES, "embedding_size": 16}, has_types=True),
    "electra": Peer("wordpiece", {**SIZES, "embedding_size": 16}, has_types=True),
    "ernie": Peer("wordpiece", {**SIZES, "use_task_id": True}, has_types=True),
    "mpnet": Peer("bpe", OFFSET),
    "modernbert": Peer(
        "bpe",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "global_attn_every_n_layers": 3,
            "local_attention": 2 * WINDOW,
        },
    ),
    "nomic_bert": Peer("wordpiece", SIZES, has_types=True),
    "deberta-v2": Peer(
        "unigram",
        {
            **SIZES,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "type_vocab_size": 0,
        },
        has_types=True,
    ),
}
DECODERS = {
    "gpt2": Peer(
        "plain", {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
    ),
    "gpt_neox": Peer("plain", {**SIZES, "rotary_pct": 0.5}),
    "opt": Peer(
        "bpe",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": 2 * WIDTH,
            "max_position_embeddings": POSITIONS,
            "word_embed_proj_dim": 16,
        },
    ),
    "falcon": Peer(
        "plain",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "llama": Peer("opened", GROUPED),
    "mistral": Peer("opened", {**GROUPED, "sliding_window": WINDOW, "head_dim": 8}),
    "qwen2": Peer(
        "plain",
        {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": Peer("plain", {**GROUPED, "head_dim": 16}),
    "gemma": Peer("opened", {**GROUPED, "head_dim": 16}),
    "gemma2": Peer(
        "opened",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": LAYER_TYPES,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3_text": Peer(
        "opened",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": LAYER_TYPES,
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi": Peer("plain", {**SIZES, "partial_rotary_factor": 0.5}),
    "phi3": Peer("opened", {**GROUPED, "sliding_window": WINDOW}),
    "olmo": Peer("plain", GROUPED),
    "olmo2": Peer("plain", GROUPED),
    "smollm3": Peer("plain", {**GROUPED, "no_rope_layer_interval": 2}),
    "granite": Peer(
        "plain",
        {**GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "cohere": Peer("opened", GROUPED),
    "starcoder2": Peer("plain", {**GROUPED, "sliding_window": WINDOW}),
}
PEERS = ENCODERS | DECODERS
