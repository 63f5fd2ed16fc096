"""Tables: Parquet by row group, Arrow by batch, objects of a program; all give the same rows."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from regauge import config
from regauge.commands._python.records import write_records
from regauge.data.sources import Record, Rejected, Source
from regauge.data.sources.arrow import Arrow
from regauge.data.sources.parquet import Parquet
from regauge.system.errors import DataError
from unit.reads import list_rejected, read_fields, read_items

ROWS = 3000
TABLE = pa.table(
    {
        "text": [f"row {number} " + "x" * 1000 for number in range(ROWS)],
        "kind": pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode(),
        "label": list(range(ROWS)),
        "score": [0.5, None] * (ROWS // 2),
        "day": pa.array([0] * ROWS, pa.date32()),
    }
)


def write(path: Path, table: pa.Table = TABLE) -> None:
    if path.suffix == ".feather":
        feather.write_feather(table, path, chunksize=100)
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=100)
    else:
        new = pa.ipc.new_stream if path.suffix == ".stream" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)


def source(path: Path, **changes: object) -> Source:
    kind = "parquet" if path.suffix == ".parquet" else "arrow"
    table = {"kind": kind, "files": (str(path),), **changes}
    table_source: Source = config.parse_choice("data/sources", table)
    return table_source


FORMS = ["a.arrow", "a.stream", "a.feather", "a.parquet"]


@pytest.mark.parametrize("name", FORMS)
def test_every_format_has_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    read = read_fields(source(tmp_path / name))
    assert [row["label"] for row in read] == list(range(ROWS))
    assert read[0] == {
        "text": "row 0 " + "x" * 1000,
        "kind": "a",
        "label": 0,
        "score": 0.5,
        "day": "1970-01-01",
    }
    assert "score" not in read[1]
    assert read_fields(source(tmp_path / name, columns=("label",)))[7] == {"label": 7}


@pytest.mark.parametrize("name", ["a.arrow", "a.stream"])
def test_a_large_file_is_read_in_pieces(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    chunked = Arrow(files=(str(tmp_path / name),), chunk_mib=1)
    pieces = chunked.list_pieces()
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 10), (10, 20), (20, None)]
    assert read_fields(chunked) == read_fields(Arrow(files=(str(tmp_path / name),)))
    last = next(iter(chunked.read(pieces[2])))
    assert (last.location, last.fields["label"]) == ("batch 20 row 0", 2000)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FORMS)
def test_an_unknown_column_is_refused_before_reading(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} has no column 'txt'; did you mean 'text'\?"):
        source(tmp_path / name, columns=("txt",)).list_pieces()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_rejected(tmp_path: Path, name: str, share: float) -> None:
    write(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    read = source(tmp_path / name)
    form = "Parquet" if name == "a.parquet" else "Arrow"
    assert [reason for _, reason in list_rejected(read)] == [f"damaged {form} file"]
    whole = [row for row in read_items(read) if isinstance(row, Record)]
    assert (len(whole) > 1000) == (name == "a.stream" and share > 0.4)


def test_undecodable_bytes_reject_only_their_row(tmp_path: Path) -> None:
    data = pa.array([b"good", b"bad \xff", b"fine"]).cast(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    write(tmp_path / "a.arrow", pa.table({"text": texts}))
    for name, part in (("a.parquet", "row group"), ("a.arrow", "batch")):
        read = source(tmp_path / name)
        assert [row["text"] for row in read_fields(read)] == ["good", "fine"]
        assert list_rejected(read) == [(f"{part} 0 row 1", "undecodable bytes")]


@pytest.mark.parametrize("name", FORMS)
def test_columns_with_the_same_name_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, pa.table([["a"], [1], [2]], ["text", "n", "n"]))
    with pytest.raises(DataError, match=rf"{name} has 2 columns 'n'; give them distinct names"):
        source(tmp_path / name).list_pieces()


DATA = [
    (pd.Series(["a", "b"], name="title"), [{"text": "a"}, {"text": "b"}]),
    (pd.Series(["a", "b"]).astype("category"), [{"text": "a"}, {"text": "b"}]),
    (pa.chunked_array([["a"], ["b"]]), [{"text": "a"}, {"text": "b"}]),
    (pa.chunked_array([[{"text": "a", "n": 1}]]), [{"text": "a", "n": 1}]),
    (pa.table({"text": ["a"]}).to_reader(), [{"text": "a"}]),
    (["a", np.str_("b")], [{"text": "a"}, {"text": "b"}]),
    (
        [{"text": "a", "day": date(2026, 1, 2), "n": np.int64(3), "d": Decimal("1.5")}],
        [{"text": "a", "day": "2026-01-02", "n": 3, "d": 1.5}],
    ),
    (
        pd.DataFrame({"text": ["a"], "day": [date(2026, 1, 2)]}),
        [{"text": "a", "day": "2026-01-02"}],
    ),
]


@pytest.mark.parametrize(("data", "records"), DATA)
def test_objects_of_a_program_become_records(
    tmp_path: Path, data: Any, records: list[dict[str, Any]]
) -> None:
    file = write_records(data, tmp_path / "out")
    assert read_fields(config.parse_choice("data/sources", file.source)) == records


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pd.DataFrame({"text": ["a", "b"], "x": ["q", 7]}), "Conversion failed for column x"),
        (pd.DataFrame({"text": ["a", "b"], "x": [[1], "q"]}), "cannot mix list and non-list"),
        (pd.DataFrame([["a", 1, 2]], columns=["text", "n", "n"]), "Duplicate column names"),
        (pd.Series(["a", 7]), "Expected bytes, got a 'int' object"),
        ([{"text": {1}}], "record 1 of data cannot be written: a value of type set"),
    ],
)
def test_an_object_that_is_no_table_is_refused_in_one_line(
    tmp_path: Path, data: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message) as error:
        write_records(data, tmp_path / "out")
    assert len(str(error.value).splitlines()) == 1


def test_files_may_have_different_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", pa.table({"text": ["one"]}))
    write(tmp_path / "b.arrow", pa.table({"text": ["two"], "label": [1]}))
    read = Arrow(files=(f"{tmp_path}/*.arrow",))
    assert read_fields(read) == [{"text": "one"}, {"text": "two", "label": 1}]
    assert not [item for item in read_items(read) if isinstance(item, Rejected)]


def test_an_empty_table_has_no_records(tmp_path: Path) -> None:
    for name in ("a.arrow", "a.stream"):
        write(tmp_path / name, TABLE.slice(0, 0))
        assert read_items(source(tmp_path / name)) == []
    assert isinstance(source(tmp_path / "a.arrow"), Arrow)
    assert not isinstance(source(tmp_path / "a.arrow"), Parquet)
