"""How an architecture reads rows that hold several texts, or padding.

transformers takes a mask of four dimensions, and positions, as they are. What an architecture does
by itself where it is given neither (no token sees those after it; a window; positions that begin
behind padding's) must then be in them, or it would be lost without a word. Most of it is tried, not
looked up: a text must come out of a row as it does alone. A model without weights is tried by a
small likeness of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regauge.errors import SettingsError
from regauge.models.init_weights import HOST, META, InitialWeights, make_buffers, materialize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of the kinds of layers that are known here."""
HEADS, WORDS = 2, 64
"""Of a likeness: attention heads, and words beside the special ones."""
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
    """Return how a model reads; it is in fp32 on the CPU, or on the meta device.

    Raises SettingsError for one that does not keep the texts of a row apart, or cannot compute.
    """
    config: Any = model.config
    window, mixed = _window(config)
    _check_heads(config)
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    with HOST:
        for likeness in _likenesses(model) if _empty(model) else (model,):
            text = _text(likeness, pad)
            alone = _output(likeness, text)
            for causal in (False, True):
                for first in dict.fromkeys((0, pad + 1, BEHIND_PADDING)):
                    found = Reading(causal, window, mixed, first)
                    if alone is not None and _keeps_apart(likeness, found, text, alone):
                        return found
    raise SettingsError(
        f"architecture '{config.model_type}' does not keep the texts of a row apart",
        "choose one that does, such as bert, roberta, modernbert, mpnet or llama",
    )


def longest(model: PreTrainedModel, found: Reading) -> int | None:
    """Return how many tokens a text can have; None where the architecture does not say."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else limit - found.first_position


def _empty(model: PreTrainedModel) -> bool:
    return next(model.parameters()).is_meta


def _likenesses(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield small models of an architecture with random weights, the smallest first.

    What it does with masks and positions depends neither on its width nor on its depth.
    """
    kind: Any = type(model.base_model)
    for narrow, shallow in ((True, True), (False, True), (True, False)):
        config = copy.deepcopy(model.config)
        try:
            _shrink(config, narrow=narrow, shallow=shallow)
            with META:
                small = kind._from_config(config, dtype=torch.float32)  # noqa: SLF001 - what an auto class calls
            make_buffers(small)
            materialize(small, InitialWeights(copy.deepcopy(small), 0, {}))
        except (AssertionError, RuntimeError, TypeError, ValueError, IndexError):
            continue
        yield small


def _shrink(config: Any, *, narrow: bool, shallow: bool) -> None:
    """Make a configuration smaller by the names that all of transformers' share."""
    if shallow:
        kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        config.num_hidden_layers = max(1, len(kinds))
        if kinds:
            config.layer_types = kinds
    if narrow:
        heads = config.num_attention_heads
        width = HEADS * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        if (groups := getattr(config, "num_key_value_heads", None)) is not None:
            config.num_key_value_heads = HEADS if groups == heads else 1
        config.num_attention_heads, config.hidden_size = HEADS, width
        if getattr(config, "intermediate_size", None) is not None:
            config.intermediate_size = 2 * width
    special = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    words = WORDS + max([value for value in special if isinstance(value, int)], default=0)
    config.vocab_size = min(config.vocab_size, words)


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


def _check_heads(config: Any) -> None:
    """Raise SettingsError where heads cannot share those of keys and values evenly."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise SettingsError(
            f"{heads} heads of attention cannot share {groups} of keys and values evenly",
            "set model.config.num_key_value_heads to what divides num_attention_heads",
        )


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
