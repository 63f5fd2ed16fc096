"""Attention as products of some rows at a time is transformers' fused attention."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from regauge.models import attention
from regauge.models.architectures import build
from regauge.models.settings import Model

BERT: dict[str, Any] = {
    "architecture": "bert",
    "config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
ROWS, LENGTH, WIDTH = 5, 12, 8


def masks(kind: str, heads: int) -> torch.Tensor | None:
    """Return what is added to scores: packed rows, padding, or something of each head's own."""
    lowest = torch.finfo(torch.float32).min
    segments = torch.arange(LENGTH).div(5, rounding_mode="floor").expand(ROWS, -1)
    if kind == "causal":
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        apart = (segments[:, :, None] != segments[:, None, :]) | later
        return torch.zeros(apart.shape).masked_fill(apart, lowest)[:, None]
    if kind == "packed":
        apart = segments[:, :, None] != segments[:, None, :]
        return torch.zeros(apart.shape).masked_fill(apart, lowest)[:, None]
    if kind == "padding":
        return torch.zeros(ROWS, 1, 1, LENGTH).masked_fill(segments[:, None, None] > 1, lowest)
    return torch.randn(ROWS, heads, LENGTH, LENGTH) if kind == "heads" else None


@pytest.mark.parametrize("scores", [1, 300, 1 << 21], ids=["one", "some", "all"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["packed", "padding", "heads", "none", "causal"])
def test_values_and_gradients_are_those_of_the_fused(
    kind: str, heads: int, groups: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MOST_SCORES", scores)
    monkeypatch.setattr(attention, "QUERIES", 5)
    torch.manual_seed(0)
    owner: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=kind == "causal")
    query = torch.randn(ROWS, heads, LENGTH, WIDTH, requires_grad=True)
    key, value = torch.randn(2, ROWS, heads // groups, LENGTH, WIDTH, requires_grad=True)
    mask, slope = masks(kind, heads), torch.randn(ROWS, LENGTH, heads, WIDTH)
    found = [
        function(owner, query, key, value, mask, scaling=0.3)[0]
        for function in (attention.chunked, sdpa_attention_forward)
    ]
    torch.testing.assert_close(*found)
    slopes = [torch.autograd.grad(each, (query, key, value), slope) for each in found]
    torch.testing.assert_close(*slopes)


def test_what_no_token_sees_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES", 5)
    spans = [[(0, 5, 5), (5, 10, 10), (10, 12, 12)], [(0, 12, 12)]]
    assert [list(attention._spans(12, 12, causal=causal)) for causal in (True, False)] == spans
    assert list(attention._spans(3, 12, causal=True)) == [(0, 3, 12)], "queries behind a cache"


def test_long_rows_and_what_is_not_known_are_left_to_the_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value = torch.randn(3, 1, 2, LENGTH, WIDTH)
    owner: Any = SimpleNamespace(is_causal=False)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attention.chunked(owner, query, key, value, None, softcap=30.0)
    own, _ = attention.chunked(owner, query, key, value, None)
    monkeypatch.delattr(attention, "_attended")
    with pytest.raises(NameError):
        attention.chunked(owner, query, key, value, None)
    monkeypatch.setattr(attention, "LONGEST", LENGTH - 1)
    fused, _ = attention.chunked(owner, query, key, value, None)
    torch.testing.assert_close(own, fused)


def test_a_model_that_is_saved_is_as_any_other(tmp_path: Path) -> None:
    """How attention was computed here is nothing that who loads it has to know."""
    model, _ = build(Model(**BERT, attention="chunked"), "none", 100, 0)
    assert model.config._attn_implementation == attention.CHUNKED
    model.save_pretrained(tmp_path)
    assert attention.CHUNKED not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_an_architecture_that_has_no_other_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(build(Model(**BERT), "none", 100, 0)[0])
    monkeypatch.setattr(kind, "_supports_attention_backend", False)
    model, _ = build(Model(**BERT, attention="chunked"), "none", 100, 0)
    assert model.config._attn_implementation == "sdpa"
