"""One vector of a text's last hidden states, as `sentences.py` describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn, positive
from torch.nn.functional import gelu, normalize, relu

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.models import sentence_transformers

HIDDEN_MOST = torch.finfo(torch.float32).max
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": relu,
    "gelu": gelu,
    "identity": positive,
}


class Pool(nn.Module):
    """Hidden states in, vectors out."""

    def __init__(self, settings: sentence_transformers.Pooling) -> None:
        super().__init__()
        self._modes = [MODES[mode] for mode in settings.modes]
        self._normalized = settings.normalized
        self._activations = [ACTIVATIONS[layer.activation] for layer in settings.dense]
        self.dense = nn.ModuleList(
            nn.Linear(layer.inputs, layer.outputs, bias=layer.bias) for layer in settings.dense
        )

    def forward(self, hidden: Tensor, segments: Tensor) -> Tensor:
        """Return vectors, [batch, width] fp32; `segments`, [batch, length], are 0 for padding."""
        real = (segments > 0).to(torch.float32)[..., None]
        states = hidden.float()
        vectors = torch.cat([mode(states, real) for mode in self._modes], -1)
        for layer, activation in zip(self.dense, self._activations, strict=True):
            inner: nn.Linear = layer  # type: ignore[assignment]
            vectors = activation(layer(vectors.to(inner.weight.dtype)).float())
        return normalize(vectors, dim=-1) if self._normalized else vectors


def mean_pool(hidden: Tensor, segments: Tensor) -> Tensor:
    """Return the mean over real tokens, [batch, width] fp32."""
    return _mean(hidden.float(), (segments > 0).to(torch.float32)[..., None])


def _mean(states: Tensor, real: Tensor) -> Tensor:
    return (states * real).sum(1) / real.sum(1).clamp(min=1.0)


def _first(states: Tensor, real: Tensor) -> Tensor:
    del real
    return states[:, 0]


def _most(states: Tensor, real: Tensor) -> Tensor:
    return states.masked_fill(real == 0, -HIDDEN_MOST).amax(1)


def _mean_of_root(states: Tensor, real: Tensor) -> Tensor:
    return (states * real).sum(1) / real.sum(1).clamp(min=1.0).sqrt()


def _weighted(states: Tensor, real: Tensor) -> Tensor:
    """Return the mean in which the n-th token counts n times (Muennighoff, 2022, "SGPT")."""
    weights = torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)
    weights = weights[None, :, None] * real
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1.0)


def _last(states: Tensor, real: Tensor) -> Tensor:
    place = (real.sum(1, keepdim=True).to(torch.int64) - 1).clamp(min=0)
    return states.gather(1, place.expand(-1, 1, states.shape[2]))[:, 0]


MODES: dict[sentence_transformers.Mode, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _first,
    "max": _most,
    "mean_sqrt_len_tokens": _mean_of_root,
    "weightedmean": _weighted,
    "lasttoken": _last,
}
"""Each takes hidden states, [batch, length, width] fp32, and which tokens are real, [.., 1]."""
