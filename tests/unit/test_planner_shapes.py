"""The shape of a model from its config.json against the real module on the meta device."""

from __future__ import annotations

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
    with pytest.raises(DataError, match="hidden_size"):
        shape_from_config({"model_type": "bert"})
