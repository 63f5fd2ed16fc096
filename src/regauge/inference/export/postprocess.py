"""Converts program outputs to table columns, in the requested dtype."""

from __future__ import annotations

import importlib
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from regauge.data.values import FieldKind, to_cell
from regauge.system.errors import DataError
from regauge.tasks._entities import TagScheme

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regauge.data.values import Value
    from regauge.inference.export.manifest import Dtype, ProgramEntry
    from regauge.inference.export.preprocess import TextWords

    Decode = Callable[[np.ndarray], list[str]]


COLUMN_TYPES: dict[FieldKind, pa.DataType] = {
    "integer": pa.int64(),
    "uint64": pa.uint64(),
    "float": pa.float64(),
    "boolean": pa.bool_(),
}
"""Field kind -> kept column type; other kinds are texts."""
ENTITIES_TYPE = pa.list_(
    pa.struct(
        [
            ("text", pa.string()),
            ("label", pa.string()),
            ("start", pa.int64()),
            ("end", pa.int64()),
            ("score", pa.float32()),
        ]
    )
)
"""Type of the `entities` column."""
INT8_MAX = 127
Columns = dict[str, np.ndarray | pa.Array]


def import_pyarrow() -> None:
    """Import pyarrow's Parquet writer and the modules it loads at its first list.

    This takes a quarter of a second, once per process.
    """
    importlib.import_module("pyarrow.parquet")
    pa.array([0])


def build_columns(
    program: ProgramEntry,
    dtype: Dtype | Literal["auto"],
    outputs: np.ndarray,
    decode: Decode | None = None,
    words: Sequence[TextWords] = (),
) -> Columns:
    """Return name -> column for outputs, [records, width] fp32.

    A column is [records] or [records, numbers]. A classifier returns `predicted_label`, or the
    class index without labels, and `probabilities`: the softmax, or for a multi-label classifier
    the sigmoid. The latter also returns `predicted_labels`: the classes with a probability above
    0.5, [records] lists. `decode` converts generated tokens to texts. `words` belong to texts with
    `entities`, [records] lists. An `auto` dtype is float16 for normalized vectors, else float32.
    """
    if program.output_kind == "entities":
        tags = outputs.reshape(len(outputs), -1, 2)
        pairs = zip(tags, words, strict=True) if words else ()
        entities = [find_entities(cells, text, program.labels) for cells, text in pairs]
        return {"entities": pa.array(entities, ENTITIES_TYPE)}
    if program.output_kind == "text":
        return {"generated_text": pa.array(decode(outputs) if decode else [], pa.string())}
    if program.output_kind == "vectors":
        is_normalized = program.pooling is not None and program.pooling.normalize
        default: Dtype = "float16" if is_normalized else "float32"
        return convert_vectors(outputs, default if dtype == "auto" else dtype)
    if program.output_kind == "classes":
        best, labels = outputs.argmax(1), program.labels
        classes = pa.array(labels).take(pa.array(best)) if labels else best
        if program.activation == "sigmoid":
            several = _select_classes(outputs > 0, labels)
            columns = {"predicted_label": classes, "predicted_labels": several}
            return {**columns, "probabilities": _sigmoid(outputs)}
        return {"predicted_label": classes, "probabilities": _softmax(outputs)}
    if program.output_kind in {"values", "scores"}:
        values = outputs[:, 0]
        values = _sigmoid(values) if program.activation == "sigmoid" else values
        return {program.output_kind.removesuffix("s"): values}
    return {"output": outputs}


def _select_classes(is_selected: np.ndarray, labels: Sequence[str]) -> pa.Array:
    """Return each record's classes as a list; `is_selected` is [records, classes]."""
    offsets = np.zeros(len(is_selected) + 1, np.int32)
    np.cumsum(is_selected.sum(1), out=offsets[1:])
    numbers = pa.array(np.nonzero(is_selected)[1])
    classes = pa.array(labels).take(numbers) if labels else numbers
    return pa.ListArray.from_arrays(pa.array(offsets), classes)


def find_entities(
    tags: np.ndarray,  # [tokens, 2]: classes and their probabilities
    words: TextWords,
    labels: Sequence[str],
) -> list[dict[str, Any]]:
    """Return a text's entities with type, characters and mean probability.

    Without tag prefixes and `O`, each word is an entity.
    """
    classes, probabilities = tags[words.positions].T
    numbers = classes.astype(int).tolist()
    names = labels or tuple(map(str, range(max(numbers, default=0) + 1)))
    scheme = TagScheme(names)
    entities = []
    for entity in scheme.find_entities(numbers):
        start, end = int(words.spans[entity.start, 0]), int(words.spans[entity.stop - 1, 1])
        score = float(probabilities[entity.start : entity.stop].mean())
        label = scheme.types[entity.type]
        text = words.text[start:end]
        entities.append({"text": text, "label": label, "start": start, "end": end, "score": score})
    return entities


def convert_vectors(vectors: np.ndarray, dtype: Dtype) -> Columns:
    """Convert vectors, [records, width] fp32, to a dtype.

    int8: each vector is divided by the largest magnitude and multiplied by 127; multiply by the
    column `scale` to restore it. binary: the signs as bits, 1 for numbers above zero, packed with
    the first number in the highest bit of a byte. Raises DataError if float16 cannot hold a number.
    """
    if dtype == "binary":
        return {"embedding": np.packbits(vectors > 0, axis=1)}
    if dtype == "int8":
        scale = np.abs(vectors).max(1) / INT8_MAX
        divisor = np.where(scale > 0, scale, 1.0)[:, None]
        return {"embedding": np.rint(vectors / divisor).astype(np.int8), "scale": scale}
    largest = np.abs(vectors).max(initial=0)
    if dtype == "float16" and largest > np.finfo(dtype).max:
        problem = f"a vector has a number of {largest:.3g}, too large for float16"
        raise DataError(problem, "choose dtype float32 (for predict: output.dtype=float32)")
    return {"embedding": vectors.astype(dtype)}


def restore_vectors(
    stored: np.ndarray, dtype: Dtype, width: int, scale: np.ndarray | None = None
) -> np.ndarray:
    """Return vectors, [records, width] fp32, from `convert_vectors`' `embedding` column.

    `scale` is the int8 vectors' column, [records]. A binary vector has numbers of one magnitude, so
    that its length is 1.
    """
    if dtype == "binary":
        signs = np.unpackbits(stored, axis=1, count=width).astype(np.float32)
        unit: np.ndarray = (2 * signs - 1) / np.float32(np.sqrt(width))
        return unit
    vectors = stored.astype(np.float32, copy=False)
    return vectors if scale is None else vectors * scale[:, None]


def build_table(
    columns: Columns, kept: Mapping[str, Sequence[Any]], kinds: dict[str, FieldKind]
) -> pa.Table:
    """Return a table with the records' kept fields, followed by their output columns.

    `kinds` has each kept field's kind.
    """
    arrays = {name: _build_kept_column(values, kinds[name]) for name, values in kept.items()}
    return pa.table(arrays | {name: _to_arrow(values) for name, values in columns.items()})


def write_parquet(table: pa.Table, file: IO[bytes]) -> None:
    """Write a table as Parquet.

    Vector columns have neither a dictionary nor statistics: writing takes a fifth of the time, and
    the file is smaller.
    """
    import pyarrow.parquet as pq

    scalars = [
        column.name for column in table.schema if not pa.types.is_fixed_size_list(column.type)
    ]
    pq.write_table(
        table, file, compression="zstd", use_dictionary=scalars, write_statistics=scalars
    )


def _build_kept_column(values: Sequence[Value | None], kind: FieldKind) -> pa.Array:
    return pa.array([to_cell(value, kind) for value in values], COLUMN_TYPES.get(kind, pa.string()))


def _to_arrow(values: np.ndarray | pa.Array) -> pa.Array:
    if isinstance(values, pa.Array) or values.ndim == 1:
        return pa.array(values) if not isinstance(values, pa.Array) else values
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    probabilities: np.ndarray = 0.5 * (1 + np.tanh(0.5 * scores))  # it does not overflow
    return probabilities


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    probabilities: np.ndarray = powers / powers.sum(1, keepdims=True)
    return probabilities
