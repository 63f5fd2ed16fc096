"""Model inputs and outputs as named tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from regauge.inference.export.postprocess import build_columns
from regauge.inference.export.records import TensorRecords
from regauge.serving.model_version import Inputs
from regauge.serving.open_inference.tensor_protocol import TEXT, OutputTensor
from regauge.serving.request_errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.inference.export.manifest import ProgramEntry
    from regauge.serving.model_version import ModelVersion

DATA_TYPES = {"int32": "INT32", "int64": "INT64", "float32": "FP32"}
DEFAULT_TEXT_INPUT = "text"
"""Text input name if the model reads a single text, whatever the field."""
MAX_TEXT_DIMENSIONS = 2


class TensorEntry(NamedTuple):
    """A model input or output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """Dimensions; -1 is any size."""
    is_optional: bool = False

    def to_document(self) -> dict[str, Any]:
        """Return the entry in a model's metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    def to_config(self, data_type: str) -> dict[str, Any]:
        """Return the entry in a model's configuration, with the data type used there."""
        config = {"name": self.name, "data_type": data_type, "dims": list(self.shape)}
        return {**config, "optional": True} if self.is_optional else config


def describe_inputs(program: ProgramEntry) -> list[TensorEntry]:
    """Return a model's inputs: texts and features, or tensors."""
    if program.tokenization is None:
        return [
            TensorEntry(
                spec.name,
                DATA_TYPES[spec.dtype],
                tuple(size if isinstance(size, int) else -1 for size in spec.shape),
            )
            for spec in program.inputs
        ]
    fields = program.fields
    texts = [TensorEntry(name, TEXT, (-1,)) for name in _text_names(program)]
    numbers = [
        TensorEntry(name, "FP32", (-1,), is_optional=True) for name in fields.numeric_features
    ]
    categories = [
        TensorEntry(name, TEXT, (-1,), is_optional=True) for name in fields.categorical_features
    ]
    return [*texts, *numbers, *categories]


def describe_outputs(program: ProgramEntry) -> list[TensorEntry]:
    """Return the outputs of a model that computes records."""
    size = program.output_size
    if program.output_kind == "vectors":
        return [TensorEntry("embedding", "FP32", (-1, size))]
    if program.output_kind == "classes":
        label_type = TEXT if program.labels else "INT64"
        label = TensorEntry("predicted_label", label_type, (-1,))
        return [label, TensorEntry("probabilities", "FP32", (-1, size))]
    if program.output_kind in {"values", "scores"}:
        return [TensorEntry(program.output_kind.removesuffix("s"), "FP32", (-1,))]
    if program.output_kind == "entities":
        return [TensorEntry("entities", TEXT, (-1,))]
    return [TensorEntry("output", "FP32", (-1, size))]


def build_inputs(
    program: ProgramEntry,
    tensors: Mapping[str, np.ndarray],
    prompt: str | None,
    truncate: bool,  # noqa: FBT001 - as in the body of a request
) -> Inputs:
    """Build texts and features from tensors; raises InvalidRequestError.

    Missing features and NaN are missing values.
    """
    _check_names(program, tensors)
    columns = {name: _read_texts(name, tensors[name]) for name in _text_names(program)}
    count = len(next(iter(columns.values())))
    numbers, categories = program.fields.numeric_features, program.fields.categorical_features
    values: dict[str, list[Any]] = {
        **{name: _read_numbers(name, tensors[name]) for name in numbers if name in tensors},
        **{name: _read_texts(name, tensors[name]) for name in categories if name in tensors},
    }
    for name, column in {**columns, **values}.items():
        if len(column) != count:
            raise InvalidRequestError(f"input '{name}' has {len(column)} records, not {count}")
    return Inputs(list(columns.values()), prompt=prompt, values=values, truncate=truncate)


def build_records(program: ProgramEntry, tensors: Mapping[str, np.ndarray]) -> TensorRecords:
    """Build records from a custom module's input tensors; raises InvalidRequestError."""
    _check_names(program, tensors)
    arrays = []
    for entry, spec in zip(describe_inputs(program), program.inputs, strict=True):
        array = tensors[entry.name]
        if array.dtype != np.dtype(spec.dtype):
            raise InvalidRequestError(f"input '{entry.name}' is not of data type {entry.datatype}")
        if array.ndim != len(entry.shape) or any(
            size not in {-1, given} for size, given in zip(entry.shape, array.shape, strict=True)
        ):
            problem = f"input '{entry.name}' has shape {list(array.shape)}"
            raise InvalidRequestError(f"{problem}, not {list(entry.shape)}")
        arrays.append(array)
    if any(len(array) != len(arrays[0]) for array in arrays):
        raise InvalidRequestError("the inputs have different numbers of records")
    return TensorRecords(arrays)


def build_outputs(
    model: ModelVersion, values: np.ndarray, inputs: Inputs | None
) -> list[OutputTensor]:
    """Return the records' named outputs; `inputs` are their texts.

    A record's entities are a list as JSON.
    """
    program = model.program
    if inputs and program.output_kind == "entities":
        entities: Any = build_columns(program, "float32", values, words=model.find_words(inputs))
        rows = [orjson.dumps(row).decode() for row in entities["entities"].to_pylist()]
        return [OutputTensor("entities", TEXT, _to_objects(rows))]
    columns: dict[str, Any] = dict(build_columns(program, "float32", values))
    outputs = []
    for entry in describe_outputs(program):
        column = columns[entry.name]
        if entry.datatype == TEXT:
            array = _to_objects(column.to_pylist())
        else:
            array = np.asarray(column, np.int64 if entry.datatype == "INT64" else np.float32)
        outputs.append(OutputTensor(entry.name, entry.datatype, array))
    return outputs


def _text_names(program: ProgramEntry) -> tuple[str, ...]:
    return program.fields.text_fields or (DEFAULT_TEXT_INPUT,)


def _check_names(program: ProgramEntry, tensors: Mapping[str, np.ndarray]) -> None:
    entries = describe_inputs(program)
    names = ", ".join(entry.name for entry in entries)
    for entry in entries:
        if entry.name not in tensors and not entry.is_optional:
            raise InvalidRequestError(f"input '{entry.name}' is missing; the model reads {names}")
    unknown = tensors.keys() - {entry.name for entry in entries}
    if unknown:
        problem = f"the model does not have input '{min(unknown)[:80]}'; it reads {names}"
        raise InvalidRequestError(problem)


def _read_texts(name: str, array: np.ndarray) -> list[str]:
    if array.dtype != object:
        raise InvalidRequestError(f"input '{name}' is not of data type {TEXT}")
    texts: list[str] = _to_column(name, array).tolist()
    return texts


def _read_numbers(name: str, array: np.ndarray) -> list[float | None]:
    """Return the numbers in an input with shape [records] or [records, 1]; None for NaN."""
    if array.dtype == object:
        raise InvalidRequestError(f"input '{name}' is not of data type FP32")
    with np.errstate(over="ignore"):
        numbers = _to_column(name, array).astype(np.float32)
    if np.isinf(numbers).any():
        raise InvalidRequestError(f"input '{name}' has a number that is not finite")
    is_missing = np.isnan(numbers)
    return [
        None if flag else number
        for flag, number in zip(is_missing.tolist(), numbers.tolist(), strict=True)
    ]


def _to_column(name: str, array: np.ndarray) -> np.ndarray:
    is_column = array.ndim == 1 or (array.ndim == MAX_TEXT_DIMENSIONS and array.shape[1] == 1)
    if not is_column:
        problem = f"input '{name}' has shape {list(array.shape)}, not [records] or [records, 1]"
        raise InvalidRequestError(problem)
    return array.reshape(-1)


def _to_objects(values: Sequence[str]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = list(values)
    return array
