"""The shape of a model from its config.json against the real module on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from regauge.models.architectures import no_pooler_argument
from regauge.planner import flops
from regauge.planner.model_shape import Head, shape_from_config
from regauge.system.errors import DataError

LAYERS = {"num_hidden_layers": 3}
WIDE_HEADS = LAYERS | {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8}
"""Heads x head_dim is twice the hidden width."""
LM = ("ForCausalLM", "lm")
WIDTH = {"hidden_size": 512, "num_attention_heads": 16}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
DEBERTA_V3 = RELATIVE | {
    "position_biased_input": False,
    "type_vocab_size": 0,
    "share_att_key": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
T5 = {"num_layers": 2, "num_decoder_layers": 3}
T5_V1_1 = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS: list[tuple[str, dict[str, Any], str, Head]] = [
    ("Bert", LAYERS, "Model", "none"),
    ("Bert", LAYERS, "ForMaskedLM", "masked-lm"),
    ("Roberta", LAYERS, "ForMaskedLM", "masked-lm"),
    ("Electra", LAYERS, "ForMaskedLM", "masked-lm"),
    ("Electra", LAYERS | {"embedding_size": 256}, "Model", "none"),
    ("DistilBert", {"n_layers": 2}, "ForMaskedLM", "masked-lm"),
    ("ModernBert", LAYERS, "ForMaskedLM", "masked-lm"),
    ("GPT2", {"n_layer": 2}, "LMHeadModel", "lm"),
    ("Llama", LAYERS | {"num_key_value_heads": 8}, "ForCausalLM", "lm"),
    ("Llama", WIDE_HEADS | {"num_key_value_heads": 2}, "ForCausalLM", "lm"),
    ("Mistral", LAYERS, "ForCausalLM", "lm"),
    ("Qwen2", LAYERS, "ForCausalLM", "lm"),
    ("Qwen3", LAYERS, "ForCausalLM", "lm"),
    ("Gemma2", LAYERS, "ForCausalLM", "lm"),
    ("Mixtral", LAYERS, "ForCausalLM", "lm"),
    ("Mixtral", WIDE_HEADS | {"num_local_experts": 4, "intermediate_size": 96}, *LM),
    ("Qwen3Moe", LAYERS | {"num_experts": 6}, "ForCausalLM", "lm"),
    ("Phi3", LAYERS | {"num_key_value_heads": 8}, "ForCausalLM", "lm"),
    ("GPTNeoX", LAYERS, "ForCausalLM", "lm"),
    ("GPTNeoX", LAYERS | {"attention_bias": False, "tie_word_embeddings": True}, *LM),
    ("Falcon", LAYERS, "ForCausalLM", "lm"),
    ("Falcon", LAYERS | {"multi_query": False, "parallel_attn": False, "bias": True}, *LM),
    ("Falcon", LAYERS | {"new_decoder_architecture": True, "num_kv_heads": 8, **WIDTH}, *LM),
    ("MPNet", LAYERS, "ForMaskedLM", "masked-lm"),
    ("Deberta", LAYERS, "ForMaskedLM", "masked-lm"),
    ("Deberta", LAYERS | RELATIVE, "ForMaskedLM", "masked-lm"),
    ("DebertaV2", LAYERS, "ForMaskedLM", "masked-lm"),
    ("DebertaV2", LAYERS | DEBERTA_V3, "ForMaskedLM", "masked-lm"),
    ("DebertaV2", LAYERS | RELATIVE | {"conv_kernel_size": 3}, "ForMaskedLM", "masked-lm"),
    ("T5", T5, "ForConditionalGeneration", "lm"),
    ("T5", T5, "EncoderModel", "none"),
    ("T5", T5_V1_1, "ForConditionalGeneration", "lm"),
]


def _build(family: str, sizes: dict[str, Any], kind: str) -> tuple[Any, Any]:
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model_class = getattr(transformers, f"{family}{kind}")
        return config, model_class(config, **(no_pooler_argument(model_class)))


@pytest.mark.parametrize(("family", "sizes", "kind", "head"), MODELS)
def test_parameters_equal_those_of_the_module(
    family: str, sizes: dict[str, Any], kind: str, head: Head
) -> None:
    """A tied matrix counts once; no task uses the pooler of a model without a head."""
    config, model = _build(family, sizes, kind)
    expected = sum(value.numel() for value in model.parameters())
    assert shape_from_config(config.to_dict()).parameters(head) == expected


@pytest.mark.parametrize(
    ("family", "sizes", "kind"),
    [
        ("Bert", LAYERS, "ForMaskedLM"),
        ("GPT2", {"n_layer": 2}, "LMHeadModel"),
        ("Llama", LAYERS | {"num_key_value_heads": 8, "hidden_size": 512}, "ForCausalLM"),
        ("Llama", WIDE_HEADS | {"num_key_value_heads": 2}, "ForCausalLM"),
        ("Phi3", LAYERS, "ForCausalLM"),
        ("GPTNeoX", LAYERS | WIDTH | {"intermediate_size": 2048}, "ForCausalLM"),
        ("Falcon", LAYERS | WIDTH, "ForCausalLM"),
        ("MPNet", LAYERS, "ForMaskedLM"),
    ],
)
def test_flops_agree_with_the_counter_of_torch(
    family: str, sizes: dict[str, Any], kind: str
) -> None:
    """Forward and backward of a whole row, counted by torch, within 5 %."""
    config, model = _build(family, sizes, kind)
    length = 128
    tokens = torch.zeros((2, length), dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    planned = flops.training_flops(shape_from_config(config.to_dict()), length, "lm")
    assert planned * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_queries_of_deberta_meet_relative_positions() -> None:
    """A pass projects the 512 positions once, which many tokens outweigh."""
    config, model = _build("DebertaV2", LAYERS | DEBERTA_V3, "ForMaskedLM")
    tokens = torch.zeros((16, 128), dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.sum().backward()
    planned = flops.training_flops(shape_from_config(config.to_dict()), 128, "lm")
    assert planned * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_token_passes_the_active_experts() -> None:
    """Two of eight experts: counted by torch on real tokens, whose routes decide the products."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 64, "head_dim": 32}
    sizes["num_key_value_heads"] = 2
    config = transformers.MixtralConfig(**LAYERS, **sizes, num_attention_heads=4)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model, length = transformers.MixtralForCausalLM(config), 64
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    shape = shape_from_config(config.to_dict())
    planned = length * flops.training_flops(shape, length, "lm")
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.05)
    dense = replace(shape, active_experts=8)
    assert flops.matmul_flops(dense) > 3 * flops.matmul_flops(shape)


def test_as_many_tokens_pass_the_decoder_of_t5() -> None:
    sizes = {"d_model": 128, "d_ff": 512, "num_heads": 4, "d_kv": 32, "vocab_size": 64}
    config = transformers.T5Config(num_layers=2, **sizes)
    model, tokens = transformers.T5ForConditionalGeneration(config), torch.arange(16)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, decoder_input_ids=tokens).logits.sum().backward()
    planned = 16 * flops.training_flops(shape_from_config(config.to_dict()), 16, "lm")
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_sliding_layers_attend_to_their_window() -> None:
    """Gemma 3 slides in five of six layers, Qwen2 in none by default."""
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=12).to_dict()
    shape = shape_from_config(gemma)
    assert shape.attention.sliding_layers == 10
    expected = (2 * 32768 + 10 * gemma["sliding_window"]) / 12
    assert shape.attention_span(32768) == pytest.approx(expected)
    assert shape_from_config(transformers.Qwen2Config().to_dict()).attention.window is None


def test_an_unknown_model_type_names_the_nearest() -> None:
    """Nothing is guessed: neither a type nor a size."""
    with pytest.raises(DataError, match="did you mean 'mistral'"):
        shape_from_config({"model_type": "mistrol"})
    with pytest.raises(DataError, match="did you mean 'mixtral'"):
        shape_from_config({"model_type": "mixtrl"})
    with pytest.raises(DataError, match="hidden_size"):
        shape_from_config({"model_type": "bert"})
    with pytest.raises(DataError, match="d_model"):
        shape_from_config({"model_type": "t5"})


def test_texts_pass_only_the_text_model_of_gemma_3() -> None:
    text = transformers.Gemma3TextConfig(num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(text)
    expected = sum(value.numel() for value in model.parameters())
    whole = transformers.Gemma3Config(text_config=text.to_dict()).to_dict()
    for config in (text.to_dict(), whole):
        assert shape_from_config(config).parameters("lm") == expected
