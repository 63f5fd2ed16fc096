"""Answers as columns: their numbers in the type that was asked for, beside what was kept."""

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

from regauge.artifacts.manifest import Program
from regauge.artifacts.output_settings import Dtype, Written
from regauge.artifacts.postprocess import check, columns, put, table, vectors
from regauge.errors import SettingsError

VECTORS = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=20),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
)
DTYPES: tuple[Dtype, ...] = ("float16", "float32", "int8", "binary")


def program(answers: Any = "vectors", width: int = 4, *labels: str) -> Program:
    return Program(answers=answers, width=width, inputs=(), labels=labels)


def drawn(records: int, width: int) -> np.ndarray:
    return np.random.default_rng(records).normal(size=(records, width)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vectors_are_rounded_to_the_type(dtype: Dtype) -> None:
    values = drawn(5, 4)
    found = columns(program(), dtype, values)
    assert list(found) == ["vector"]
    assert isinstance(found["vector"], np.ndarray)
    assert found["vector"].dtype == dtype
    assert np.array_equal(found["vector"], values.astype(dtype))


@given(values=VECTORS)
def test_integers_are_half_a_step_away_at_most(values: np.ndarray) -> None:
    found = vectors(values, "int8")
    whole, scale = np.asarray(found["vector"]), np.asarray(found["scale"])
    assert list(found) == ["vector", "scale"]
    assert (whole.dtype, whole.shape, scale.shape) == (np.int8, values.shape, values.shape[:1])
    most = np.abs(values).max(1)
    np.testing.assert_allclose(scale, most / 127, rtol=1e-6)
    back = whole.astype(np.float64) * scale[:, None]
    assert (np.abs(back - values) <= scale[:, None] * 0.5001).all()
    assert (np.abs(whole).max(1) == np.where(scale > 0, 127, 0)).all()


@given(values=VECTORS)
def test_a_bit_is_set_where_a_number_is_above_zero(values: np.ndarray) -> None:
    (name, bits) = next(iter(vectors(values, "binary").items()))
    width = values.shape[1]
    assert (name, bits.dtype, bits.shape) == ("vector", np.uint8, (len(values), -(-width // 8)))
    for row, told in zip(values.tolist(), bits.tolist(), strict=True):
        whole = [told[place // 8] >> (7 - place % 8) & 1 for place in range(8 * len(told))]
        assert whole == [int(value > 0) for value in row] + [0] * (len(whole) - width)


def test_classes_have_their_probabilities_beside_them() -> None:
    scores = np.array([[0.0, 1.0, -1.0], [500.0, -500.0, 0.0], [1e4, 1e4, 0.0]], np.float32)
    found = columns(program("classes", 3), "float16", scores)
    assert list(found) == ["class", "probabilities"]
    assert found["class"].tolist() == [1, 0, 0]
    wanted = np.exp([0, 1, -1]) / np.exp([0, 1, -1]).sum()
    np.testing.assert_allclose(found["probabilities"][0], wanted, rtol=1e-6)
    np.testing.assert_allclose(found["probabilities"][1:], [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-7)


def test_classes_that_have_names_are_named() -> None:
    scores = np.array([[0, 1, 2], [2, 1, 0], [0, 2, 1]], np.float32)
    found = columns(program("classes", 3, "bad", "so-so", "good"), "float16", scores)
    assert found["class"].to_pylist() == ["good", "bad", "so-so"]


@pytest.mark.parametrize(("answers", "name"), [("values", "value"), ("scores", "score")])
def test_a_value_is_a_number_of_its_own(answers: str, name: str) -> None:
    found = columns(program(answers, 1), "int8", np.array([[1.25], [-2.5]], np.float32))
    assert list(found) == [name]
    assert found[name].tolist() == [1.25, -2.5]


def test_tokens_that_were_written_become_texts() -> None:
    def decode(tokens: np.ndarray) -> list[str]:
        return [" ".join(f"{token:g}" for token in row if token >= 0) for row in tokens]

    tokens = np.array([[5, 6], [7, -1]], np.float32)
    found = columns(program("text", 2), "float16", tokens, decode)
    assert found["answer"].to_pylist() == ["5 6", "7"]
    nothing = columns(program("text", 2), "float16", tokens[:0], decode)["answer"]
    assert (len(nothing), nothing.type) == (0, pa.string())


def test_what_an_own_module_answers_is_kept_as_it_is() -> None:
    values = drawn(3, 2)
    found = columns(program("tensor", 2), "int8", values)
    assert list(found) == ["answer"]
    assert np.array_equal(found["answer"], values)


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
def test_a_table_has_what_was_kept_and_then_the_answers(
    records: int, dtype: Dtype, kind: pa.DataType
) -> None:
    values = drawn(records, 10)
    kept: dict[str, list[Any]] = {
        "id": list(range(records)),
        "name": [f"n{place}" for place in range(records)],
        "price": [place + 0.5 for place in range(records)],
    }
    kinds = {"id": "integer", "name": "text", "price": "real"}
    found = table(columns(program(width=10), dtype, values), kept, kinds)
    scale = ["scale"] if dtype == "int8" else []
    assert found.column_names == ["id", "name", "price", "vector", *scale]
    types = [pa.int64(), pa.string(), pa.float64(), kind, *([pa.float32()] if scale else [])]
    assert found.schema.types == types
    assert found.num_rows == records
    assert {name: found[name].to_pylist() for name in kept} == kept
    made = np.asarray(vectors(values, dtype)["vector"])
    assert found["vector"].to_pylist() == made.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_has_the_table_and_looks_for_equal_values_in_single_columns(
    dtype: Dtype, tmp_path: Path
) -> None:
    kept = {"name": [f"n{place % 3}" for place in range(60)]}
    found = table(columns(program(width=16), dtype, drawn(60, 16)), kept, {"name": "text"})
    path = tmp_path / "answers.parquet"
    with path.open("wb") as file:
        put(found, file)
    assert pq.read_table(path).equals(found)
    group = pq.read_metadata(path).row_group(0)
    stored = {group.column(at).path_in_schema: group.column(at) for at in range(group.num_columns)}
    assert "RLE_DICTIONARY" in stored["name"].encodings
    assert "RLE_DICTIONARY" not in stored["vector.list.element"].encodings
    assert stored["vector.list.element"].compression == "ZSTD"


def test_a_field_that_a_record_lacks_is_null() -> None:
    found = table({}, {"id": [1, None], "name": [None, "b"]}, {"id": "integer", "name": "text"})
    assert found.to_pydict() == {"id": [1, None], "name": [None, "b"]}


@pytest.mark.parametrize("labels", [(), ("no", "yes")])
def test_a_table_of_no_record_has_its_columns(labels: tuple[str, ...]) -> None:
    nothing = np.empty((0, 2), np.float32)
    found = table(columns(program("classes", 2, *labels), "float16", nothing), {}, {})
    assert found.num_rows == 0
    assert found.column_names == ["class", "probabilities"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("told", "taken"),
    [
        (program(), {"vector"}),
        (program("classes", 2, "no", "yes"), {"class", "probabilities"}),
        (program("values", 1), {"value"}),
        (program("tensor", 2), {"answer"}),
        (program("text", 2), {"answer"}),
    ],
)
def test_a_kept_field_may_not_have_the_name_of_an_answer(
    told: Program, taken: set[str], dtype: Dtype
) -> None:
    names = taken | ({"scale"} if "vector" in taken and dtype == "int8" else set())
    every = ["id", "text", "vector", "scale", "class", "probabilities", "value", "answer"]
    output = Written(folder="out", dtype=dtype)
    check(told, output, [name for name in every if name not in names])
    for name in names:
        with pytest.raises(SettingsError, match=f"'{name}' has the name of what is written"):
            check(told, output, ["id", name])


@pytest.mark.parametrize(
    ("told", "fits"),
    [
        (program(), True),
        (program("classes", 2), True),
        (program("values", 1), True),
        (program("classes", 2, "no", "yes"), False),
        (program("text", 2), False),
    ],
)
def test_an_array_holds_numbers_alone(told: Program, *, fits: bool) -> None:
    output = Written(folder="out", format="npy")
    if fits:
        check(told, output, [])
        return
    with pytest.raises(SettingsError, match="npy holds numbers, and the answers are"):
        check(told, output, [])
