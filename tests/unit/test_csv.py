"""CSV: every row once, with the declared numbers; invalid rows are rejected with the reason."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from regauge import config
from regauge.data.sources import Record, Rejected, _files
from regauge.data.sources.csv_ import Csv
from regauge.system.errors import DataError, SettingsError
from unit.preparing import prepare_dataset, write_corpus
from unit.reads import list_rejected, read_fields, read_items


def source(folder: Path, text: bytes, **changes: Any) -> Csv:
    (folder / "a.csv").write_bytes(text)
    return config.build(Csv, {"files": (f"{folder}/a.csv",), **changes})


def test_values_may_contain_delimiters_quotes_and_line_breaks(tmp_path: Path) -> None:
    read = source(tmp_path, b'\xef\xbb\xbftitle,text\r\n"a, b","""c""\r\nd"\r\n\r\ne,\r\n')
    assert read_fields(read) == [{"title": "a, b", "text": '"c"\nd'}, {"title": "e"}]
    locations = [item.location for item in read_items(read)]
    assert locations == ["line 2", "line 5"]


def test_numbers_are_declared(tmp_path: Path) -> None:
    text = b"id,score,text\n7,1e3,9\n,,\nx,1,a\n1,nan,a\n1_0,1,a\n9223372036854775808,1,a\n2,NA,b\n"
    read = source(tmp_path, text, integers=("id",), floats=("score",), na_values=("", "NA"))
    assert read_fields(read) == [
        {"id": 7, "score": 1000.0, "text": "9"},
        {},
        {"id": 2**63, "score": 1.0, "text": "a"},
        {"id": 2, "text": "b"},
    ]
    assert list_rejected(read) == [
        ("line 4", "no number in 'id'"),
        ("line 5", "no number in 'score'"),
        ("line 6", "no number in 'id'"),
    ]


def test_column_names_are_in_the_header_or_the_run_file(tmp_path: Path) -> None:
    text = b"a\tb\tc\n1\t2\t3\n"
    tabs = {"delimiter": "\t"}
    assert read_fields(source(tmp_path, text, **tabs)) == [{"a": "1", "b": "2", "c": "3"}]
    assert read_fields(source(tmp_path, text, **tabs, columns=("c", "a"))) == [{"a": "1", "c": "3"}]
    named = source(tmp_path, text, **tabs, column_names=("x", "y", "z"), columns=("y",))
    assert read_fields(named) == [{"y": "b"}, {"y": "2"}]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_header_with_another_delimiter_is_refused(tmp_path: Path, delimiter: str) -> None:
    text = f"a{delimiter}b, c\n1{delimiter}2\n".replace(", ", " ").encode()
    shown = json.dumps(delimiter)
    with pytest.raises(DataError) as caught:
        source(tmp_path, text, integers=("a",)).list_pieces()
    assert f"which looks separated by {shown}; set source.delimiter = {shown}" in str(caught.value)
    fields = read_fields(source(tmp_path, text, delimiter=delimiter))
    assert fields == [{"a": "1", "b c": "2"}]
    assert read_fields(source(tmp_path, text, delimiter=",")) == [
        {f"a{delimiter}b c": f"1{delimiter}2"}
    ]


def test_json_lines_are_no_csv(tmp_path: Path) -> None:
    read = source(tmp_path, b'{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n')
    with pytest.raises(DataError, match=r'looks like JSON; set source\.kind = "jsonl"'):
        read.list_pieces()


def test_a_tab_separated_file_may_have_commas_in_its_header(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a,b\n1,2\n")
    read = config.build(Csv, {"files": (f"{tmp_path}/a.tsv",)})
    with pytest.raises(DataError, match=r'looks separated by ","; set source\.delimiter = ","'):
        read.list_pieces()


def test_numbers_of_rows_need_no_declaration(tmp_path: Path) -> None:
    lines = [f"word{index} word{index + 1} of,{index % 3},{index / 4}" for index in range(40)]
    (tmp_path / "a.csv").write_text("text,stars,price\n" + "\n".join([*lines, "a b c,three,"]))
    rows = {"layout": "fields", "fields": {"text": 8}, "integers": ["stars"], "floats": ["price"]}
    data = prepare_dataset(
        tmp_path,
        source={"kind": "csv", "files": [f"{tmp_path}/a.csv"]},
        rows=rows,
        split={"heldout_fraction": 0.0},
    )
    taken = data.rows("train").take(range(40))
    assert [row["stars"] for row in taken] == [index % 3 for index in range(40)]
    assert [row["price"] for row in taken] == [index / 4 for index in range(40)]
    assert data.manifest.skipped == {"no integer field 'stars'": 1}


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz"])
def test_tsv_files_are_separated_by_tabs(tmp_path: Path, ending: str) -> None:
    path, text = tmp_path / f"a{ending}", b"id\ttext\n1\tone, two\n"
    path.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
    files = {"files": (str(path),)}
    assert read_fields(config.build(Csv, files)) == [{"id": "1", "text": "one, two"}]
    assert list_rejected(config.build(Csv, {**files, "delimiter": ","})) == [
        ("line 2", "wrong number of values")
    ]


@pytest.mark.parametrize("key", ["columns", "integers", "floats"])
def test_an_unknown_column_is_refused_before_reading(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match=r"a.csv has no column 'txt'; did you mean 'text'\?"):
        source(tmp_path, b"text,label\na,1\n", **{key: ("txt",)}).list_pieces()


def test_columns_with_the_same_name_are_refused_unless_unused(tmp_path: Path) -> None:
    text = b"a,a,b\n1,2,3\n"
    with pytest.raises(
        DataError, match=r"2 columns 'a'; set source\.column_names to distinct names"
    ):
        source(tmp_path, text).list_pieces()
    assert read_fields(source(tmp_path, text, columns=("b",))) == [{"b": "3"}]


def test_a_row_with_the_wrong_number_of_values_is_rejected(tmp_path: Path) -> None:
    read = source(tmp_path, b"a,b\n1,2\n1\n1,2,3\n3,4\n")
    assert read_fields(read) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert list_rejected(read) == [(f"line {line}", "wrong number of values") for line in (3, 4)]


def test_a_file_that_ends_within_a_value_is_rejected(tmp_path: Path) -> None:
    read = source(tmp_path, b'a,b\n1,2\n3,"four\nfive\nsix')
    assert read_fields(read) == [{"a": "1", "b": "2"}]
    first, *others = [item for item in read_items(read) if isinstance(item, Rejected)]
    assert (first.location, first.reason) == ("line 3", "malformed CSV")
    assert first.detail == "unexpected end of data in line 5"
    assert [(item.location, item.reason) for item in others] == [
        ("line 4", "wrong number of values"),
        ("line 5", "wrong number of values"),
    ]


def test_a_stray_quote_rejects_only_its_line(tmp_path: Path) -> None:
    read = source(tmp_path, b'a,b\n"1,2\n3,4\n5,"6"\n7,8\n')
    assert read_fields(read) == [{"a": "3", "b": "4"}, {"a": "5", "b": "6"}, {"a": "7", "b": "8"}]
    (bad,) = list_rejected(read)
    assert bad == ("line 2", "malformed CSV")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_each_line_is_a_record_or_a_rejection_if_texts_begin_with_a_quotation_mark(
    tmp_path: Path, delimiter: str, *, is_closed: bool, compressed: bool
) -> None:
    """A quotation may end in a later text, which makes one valid value of all lines between."""
    lines = [f"river stone {number}{delimiter}a" for number in range(300)]
    for number in (10, 50, 51, 130, 299):
        lines[number] = f'"{lines[number]}'
        if is_closed and number < 200:
            lines[number + 20] = lines[number + 20].replace(delimiter, f'"{delimiter}')
    lines[200] = f'"quoted {delimiter} text"{delimiter}b'
    text = "\n".join([f"text{delimiter}label", *lines]).encode()
    path = tmp_path / ("a.csv.gz" if compressed else "a.csv")
    path.write_bytes(gzip.compress(text) if compressed else text)
    read = config.build(Csv, {"files": (str(path),), "delimiter": delimiter, "quote": '"'})
    records, rejected = read_fields(read), list_rejected(read)
    assert len(records) == 295
    assert rejected == [(f"line {n + 2}", "malformed CSV") for n in (10, 50, 51, 130, 299)]
    assert max(len(str(record["text"])) for record in records) < 30


def test_tabs_separate_values_that_are_quoted_only_if_the_header_is(tmp_path: Path) -> None:
    text = b'text\tlabel\n"He said\ta\nand "left"\tb\n"\tc\n'
    expected = [
        {"text": '"He said', "label": "a"},
        {"text": 'and "left"', "label": "b"},
        {"text": '"', "label": "c"},
    ]
    (tmp_path / "a.tsv").write_bytes(text)
    assert read_fields(Csv(files=(f"{tmp_path}/a.tsv",))) == expected
    assert read_fields(source(tmp_path, text, delimiter="\t")) == expected
    (tmp_path / "b.tsv").write_bytes(b'"text"\t"label"\n"a\tb"\t"c"\n')
    quoted = Csv(files=(f"{tmp_path}/b.tsv",))
    assert read_fields(quoted) == [{"text": "a\tb", "label": "c"}]


def test_texts_of_several_lines_are_kept(tmp_path: Path) -> None:
    """The standard library's reader is the reference."""
    draw = np.random.default_rng(0)
    words = ["river", "a, b", '"', "\n", "two\nlines", ";"]
    rows = [[" ".join(draw.choice(words, 30)), str(number)] for number in range(200)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], *rows])
    with (tmp_path / "a.csv").open(newline="") as file:
        expected = list(csv.DictReader(file))
    assert read_fields(Csv(files=(f"{tmp_path}/a.csv",))) == expected


def test_an_unreadable_line_ends_only_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "MAX_LINE_BYTES", 20)
    endless = b"x" * 50
    read = source(tmp_path, b'a,b\n1,2\n3,"\n' + endless + b'"\n' + endless + b"\n4,5\n")
    assert read_fields(read) == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    assert [location for location, _ in list_rejected(read)] == ["line 3", "line 4", "line 5"]


def test_pieces_of_a_large_file_without_quotes_have_every_row_once(tmp_path: Path) -> None:
    rows = [f'{number},"{"x" * (number % 700)}' for number in range(9000)]
    text = "\n".join(["id,text", *rows]).encode()
    read = source(tmp_path, text, quote="", chunk_mib=1, integers=("id",))
    assert len(read.list_pieces()) > 2
    assert [row["id"] for row in read_fields(read)] == list(range(9000))
    assert not list_rejected(read)
    assert len(source(tmp_path, text, chunk_mib=1).list_pieces()) == 1


def test_compressed_files_have_the_same_rows(tmp_path: Path) -> None:
    text = b"id,text\n" + b"".join(b'%d,"a\nb"\n' % number for number in range(500))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.csv.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    plain = read_fields(source(tmp_path, text))
    assert len(plain) == 500
    for name in ("a.csv.gz", "a.csv.zst"):
        assert read_fields(Csv(files=(f"{tmp_path}/{name}",))) == plain
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text)[:10])
    assert [reason for _, reason in list_rejected(Csv(files=(f"{tmp_path}/b.csv.gz",)))] == [
        "damaged compressed file"
    ]


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    assert read_items(source(tmp_path, b"")) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"integers": ("a",), "floats": ("a",)}, "'a' is in integers and in floats; remove it"),
        ({"integers": ("a",), "columns": ("b",)}, "the number column 'a' is not in columns"),
        ({"delimiter": '"'}, "invalid delimiter '\"'"),
        ({"delimiter": ",,"}, "at most 1 character"),
        ({"delimitr": ";"}, "did you mean 'delimiter'"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config.parse_choice("data/sources", {"kind": "csv", "files": ("a",), **changes})


def test_csv_and_json_lines_give_the_same_dataset(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "a.jsonl", 300)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["title", "text", "number"])
        writer.writeheader()
        writer.writerows(documents)
    lines = prepare_dataset(tmp_path, "lines")
    rows = prepare_dataset(
        tmp_path,
        "rows",
        source={"kind": "csv", "files": [f"{tmp_path}/a.csv"], "integers": ["number"]},
    )
    assert lines.manifest.splits == rows.manifest.splits
    assert all(isinstance(item, Record) for item in read_items(Csv(files=(f"{tmp_path}/a.csv",))))
    assert (
        json.loads((rows.folder / "inputs.json").read_text())["settings"]["source"]["kind"] == "csv"
    )
