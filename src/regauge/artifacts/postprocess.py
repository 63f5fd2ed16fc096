"""Answers as columns of a table: the numbers of a program, in the type that was asked for."""

from __future__ import annotations

import importlib
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regauge.artifacts.manifest import Program
    from regauge.artifacts.output_settings import Dtype, Written

    Decode = Callable[[np.ndarray], list[str]]


KINDS = {"text": pa.string(), "integer": pa.int64(), "real": pa.float64()}
"""Of fields that are kept beside the answers."""
MOST = {"integer": 2**63, "real": 2**1023}
"""Below which a whole number has to be, to be kept as one of these."""
INT8_MOST = 127
Columns = dict[str, np.ndarray | pa.Array]


def prepare() -> None:
    """Import what answers are written with, and let pyarrow import what it looks at lists with.

    A quarter of a second, once.
    """
    importlib.import_module("pyarrow.parquet")
    pa.array([0])


def columns(
    program: Program, dtype: Dtype, answers: np.ndarray, decode: Decode | None = None
) -> Columns:
    """Return the columns of answers, [records, width] fp32, by name.

    A column of several numbers is [records, numbers]. Classes are named where they have names,
    with their probabilities (softmax) beside them. `decode` makes texts of tokens.
    """
    if program.answers == "text":
        return {"answer": pa.array(decode(answers) if decode else [], pa.string())}
    if program.answers == "vectors":
        return vectors(answers, dtype)
    if program.answers == "classes":
        best, names = answers.argmax(1), program.labels
        told = pa.array(names).take(pa.array(best)) if names else best
        return {"class": told, "probabilities": _softmax(answers)}
    if program.answers in {"values", "scores"}:
        return {program.answers.removesuffix("s"): answers[:, 0]}
    return {"answer": answers}


def vectors(values: np.ndarray, dtype: Dtype) -> Columns:
    """Return vectors, [records, width] fp32, in a type.

    As int8 a vector is its numbers by their largest, times 127; `scale` takes them back. As binary
    the sign of each number is a bit, 1 above zero, the first one the highest of its byte.
    """
    if dtype == "binary":
        return {"vector": np.packbits(values > 0, axis=1)}
    if dtype == "int8":
        scale = np.abs(values).max(1) / INT8_MOST
        safe = np.where(scale > 0, scale, 1.0)[:, None]
        return {"vector": np.rint(values / safe).astype(np.int8), "scale": scale}
    return {"vector": values.astype(dtype)}


def table(found: Columns, kept: Mapping[str, Sequence[Any]], kinds: dict[str, str]) -> pa.Table:
    """Return the kept fields of records and their answers beside each other."""
    arrays = {name: _kept(values, kinds[name]) for name, values in kept.items()}
    return pa.table(arrays | {name: _array(values) for name, values in found.items()})


def put(found: pa.Table, file: IO[bytes]) -> None:
    """Write a table as Parquet.

    Numbers of a vector are not looked through for equal ones, nor for the least: in a fifth of the
    seconds they take less room.
    """
    import pyarrow.parquet as pq

    single = [each.name for each in found.schema if not pa.types.is_fixed_size_list(each.type)]
    pq.write_table(found, file, compression="zstd", use_dictionary=single, write_statistics=single)


def check(program: Program, output: Written, kept: Sequence[str]) -> None:
    """Raise SettingsError for answers that do not fit their form, or have a kept field's name."""
    made = columns(program, output.dtype, np.zeros((1, program.width), np.float32))
    if output.format == "npy" and isinstance(next(iter(made.values())), pa.Array):
        problem = f"output.format = npy holds numbers, and the answers are {program.answers}"
        raise SettingsError(problem, "leave it out: a table holds them")
    for name in kept:
        if name in made:
            problem = f"a record's field '{name}' has the name of what is written beside it"
            raise SettingsError(problem, "name the fields that are kept in output.keep")


def _kept(values: Sequence[Any], kind: str) -> pa.Array:
    if kind == "real":  # pyarrow refuses whole numbers that would be rounded
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, KINDS[kind])


def _array(values: np.ndarray | pa.Array) -> pa.Array:
    if isinstance(values, pa.Array) or values.ndim == 1:
        return pa.array(values) if not isinstance(values, pa.Array) else values
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    found: np.ndarray = powers / powers.sum(1, keepdims=True)
    return found
