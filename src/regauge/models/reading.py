"""How an architecture reads rows that hold several texts, or padding.

transformers takes a mask of four dimensions, and positions, as they are. What an architecture does
by itself where it is given neither (no token sees those after it; a window; positions that begin
behind padding's) must then be in them, or it would be lost without a word. Most of it is tried, not
looked up: a text must come out of a row as it does alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regauge.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of the kinds of layers that are known here."""
BEHIND_PADDING = 2
"""The first position of MPNet, whose padding is 1 whatever its configuration says."""


@dataclass(frozen=True)
class Reading:
    """How one architecture reads."""

    causal: bool = False
    """Whether no token sees those after it."""
    window: int | None = None
    """How far the tokens of its windowed layers see; None where it has none."""
    mixed: bool = False
    """Whether only some of its layers have the window: they take a mask for each kind."""
    first_position: int = 0
    """The position of a text's first token."""

    def masks(
        self, segments: Tensor, dtype: torch.dtype, *, packed: bool
    ) -> Tensor | dict[str, Tensor]:
        """Return what transformers takes as `attention_mask`; segments are [batch, length].

        In a packed row each segment is a text of its own; else a row is a text and padding.
        """
        bias = self.bias(segments, dtype, self.window, packed=packed)
        if not self.mixed:
            return bias
        return {FULL: self.bias(segments, dtype, None, packed=packed), SLIDING: bias}

    def bias(
        self, segments: Tensor, dtype: torch.dtype, window: int | None, *, packed: bool
    ) -> Tensor:
        """Return one mask, [batch, 1, length or 1, length]: 0, or the most negative number.

        Padding sees padding, so that no row of the softmax is empty. A causal window counts the
        token itself, any other reaches to both sides of it.
        """
        if packed:
            allowed = segments[:, :, None] == segments[:, None, :]
        else:
            allowed = (segments > 0)[:, None, :]
        length = segments.shape[1]
        if self.causal:
            allowed = allowed & _band(segments, 1 - (window or length), 0)
        elif window is not None:
            allowed = allowed & _band(segments, -window, window)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
        return bias.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


def reading(model: PreTrainedModel) -> Reading:
    """Return how a model reads; it is in fp32 on the CPU.

    Raises SettingsError for one that does not keep the texts of a row apart.
    """
    config: Any = model.config
    window, mixed = _window(config)
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    text = _text(model, pad)
    alone = _output(model, text)
    for causal in (False, True):
        for first in dict.fromkeys((0, pad + 1, BEHIND_PADDING)):
            found = Reading(causal, window, mixed, first)
            if alone is not None and _keeps_apart(model, found, text, alone):
                return found
    raise SettingsError(
        f"architecture '{config.model_type}' does not keep the texts of a row apart",
        "choose one that does, such as bert, roberta, modernbert, mpnet or llama",
    )


def longest(model: PreTrainedModel, found: Reading) -> int | None:
    """Return how many tokens a text can have; None where the architecture does not say."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else limit - found.first_position


def _window(config: PretrainedConfig) -> tuple[int | None, bool]:
    """Return how far an architecture's windowed layers see, and whether others have no window."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - {FULL, SLIDING}):
        raise SettingsError(
            f"architecture '{config.model_type}' has layers of kind '{unknown[0]}', whose masks are"
            " not known here",
            "choose one whose layers are of kind full_attention or sliding_attention",
        )
    reach = getattr(config, "sliding_window", None)
    if not reach or getattr(config, "use_sliding_window", None) is False or kinds == {FULL}:
        return None, False
    return reach, SLIDING in kinds


def _text(model: PreTrainedModel, pad: int) -> Tensor:
    """Return a text of six tokens, [1, 6], of the last words of the vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    count = embeddings.weight.shape[0]
    words = torch.tensor([number for number in range(max(0, count - 5), count) if number != pad])
    return words[torch.tensor([[0, 1, 2, 3, 1, 2]])]


def _keeps_apart(model: PreTrainedModel, found: Reading, text: Tensor, alone: Tensor) -> bool:
    """Return whether a text behind its own second half comes out of a row as it does alone."""
    row = torch.cat([text[:, 3:], text], 1)
    places = torch.cat([torch.arange(3), torch.arange(6)])[None] + found.first_position
    segments = torch.tensor([[1] * 3 + [2] * 6])
    masks = found.masks(segments, torch.float32, packed=True)
    both = _output(model, row, attention_mask=masks, position_ids=places)
    return both is not None and torch.allclose(both[:, 3:], alone, rtol=1e-3, atol=1e-4)


def _output(model: PreTrainedModel, row: Tensor, **how: Any) -> Tensor | None:
    """Return the hidden states of a row without dropout; None where the model refuses it."""
    inner: Any = model.base_model
    training = model.training
    try:
        with torch.no_grad():
            inner.eval()
            states: Tensor = inner(row, **how)[0]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    finally:
        model.train(training)
    return states


def _band(segments: Tensor, least: int, most: int) -> Tensor:
    """Return [length, length]: whether the key is between these distances of the query."""
    length = segments.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=segments.device)
    return square.triu(least).tril(most)
