"""Outputs become columns in the requested dtype, next to the kept fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from regauge.inference.export.manifest import Dtype, ProgramEntry
from regauge.inference.export.postprocess import (
    build_columns,
    build_table,
    convert_vectors,
    write_parquet,
)
from regauge.inference.predict.fields import check_columns
from regauge.inference.predict.settings import PredictOutput
from regauge.models.sentence_transformers import Pooling
from regauge.system.errors import DataError, SettingsError

VECTORS = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=20),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
)
DTYPES: tuple[Dtype, ...] = ("float16", "float32", "int8", "binary")


def program(output_kind: Any = "vectors", width: int = 4, *labels: str) -> ProgramEntry:
    return ProgramEntry(output_kind=output_kind, output_size=width, inputs=(), labels=labels)


def random_vectors(records: int, width: int) -> np.ndarray:
    return np.random.default_rng(records).normal(size=(records, width)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vectors_are_rounded_to_the_type(dtype: Dtype) -> None:
    values = random_vectors(5, 4)
    columns = build_columns(program(), dtype, values)
    assert list(columns) == ["embedding"]
    assert isinstance(columns["embedding"], np.ndarray)
    assert columns["embedding"].dtype == dtype
    assert np.array_equal(columns["embedding"], values.astype(dtype))


def test_vectors_of_any_size_are_kept_by_default() -> None:
    values = random_vectors(5, 4)
    for pooling in (None, Pooling(normalize=False)):
        entry = program().model_copy(update={"pooling": pooling})
        large = build_columns(entry, "auto", values * 1e6)["embedding"]
        assert isinstance(large, np.ndarray)
        assert np.array_equal(large, values * np.float32(1e6))
    normalized = program().model_copy(update={"pooling": Pooling()})
    [column] = build_columns(normalized, "auto", values).values()
    assert np.array_equal(column, values.astype(np.float16))


def test_a_number_beyond_float16_is_refused() -> None:
    values = np.array([[1.0, -65_504.0]], np.float32)
    assert np.isfinite(convert_vectors(values, "float16")["embedding"]).all()
    with pytest.raises(DataError, match=r"1\.31e\+05, too large for float16; .* float32"):
        convert_vectors(values * 2, "float16")


@given(values=VECTORS)
def test_int8_vectors_are_rounded_to_half_a_step(values: np.ndarray) -> None:
    columns = convert_vectors(values, "int8")
    quantized, scale = np.asarray(columns["embedding"]), np.asarray(columns["scale"])
    assert list(columns) == ["embedding", "scale"]
    assert (quantized.dtype, quantized.shape, scale.shape) == (
        np.int8,
        values.shape,
        values.shape[:1],
    )
    most = np.abs(values).max(1)
    np.testing.assert_allclose(scale, most / 127, rtol=1e-6)
    back = quantized.astype(np.float64) * scale[:, None]
    assert (np.abs(back - values) <= scale[:, None] * 0.5001).all()
    assert (np.abs(quantized).max(1) == np.where(scale > 0, 127, 0)).all()


@given(values=VECTORS)
def test_binary_vectors_have_a_bit_for_each_positive_number(values: np.ndarray) -> None:
    (name, packed) = next(iter(convert_vectors(values, "binary").items()))
    width = values.shape[1]
    assert (name, packed.dtype, packed.shape) == (
        "embedding",
        np.uint8,
        (len(values), -(-width // 8)),
    )
    for row, row_bytes in zip(values.tolist(), packed.tolist(), strict=True):
        row_bits = [row_bytes[bit // 8] >> (7 - bit % 8) & 1 for bit in range(8 * len(row_bytes))]
        assert row_bits == [int(value > 0) for value in row] + [0] * (len(row_bits) - width)


def test_classes_have_probabilities() -> None:
    scores = np.array([[0.0, 1.0, -1.0], [500.0, -500.0, 0.0], [1e4, 1e4, 0.0]], np.float32)
    columns = build_columns(program("classes", 3), "float16", scores)
    assert list(columns) == ["predicted_label", "probabilities"]
    assert columns["predicted_label"].tolist() == [1, 0, 0]
    expected = np.exp([0, 1, -1]) / np.exp([0, 1, -1]).sum()
    np.testing.assert_allclose(columns["probabilities"][0], expected, rtol=1e-6)
    np.testing.assert_allclose(columns["probabilities"][1:], [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-7)


def test_classes_with_labels_are_named() -> None:
    scores = np.array([[0, 1, 2], [2, 1, 0], [0, 2, 1]], np.float32)
    columns = build_columns(program("classes", 3, "bad", "so-so", "good"), "float16", scores)
    assert columns["predicted_label"].to_pylist() == ["good", "bad", "so-so"]


@pytest.mark.parametrize(("output_kind", "name"), [("values", "value"), ("scores", "score")])
def test_values_and_scores_are_scalar_columns(output_kind: str, name: str) -> None:
    columns = build_columns(program(output_kind, 1), "int8", np.array([[1.25], [-2.5]], np.float32))
    assert list(columns) == [name]
    assert columns[name].tolist() == [1.25, -2.5]


def test_generated_tokens_become_texts() -> None:
    def decode(tokens: np.ndarray) -> list[str]:
        return [" ".join(f"{token:g}" for token in row if token >= 0) for row in tokens]

    tokens = np.array([[5, 6], [7, -1]], np.float32)
    columns = build_columns(program("text", 2), "float16", tokens, decode)
    assert columns["generated_text"].to_pylist() == ["5 6", "7"]
    no_outputs = build_columns(program("text", 2), "float16", tokens[:0], decode)["generated_text"]
    assert (len(no_outputs), no_outputs.type) == (0, pa.string())


def test_the_output_of_a_custom_module_is_unchanged() -> None:
    values = random_vectors(3, 2)
    columns = build_columns(program("tensor", 2), "int8", values)
    assert list(columns) == ["output"]
    assert np.array_equal(columns["output"], values)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float16", pa.list_(pa.float16(), 10)),
        ("float32", pa.list_(pa.float32(), 10)),
        ("int8", pa.list_(pa.int8(), 10)),
        ("binary", pa.list_(pa.uint8(), 2)),
    ],
)
@pytest.mark.parametrize("records", [0, 1, 7])
def test_a_table_has_the_kept_fields_and_then_the_outputs(
    records: int, dtype: Dtype, kind: pa.DataType
) -> None:
    values = random_vectors(records, 10)
    kept_fields: dict[str, list[Any]] = {
        "id": list(range(records)),
        "name": [f"n{index}" for index in range(records)],
        "price": [index + 0.5 for index in range(records)],
    }
    kinds = {"id": "integer", "name": "text", "price": "float"}
    columns = build_table(build_columns(program(width=10), dtype, values), kept_fields, kinds)
    scale = ["scale"] if dtype == "int8" else []
    assert columns.column_names == ["id", "name", "price", "embedding", *scale]
    types = [pa.int64(), pa.string(), pa.float64(), kind, *([pa.float32()] if scale else [])]
    assert columns.schema.types == types
    assert columns.num_rows == records
    assert {name: columns[name].to_pylist() for name in kept_fields} == kept_fields
    vectors = np.asarray(convert_vectors(values, dtype)["embedding"])
    assert columns["embedding"].to_pylist() == vectors.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_scalar_columns_have_a_dictionary_in_a_file(dtype: Dtype, tmp_path: Path) -> None:
    kept_fields = {"name": [f"n{index % 3}" for index in range(60)]}
    columns = build_table(
        build_columns(program(width=16), dtype, random_vectors(60, 16)),
        kept_fields,
        {"name": "text"},
    )
    path = tmp_path / "vectors.parquet"
    with path.open("wb") as file:
        write_parquet(columns, file)
    assert pq.read_table(path).equals(columns)
    row_group = pq.read_metadata(path).row_group(0)
    column_chunks = {
        row_group.column(index).path_in_schema: row_group.column(index)
        for index in range(row_group.num_columns)
    }
    assert "RLE_DICTIONARY" in column_chunks["name"].encodings
    assert "RLE_DICTIONARY" not in column_chunks["embedding.list.element"].encodings
    assert column_chunks["embedding.list.element"].compression == "ZSTD"


def test_a_missing_field_is_null() -> None:
    columns = build_table(
        {}, {"id": [1, None], "name": [None, "b"]}, {"id": "integer", "name": "text"}
    )
    assert columns.to_pydict() == {"id": [1, None], "name": [None, "b"]}


@pytest.mark.parametrize("labels", [(), ("no", "yes")])
def test_an_empty_table_has_its_columns(labels: tuple[str, ...]) -> None:
    no_outputs = np.empty((0, 2), np.float32)
    columns = build_table(
        build_columns(program("classes", 2, *labels), "float16", no_outputs), {}, {}
    )
    assert columns.num_rows == 0
    assert columns.column_names == ["predicted_label", "probabilities"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        (program(), {"embedding"}),
        (program("classes", 2, "no", "yes"), {"predicted_label", "probabilities"}),
        (program("values", 1), {"value"}),
        (program("tensor", 2), {"output"}),
        (program("text", 2), {"generated_text"}),
    ],
)
def test_a_kept_field_must_not_have_the_name_of_an_output_column(
    entry: ProgramEntry, columns: set[str], dtype: Dtype
) -> None:
    names = columns | ({"scale"} if "embedding" in columns and dtype == "int8" else set())
    fields = ["id", "text", "embedding", "scale", "predicted_label", "probabilities", "value"]
    fields += ["output", "generated_text"]
    output = PredictOutput(folder="out", dtype=dtype)
    check_columns(entry, output, [name for name in fields if name not in names])
    for name in names:
        with pytest.raises(SettingsError, match=f"field '{name}' has the name of an output column"):
            check_columns(entry, output, ["id", name])


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        (program(), True),
        (program("classes", 2), True),
        (program("values", 1), True),
        (program("classes", 2, "no", "yes"), False),
        (program("text", 2), False),
    ],
)
def test_the_npy_format_needs_numeric_outputs(entry: ProgramEntry, *, fits: bool) -> None:
    output = PredictOutput(folder="out", format="npy")
    if fits:
        check_columns(entry, output, [])
        return
    with pytest.raises(SettingsError, match="npy holds numbers, but the outputs are"):
        check_columns(entry, output, [])
