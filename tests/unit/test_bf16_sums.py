"""Gradients in bf16 on a CPU: sums over all tokens are as exact as the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regauge.models import precision
from regauge.models.modules import TextModule
from unit.test_text_packing import build_batch, build_module

LENGTHS = (5, 40, 3, 11, 26, 7, 60, 33) * 4


def wrap(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return a module that computes a layer in a dtype."""
    module: Any = torch.nn.Sequential(layer)
    module.compute_dtype = dtype
    return module


def compute_gradients(module: TextModule, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the gradients of a function of the vectors, with weights in a dtype."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    module.compute_dtype = dtype
    vectors = module.train()(build_batch(LENGTHS))["vectors"]
    scale = torch.arange(vectors.numel(), dtype=torch.float32).view_as(vectors).sin()
    (vectors * scale).sum().backward()
    return {
        name: weight.grad.float()
        for name, weight in module.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_every_gradient_is_near_that_in_fp32(architecture: str) -> None:
    exact = compute_gradients(build_module(architecture, "vectors")[0], torch.float32)
    module, _ = build_module(architecture, "vectors")
    module.compute_dtype = torch.bfloat16
    precision.sum_gradients_in_fp32(module)
    assert {type(layer) for layer in module.modules()} & {precision.Fp32SumNorm}
    gradients = compute_gradients(module, torch.bfloat16)
    assert gradients.keys() == exact.keys()
    for name, gradient in exact.items():
        if not name.endswith("key.bias"):  # 0: a softmax ignores what all keys have in common
            error = float((gradients[name] - gradient).norm() / gradient.norm())
            assert error < 0.1, name


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradients_of_a_norm_are_those_of_torch(bias: Any) -> None:
    """With one token nothing is summed, and torch's gradients are exact up to their rounding."""
    torch.manual_seed(0)
    reference = torch.nn.LayerNorm(64, bias=bias)
    torch.nn.init.normal_(reference.weight)
    reference = reference.to(torch.bfloat16)
    changed = torch.nn.LayerNorm(64, bias=bias).to(torch.bfloat16)
    changed.load_state_dict(reference.state_dict())
    precision.sum_gradients_in_fp32(wrap(changed, torch.bfloat16))
    results = []
    for norm in (reference, changed):
        hidden = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
        hidden = hidden.to(torch.bfloat16).requires_grad_()
        output = norm(hidden)
        (output.float() * torch.arange(64.0)).sum().backward()
        results.append([output, hidden.grad, *(weight.grad for weight in norm.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_an_embedding_of_words_stays_in_bf16() -> None:
    words, types = torch.nn.Embedding(2000, 4), torch.nn.Embedding(2, 4)
    precision.sum_gradients_in_fp32(wrap(torch.nn.ModuleList([words, types]), torch.bfloat16))
    assert [type(layer) for layer in (words, types)] == [
        torch.nn.Embedding,
        precision.Fp32SumEmbedding,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replay_in_fp64_sums_in_fp64(dtype: torch.dtype) -> None:
    norm = torch.nn.LayerNorm(4)
    precision.sum_gradients_in_fp32(wrap(norm, dtype))
    assert type(norm) is torch.nn.LayerNorm
