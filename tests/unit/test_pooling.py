"""Pooling against formulas that are computed for one text at a time."""

from __future__ import annotations

from math import erf
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from regauge.models.pooling import TextPooling, mean_pool
from regauge.models.sentence_transformers import ACTIVATIONS, DenseLayer, Pooling, PoolingMode

Array = NDArray[np.float64]
WIDTH = 6
LENGTHS = (1, 2, 5, 9, 3)
"""Of ragged texts, the longest in the middle."""
EVERY = get_args(PoolingMode)


def expected_vector(mode: PoolingMode, states: Array) -> Array:
    """Return the vector of one text's states, [tokens, width], by the formula of a mode."""
    counts = np.arange(1, len(states) + 1)[:, None]
    vectors: dict[PoolingMode, Array] = {
        "mean": states.mean(0),
        "cls": states[0],
        "max": states.max(0),
        "mean_sqrt_len_tokens": states.sum(0) / np.sqrt(len(states)),
        "weightedmean": (states * counts).sum(0) / counts.sum(),
        "lasttoken": states[-1],
    }
    return vectors[mode]


def expected_vectors(modes: tuple[PoolingMode, ...], states: list[Array]) -> Array:
    """Return the vectors of all texts; several modes are concatenated."""
    rows = ([expected_vector(mode, text_states) for mode in modes] for text_states in states)
    return np.stack([np.concatenate(vectors) for vectors in rows])


def texts(seed: int = 0) -> list[Array]:
    """Return hidden states of some texts; most values are negative, so zero padding is noticed."""
    draw = np.random.default_rng(seed)
    return [draw.normal(-1.0, 2.0, (length, WIDTH)) for length in LENGTHS]


def batch(
    states: list[Array], length: int, padding: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states, [texts, length, width], and segments, with a number in the padding."""
    hidden = np.full((len(states), length, WIDTH), padding)
    segments = np.zeros((len(states), length), np.int32)
    for row, text_states in enumerate(states):
        hidden[row, : len(text_states)] = text_states
        segments[row, : len(text_states)] = 1
    return torch.from_numpy(hidden).to(dtype), torch.from_numpy(segments)


def pool(pooling: Pooling, states: list[Array], **changes: Any) -> Array:
    with torch.no_grad():
        pooled = TextPooling(pooling)(*batch(states, **{"length": 9, "padding": 0.0, **changes}))
    assert pooled.dtype == torch.float32
    return pooled.double().numpy()


@pytest.mark.parametrize("padding", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("mode", EVERY)
def test_modes_ignore_padding(mode: PoolingMode, padding: float) -> None:
    expected = expected_vectors((mode,), texts())
    pooling = Pooling(modes=(mode,), normalize=False)
    for length in (9, 16):
        pooled = pool(pooling, texts(), length=length, padding=padding)
        np.testing.assert_allclose(pooled, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("modes", [("mean", "cls"), ("cls", "mean"), EVERY])
def test_several_modes_are_concatenated_in_order(
    modes: tuple[PoolingMode, ...],
) -> None:
    expected = expected_vectors(modes, texts())
    pooled = pool(Pooling(modes=modes, normalize=False), texts())
    np.testing.assert_allclose(pooled, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("modes", [("mean",), ("cls", "max")])
def test_normalized_vectors_keep_their_direction(
    modes: tuple[PoolingMode, ...],
) -> None:
    plain = pool(Pooling(modes=modes, normalize=False), texts())
    pooled = pool(Pooling(modes=modes, normalize=True), texts())
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, plain / lengths, rtol=2e-6, atol=2e-7)
    assert not np.allclose(lengths, 1, atol=0.1)


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_an_empty_row_is_zero(mode: PoolingMode) -> None:
    states = [np.empty((0, WIDTH)), *texts()]
    for normalized in (False, True):
        pooled = pool(Pooling(modes=(mode,), normalize=normalized), states, padding=3.0)
        assert not pooled[0].any()
        assert np.isfinite(pooled).all()


@pytest.mark.parametrize("mode", EVERY)
def test_bf16_states_are_pooled_as_fp32_ones(mode: PoolingMode) -> None:
    hidden, segments = batch(texts(), 9, 1e4, torch.bfloat16)
    rounded = [
        row[: len(text_states)].double().numpy()
        for row, text_states in zip(hidden, texts(), strict=True)
    ]
    pooled = TextPooling(Pooling(modes=(mode,), normalize=False))(hidden, segments)
    assert pooled.dtype == torch.float32
    expected = expected_vectors((mode,), rounded)
    np.testing.assert_allclose(pooled.double().numpy(), expected, rtol=2e-6, atol=2e-6)


def test_sums_of_bf16_states_are_fp32() -> None:
    """A bfloat16 sum of 2,000 values of 1.125 would stop at 256."""
    hidden = torch.full((1, 2000, WIDTH), 1.125, dtype=torch.bfloat16)
    segments = torch.ones((1, 2000), dtype=torch.int32)
    pooled = TextPooling(Pooling(normalize=False))(hidden, segments)
    assert pooled.dtype == torch.float32
    assert pooled.eq(1.125).all()


ACTIVATED: dict[str, Any] = {
    "tanh": np.tanh,
    "relu": lambda value: np.maximum(value, 0.0),
    "gelu": lambda value: value * (1 + np.vectorize(erf)(value / np.sqrt(2))) / 2,
    "identity": lambda value: value,
}


def test_every_activation_is_tested() -> None:
    assert set(ACTIVATIONS.values()) == set(ACTIVATED)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATED)
def test_the_dense_layer_formula(activation: Any, *, bias: bool) -> None:
    dense = DenseLayer(
        in_features=WIDTH, out_features=4, bias=bias, activation=activation, folder="2_Dense"
    )
    pool = TextPooling(Pooling(dense=(dense,), normalize=False))
    (layer,) = pool.dense
    weights = {name: value.detach().double().numpy() for name, value in layer.named_parameters()}
    assert ("bias" in weights) is bias
    means = expected_vectors(("mean",), texts())
    expected = ACTIVATED[activation](means @ weights["weight"].T + weights.get("bias", 0.0))
    with torch.no_grad():
        pooled = pool(*batch(texts(), 9, 0.0)).double().numpy()
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(pooled).max() > 0.1


def test_dense_layers_precede_normalization() -> None:
    first = DenseLayer(in_features=2 * WIDTH, out_features=5, activation="relu", folder="2_Dense")
    second = DenseLayer(in_features=5, out_features=3, activation="tanh", folder="3_Dense")
    pool = TextPooling(Pooling(modes=("cls", "max"), dense=(first, second), normalize=True))
    vectors = expected_vectors(("cls", "max"), texts())
    for name, layer in zip(("relu", "tanh"), pool.dense, strict=True):
        weight, bias = (value.detach().double().numpy() for value in layer.parameters())
        vectors = ACTIVATED[name](vectors @ weight.T + bias)
    with torch.no_grad():
        pooled = pool(*batch(texts(), 9, 0.0)).double().numpy()
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)


def test_bf16_dense_layers_give_fp32_vectors() -> None:
    dense = DenseLayer(in_features=WIDTH, out_features=4, activation="identity", folder="2_Dense")
    pool = TextPooling(Pooling(dense=(dense,), normalize=False)).to(torch.bfloat16)
    wide = TextPooling(Pooling(dense=(dense,), normalize=False))
    wide.load_state_dict(pool.state_dict())
    with torch.no_grad():
        pooled = pool(*batch(texts(), 9, 0.0, torch.bfloat16))
        exact = wide(*batch(texts(), 9, 0.0))
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, exact, rtol=0.05, atol=0.05)


def test_mean_pool_equals_the_mode_mean() -> None:
    hidden, segments = batch(texts(), 9, 1e4)
    pooled = mean_pool(hidden, segments)
    assert torch.equal(pooled, TextPooling(Pooling(normalize=False))(hidden, segments))
