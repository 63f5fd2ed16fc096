"""What a model weighs and costs, beside what transformers and torch count themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from distributed.runs import BERT, GPT, LLAMA
from regauge.models.architectures import Head, blocks, build
from regauge.models.flops import counts, flops_per_token
from regauge.models.init_weights import META
from regauge.models.settings import Model
from regauge.training.batch_finder.memory import moments
from regauge.training.settings import Optimizer

VOCABULARY, ROWS, LENGTH = 300, 3, 16
QWEN = {
    "architecture": "qwen3",
    "config": {**LLAMA["config"], "head_dim": 24, "num_key_value_heads": 1},
}
PLAIN = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
PUBLISHED: dict[str, tuple[dict[str, Any], Head, int]] = {
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
"""Models as they were published, and the weights that they are known to have."""


def made(model: dict[str, Any], head: Head) -> Any:
    settings = Model(**{**model, "dropout": 0.0, "attention": "eager"})
    return build(settings, head, VOCABULARY, 0)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_of_published_models(name: str) -> None:
    model, head, expected = PUBLISHED[name]
    with META:
        assert counts(made(model, head)).all == expected


@pytest.mark.parametrize(
    ("model", "head"), [(BERT, "masked"), (GPT, "causal"), (LLAMA, "causal"), (QWEN, "causal")]
)
def test_weights_are_counted_as_transformers_counts_its_own(
    model: dict[str, Any], head: Head
) -> None:
    own = made(model, head)
    plain: PreTrainedModel = PLAIN[head].from_config(own.config)
    found = counts(own)
    assert found.all == found.trained == plain.num_parameters()
    assert found.all - found.embedding == plain.num_parameters(exclude_embeddings=True)
    assert 0 < found.matmul < found.blocks < found.all
    own.base_model.requires_grad_(requires_grad=False)
    plain.base_model.requires_grad_(requires_grad=False)
    assert counts(own).trained == plain.num_parameters(only_trainable=True) < found.all


@pytest.mark.parametrize(
    ("model", "head"), [(BERT, "masked"), (GPT, "causal"), (LLAMA, "causal"), (QWEN, "causal")]
)
def test_the_cost_of_a_token_is_what_torch_counts(model: dict[str, Any], head: Head) -> None:
    """Of transformers' own class, forward and backward, with its head taken off.

    torch counts the products of rotary positions as well, 1 in 1,000 here.
    """
    own = made(model, head)
    plain = PLAIN[head].from_config(own.config, attn_implementation="eager")
    tokens = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        plain(tokens).logits.sum().backward()
    inside = {id(value) for block in blocks(plain) for value in block.parameters()}
    rest = {id(value): value for value in plain.parameters() if id(value) not in inside}
    words = plain.get_output_embeddings().weight
    heads = [
        words,
        *(v for n, v in plain.named_parameters() if "predictions.transform.dense.w" in n),
    ]
    assert all(id(value) in rest for value in heads)
    outside = 6 * sum(value.numel() for value in heads)
    found = counter.get_total_flops() / (ROWS * LENGTH) - outside
    assert flops_per_token(own, LENGTH) == pytest.approx(found, rel=2e-3)


def test_a_weight_that_is_not_trained_costs_no_gradient() -> None:
    """All but the first block's inputs: nothing before them is trained."""
    own = made(LLAMA, "causal")
    for value in own.parameters():
        value.requires_grad_(requires_grad=False)
    inputs = torch.randn(ROWS, LENGTH, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        own.model(inputs_embeds=inputs).last_hidden_state.sum().backward()
    found = counter.get_total_flops() / (ROWS * LENGTH)
    assert flops_per_token(own, LENGTH) == pytest.approx(found, rel=3e-3)
    assert counts(own).trained == 0


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_what_an_optimizer_keeps_is_found_by_asking_it(kind: str) -> None:
    shapes = [(300, 32), (64, 32), (64,)]
    elements = sum(map(math.prod, shapes))
    expected = {"adamw": 2 * elements, "sgd": elements, "adafactor": 300 + 32 + 64 + 32 + 64}
    optimizer = Optimizer.model_validate({"kind": kind})
    assert moments(optimizer, shapes) == expected[kind]
