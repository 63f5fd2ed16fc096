"""Attention masks and positions for rows with several texts or padding.

transformers uses a 4-D mask and explicit positions unchanged. They must then contain everything
that the architecture adds by default: causality, a sliding window, a position offset. Otherwise
these are lost silently.

`detect_attention_spec` finds these properties by trial: a text in a packed row must give the same
outputs as alone. A model without weights is tested with a tiny copy. An architecture that fails the
trial gets transformers' padding mask instead, for rows with one text.

`pack_texts` gathers texts into packed rows; `unpack_texts` scatters the hidden states back, so that
pooling and heads read texts.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from regauge.models.init_weights import CPU, META, InitialWeights, materialize, materialize_buffers
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from regauge.models.losses import Batch

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names for the supported layer types."""
LIMIT_FIELDS = ("max_position_embeddings", "max_seq_len")
"""Configuration fields with the maximum length; -1 is unlimited."""
MIN_TOLERANCE, NOISE_FACTOR = 2e-5, 50
"""Tolerance of a trial relative to the largest number, and relative to measured rounding."""
FAILURES = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors from a model that cannot compute a row, or cannot have a given size."""
TINY_HEADS, TINY_VOCABULARY = 2, 64
"""Attention heads and vocabulary size (without special tokens) of a tiny copy."""
TOKEN_COLUMNS = ("tokens", "positions", "model_positions", "types")
"""Arrays with one value per token that a model reads."""
TOKEN_LOGITS = 3
"""Dimensions of per-token logits; per-text logits have one less."""
MIN_POSITIONS = 32
"""Positions in a tiny copy; trial rows are shorter."""
MPNET_FIRST_POSITION = 2
"""MPNet's first position id; its padding id is 1 whatever the configuration says."""


@dataclass(frozen=True)
class AttentionSpec:
    """An architecture's attention properties."""

    is_causal: bool = False
    """Whether tokens attend only to themselves and earlier tokens."""
    window: int | None = None
    """Sliding window size in tokens, if any."""
    has_mixed_layers: bool = False
    """Whether only some layers have the window; then there is a mask for each layer type."""
    first_position: int = 0
    """Position id of a text's first token."""
    isolates_texts: bool = True
    """Whether a row may hold several texts; otherwise the model gets no mask but the padding's."""
    unpacks_texts: bool = False
    """Whether texts computed in packed rows give the same head outputs, if a head is read."""

    def build_inputs(
        self, segments: Tensor, positions: Tensor, dtype: torch.dtype, *, packed: bool
    ) -> dict[str, Any]:
        """Return the mask and position ids as transformers arguments.

        Segments and positions are [batch, length]. A model that does not isolate texts numbers the
        positions itself.
        """
        masks = {"attention_mask": self.build_masks(segments, dtype, packed=packed)}
        if not self.isolates_texts:
            return masks
        offset = self.first_position
        return {**masks, "position_ids": positions + offset if offset else positions}

    def skip_padding_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return positions that do not count padding tokens inside a text, [batch, length].

        Architectures with an offset number them this way: the padding id has its own position.
        """
        is_padding = tokens == self.first_position - 1
        return torch.where(is_padding, -1, positions - is_padding.cumsum(1, dtype=positions.dtype))

    def build_masks(
        self, segments: Tensor, dtype: torch.dtype, *, packed: bool
    ) -> Tensor | dict[str, Tensor]:
        """Build the `attention_mask` argument of transformers; segments are [batch, length].

        In a packed row each segment is a separate text; otherwise a row is one text and padding.
        """
        if not self.isolates_texts:
            return (segments > 0).long()
        bias = self.build_bias(segments, dtype, self.window, packed=packed)
        if not self.has_mixed_layers:
            return bias
        return {FULL: self.build_bias(segments, dtype, None, packed=packed), SLIDING: bias}

    def build_bias(
        self, segments: Tensor, dtype: torch.dtype, window: int | None, *, packed: bool
    ) -> Tensor:
        """Build an additive mask, [batch, 1, length or 1, length]: 0 or the lowest finite value.

        Padding attends to padding, so that no softmax row is empty. A causal window includes the
        token itself; a bidirectional one extends this far to both sides.
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


def detect_attention_spec(
    model: PreTrainedModel, *, packs_texts: bool = True, has_head: bool = False
) -> AttentionSpec:
    """Detect a model's attention properties, in fp32 on the CPU or on the meta device.

    With `packs_texts`, a row may hold several texts. With `has_head`, head outputs are compared,
    otherwise hidden states. Raises SettingsError if the model mixes texts in a packed row, if
    padding changes its outputs, or if it cannot run.
    """
    config: Any = model.config
    unknown = sorted(_layer_types(config) - {FULL, SLIDING})
    if unknown and packs_texts:
        raise SettingsError(
            f"architecture '{config.model_type}' has unsupported layers of type '{unknown[0]}'",
            "choose one with layers of type full_attention or sliding_attention",
        )
    _check_heads(config)
    with CPU:
        for sample in _list_samples(model, has_head=has_head):
            trial = AttentionTrial(sample, has_head=has_head)
            spec = None if unknown else trial.find_packed_spec()
            if not packs_texts:
                spec = trial.find_padded_spec(spec)
                if spec is not None:
                    spec = replace(spec, unpacks_texts=trial.unpacks_texts(spec))
            if spec is not None:
                return spec
    examples = "such as bert, roberta, modernbert, mpnet or llama"
    if packs_texts:
        problem = f"architecture '{config.model_type}' does not isolate the texts of a packed row"
        raise SettingsError(problem, f"choose one that does, {examples}")
    problem = f"padding changes the outputs of architecture '{config.model_type}'"
    raise SettingsError(problem, f"choose another one, {examples}")


def max_text_tokens(model: PreTrainedModel, spec: AttentionSpec) -> int | None:
    """Return the maximum text length in tokens; None if unlimited."""
    limits = (getattr(model.config, name, None) for name in LIMIT_FIELDS)
    limit = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    return None if limit is None else limit - spec.first_position


def pack_texts(batch: Batch) -> Batch:
    """Return the model's inputs in `packed` rows, [rows, row length].

    `segments` number the texts in the batch from 1, and 0 is padding. `keys` belong to the texts.
    """
    packed, length = batch["packed"], batch["tokens"].shape[1]
    numbers = packed.clamp(min=0)
    rows = {name: batch[name].flatten()[numbers] for name in TOKEN_COLUMNS if name in batch}
    texts = numbers // length
    segments = torch.where(packed < 0, 0, texts + 1)
    return {**rows, "segments": segments, "keys": batch["keys"][texts]}


def unpack_texts(states: Tensor, places: Tensor) -> Tensor:
    """Scatter packed hidden states back to texts, [batch, length, width].

    Padding gets an arbitrary token's state.
    """
    rows = states.flatten(0, 1).index_select(0, places.flatten())
    return rows.view(*places.shape, -1)


@contextmanager
def unpacked_outputs(model: PreTrainedModel, places: Tensor | None) -> Iterator[None]:
    """Let a head read per-text states while the encoder computes packed rows."""
    if places is None:
        yield
        return
    base_model: Any = model.base_model

    def unpack(_module: nn.Module, _args: Any, outputs: Any) -> Any:
        states = unpack_texts(outputs.last_hidden_state, places)
        outputs.last_hidden_state = states
        if outputs.get("pooler_output") is not None:
            outputs.pooler_output = base_model.pooler(states)
        return outputs

    hook = base_model.register_forward_hook(unpack)
    try:
        yield
    finally:
        hook.remove()


def _list_samples(model: PreTrainedModel, *, has_head: bool) -> Iterator[PreTrainedModel]:
    """Yield the model; without weights, small random models of its architecture, smallest first.

    How an architecture uses masks and positions depends on neither width nor depth.
    """
    if not next(model.parameters()).is_meta:
        yield model
        return
    model_class: Any = type(model if has_head else model.base_model)
    for narrow, shallow in ((True, True), (False, True), (True, False)):
        config = copy.deepcopy(model.config)
        try:
            _shrink(config, narrow=narrow, shallow=shallow)
            with META:
                small = model_class._from_config(config, dtype=torch.float32)  # noqa: SLF001 - as auto classes do
            materialize_buffers(small)
            materialize(small, InitialWeights(copy.deepcopy(small), 0, {}))
        except FAILURES:
            continue
        yield small


def _shrink(config: Any, *, narrow: bool, shallow: bool) -> None:
    """Reduce the sizes in a configuration, by the field names that transformers shares.

    The positions are enough for the trials, whatever the model has.
    """
    for name in LIMIT_FIELDS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and 0 < limit < MIN_POSITIONS:
            setattr(config, name, MIN_POSITIONS)
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


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _read_window(config: PretrainedConfig) -> tuple[int | None, bool]:
    """Return the sliding window size, and whether some layers lack it."""
    kinds = _layer_types(config)
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", None) is False or kinds == {FULL}:
        return None, False
    return window, SLIDING in kinds


def _check_heads(config: Any) -> None:
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise SettingsError(
            f"{heads} attention heads cannot share {groups} key-value heads evenly",
            "set model.config.num_key_value_heads to a divisor of num_attention_heads",
        )


class AttentionTrial:
    """Compares the outputs of a sample text with those in a row with another text or padding."""

    def __init__(self, model: PreTrainedModel, *, has_head: bool) -> None:
        self._model = model
        self._has_head = has_head
        pad_id: Any = model.config.pad_token_id
        self._pad_id: int = pad_id if isinstance(pad_id, int) else 0
        self._text = self._sample_text()
        self._states = self._compute(self._text)
        self._tolerance = self._measure_tolerance()
        # The outputs of a causal model do not depend on later tokens.
        self._is_causal = self._is_equal(self._compute(self._text[:, :3]), self._states[:, :3])

    def find_packed_spec(self) -> AttentionSpec | None:
        """Return the properties with which a text after another one is isolated."""
        window, has_mixed_layers = _read_window(self._model.config)
        row = torch.cat([self._text[:, 3:], self._text], 1)
        indices = torch.cat([torch.arange(3), torch.arange(6)])[None]
        segments = torch.tensor([[1] * 3 + [2] * 6])
        for is_causal in (self._is_causal, not self._is_causal):
            for first_position in dict.fromkeys((0, self._pad_id + 1, MPNET_FIRST_POSITION)):
                spec = AttentionSpec(is_causal, window, has_mixed_layers, first_position)
                inputs = spec.build_inputs(segments, indices, torch.float32, packed=True)
                if self._is_equal(self._compute(row, **inputs)[:, 3:], self._states):
                    return spec
        return None

    def find_padded_spec(self, packed_spec: AttentionSpec | None) -> AttentionSpec | None:
        """Return the properties with which padding does not change the outputs of a text."""
        padded_spec = AttentionSpec(is_causal=self._is_causal, isolates_texts=False)
        candidates = (packed_spec, padded_spec) if packed_spec else (padded_spec,)
        return next((spec for spec in candidates if self._ignores_padding(spec)), None)

    def unpacks_texts(self, spec: AttentionSpec) -> bool:
        """Return whether a packed row with two texts gives the outputs of each text alone."""
        if not (spec.isolates_texts and self._has_head):
            return spec.isolates_texts
        row = torch.cat([self._text[:, :3], self._text, self._text[:, :1]], 1)
        positions = torch.cat([torch.arange(3), torch.arange(6), torch.zeros(1)]).int()[None]
        segments = torch.tensor([[1] * 3 + [2] * 6 + [0]])
        places = torch.tensor([[0, 1, 2, 0, 0, 0], [3, 4, 5, 6, 7, 8]])
        inputs = spec.build_inputs(segments, positions, torch.float32, packed=True)
        with unpacked_outputs(self._model, places):
            outputs = self._compute(row, has_head=True, **inputs)
        texts = (self._text[:, :3], self._text)
        expected = [self._compute(text, has_head=True) for text in texts]
        if len(outputs) != len(texts) or outputs.ndim != expected[0].ndim:
            return False
        if outputs.ndim == TOKEN_LOGITS:
            outputs = torch.cat([outputs[0, :3], outputs[1]])
            expected = [logits[0] for logits in expected]
        return self._is_equal(outputs, torch.cat(expected))

    def _ignores_padding(self, spec: AttentionSpec) -> bool:
        """Return whether a padded text gives the same outputs as the text alone."""
        row = torch.cat([self._text, torch.zeros(1, 3, dtype=torch.int64)], 1)
        segments = torch.tensor([[1] * 6 + [0] * 3])
        inputs = spec.build_inputs(segments, torch.arange(9)[None], torch.float32, packed=False)
        if self._has_head:
            alone = self._compute(self._text, has_head=True)
            return self._is_equal(self._compute(row, has_head=True, **inputs), alone)
        return self._is_equal(self._compute(row, **inputs)[:, :6], self._states)

    def _measure_tolerance(self) -> float:
        """Return the largest rounding error, measured in a batch with the same text.

        Small random models need a low tolerance: one more token changes little.
        """
        if not self._states.numel():
            return 0.0
        scale = float(self._states.abs().max())
        batch = self._compute(self._text.expand(4, -1))
        noise = float((batch - self._states).abs().max()) if batch.numel() else 0.0
        return max(MIN_TOLERANCE * scale, NOISE_FACTOR * noise)

    def _is_equal(self, outputs: Tensor, expected: Tensor) -> bool:
        """Return whether outputs are equal up to rounding; false if one of them is empty."""
        has_values = outputs.shape == expected.shape and outputs.numel() > 0
        return has_values and float((outputs - expected).abs().max()) <= self._tolerance

    def _sample_text(self) -> Tensor:
        """Return six tokens from the end of the vocabulary, [1, 6]."""
        embeddings: Any = self._model.get_input_embeddings()
        count = embeddings.weight.shape[0]
        last_ids = range(max(0, count - 5), count)
        tokens = torch.tensor([token for token in last_ids if token != self._pad_id])
        return tokens[torch.tensor([[0, 1, 2, 3, 1, 2]])]

    def _compute(self, row: Tensor, *, has_head: bool = False, **inputs: Any) -> Tensor:
        """Return the outputs of a row without dropout; an empty tensor if the model fails.

        They are logits, [1, labels], with a head, otherwise hidden states, [1, tokens, width].
        """
        inner: Any = self._model if has_head else self._model.base_model
        training = self._model.training
        try:
            with torch.no_grad():
                self._model.eval()
                outputs: Tensor = inner(row, **inputs)[0]
        except FAILURES:
            return torch.empty(1, 0)
        finally:
            self._model.train(training)
        return outputs


def _band(segments: Tensor, min_distance: int, max_distance: int) -> Tensor:
    """Return a mask, [length, length], of keys between two signed distances from the query."""
    length = segments.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=segments.device)
    return square.triu(min_distance).tril(max_distance)
