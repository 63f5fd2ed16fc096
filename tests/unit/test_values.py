"""Values of every format are kept exactly, or their record is rejected."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.config import build
from regauge.data.columns import encode_value
from regauge.data.sources import Record, Rejected, Source
from regauge.data.values import (
    FieldKind,
    convert_value,
    fits_kind,
    format_key,
    infer_kind,
    merge_kinds,
)
from regauge.inference.export.postprocess import build_table
from regauge.inference.predict.fields import infer_fields
from regauge.inference.predict.settings import PredictSettings
from regauge.system.errors import DataError
from unit.reads import list_rejected, read_fields, read_items

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text('abcä\n"', max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text("xyz", min_size=1, max_size=2), children, max_size=3)
    ),
    max_leaves=5,
)


def build_source(kind: str, path: Path, **options: Any) -> Source:
    table = {"kind": kind, "files": (str(path),), **options}
    tables = {"artifact": "a", "source": table, "output": {"folder": "o"}}
    return build(PredictSettings, tables).source


def read_table(tmp_path: Path, **columns: pa.Array) -> Source:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    return build_source("parquet", tmp_path / "a.parquet")


def store(values: list[Any]) -> tuple[FieldKind, list[Any]]:
    """Return the kind of a field with these values, and its output column."""
    kind, has_negative = infer_kind(values[0]), False
    for value in values:
        has_negative |= isinstance(value, int | float) and value < 0
        kind = merge_kinds(kind, infer_kind(value), has_negative=has_negative)
    fitting = [value for value in values if fits_kind(value, kind)]
    return kind, build_table({}, {"x": fitting}, {"x": kind})["x"].to_pylist()


def parse_cell(cell: Any, kind: FieldKind, value: Any) -> Any:
    if kind == "decimal":
        return float(cell) if isinstance(value, float) else Decimal(cell)
    return json.loads(cell) if kind == "json" else cell


LISTS = st.lists(NUMBERS, min_size=1, max_size=6) | st.lists(
    JSON.filter(lambda value: value is not None), min_size=1, max_size=6
)


@settings(max_examples=200)
@given(LISTS)
def test_values_in_a_column_are_equal_to_the_input_or_rejected(values: list[Any]) -> None:
    kind, cells = store(values)
    expected = [value for value in values if fits_kind(value, kind)]
    pairs = zip(cells, expected, strict=True)
    assert [parse_cell(cell, kind, value) for cell, value in pairs] == expected
    has_only_numbers = all(type(value) in (int, float) for value in values)
    # An integer that a float would round is rejected.
    if kind == "json" or (has_only_numbers and kind != "float"):
        assert len(cells) == len(values)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -(2**63)], "integer"),
        ([1, 2**63], "uint64"),
        ([2**64 - 1, 0], "uint64"),
        ([2**63, -1], "decimal"),
        ([2**64], "decimal"),
        ([1, 0.5], "float"),
        ([True, False], "boolean"),
        ([True, 1], "boolean"),
        ([1, "a"], "integer"),
        ([[1], 1], "json"),
        (["a", 1], "text"),
    ],
)
def test_the_narrowest_kind_that_keeps_all_values_is_chosen(
    values: list[Any], kind: FieldKind
) -> None:
    assert store(values)[0] == kind


@given(NUMBERS, NUMBERS)
def test_numbers_have_equal_keys_if_and_only_if_they_are_equal(one: float, other: float) -> None:
    assert (format_key(one) == format_key(other)) == (one == other)
    assert float(format_key(one)) == float(one)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (7, "7"),
        (7.0, "7"),
        ("7", "7"),
        (True, "1"),
        (0.5, "0.5"),
        ({"b": 1, "a": [2]}, '{"a": [2], "b": 1}'),
    ],
)
def test_keys_of_values(value: Any, key: str) -> None:
    assert format_key(value) == key


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (math.nan, None),
        (Decimal("12.50"), 12.5),
        (Decimal("7.00"), 7),
        (Decimal("1e40"), 10**40),
        (Decimal("0.1234567890123456789"), "0.1234567890123456789"),
        (date(2024, 2, 29), "2024-02-29"),
        (datetime(2024, 2, 29, 1, 2, 3, tzinfo=UTC), "2024-02-29T01:02:03+00:00"),
        ([1, {"a": None}], [1, {"a": None}]),
    ],
)
def test_foreign_values_are_converted(value: object, stored: object) -> None:
    assert convert_value(value) == stored


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, [b"nested"], {"a": date(2024, 1, 1)}, 1j])
def test_values_without_an_exact_form_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"a value of type|not JSON"):
        convert_value(value)


@pytest.mark.parametrize(
    ("value", "kind", "cell"),
    [
        (2**63 - 1, "integer", 2**63 - 1),
        (3.0, "integer", 3),
        (True, "integer", 1),
        (2**63, "integer", TypeError),
        (2.5, "integer", TypeError),
        ("3", "integer", 3),
        ("3.0", "integer", 3),
        ("3.5", "integer", TypeError),
        ("three", "integer", TypeError),
        ("9223372036854775808", "integer", TypeError),
        (None, "integer", TypeError),
        (10**400, "float", TypeError),
        (math.inf, "float", TypeError),
        ("0.5", "float", 0.5),
        ("nan", "float", TypeError),
        ("half", "float", TypeError),
        (2**60, "float", 2.0**60),
    ],
)
def test_cells_of_rows_are_exact_or_refused(value: Any, kind: Any, cell: Any) -> None:
    if cell is TypeError:
        with pytest.raises(TypeError, match=r"is not (an integer of 64 bits|a finite number)"):
            encode_value(value, kind)
    else:
        assert encode_value(value, kind) == cell


def test_columns_of_every_arrow_type_are_read_exactly(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=2))
    source = read_table(
        tmp_path,
        uint64=pa.array([2**64 - 1], pa.uint64()),
        bool=pa.array([True]),
        half=pa.array([1.5], pa.float16()),
        date=pa.array([date(2024, 2, 29)]),
        time=pa.array([time(1, 2, 3)]),
        nanoseconds=pa.array([1700000000123456789], pa.timestamp("ns")),
        zoned=pa.array([datetime(2024, 1, 1, 2, tzinfo=zone)], pa.timestamp("ms", "Europe/Berlin")),
        price=pa.array([Decimal("12.50")]),
        long=pa.array([Decimal("12345678901234567890.12345678901234567")]),
        tags=pa.array([["a", None]]),
        nested=pa.array([{"x": 1, "y": [0.5]}]),
        word=pa.array(["w"]).dictionary_encode(),
        digest=pa.array([b"raw"]),
        infinite=pa.array([math.inf]),
        empty=pa.nulls(1),
    )
    assert read_fields(source) == [
        {
            "uint64": 2**64 - 1,
            "bool": True,
            "half": 1.5,
            "date": "2024-02-29",
            "time": "01:02:03.000000",
            "nanoseconds": "2023-11-14T22:13:20.123456789",
            "zoned": "2024-01-01T00:00:00.000Z",
            "price": 12.5,
            "long": "12345678901234567890.12345678901234567",
            "tags": ["a", None],
            "nested": {"x": 1, "y": [0.5]},
            "word": "w",
            "infinite": math.inf,
        }
    ]
    kinds = infer_fields(source, source.list_pieces())
    assert kinds | {"word": "text"} == {
        "uint64": "uint64",
        "bool": "boolean",
        "half": "float",
        "date": "date",
        "time": "date",
        "nanoseconds": "date",
        "zoned": "date",
        "price": "decimal",
        "long": "decimal",
        "tags": "json",
        "nested": "json",
        "word": "text",
        "infinite": "float",
    }


def test_a_binary_column_is_reported_and_refused_if_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(pa.table({"text": ["a"], "image": [b"\x00"]}), tmp_path / "a.parquet")
    source = build_source("parquet", tmp_path / "a.parquet")
    source.list_pieces()
    assert "Column 'image' of type binary is left out" in caplog.text
    named = build_source("parquet", tmp_path / "a.parquet", columns=("text", "image"))
    with pytest.raises(DataError, match=r"'image' has type binary; remove it from source.columns"):
        named.list_pieces()


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ('{"n": 18446744073709551616}', {"n": 2**64}),
        ('{"n": 1.0, "flag": true}', {"n": 1.0, "flag": True}),
        ('{"n": {"a": [1]}}', {"n": {"a": [1]}}),
        ('{"n": null, "m": NaN}', {}),
        ('{"n": 1e999}', "a number out of range"),
        ('{"n": "\\ud800"}', "undecodable bytes"),
        ('{"n": ["\\ud800"]}', "undecodable bytes"),
        ("[1]", "not a JSON object"),
        ('{"n": ' + "[" * 100_000, "malformed JSON"),
    ],
)
def test_values_of_json_lines(tmp_path: Path, line: str, outcome: object) -> None:
    from regauge.data.sources import reject_undecodable

    (tmp_path / "a.jsonl").write_text(line + "\n")
    (item,) = map(reject_undecodable, read_items(build_source("jsonl", tmp_path / "a.jsonl")))
    if isinstance(outcome, str):
        assert isinstance(item, Rejected)
        assert item.reason == outcome
    else:
        assert isinstance(item, Record)
        assert item.fields == outcome
        assert all(type(item.fields[name]) is type(value) for name, value in outcome.items())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18446744073709551616", 2**64),
        (" 7", 7),
        ("7.0", 7),
        ("-0", 0),
        ("7.5", None),
        ("1_000", None),
        ("1e999999999", None),
        ("nan", None),
        ("seven", None),
    ],
)
def test_integers_of_csv_files(tmp_path: Path, text: str, number: int | None) -> None:
    (tmp_path / "a.csv").write_text(f"n\n{text}\n")
    source = build_source("csv", tmp_path / "a.csv", integers=("n",))
    if number is None:
        assert list_rejected(source) == [("line 2", "no number in 'n'")]
    else:
        assert read_fields(source) == [{"n": number}]
