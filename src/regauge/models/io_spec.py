"""Program input and output specifications; does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from regauge.config import Settings
from regauge.models.settings import Interactions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from regauge.models.architectures import HeadKind

ROWS: Final = "rows"
LENGTH: Final = "length"
"""Names of dynamic tensor dimensions."""
DEFAULT_CLASS_NAME: Final = "LABEL_"
"""Prefix of transformers' default class names: `LABEL_0`, `LABEL_1`, …."""
OutputKind = Literal["vectors", "classes", "values", "scores", "entities", "text", "tensor"]
"""Output per record: text embedding, class scores, predicted value, candidate score, entities in a
text, generated text, or a custom module's tensor."""


class ModelHead(NamedTuple):
    """The head that a task adds to a transformers model."""

    kind: HeadKind
    outputs: int = 0
    """Number of classes."""


class TensorSpec(Settings):
    """A program input tensor."""

    name: str
    """Name of the `forward` argument."""
    shape: tuple[int | Literal["rows", "length"], ...]
    """Dimensions; dynamic ones have names."""
    dtype: Literal["int32", "int64", "float32"] = "float32"
    """Element type."""


def build_example_arrays(
    inputs: Sequence[TensorSpec], rows: int, length: int
) -> tuple[np.ndarray, ...]:
    """Return inputs filled with 1, which is valid as a token id and as a length."""
    import numpy as np

    sizes: dict[Any, Any] = {ROWS: rows, LENGTH: length}
    return tuple(
        np.ones([sizes.get(size, size) for size in spec.shape], spec.dtype) for spec in inputs
    )


def build_draws_spec(max_new_tokens: int) -> TensorSpec:
    """Return the input of a sampling program: a number in [0, 1) per new token."""
    return TensorSpec(name="draws", shape=(ROWS, max_new_tokens))


class RankingSpec(Settings):
    """How a ranking model reads a record."""

    num_query_texts: int
    """Number of query texts; they precede the candidate's texts."""
    is_calibrated: bool
    """Whether scores are logits of probabilities, not only an order."""
    encoders: Literal["shared", "separate"]
    """One encoder for all texts, or separate ones for queries and candidates."""
    interactions: Interactions
    """Network that computes the score from the features."""


class InputSpec(Settings):
    """The record fields that a program reads."""

    text_fields: tuple[str, ...] = ()
    """Text fields; if empty, a record has one text in any field."""
    max_lengths: tuple[int, ...] = ()
    """Maximum tokens per text, special tokens included."""
    is_pair: bool = False
    """Whether two texts are concatenated to a pair."""
    numeric_features: tuple[str, ...] = ()
    """Numeric features; values may be missing."""
    categorical_features: tuple[str, ...] = ()
    """Categorical features; values may be missing."""
    ranking: RankingSpec | None = None
    """Set for ranking models."""

    @property
    def num_separate_texts(self) -> int:
        """Number of separately encoded texts per record."""
        return 1 if self.is_pair else max(1, len(self.text_fields))

    def max_row_tokens(self, positions: int | None) -> int | None:
        """Return the maximum row length in tokens, by the text and model limits.

        `positions` is the model limit, or None. Returns None if there is no limit at all.
        """
        if not self.max_lengths:
            return positions
        limit = sum(self.max_lengths) if self.is_pair else max(self.max_lengths)
        return limit if positions is None else min(limit, positions)


def program_inputs(spec: InputSpec) -> tuple[TensorSpec, ...]:
    """Return a program's input tensors for a record specification.

    `tokens` and `lengths` are the texts, padded; `starts` is where the second text of a pair
    starts. Candidates have `numbers` (NaN if missing) and `categories` (embedding table rows).
    """
    texts = (spec.num_separate_texts,) if spec.num_separate_texts > 1 else ()
    inputs = [
        TensorSpec(name="tokens", shape=(ROWS, *texts, LENGTH), dtype="int32"),
        TensorSpec(name="lengths", shape=(ROWS, *texts), dtype="int32"),
    ]
    if spec.is_pair:
        inputs.append(TensorSpec(name="starts", shape=(ROWS,), dtype="int32"))
    if spec.ranking is not None:  # compilers do not support empty tensors
        numbers, categories = (
            max(1, len(spec.numeric_features)),
            max(1, len(spec.categorical_features)),
        )
        inputs.append(TensorSpec(name="numbers", shape=(ROWS, numbers)))
        inputs.append(TensorSpec(name="categories", shape=(ROWS, categories), dtype="int64"))
    return tuple(inputs)


def read_class_names(id2label: Mapping[Any, Any] | None) -> tuple[str, ...]:
    """Return the class names in a configuration; empty for the default names."""
    by_index = {int(index): str(name) for index, name in (id2label or {}).items()}
    names = tuple(by_index[index] for index in sorted(by_index))
    return () if all(name.startswith(DEFAULT_CLASS_NAME) for name in names) else names
