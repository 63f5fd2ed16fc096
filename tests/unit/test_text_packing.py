"""Texts in packed rows: every token once, little padding, and the outputs of padded rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regauge.data.batches import build_packing
from regauge.data.buckets import choose_bucket_lengths
from regauge.data.packing import MAX_PACKED_SHARE, pack_texts
from regauge.models.architectures import ClassHead, HeadKind, build_model
from regauge.models.modules import Classifier, Encoder, TextModule, TokenClassifier
from regauge.models.settings import Model

LENGTHS = (5, 40, 3, 11, 26, 0, 7)
WIDTH = 64
MODULES: dict[str, tuple[Any, HeadKind, str]] = {
    "vectors": (Encoder, "none", "vectors"),
    "classes": (Classifier, "classes", "scores"),
    "tags": (TokenClassifier, "tokens", "scores"),
}


@given(st.lists(st.integers(0, 128), min_size=1, max_size=40))
def test_every_token_has_one_place(lengths: list[int]) -> None:
    segments = (np.arange(128) < np.array(lengths)[:, None]).astype(np.int32)
    arrays = build_packing(segments)
    if not arrays:
        assert pack_texts(lengths, 128) is None
        return
    packed, places = arrays["packed"], arrays["places"]
    assert packed.size <= MAX_PACKED_SHARE * segments.size
    assert sorted(packed[packed >= 0]) == np.flatnonzero(segments).tolist()
    assert (packed.flat[places[segments > 0]] == np.flatnonzero(segments)).all()
    for row in packed:
        texts = row[row >= 0]
        assert (row[: len(texts)] == texts).all()
        assert (np.diff(texts)[np.diff(texts // 128) == 0] == 1).all()


@pytest.mark.parametrize("lengths", [[0, 0], [64, 60, 64, 63], [128]])
def test_texts_of_similar_lengths_stay_padded(lengths: list[int]) -> None:
    segments = (np.arange(max(*lengths, 8)) < np.array(lengths)[:, None]).astype(np.int32)
    assert build_packing(segments) == {}


def draw_lengths(median: float, spread: float, longest: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(median), spread, 20_000).round()
    return np.clip(lengths, 3, longest).astype(int)


@pytest.mark.parametrize(
    ("median", "spread", "longest"),
    [
        (11, 0.6, 126),
        (8, 0.35, 64),
        (120, 0.7, 512),
        (30, 1.0, 256),
        (55, 0.2, 128),
        (150, 0.2, 512),
    ],
)
@pytest.mark.parametrize("rows", [32, 128])
def test_batches_of_any_shape_have_little_padding(
    median: float, spread: float, longest: int, rows: int
) -> None:
    lengths = draw_lengths(median, spread, longest)
    histogram = np.bincount(lengths).tolist()
    buckets = choose_bucket_lengths(histogram, 4)
    computed = real = 0
    for start in range(0, len(lengths) - rows, rows):
        batch = lengths[start : start + rows].tolist()
        padded = next(size for size in buckets if size >= max(batch))
        packed = pack_texts(batch, padded)
        computed += packed.num_tokens if packed else padded * rows
        real += sum(batch)
    measured = real / computed
    assert measured >= 0.9


def test_batches_of_one_shape_are_padded_to_their_longest_text() -> None:
    """Four bucket lengths are no help if every batch has a long text."""
    lengths = draw_lengths(11, 0.6, 126)
    histogram = np.bincount(lengths).tolist()
    buckets = choose_bucket_lengths(histogram, 4)
    batches = lengths[: len(lengths) // 32 * 32].reshape(-1, 32).max(1)
    computed = sum(next(size for size in buckets if size >= longest) for longest in batches)
    measured = lengths[: len(batches) * 32].sum() / (32 * computed)
    assert measured < 0.5


def build_module(architecture: str, kind: str, dropout: float = 0.0) -> tuple[TextModule, str]:
    """Return a module with random weights, and the name of its output."""
    module_class, head, name = MODULES[kind]
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": WIDTH + 8,
    }
    narrow = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    own_names = {"distilbert": narrow | {"max_position_embeddings": WIDTH}}
    config = own_names.get(architecture, sizes)
    attention = "eager" if architecture == "deberta-v2" else "sdpa"
    settings = Model(architecture=architecture, config=config, dropout=dropout, attention=attention)
    class_head = None if head == "none" else ClassHead(3)
    return module_class(*build_model(settings, head, 90, 0, 1, class_head=class_head)), name


def build_batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    positions = np.arange(WIDTH, dtype=np.int32)
    segments = (positions < np.array(lengths)[:, None]).astype(np.int32)
    tokens = np.random.default_rng(0).integers(2, 90, segments.shape).astype(np.int32)
    arrays = {
        "tokens": np.where(segments, tokens, 1),
        "segments": segments,
        "positions": np.broadcast_to(positions, segments.shape).copy(),
        "types": (segments * (positions >= 4)).astype(np.int32),
        "keys": np.arange(len(lengths), dtype=np.int32) * 77,
        **build_packing(segments),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def compute(module: TextModule, batch: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return the outputs of real tokens or texts, and the gradients of all weights."""
    module.zero_grad()
    output = module(batch)[name]
    real = batch["segments"] > 0
    values = output[real] if output.ndim == 3 else output[real[:, 0]]
    scale = torch.arange(values.numel(), dtype=torch.float32).view_as(values).sin()
    (values * scale).sum().backward()
    weights = [weight.grad.flatten() for weight in module.parameters() if weight.grad is not None]
    return values.detach(), torch.cat(weights)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra", "modernbert", "distilbert"])
def test_packed_rows_give_the_outputs_of_padded_ones(
    architecture: str, kind: str, dropout: float
) -> None:
    """The masks of dropout are equal, too: a token keeps the address that it has in its text."""
    module, name = build_module(architecture, kind, dropout)
    assert module.can_pack
    module.train()
    batch = build_batch()
    assert batch["packed"].numel() < batch["tokens"].numel() / 2
    packed = compute(module, batch, name)
    padded = compute(module, {k: batch[k] for k in batch if k not in {"packed", "places"}}, name)
    torch.testing.assert_close(packed[0], padded[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1], padded[1], rtol=1e-3, atol=1e-4)
    if dropout:
        module.eval()
        assert float((compute(module, batch, name)[0] - packed[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra", "modernbert", "distilbert"])
def test_a_row_may_be_longer_than_the_longest_text_of_the_model(architecture: str) -> None:
    module, name = build_module(architecture, "vectors")
    batch = build_batch((64, 40, 38, 36, 40, 35))
    assert batch["packed"].shape[1] > 2 * WIDTH
    packed = compute(module, batch, name)
    padded = compute(module, {k: batch[k] for k in batch if k not in {"packed", "places"}}, name)
    torch.testing.assert_close(packed[0], padded[0], rtol=1e-4, atol=1e-5)


def test_a_head_with_a_pooling_layer_of_its_own_form_is_not_packed() -> None:
    """ALBERT's pooling layer has its activation outside, so its states cannot be pooled again."""
    assert not build_module("albert", "classes")[0].can_pack
    assert build_module("albert", "vectors")[0].can_pack


def test_texts_of_a_model_that_mixes_rows_stay_padded() -> None:
    assert not build_module("deberta-v2", "vectors")[0].can_pack
