"""Chunked attention equals the fused attention of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from regauge.models import attention
from regauge.models.architectures import build_model
from regauge.models.settings import Model

BERT: dict[str, Any] = {
    "architecture": "bert",
    "config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
ROWS, LENGTH, WIDTH = 5, 12, 8


def masks(kind: str, heads: int) -> torch.Tensor | None:
    """Return an additive mask: of packed rows, of padding, or random per head; None for none."""
    lowest = torch.finfo(torch.float32).min
    segments = torch.arange(LENGTH).div(5, rounding_mode="floor").expand(ROWS, -1)
    if kind == "causal":
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        masked = (segments[:, :, None] != segments[:, None, :]) | later
        return torch.zeros(masked.shape).masked_fill(masked, lowest)[:, None]
    if kind == "packed":
        masked = segments[:, :, None] != segments[:, None, :]
        return torch.zeros(masked.shape).masked_fill(masked, lowest)[:, None]
    if kind == "padding":
        return torch.zeros(ROWS, 1, 1, LENGTH).masked_fill(segments[:, None, None] > 1, lowest)
    return torch.randn(ROWS, heads, LENGTH, LENGTH) if kind == "heads" else None


@pytest.mark.parametrize("scores", [1, 300, 1 << 21], ids=["one", "some", "all"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["packed", "padding", "heads", "none", "causal"])
def test_outputs_and_gradients_equal_fused_attention(
    kind: str, heads: int, groups: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", scores)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    torch.manual_seed(0)
    layer: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=kind == "causal")
    query = torch.randn(ROWS, heads, LENGTH, WIDTH, requires_grad=True)
    key, value = torch.randn(2, ROWS, heads // groups, LENGTH, WIDTH, requires_grad=True)
    mask, output_gradient = masks(kind, heads), torch.randn(ROWS, LENGTH, heads, WIDTH)
    outputs = [
        function(layer, query, key, value, mask, scaling=0.3)[0]
        for function in (attention.chunked_attention, sdpa_attention_forward)
    ]
    torch.testing.assert_close(*outputs)
    inputs = (query, key, value)
    gradients = [torch.autograd.grad(output, inputs, output_gradient) for output in outputs]
    torch.testing.assert_close(*gradients)


def test_causal_attention_skips_later_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    causal = list(attention._query_spans(12, 12, is_causal=True))
    assert causal == [(0, 5, 5), (5, 10, 10), (10, 12, 12)]
    assert list(attention._query_spans(12, 12, is_causal=False)) == [(0, 12, 12)]
    cached = list(attention._query_spans(3, 12, is_causal=True))
    assert cached == [(0, 3, 12)], "queries after a key-value cache"


def test_long_rows_and_unsupported_arguments_use_fused_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value = torch.randn(3, 1, 2, LENGTH, WIDTH)
    layer: Any = SimpleNamespace(is_causal=False)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attention.chunked_attention(layer, query, key, value, None, softcap=30.0)
    chunked, _ = attention.chunked_attention(layer, query, key, value, None)
    monkeypatch.delattr(attention, "_attend_in_chunks")
    with pytest.raises(NameError):
        attention.chunked_attention(layer, query, key, value, None)
    monkeypatch.setattr(attention, "MAX_ROW_TOKENS", LENGTH - 1)
    fused, _ = attention.chunked_attention(layer, query, key, value, None)
    torch.testing.assert_close(chunked, fused)


def test_a_saved_model_does_not_name_chunked_attention(tmp_path: Path) -> None:
    """Chunked attention is unknown to plain transformers, which must load the folder."""
    model, _ = build_model(Model(**BERT, attention="chunked"), "none", 100, 0)
    assert model.config._attn_implementation == attention.CHUNKED
    model.save_pretrained(tmp_path)
    assert attention.CHUNKED not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_an_architecture_without_attention_backends_keeps_sdpa(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type(build_model(Model(**BERT), "none", 100, 0)[0])
    monkeypatch.setattr(kind, "_supports_attention_backend", False)
    model, _ = build_model(Model(**BERT, attention="chunked"), "none", 100, 0)
    assert model.config._attn_implementation == "sdpa"
