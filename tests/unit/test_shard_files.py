"""Shards as JSON Lines and CSV: every value of a record and of an output comes back."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from regauge.data.values import FieldKind, Value
from regauge.inference.export.postprocess import Columns
from regauge.inference.predict.shard_files import ShardColumns

KINDS: dict[str, FieldKind] = {
    "id": "uint64",
    "price": "float",
    "name": "text",
    "tags": "json",
    "total": "decimal",
    "new": "boolean",
}
VALUES: dict[str, list[Value | None]] = {
    "id": [2**64 - 1, 0, None],
    "price": [0.1, 3, None],
    "name": ['a "b",\nc', "", None],
    "tags": [["x", {"y": 1}], 7, None],
    "total": [2**70, 0.5, None],
    "new": [True, False, None],
}
VECTORS = np.array([[0.1, -1e-5], [3.0, 1e20], [1 / 3, 0.0]], np.float32)


def write(file_format: str, outputs: Columns) -> bytes:
    [(suffix, write_file)] = ShardColumns(VALUES, KINDS, outputs).list_files(file_format).items()
    assert suffix == file_format
    file = io.BytesIO()
    write_file(file)
    return file.getvalue()


def read_jsonl(data: bytes) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in data.decode().splitlines()]


def test_json_lines_have_the_values_of_the_records() -> None:
    rows = read_jsonl(write("jsonl", {"embedding": VECTORS}))
    for name, values in VALUES.items():
        assert [row[name] for row in rows] == values
    assert [type(row["id"]) for row in rows[:2]] == [int, int]
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), VECTORS)
    assert rows[0]["embedding"] == [0.1, -1e-05], "the shortest number of its type"


def test_csv_quotes_texts_and_encodes_nested_values_as_json() -> None:
    data = write("csv", {"embedding": VECTORS})
    rows = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    assert [row["name"] for row in rows] == ['a "b",\nc', "", ""]
    assert data.splitlines()[-2].split(b",")[2] == b'""', "an empty text is not a missing one"
    assert data.splitlines()[-1].startswith(b",,,,,,")
    assert [json.loads(row["tags"]) for row in rows[:2]] == VALUES["tags"][:2]
    assert [row["total"] for row in rows] == [str(2**70), "0.5", ""]
    assert [row["id"] for row in rows] == [str(2**64 - 1), "0", ""]
    vectors = [json.loads(row["embedding"]) for row in rows]
    assert np.array_equal(np.array(vectors, np.float32), VECTORS)


@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_classes_and_texts_are_written(file_format: str) -> None:
    names = pa.array(["é\u2028", "b", "b"])
    probabilities = np.array([[0.98, 0.02]] * 3, np.float32)
    data = write(file_format, {"predicted_label": names, "probabilities": probabilities})
    if file_format == "jsonl":
        first = json.loads(data.decode().split("\n")[0])
    else:
        first = next(csv.DictReader(io.StringIO(data.decode(), newline="")))
        first["probabilities"] = json.loads(first["probabilities"])
    assert first["predicted_label"] == "é\u2028"
    assert first["probabilities"] == [0.98, 0.02]


def test_numbers_that_json_lacks_are_written_as_valid_json() -> None:
    outputs: Columns = {"value": np.array([math.nan, math.inf, -math.inf], np.float32)}
    rows = read_jsonl(write("jsonl", outputs))
    texts = ("NaN", "Infinity", "-Infinity")
    assert [(row["value"], row["value_text"]) for row in rows] == [(None, text) for text in texts]


def test_arrays_and_tables_have_separate_files() -> None:
    columns = ShardColumns(VALUES, KINDS, {"embedding": VECTORS})
    assert list(columns.list_files("npy")) == ["npy", "parquet"]
    assert list(ShardColumns({}, {}, {"embedding": VECTORS}).list_files("npy")) == ["npy"]
    assert list(columns.list_files("parquet")) == ["parquet"]
