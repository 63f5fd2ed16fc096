"""Attention masks and positions of rows that hold several texts, or padding.

transformers uses a 4-D mask and explicit positions unchanged. They must then contain everything
that the architecture adds by default: causality, a sliding window, an offset of the positions.
Otherwise this is lost silently.

`detect_attention_spec` finds these properties by trial: a text in a packed row must have the same
hidden states as the text alone. A model without weights is tested with a tiny copy of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regauge.errors import SettingsError
from regauge.models.init_weights import CPU, META, InitialWeights, materialize, materialize_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of the supported layer types."""
TINY_HEADS, TINY_VOCABULARY = 2, 64
"""Attention heads and vocabulary size (without special tokens) of a tiny copy."""
MPNET_FIRST_POSITION = 2
"""First position id of MPNet, whose padding id is 1 whatever its configuration contains."""


@dataclass(frozen=True)
class AttentionSpec:
    """Attention properties of one architecture."""

    is_causal: bool = False
    """Whether tokens attend only to themselves and earlier tokens."""
    window: int | None = None
    """Size of the sliding window in tokens; None without one."""
    has_mixed_layers: bool = False
    """Whether only some layers have the window; then there is a mask for each layer type."""
    first_position: int = 0
    """Position id of a text's first token."""

    def build_masks(
        self, segments: Tensor, dtype: torch.dtype, *, packed: bool
    ) -> Tensor | dict[str, Tensor]:
        """Build the `attention_mask` argument of transformers; segments are [batch, length].

        In a packed row each segment is a separate text; otherwise a row is one text and padding.
        """
        bias = self.build_bias(segments, dtype, self.window, packed=packed)
        if not self.has_mixed_layers:
            return bias
        return {FULL: self.build_bias(segments, dtype, None, packed=packed), SLIDING: bias}

    def build_bias(
        self, segments: Tensor, dtype: torch.dtype, window: int | None, *, packed: bool
    ) -> Tensor:
        """Build an additive mask, [batch, 1, length or 1, length]: 0 or the lowest finite value.

        Padding attends to padding, so that no row of the softmax is empty. A causal window includes
        the token itself; a bidirectional one extends this far to both sides.
        """
        if packed:
            allowed = segments[:, :, None] == segments[:, None, :]
        else:
            allowed = (segments > 0)[:, None, :]
        length = segments.shape[1]
        if self.is_causal:
            allowed = allowed & _band(segments, 1 - (window or length), 0)
        elif window is not None:
            allowed = allowed & _band(segments, -window, window)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
        return bias.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


def detect_attention_spec(model: PreTrainedModel) -> AttentionSpec:
    """Detect the attention properties of a model, in fp32 on the CPU or on the meta device.

    Raises SettingsError if the model does not isolate the texts of a packed row, or cannot run.
    """
    config: Any = model.config
    window, has_mixed_layers = _read_window(config)
    _check_heads(config)
    pad_id = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    with CPU:
        for sample in _tiny_copies(model) if _has_no_weights(model) else (model,):
            text = _sample_text(sample, pad_id)
            expected = _hidden_states(sample, text)
            for is_causal in (False, True):
                for position in dict.fromkeys((0, pad_id + 1, MPNET_FIRST_POSITION)):
                    spec = AttentionSpec(is_causal, window, has_mixed_layers, position)
                    if expected is not None and _is_packed_equal(sample, spec, text, expected):
                        return spec
    raise SettingsError(
        f"architecture '{config.model_type}' does not isolate the texts of a packed row",
        "choose one that does, such as bert, roberta, modernbert, mpnet or llama",
    )


def max_text_tokens(model: PreTrainedModel, spec: AttentionSpec) -> int | None:
    """Return the maximum number of tokens of a text; None if the architecture has no limit."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else limit - spec.first_position


def _has_no_weights(model: PreTrainedModel) -> bool:
    return next(model.parameters()).is_meta


def _tiny_copies(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield small models of the same architecture with random weights, the smallest first.

    How an architecture uses masks and positions depends neither on its width nor on its depth.
    """
    model_class: Any = type(model.base_model)
    for narrow, shallow in ((True, True), (False, True), (True, False)):
        config = copy.deepcopy(model.config)
        try:
            _shrink(config, narrow=narrow, shallow=shallow)
            with META:
                small = model_class._from_config(config, dtype=torch.float32)  # noqa: SLF001 - as auto classes do
            materialize_buffers(small)
            materialize(small, InitialWeights(copy.deepcopy(small), 0, {}))
        except (AssertionError, RuntimeError, TypeError, ValueError, IndexError):
            continue
        yield small


def _shrink(config: Any, *, narrow: bool, shallow: bool) -> None:
    """Reduce the sizes in a configuration, by the field names that transformers shares."""
    if shallow:
        layer_types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        config.num_hidden_layers = max(1, len(layer_types))
        if layer_types:
            config.layer_types = layer_types
    if narrow:
        heads = config.num_attention_heads
        width = TINY_HEADS * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        if (groups := getattr(config, "num_key_value_heads", None)) is not None:
            config.num_key_value_heads = TINY_HEADS if groups == heads else 1
        config.num_attention_heads, config.hidden_size = TINY_HEADS, width
        if getattr(config, "intermediate_size", None) is not None:
            config.intermediate_size = 2 * width
    special = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    last_special = max([value for value in special if isinstance(value, int)], default=0)
    config.vocab_size = min(config.vocab_size, TINY_VOCABULARY + last_special)


def _read_window(config: PretrainedConfig) -> tuple[int | None, bool]:
    """Return the size of the sliding window, and whether some layers have no window."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - {FULL, SLIDING}):
        raise SettingsError(
            f"architecture '{config.model_type}' has unsupported layers of type '{unknown[0]}'",
            "choose one with layers of type full_attention or sliding_attention",
        )
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", None) is False or kinds == {FULL}:
        return None, False
    return window, SLIDING in kinds


def _check_heads(config: Any) -> None:
    """Raise SettingsError if query heads cannot share key-value heads evenly."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise SettingsError(
            f"{heads} attention heads cannot share {groups} key-value heads evenly",
            "set model.config.num_key_value_heads to a divisor of num_attention_heads",
        )


def _sample_text(model: PreTrainedModel, pad_id: int) -> Tensor:
    """Return a text of six tokens, [1, 6], from the end of the vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    count = embeddings.weight.shape[0]
    tokens = torch.tensor([token for token in range(max(0, count - 5), count) if token != pad_id])
    return tokens[torch.tensor([[0, 1, 2, 3, 1, 2]])]


def _is_packed_equal(
    model: PreTrainedModel,
    spec: AttentionSpec,
    text: Tensor,  # [1, 6]
    expected: Tensor,  # [1, 6, width]
) -> bool:
    """Return whether a text that is packed after another one has the expected hidden states."""
    row = torch.cat([text[:, 3:], text], 1)
    positions = torch.cat([torch.arange(3), torch.arange(6)])[None] + spec.first_position
    segments = torch.tensor([[1] * 3 + [2] * 6])
    masks = spec.build_masks(segments, torch.float32, packed=True)
    states = _hidden_states(model, row, attention_mask=masks, position_ids=positions)
    return states is not None and torch.allclose(states[:, 3:], expected, rtol=1e-3, atol=1e-4)


def _hidden_states(model: PreTrainedModel, row: Tensor, **inputs: Any) -> Tensor | None:
    """Return the hidden states of a row without dropout; None if the model raises an error."""
    inner: Any = model.base_model
    training = model.training
    try:
        with torch.no_grad():
            inner.eval()
            states: Tensor = inner(row, **inputs)[0]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    finally:
        model.train(training)
    return states


def _band(segments: Tensor, min_distance: int, max_distance: int) -> Tensor:
    """Return a mask, [length, length], of keys between two signed distances from the query."""
    length = segments.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=segments.device)
    return square.triu(min_distance).tril(max_distance)
