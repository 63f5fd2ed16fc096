"""Pieces of a source in parts: what is read, encoded and written of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from distributed import datasets
from regauge.artifacts.manifest import Program
from regauge.artifacts.output_settings import Written
from regauge.artifacts.preprocess import Reader
from regauge.data.sources import Found, Piece, Record, Rejected, Skipped, Source
from regauge.errors import SettingsError
from regauge.models.io_spec import Fields
from regauge.models.sentence_transformers import Reads
from regauge.prediction.fields import kind_of
from regauge.prediction.shard import Asked, Shelf, Taken, Writer, read
from regauge.prediction.shard_queue import Shard


class Counted(Source):
    """So many records in each piece, each with the number that it has in its piece."""

    kind = "counted"
    sizes: tuple[int, ...]

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(Piece(str(number), 1, 1, "", ()) for number in range(len(self.sizes)))

    def read(self, piece: Piece) -> Iterator[Found]:
        for number in range(self.sizes[int(piece.name)]):
            yield Record(piece.name, f"record {number}", {"number": number})


def shelf(rows: int, *sizes: int) -> Shelf:
    source = Counted(sizes=sizes)
    return Shelf(source, source.pieces(), Asked((), None, rows, {}, Written(folder="out")))


def taken(made: Shelf, piece: int, part: int) -> tuple[list[int], bool] | None:
    """Return the numbers of the records of a part, all of them of its piece, and if it is last."""
    found = made.take(Shard(piece, part))
    if found is None:
        return None
    records = [each for each in found[0] if isinstance(each, Record)]
    assert {each.file for each in records} <= {str(piece)}
    return [int(each.fields["number"]) for each in records], found[1]


def parts(rows: int, size: int) -> list[tuple[list[int], bool]]:
    """Return what the parts of a piece hold; of an empty piece there is one, and it is the last."""
    starts = range(0, max(1, size), rows)
    cut = [list(range(start, min(size, start + rows))) for start in starts]
    return [(each, place == len(cut) - 1) for place, each in enumerate(cut)]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 6, 7])
def test_parts_follow_each_other_and_the_last_one_says_so(size: int) -> None:
    made, wanted = shelf(3, size), parts(3, size)
    assert [taken(made, 0, part) for part in range(len(wanted))] == wanted
    assert [last for _, last in wanted] == [False] * (len(wanted) - 1) + [True]
    assert taken(made, 0, len(wanted)) is None
    assert taken(made, 0, len(wanted) + 5) is None
    assert taken(made, 0, 0) == wanted[0]


@given(
    rows=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_part_of_any_piece_can_be_asked_for_in_any_order(
    rows: int, sizes: list[int], data: st.DataObject
) -> None:
    made = shelf(rows, *sizes)
    shard = st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, 6))
    for piece, part in data.draw(st.lists(shard, max_size=25)):
        every = parts(rows, sizes[piece])
        assert taken(made, piece, part) == (every[part] if part < len(every) else None)


def test_a_piece_that_is_open_is_read_on_and_not_again() -> None:
    begun: list[str] = []

    class Watched(Counted):
        kind = "watched"

        def read(self, piece: Piece) -> Iterator[Found]:
            begun.append(piece.name)
            yield from super().read(piece)

    source = Watched(sizes=(9, 4))
    asked = Asked((), None, 2, {}, Written(folder="out"))
    made = Shelf(source, source.pieces(), asked)
    for part in (0, 1, 3):
        assert taken(made, 0, part) == parts(2, 9)[part]
    assert begun == ["0"]
    assert taken(made, 0, 1) == parts(2, 9)[1]
    assert begun == ["0", "0"]
    assert taken(made, 1, 1) == parts(2, 4)[1]
    assert begun == ["0", "0", "1"]


class Mixed(Source):
    """What records of one piece come to, given by the test."""

    kind = "mixed"
    found: tuple[Any, ...]

    def pieces(self) -> tuple[Piece, ...]:
        return (Piece("all", 1, 1, "", ()),)

    def read(self, piece: Piece) -> Iterator[Found]:
        del piece
        yield from self.found


def record(place: int, **fields: Any) -> Record:
    return Record("a.jsonl", f"line {place}", fields)


FOUND = (
    record(1, text="w5 w6", id=1, price=2),
    Rejected("a.jsonl", "line 2", "malformed JSON", "no end"),
    Skipped("a filter", {"text": "w1"}),
    record(4, text="w7 " * 20, id=4, price=0.5, more="left out"),
    record(5, id=5),
    record(6, text=6, id=6),
    record(7, text="w8", id="seven"),
    Skipped("a filter", {}),
    record(9, text="", price="dear"),
    record(10, text="w9"),
)
KEPT = {"id": "integer", "price": "real"}
READS = Reads(tokens=8, prompts={"query": "w20 w21 "})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer of words; what it encodes ends in token 3."""
    return datasets.pairs(tmp_path_factory.mktemp("data") / "pairs") / "tokenizer"


@pytest.fixture
def reader(tokenizer: Path) -> Reader:
    return Reader(tokenizer, READS, Fields())


def answered(
    reader: Reader,
    rows: int = 100,
    found: tuple[Any, ...] = FOUND,
    texts: tuple[str, ...] = ("text",),
    prompt: str | None = None,
    part: int = 0,
) -> Taken:
    source = Mixed(found=found)
    asked = Asked(texts, prompt, rows, KEPT, Written(folder="out"))
    taken = read(Shelf(source, source.pieces(), asked), reader, asked, Shard(0, part))
    assert taken is not None
    return taken


def tokens(taken: Taken, text: int = 0) -> list[list[int]]:
    each = taken.rows.texts[text]
    return [part.tolist() for part in np.split(each.ids, np.cumsum(each.lengths)[:-1])]


def test_what_cannot_be_answered_is_set_aside_and_what_was_skipped_is_counted(
    reader: Reader,
) -> None:
    found = answered(reader)
    assert tokens(found) == [[5, 6, 3], [7] * 7 + [3], [9, 3]]
    assert found.kept == {"id": [1, 4, None], "price": [2, 0.5, None]}
    assert (len(found.rows), found.skipped, found.truncated, found.last) == (3, 2, 1, True)
    assert [(each.place, each.reason) for each in found.quarantined] == [
        ("line 2", "malformed JSON"),
        ("line 5", "no text in 'text'"),
        ("line 6", "no text in 'text'"),
        ("line 7", "'id' is no integer"),
        ("line 9", "'price' is no real"),
    ]
    assert found.quarantined[3].detail == "str 'seven'"
    assert found.seconds["read"] >= 0


def test_a_part_is_so_many_records_good_or_bad(reader: Reader) -> None:
    first, second, third = (answered(reader, 4, part=part) for part in range(3))
    counts = [
        (len(each.rows), len(each.quarantined), each.skipped) for each in (first, second, third)
    ]
    assert counts == [(2, 1, 1), (0, 3, 1), (1, 1, 0)]
    assert [each.last for each in (first, second, third)] == [False, False, True]
    assert second.rows.tokens == 0


def test_a_number_that_is_read_may_be_missing_and_not_be_a_text(reader: Reader) -> None:
    source = Mixed(found=FOUND)
    asked = Asked(("text",), None, 100, {}, Written(folder="out"), numbers=("price",))
    found = read(Shelf(source, source.pieces(), asked), reader, asked, Shard(0, 0))
    assert found is not None
    assert found.kept == {}
    assert tokens(found) == [[5, 6, 3], [7] * 7 + [3], [8, 3], [9, 3]]
    reasons = [(each.place, each.reason) for each in found.quarantined]
    assert reasons[-1] == ("line 9", "'price' is no number")


def test_behind_the_last_part_there_is_none(reader: Reader) -> None:
    source = Mixed(found=FOUND)
    asked = Asked(("text",), None, 5, KEPT, Written(folder="out"))
    made = Shelf(source, source.pieces(), asked)
    assert read(made, reader, asked, Shard(0, 2)) is None


def test_a_prompt_stands_before_every_text(reader: Reader) -> None:
    found = answered(reader, prompt="query")
    assert tokens(found) == [[20, 21, 5, 6, 3], [20, 21] + [7] * 5 + [3], [20, 21, 9, 3]]
    with pytest.raises(SettingsError, match="no prompt is called 'passage'"):
        answered(reader, prompt="passage")


PAIRS = (
    record(1, query="w5 w6 w7 w8 w9", text="w10"),
    record(2, query="w11", text="w12 " * 9),
    record(3, query="w13"),
)


def test_two_texts_are_read_beside_each_other_or_as_one(tokenizer: Path) -> None:
    fields = Fields(texts=("query", "text"), limits=(4, 6))
    apart = partial(answered, found=PAIRS, texts=("query", "text"))
    beside = apart(Reader(tokenizer, READS, fields))
    assert tokens(beside, 0) == [[5, 6, 7, 3], [11, 3]]
    assert tokens(beside, 1) == [[10, 3], [12] * 5 + [3]]
    assert (beside.truncated, beside.rows.features) == (2, ())
    assert [each.reason for each in beside.quarantined] == ["no text in 'text'"]
    joined = apart(Reader(tokenizer, READS, fields.model_copy(update={"joined": True})))
    assert tokens(joined) == [[5, 6, 7, 3, 10, 3], [11, 3] + [12] * 5 + [3]]
    assert [each.tolist() for each in joined.rows.features] == [[4, 2]]
    assert joined.truncated == 2


def test_what_every_text_begins_with_stands_once_before_two_that_are_joined(
    tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "opening"
    shutil.copytree(tokenizer, folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    made.save(str(folder / "tokenizer.json"))
    fields = Fields(texts=("query", "text"), limits=(4, 5), joined=True)
    found = answered(Reader(folder, READS, fields), found=PAIRS, texts=("query", "text"))
    assert tokens(found) == [[2, 5, 6, 3, 10, 3], [2, 11, 3, 12, 12, 12, 3]]
    assert [each.tolist() for each in found.rows.features] == [[4, 3]]
    assert found.truncated == 2


PROGRAM = Program(answers="vectors", width=2, inputs=())


def spoken(tokens: np.ndarray) -> list[str]:
    return [" ".join(f"w{token:g}" for token in row if token >= 0) for row in tokens]


def writer(folder: Path, program: Program = PROGRAM, **output: Any) -> Writer:
    for room in ("shards", "quarantine", "aside"):
        (folder / room).mkdir(exist_ok=True)
    asked = Asked(("text",), None, 100, KEPT, Written(folder=str(folder), **output))
    return Writer(folder, folder / "aside", program, asked, spoken)


def names(folder: Path) -> dict[str, list[str]]:
    return {
        room: sorted(path.name for path in (folder / room).iterdir())
        for room in ("shards", "quarantine", "aside")
    }


VECTORS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def test_a_shard_is_written_with_the_line_that_tells_of_it(reader: Reader, tmp_path: Path) -> None:
    found = answered(reader)
    found.slots = 64
    found.seconds["compute"] = 0.25
    line = writer(tmp_path).write(found, VECTORS)
    assert names(tmp_path) == {
        "shards": ["000000-00000.parquet"],
        "quarantine": ["000000-00000.jsonl"],
        "aside": [],
    }
    file = tmp_path / "shards" / "000000-00000.parquet"
    made = pq.read_table(file)
    assert made.column_names == ["id", "price", "vector"]
    assert made["vector"].to_pylist() == VECTORS.tolist()
    assert made["id"].to_pylist() == [1, 4, None]
    aside = [
        json.loads(text)
        for text in (tmp_path / "quarantine" / "000000-00000.jsonl").read_text().splitlines()
    ]
    assert aside == [each._asdict() for each in found.quarantined]
    told = {name: line[name] for name in ("rows", "quarantined", "skipped", "truncated", "slots")}
    assert told == {"rows": 3, "quarantined": 5, "skipped": 2, "truncated": 1, "slots": 64}
    assert (line["piece"], line["part"], line["last"], line["tokens"]) == (0, 0, True, 13)
    assert line["bytes"] == {file.name: file.stat().st_size}
    assert set(line["sha256"]) == {file.name}
    assert set(line["seconds"]) == {"read", "compute", "write"}
    assert json.loads(json.dumps(line)) == line


@pytest.mark.parametrize(
    ("name", "number", "kept"),
    [
        ("id", 2**63 - 1, 2**63 - 1),
        ("id", 2**63, None),
        ("id", 2.5, None),
        ("price", 2**53 + 1, 2.0**53),
        ("price", 10**400, None),
    ],
)
def test_a_number_that_a_column_cannot_hold_is_set_aside_and_one_that_it_rounds_is_kept(
    reader: Reader, tmp_path: Path, name: str, number: float, kept: float | None
) -> None:
    found = answered(reader, found=(record(1, text="w5"), record(2, text="w6", **{name: number})))
    line = writer(tmp_path).write(found, VECTORS[: len(found.rows)])
    assert line["quarantined"] == (kept is None)
    column = pq.read_table(tmp_path / "shards" / "000000-00000.parquet")[name].to_pylist()
    assert column == [None] + [kept] * (kept is not None)


def test_what_was_set_aside_before_and_is_no_more_is_gone(reader: Reader, tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.write(answered(reader), VECTORS)
    made.write(answered(reader, found=FOUND[:1]), VECTORS[:1])
    assert names(tmp_path)["quarantine"] == []
    assert pq.read_table(tmp_path / "shards" / "000000-00000.parquet").num_rows == 1


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_an_array_has_the_other_columns_beside_it(
    reader: Reader, tmp_path: Path, dtype: str
) -> None:
    line = writer(tmp_path, format="npy", dtype=dtype).write(answered(reader), VECTORS)
    assert names(tmp_path)["shards"] == ["000000-00000.npy", "000000-00000.parquet"]
    assert sorted(line["bytes"]) == sorted(line["sha256"]) == names(tmp_path)["shards"]
    array = np.load(tmp_path / "shards" / "000000-00000.npy")
    assert (array.dtype, array.shape) == (np.dtype(dtype), (3, 2))
    beside = pq.read_table(tmp_path / "shards" / "000000-00000.parquet").column_names
    assert beside == ["id", "price", *(["scale"] if dtype == "int8" else [])]


def test_a_shard_without_an_answer_is_written_too(reader: Reader, tmp_path: Path) -> None:
    nothing = answered(reader, found=(FOUND[1],))
    line = writer(tmp_path).write(nothing, np.empty((0, 2), np.float32))
    assert (line["rows"], line["quarantined"], line["last"]) == (0, 1, True)
    made = pq.read_table(tmp_path / "shards" / "000000-00000.parquet")
    assert (made.num_rows, made.column_names) == (0, ["id", "price", "vector"])


def test_tokens_that_a_program_wrote_become_texts(reader: Reader, tmp_path: Path) -> None:
    program = Program(answers="text", width=2, inputs=())
    tokens = np.array([[5, 6], [7, -1], [-1, -1]], np.float32)
    writer(tmp_path, program).write(answered(reader), tokens)
    made = pq.read_table(tmp_path / "shards" / "000000-00000.parquet")
    assert made.column_names == ["id", "price", "answer"]
    assert made["answer"].to_pylist() == ["w5 w6", "w7", ""]


@pytest.mark.parametrize(
    ("value", "kind"), [("a", "text"), ("", "text"), (3, "integer"), (3.0, "real")]
)
def test_a_value_shows_what_its_field_holds(value: Any, kind: str) -> None:
    assert kind_of(value) == kind
