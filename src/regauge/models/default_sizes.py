"""Sizes that a run file may leave out: the defaults of the configurations of transformers.

A test compares them with the installed transformers, whose import takes seconds.
"""

from __future__ import annotations

from typing import Any

Sizes = dict[str, Any]


def _sizes(layers: int, hidden: int, heads: int, ffn: int, **others: Any) -> Sizes:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        **others,
    }


BERT = _sizes(12, 768, 12, 3072, vocab_size=30522, max_position_embeddings=512, type_vocab_size=2)
LLAMA = _sizes(32, 4096, 32, 11008, vocab_size=32000, tie_word_embeddings=False)
QWEN = _sizes(
    32,
    4096,
    32,
    22016,
    vocab_size=151936,
    num_key_value_heads=32,
    tie_word_embeddings=False,
    use_sliding_window=False,
    max_window_layers=28,
)
GEMMA = _sizes(28, 3072, 16, 24576, vocab_size=256000, num_key_value_heads=16)
GEMMA |= {"tie_word_embeddings": True, "head_dim": 256}
GEMMA_2 = GEMMA | _sizes(26, 2304, 8, 9216, num_key_value_heads=4, sliding_window=4096)
DEFAULT_SIZES: dict[str, Sizes] = {
    "bert": BERT,
    "roberta": BERT | {"vocab_size": 50265},
    "xlm-roberta": BERT,
    "camembert": BERT,
    "electra": BERT | _sizes(12, 256, 4, 1024, embedding_size=128),
    "distilbert": {
        "vocab_size": 30522,
        "dim": 768,
        "hidden_dim": 3072,
        "n_layers": 6,
        "n_heads": 12,
        "max_position_embeddings": 512,
    },
    "modernbert": _sizes(22, 768, 12, 1152, vocab_size=50368, local_attention=128),
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
    "llama": LLAMA | {"max_position_embeddings": 2048},
    "mistral": LLAMA
    | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
    "gemma": GEMMA,
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_2 | {"vocab_size": 262208},
}
"""Keys of config.json by model type."""
