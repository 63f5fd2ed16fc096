"""Tables: Parquet by row group, Arrow by batch; the same rows from every form."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from regauge import config
from regauge.data.sources import Record, Rejected, Source
from regauge.data.sources.arrow import Arrow
from regauge.data.sources.parquet import Parquet
from regauge.errors import DataError
from unit.reads import everything, fields, rejected

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
    found: Source = config.choose("data/sources", table)
    return found


FORMS = ["a.arrow", "a.stream", "a.feather", "a.parquet"]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    read = fields(source(tmp_path / name))
    assert [row["label"] for row in read] == list(range(ROWS))
    assert read[0] == {"text": "row 0 " + "x" * 1000, "kind": "a", "label": 0, "score": 0.5}
    assert "score" not in read[1]
    assert fields(source(tmp_path / name, columns=("label",)))[7] == {"label": 7}


@pytest.mark.parametrize("name", ["a.arrow", "a.stream"])
def test_a_large_file_is_read_in_parts(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    parts = Arrow(files=(str(tmp_path / name),), piece_mib=1)
    pieces = parts.pieces()
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 10), (10, 20), (20, None)]
    assert fields(parts) == fields(Arrow(files=(str(tmp_path / name),)))
    last = next(iter(parts.read(pieces[2])))
    assert (last.place, last.fields["label"]) == ("batch 20 row 0", 2000)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FORMS)
def test_a_column_that_is_not_there_is_answered_before_reading(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} has no column 'txt'; did you mean 'text'\?"):
        source(tmp_path / name, columns=("txt",)).pieces()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_noticed(tmp_path: Path, name: str, share: float) -> None:
    write(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    read = source(tmp_path / name)
    form = "Parquet" if name == "a.parquet" else "Arrow"
    assert [reason for _, reason in rejected(read)] == [f"damaged {form} file"]
    whole = [row for row in everything(read) if isinstance(row, Record)]
    assert (len(whole) > 1000) == (name == "a.stream" and share > 0.4)


def test_undecodable_bytes_cost_their_row_alone(tmp_path: Path) -> None:
    data = pa.array([b"good", b"bad \xff", b"fine"]).cast(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    write(tmp_path / "a.arrow", pa.table({"text": texts}))
    for name, part in (("a.parquet", "row group"), ("a.arrow", "batch")):
        read = source(tmp_path / name)
        assert [row["text"] for row in fields(read)] == ["good", "fine"]
        assert rejected(read) == [(f"{part} 0 row 1", "undecodable bytes")]


def test_files_of_other_columns_are_read_beside_each_other(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", pa.table({"text": ["one"]}))
    write(tmp_path / "b.arrow", pa.table({"text": ["two"], "label": [1]}))
    read = Arrow(files=(f"{tmp_path}/*.arrow",))
    assert fields(read) == [{"text": "one"}, {"text": "two", "label": 1}]
    assert not [found for found in everything(read) if isinstance(found, Rejected)]


def test_an_empty_table_holds_nothing(tmp_path: Path) -> None:
    for name in ("a.arrow", "a.stream"):
        write(tmp_path / name, TABLE.slice(0, 0))
        assert everything(source(tmp_path / name)) == []
    assert isinstance(source(tmp_path / "a.arrow"), Arrow)
    assert not isinstance(source(tmp_path / "a.arrow"), Parquet)
