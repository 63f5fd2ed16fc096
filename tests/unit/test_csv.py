"""CSV: every row once, with the numbers that were asked for; what breaks one is named."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from regauge import config
from regauge.data.sources import Record, Rejected, _files
from regauge.data.sources.csv_ import Csv
from regauge.errors import DataError, SettingsError
from unit.preparing import corpus, prepared
from unit.reads import everything, fields, rejected


def source(folder: Path, text: bytes, **changes: Any) -> Csv:
    (folder / "a.csv").write_bytes(text)
    return config.build(Csv, {"files": (f"{folder}/a.csv",), **changes})


def test_values_may_hold_delimiters_quotes_and_new_lines(tmp_path: Path) -> None:
    read = source(tmp_path, b'\xef\xbb\xbftitle,text\r\n"a, b","""c""\r\nd"\r\n\r\ne,\r\n')
    assert fields(read) == [{"title": "a, b", "text": '"c"\nd'}, {"title": "e"}]
    places = [found.place for found in everything(read)]
    assert places == ["line 2", "line 5"]


def test_numbers_are_what_is_declared(tmp_path: Path) -> None:
    text = b"id,score,text\n7,1e3,9\n,,\nx,1,a\n1,nan,a\n1_0,1,a\n9223372036854775808,1,a\n2,NA,b\n"
    read = source(tmp_path, text, integers=("id",), reals=("score",), missing=("", "NA"))
    assert fields(read) == [{"id": 7, "score": 1000.0, "text": "9"}, {}, {"id": 2, "text": "b"}]
    assert rejected(read) == [
        ("line 4", "no number in 'id'"),
        ("line 5", "no number in 'score'"),
        ("line 6", "no number in 'id'"),
        ("line 7", "no number in 'id'"),
    ]


def test_columns_have_names_from_the_header_or_the_run_file(tmp_path: Path) -> None:
    text = b"a\tb\tc\n1\t2\t3\n"
    tabs = {"delimiter": "\t"}
    assert fields(source(tmp_path, text, **tabs)) == [{"a": "1", "b": "2", "c": "3"}]
    assert fields(source(tmp_path, text, **tabs, columns=("c", "a"))) == [{"a": "1", "c": "3"}]
    named = source(tmp_path, text, **tabs, names=("x", "y", "z"), columns=("y",))
    assert fields(named) == [{"y": "b"}, {"y": "2"}]


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz"])
def test_a_tab_is_between_values_where_the_ending_says_so(tmp_path: Path, ending: str) -> None:
    path, text = tmp_path / f"a{ending}", b"id\ttext\n1\tone, two\n"
    path.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
    files = {"files": (str(path),)}
    assert fields(config.build(Csv, files)) == [{"id": "1", "text": "one, two"}]
    assert rejected(config.build(Csv, {**files, "delimiter": ","})) == [
        ("line 2", "another number of values")
    ]


@pytest.mark.parametrize("key", ["columns", "integers", "reals"])
def test_a_column_that_is_not_there_is_answered_before_reading(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match=r"a.csv has no column 'txt'; did you mean 'text'\?"):
        source(tmp_path, b"text,label\na,1\n", **{key: ("txt",)}).pieces()


def test_two_columns_of_one_name_are_told_apart_or_passed_over(tmp_path: Path) -> None:
    text = b"a,a,b\n1,2,3\n"
    with pytest.raises(DataError, match="2 columns 'a'; name the columns otherwise"):
        source(tmp_path, text).pieces()
    assert fields(source(tmp_path, text, columns=("b",))) == [{"b": "3"}]


def test_a_row_of_another_length_is_rejected(tmp_path: Path) -> None:
    read = source(tmp_path, b"a,b\n1,2\n1\n1,2,3\n3,4\n")
    assert fields(read) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert rejected(read) == [(f"line {line}", "another number of values") for line in (3, 4)]


def test_a_file_cut_in_the_middle_of_a_value_is_noticed(tmp_path: Path) -> None:
    read = source(tmp_path, b'a,b\n1,2\n3,"four\nfive\nsix')
    assert fields(read) == [{"a": "1", "b": "2"}]
    (bad,) = [found for found in everything(read) if isinstance(found, Rejected)]
    assert (bad.place, bad.reason) == ("line 3", "malformed CSV")
    assert bad.detail == "unexpected end of data, up to line 5"


def test_a_stray_quote_costs_what_it_encloses(tmp_path: Path) -> None:
    read = source(tmp_path, b'a,b\n"1,2\n3,4\n5,"6"\n7,8\n')
    assert fields(read) == [{"a": "7", "b": "8"}]
    (bad,) = rejected(read)
    assert bad == ("line 2", "malformed CSV")


def test_a_line_that_cannot_be_read_ends_its_row_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "LONGEST_LINE", 20)
    endless = b"x" * 50
    read = source(tmp_path, b'a,b\n1,2\n3,"\n' + endless + b'"\n' + endless + b"\n4,5\n")
    assert fields(read) == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    assert [place for place, _ in rejected(read)] == ["line 3", "line 4", "line 5"]


def test_parts_of_a_large_file_without_quotes_hold_every_row_once(tmp_path: Path) -> None:
    rows = [f'{number},"{"x" * (number % 700)}' for number in range(9000)]
    text = "\n".join(["id,text", *rows]).encode()
    read = source(tmp_path, text, quote="", piece_mib=1, integers=("id",))
    assert len(read.pieces()) > 2
    assert [found["id"] for found in fields(read)] == list(range(9000))
    assert not rejected(read)
    assert len(source(tmp_path, text, piece_mib=1).pieces()) == 1


def test_compressed_rows_are_the_same_rows(tmp_path: Path) -> None:
    text = b"id,text\n" + b"".join(b'%d,"a\nb"\n' % number for number in range(500))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.csv.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    plain = fields(source(tmp_path, text))
    assert len(plain) == 500
    for name in ("a.csv.gz", "a.csv.zst"):
        assert fields(Csv(files=(f"{tmp_path}/{name}",))) == plain
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text)[:10])
    assert [reason for _, reason in rejected(Csv(files=(f"{tmp_path}/b.csv.gz",)))] == [
        "damaged compressed file"
    ]


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    assert everything(source(tmp_path, b"")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"integers": ("a",), "reals": ("a",)}, "both an integer and a real"),
        ({"integers": ("a",), "columns": ("b",)}, "not among the columns"),
        ({"delimiter": '"'}, "cannot be between two values"),
        ({"delimiter": ",,"}, "at most 1 character"),
        ({"delimitr": ";"}, "did you mean 'delimiter'"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config.choose("data/sources", {"kind": "csv", "files": ("a",), **changes})


def test_rows_are_those_of_the_same_records_elsewhere(tmp_path: Path) -> None:
    documents = corpus(tmp_path / "a.jsonl", 300)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["title", "text", "number"])
        writer.writeheader()
        writer.writerows(documents)
    lines = prepared(tmp_path, "lines")
    rows = prepared(
        tmp_path,
        "rows",
        source={"kind": "csv", "files": [f"{tmp_path}/a.csv"], "integers": ["number"]},
    )
    assert lines.manifest.splits == rows.manifest.splits
    assert all(isinstance(found, Record) for found in everything(Csv(files=(f"{tmp_path}/a.csv",))))
    assert (
        json.loads((rows.folder / "inputs.json").read_text())["settings"]["source"]["kind"] == "csv"
    )
