"""Tiny causal models with random weights, whose answers vary, as folders to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<s>", "</s>", "<user>", "<answer>")
END_ID = SPECIAL.index("</s>")
VOCABULARY = len(SPECIAL) + 256
MAX_TOKENS = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": END_ID,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
}


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer, so that a character may have several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder: Path, kind: str = "llama", **generation: Any) -> Path:
    """Write a model of a kind with its tokenizer; `generation` goes to generation_config.json."""
    torch.manual_seed(3)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_TOKENS}
        model: Any = GPT2LMHeadModel(GPT2Config(**COMMON, **sizes))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**COMMON, **LLAMA, sliding_window=8))
    else:
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **LLAMA))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3)  # small weights repeat one token
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
