"""Parameter counts and FLOPs, compared with the counts of transformers and torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from distributed.runs import BERT, GPT, LLAMA
from regauge.models.architectures import HeadKind, build_model, find_blocks
from regauge.models.flops import count_parameters, flops_per_token
from regauge.models.init_weights import META
from regauge.models.settings import Model
from regauge.training.settings import Optimizer
from regauge.training.state_bytes import count_moments

VOCABULARY, ROWS, LENGTH = 300, 3, 16
QWEN = {
    "architecture": "qwen3",
    "config": {**LLAMA["config"], "head_dim": 24, "num_key_value_heads": 1},
}
PLAIN = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
PUBLISHED: dict[str, tuple[dict[str, Any], HeadKind, int]] = {
    "bert-large-uncased": (
        {
            "architecture": "bert",
            "config": {
                "vocab_size": 30522,
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
            },
        },
        "masked",
        335_174_458,
    ),
    "Llama-2-7b": (
        {"architecture": "llama", "config": {"vocab_size": 32000}},
        "causal",
        6_738_415_616,
    ),
}
"""Published models and their parameter counts."""


def build(model: dict[str, Any], head: HeadKind) -> Any:
    settings = Model(**{**model, "dropout": 0.0, "attention": "eager"})
    return build_model(settings, head, VOCABULARY, 0)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameter_counts_of_published_models(name: str) -> None:
    model, head, expected = PUBLISHED[name]
    with META:
        assert count_parameters(build(model, head)).all == expected


@pytest.mark.parametrize(
    ("model", "head"), [(BERT, "masked"), (GPT, "causal"), (LLAMA, "causal"), (QWEN, "causal")]
)
def test_parameter_counts_equal_transformers(model: dict[str, Any], head: HeadKind) -> None:
    module = build(model, head)
    plain: PreTrainedModel = PLAIN[head].from_config(module.config)
    counts = count_parameters(module)
    assert counts.all == counts.trained == plain.num_parameters()
    assert counts.all - counts.embedding == plain.num_parameters(exclude_embeddings=True)
    assert 0 < counts.matmul < counts.blocks < counts.all
    module.base_model.requires_grad_(requires_grad=False)
    plain.base_model.requires_grad_(requires_grad=False)
    assert (
        count_parameters(module).trained == plain.num_parameters(only_trainable=True) < counts.all
    )


@pytest.mark.parametrize(
    ("model", "head"), [(BERT, "masked"), (GPT, "causal"), (LLAMA, "causal"), (QWEN, "causal")]
)
def test_flops_equal_those_that_torch_counts(model: dict[str, Any], head: HeadKind) -> None:
    """Compare with a forward and backward pass of the class of transformers, without its head.

    torch also counts the products of rotary positions, 0.1 % here.
    """
    module = build(model, head)
    plain = PLAIN[head].from_config(module.config, attn_implementation="eager")
    tokens = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        plain(tokens).logits.sum().backward()
    inside = {id(value) for block in find_blocks(plain) for value in block.parameters()}
    rest = {id(value): value for value in plain.parameters() if id(value) not in inside}
    words = plain.get_output_embeddings().weight
    heads = [
        words,
        *(v for n, v in plain.named_parameters() if "predictions.transform.dense.w" in n),
    ]
    assert all(id(value) in rest for value in heads)
    outside = 6 * sum(value.numel() for value in heads)
    torch_flops = counter.get_total_flops() / (ROWS * LENGTH) - outside
    assert flops_per_token(module, LENGTH) == pytest.approx(torch_flops, rel=2e-3)


def test_frozen_weights_cost_no_gradient() -> None:
    """The inputs of the first block have a gradient, as FLOPS_FORMULA assumes."""
    module = build(LLAMA, "causal")
    for value in module.parameters():
        value.requires_grad_(requires_grad=False)
    inputs = torch.randn(ROWS, LENGTH, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module.model(inputs_embeds=inputs).last_hidden_state.sum().backward()
    torch_flops = counter.get_total_flops() / (ROWS * LENGTH)
    assert flops_per_token(module, LENGTH) == pytest.approx(torch_flops, rel=3e-3)
    assert count_parameters(module).trained == 0


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_optimizer_moments_are_counted(kind: str) -> None:
    shapes = [(300, 32), (64, 32), (64,)]
    elements = sum(map(math.prod, shapes))
    expected = {"adamw": 2 * elements, "sgd": elements, "adafactor": 300 + 32 + 64 + 32 + 64}
    optimizer = Optimizer.model_validate({"kind": kind})
    assert count_moments(optimizer.kind, shapes) == expected[kind]
