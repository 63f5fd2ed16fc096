"""Pools last hidden states to one vector, as `sentence_transformers.Pooling` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn, positive
from torch.nn.functional import gelu, normalize, relu

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.models import sentence_transformers

MAX_HIDDEN = torch.finfo(torch.float32).max
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": relu,
    "gelu": gelu,
    "identity": positive,
}


class TextPooling(nn.Module):
    """Pools hidden states, then applies dense layers and normalization."""

    def __init__(self, settings: sentence_transformers.Pooling) -> None:
        super().__init__()
        self._modes = [MODES[mode] for mode in settings.modes]
        self._normalized = settings.normalize
        self._width = settings.truncate_dim
        self._activations = [ACTIVATIONS[layer.activation] for layer in settings.dense]
        self.dense = nn.ModuleList(
            nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
            for layer in settings.dense
        )

    def forward(self, hidden: Tensor, segments: Tensor) -> Tensor:
        """Return vectors, [batch, width] fp32.

        Hidden states are [batch, length, width]; `segments`, [batch, length], is 0 for padding.
        """
        real = (segments > 0).to(torch.float32)[..., None]
        states = hidden.float()
        vectors = torch.cat([mode(states, real) for mode in self._modes], -1)
        for layer, activation in zip(self.dense, self._activations, strict=True):
            linear: nn.Linear = layer  # type: ignore[assignment]
            vectors = activation(layer(vectors.to(linear.weight.dtype)).float())
        vectors = normalize(vectors, dim=-1) if self._normalized else vectors
        return vectors if self._width is None else vectors[:, : self._width]


def mean_pool(hidden: Tensor, segments: Tensor) -> Tensor:
    """Return the mean hidden state over real tokens, [batch, width] fp32."""
    return _mean(hidden.float(), (segments > 0).to(torch.float32)[..., None])


def _mean(states: Tensor, real: Tensor) -> Tensor:
    return (states * real).sum(1) / real.sum(1).clamp(min=1.0)


def _first_token(states: Tensor, real: Tensor) -> Tensor:
    del real
    return states[:, 0]


def _max(states: Tensor, real: Tensor) -> Tensor:
    return states.masked_fill(real == 0, -MAX_HIDDEN).amax(1)


def _mean_sqrt_length(states: Tensor, real: Tensor) -> Tensor:
    return (states * real).sum(1) / real.sum(1).clamp(min=1.0).sqrt()


def _position_weighted_mean(states: Tensor, real: Tensor) -> Tensor:
    """Return the mean with weight n for the n-th token (SGPT, Muennighoff, 2022)."""
    weights = torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)
    weights = weights[None, :, None] * real
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1.0)


def _last_token(states: Tensor, real: Tensor) -> Tensor:
    index = (real.sum(1, keepdim=True).to(torch.int64) - 1).clamp(min=0)
    return states.gather(1, index.expand(-1, 1, states.shape[2]))[:, 0]


MODES: dict[sentence_transformers.PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _first_token,
    "max": _max,
    "mean_sqrt_len_tokens": _mean_sqrt_length,
    "weightedmean": _position_weighted_mean,
    "lasttoken": _last_token,
}
"""Pooling functions of hidden states, [batch, length, width] fp32.

The second argument is 1 for real tokens and 0 for padding, [batch, length, 1].
"""
