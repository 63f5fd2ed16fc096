"""Shards are read in parts of pieces, encoded and written."""

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
from regauge.data.sources import Piece, Record, Rejected, Skipped, Source, SourceItem
from regauge.inference.export.manifest import ProgramEntry
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.predict.fields import InputFields
from regauge.inference.predict.settings import PredictOutput
from regauge.inference.predict.shard import (
    EncodedShard,
    PieceReader,
    RecordSpec,
    ShardWriter,
    read_shard,
)
from regauge.inference.predict.shard_queue import ShardId
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from regauge.system.errors import SettingsError


class CountedSource(Source):
    """Pieces of the given sizes; each record has its number in its piece."""

    kind = "counted"
    sizes: tuple[int, ...]

    def list_pieces(self) -> tuple[Piece, ...]:
        return tuple(Piece(str(number), 1, 1, "", ()) for number in range(len(self.sizes)))

    def read(self, piece: Piece) -> Iterator[SourceItem]:
        for number in range(self.sizes[int(piece.name)]):
            yield Record(piece.name, f"record {number}", {"number": number})


def build_spec(
    rows: int = 100, texts: tuple[str, ...] = ("text",), prompt: str | None = None, **options: Any
) -> RecordSpec:
    return RecordSpec(
        InputFields(texts),
        prompt,
        rows,
        options.pop("kept", KEPT),
        PredictOutput(**{"folder": "out", **options.pop("output", {})}),
        **options,
    )


def build_reader(rows: int, *sizes: int) -> PieceReader:
    source = CountedSource(sizes=sizes)
    return PieceReader(source, source.list_pieces(), build_spec(rows, (), kept={}))


def read_numbers(reader: PieceReader, piece: int, part: int) -> tuple[list[int], bool] | None:
    """Return the numbers of the records of a part, and whether it is the last one."""
    items = reader.read_part(ShardId(piece, part))
    if items is None:
        return None
    records = [item for item in items[0] if isinstance(item, Record)]
    assert {record.file for record in records} <= {str(piece)}
    return [int(record.fields["number"]) for record in records], items[1]


def expected_parts(rows: int, size: int) -> list[tuple[list[int], bool]]:
    """Return the numbers in each part, and whether it is the last; an empty piece has one part."""
    starts = range(0, max(1, size), rows)
    numbers = [list(range(start, min(size, start + rows))) for start in starts]
    return [(part, index == len(numbers) - 1) for index, part in enumerate(numbers)]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 6, 7])
def test_parts_are_consecutive_and_the_last_one_is_marked(size: int) -> None:
    reader, expected = build_reader(3, size), expected_parts(3, size)
    assert [read_numbers(reader, 0, part) for part in range(len(expected))] == expected
    assert [is_last for _, is_last in expected] == [False] * (len(expected) - 1) + [True]
    assert read_numbers(reader, 0, len(expected)) is None
    assert read_numbers(reader, 0, len(expected) + 5) is None
    assert read_numbers(reader, 0, 0) == expected[0]


@given(
    rows=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    data=st.data(),
)
def test_parts_can_be_read_in_any_order(rows: int, sizes: list[int], data: st.DataObject) -> None:
    reader = build_reader(rows, *sizes)
    shard = st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, 6))
    for piece, part in data.draw(st.lists(shard, max_size=25)):
        expected = expected_parts(rows, sizes[piece])
        assert read_numbers(reader, piece, part) == (
            expected[part] if part < len(expected) else None
        )


def test_an_open_piece_is_not_read_from_its_start_again() -> None:
    started: list[str] = []

    class WatchedSource(CountedSource):
        kind = "watched"

        def read(self, piece: Piece) -> Iterator[SourceItem]:
            started.append(piece.name)
            yield from super().read(piece)

    source = WatchedSource(sizes=(9, 4))
    reader = PieceReader(source, source.list_pieces(), build_spec(2, (), kept={}))
    for part in (0, 1, 3):
        assert read_numbers(reader, 0, part) == expected_parts(2, 9)[part]
    assert started == ["0"]
    assert read_numbers(reader, 0, 1) == expected_parts(2, 9)[1]
    assert started == ["0", "0"]
    assert read_numbers(reader, 1, 1) == expected_parts(2, 4)[1]
    assert started == ["0", "0", "1"]


class ItemsSource(Source):
    """One piece with the given items."""

    kind = "items"
    items: tuple[Any, ...]

    def list_pieces(self) -> tuple[Piece, ...]:
        return (Piece("all", 1, 1, "", ()),)

    def read(self, piece: Piece) -> Iterator[SourceItem]:
        del piece
        yield from self.items


def record(line: int, **fields: Any) -> Record:
    return Record("a.jsonl", f"line {line}", fields)


ITEMS = (
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
KEPT = {"id": "integer", "price": "float"}
TOKENIZATION = Tokenization(max_length=8, prompts={"query": "w20 w21 "})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer of words, which ends each text with token 3."""
    return datasets.write_pairs(tmp_path_factory.mktemp("data") / "pairs") / "tokenizer"


@pytest.fixture
def preprocessor(tokenizer: Path) -> Preprocessor:
    return Preprocessor(tokenizer, TOKENIZATION, InputSpec())


def encode_shard(
    preprocessor: Preprocessor,
    rows: int = 100,
    items: tuple[Any, ...] = ITEMS,
    part: int = 0,
    **options: Any,
) -> EncodedShard:
    shard = find_shard(preprocessor, build_spec(rows, **options), items, part)
    assert shard is not None
    return shard


def find_shard(
    preprocessor: Preprocessor, record_spec: RecordSpec, items: tuple[Any, ...], part: int
) -> EncodedShard | None:
    source = ItemsSource(items=items)
    piece_reader = PieceReader(source, source.list_pieces(), record_spec)
    return read_shard(piece_reader, preprocessor, record_spec, ShardId(0, part))


def token_lists(shard: EncodedShard, text: int = 0) -> list[list[int]]:
    texts = shard.records.texts[text]
    return [ids.tolist() for ids in np.split(texts.ids, np.cumsum(texts.lengths)[:-1])]


def test_invalid_records_are_quarantined_and_skipped_records_are_counted(
    preprocessor: Preprocessor,
) -> None:
    shard = encode_shard(preprocessor)
    assert token_lists(shard) == [[5, 6, 3], [7] * 7 + [3], [9, 3]]
    assert shard.kept_values == {"id": [1, 4, None], "price": [2, 0.5, None]}
    counts = (len(shard.records), shard.num_skipped, shard.num_truncated, shard.is_last)
    assert counts == (3, 2, 1, True)
    assert [(item.location, item.reason) for item in shard.quarantined] == [
        ("line 2", "malformed JSON"),
        ("line 5", "no text in 'text'"),
        ("line 6", "no text in 'text'"),
        ("line 7", "'id' is not of type integer"),
        ("line 9", "'price' is not of type float"),
    ]
    assert shard.quarantined[3].detail == "str 'seven'"
    assert shard.seconds["read"] >= 0


def test_invalid_and_skipped_records_count_towards_the_size_of_a_part(
    preprocessor: Preprocessor,
) -> None:
    first, second, third = (encode_shard(preprocessor, 4, part=part) for part in range(3))
    counts = [
        (len(shard.records), len(shard.quarantined), shard.num_skipped)
        for shard in (first, second, third)
    ]
    assert counts == [(2, 1, 1), (0, 3, 1), (1, 1, 0)]
    assert [shard.is_last for shard in (first, second, third)] == [False, False, True]
    assert second.records.num_tokens == 0


def test_a_numeric_field_may_be_missing_but_must_not_be_a_text(preprocessor: Preprocessor) -> None:
    shard = encode_shard(preprocessor, kept={}, numeric_fields=("price",))
    assert shard.kept_values == {}
    assert token_lists(shard) == [[5, 6, 3], [7] * 7 + [3], [8, 3], [9, 3]]
    reasons = [(item.location, item.reason) for item in shard.quarantined]
    assert reasons[-1] == ("line 9", "'price' is not a number")


def test_a_part_past_the_end_is_none(preprocessor: Preprocessor) -> None:
    assert find_shard(preprocessor, build_spec(5), ITEMS, part=2) is None


def test_a_prompt_is_prepended_to_each_text(preprocessor: Preprocessor) -> None:
    shard = encode_shard(preprocessor, prompt="query")
    assert token_lists(shard) == [[20, 21, 5, 6, 3], [20, 21] + [7] * 5 + [3], [20, 21, 9, 3]]
    with pytest.raises(SettingsError, match="no prompt is called 'passage'"):
        encode_shard(preprocessor, prompt="passage")


PAIRS = (
    record(1, query="w5 w6 w7 w8 w9", text="w10"),
    record(2, query="w11", text="w12 " * 9),
    record(3, query="w13"),
)


def test_two_texts_are_encoded_separately_or_joined(tokenizer: Path) -> None:
    input_spec = InputSpec(text_fields=("query", "text"), max_lengths=(4, 6))
    encode = partial(encode_shard, items=PAIRS, texts=("query", "text"))
    separate = encode(Preprocessor(tokenizer, TOKENIZATION, input_spec))
    assert token_lists(separate, 0) == [[5, 6, 7, 3], [11, 3]]
    assert token_lists(separate, 1) == [[10, 3], [12] * 5 + [3]]
    assert (separate.num_truncated, separate.records.features) == (2, ())
    assert [item.reason for item in separate.quarantined] == ["no text in 'text'"]
    joined = encode(
        Preprocessor(tokenizer, TOKENIZATION, input_spec.model_copy(update={"is_pair": True}))
    )
    assert token_lists(joined) == [[5, 6, 7, 3, 10, 3], [11, 3] + [12] * 5 + [3]]
    assert [values.tolist() for values in joined.records.features] == [[4, 2]]
    assert joined.num_truncated == 2


def test_joined_texts_have_one_start_token(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "opening"
    shutil.copytree(tokenizer, folder)
    tokenizer_file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer_file.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    tokenizer_file.save(str(folder / "tokenizer.json"))
    input_spec = InputSpec(text_fields=("query", "text"), max_lengths=(4, 5), is_pair=True)
    shard = encode_shard(
        Preprocessor(folder, TOKENIZATION, input_spec), items=PAIRS, texts=("query", "text")
    )
    assert token_lists(shard) == [[2, 5, 6, 3, 10, 3], [2, 11, 3, 12, 12, 12, 3]]
    assert [values.tolist() for values in shard.records.features] == [[4, 3]]
    assert shard.num_truncated == 2


PROGRAM = ProgramEntry(output_kind="vectors", output_size=2, inputs=())


def decode(tokens: np.ndarray) -> list[str]:
    return [" ".join(f"w{token:g}" for token in row if token >= 0) for row in tokens]


def build_writer(folder: Path, program: ProgramEntry = PROGRAM, **output: Any) -> ShardWriter:
    for name in ("shards", "quarantine", "scratch"):
        (folder / name).mkdir(exist_ok=True)
    record_spec = build_spec(output=output)
    return ShardWriter(folder, folder / "scratch", program, record_spec, decode)


def file_names(folder: Path) -> dict[str, list[str]]:
    return {
        name: sorted(path.name for path in (folder / name).iterdir())
        for name in ("shards", "quarantine", "scratch")
    }


VECTORS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def test_a_shard_is_written_and_its_ledger_line_is_returned(
    preprocessor: Preprocessor, tmp_path: Path
) -> None:
    shard = encode_shard(preprocessor)
    shard.computed_tokens = 64
    shard.seconds["compute"] = 0.25
    line = build_writer(tmp_path).write(shard, VECTORS)
    assert file_names(tmp_path) == {
        "shards": ["000000-00000.parquet"],
        "quarantine": ["000000-00000.jsonl"],
        "scratch": [],
    }
    file = tmp_path / "shards" / "000000-00000.parquet"
    table = pq.read_table(file)
    assert table.column_names == ["id", "price", "embedding"]
    assert table["embedding"].to_pylist() == VECTORS.tolist()
    assert table["id"].to_pylist() == [1, 4, None]
    rejected = [
        json.loads(text)
        for text in (tmp_path / "quarantine" / "000000-00000.jsonl").read_text().splitlines()
    ]
    assert rejected == [item.to_document() for item in shard.quarantined]
    counts = {"rows": 3, "quarantined": 5, "skipped": 2, "truncated": 1, "computed_tokens": 64}
    position = {"piece": 0, "part": 0, "is_last": True, "tokens": 13}
    assert (counts | position).items() <= line.items()
    assert line["bytes"] == {file.name: file.stat().st_size}
    assert set(line["sha256"]) == {file.name}
    assert set(line["seconds"]) == {"read", "compute", "write"}
    assert json.loads(json.dumps(line)) == line


@pytest.mark.parametrize(
    ("name", "number", "stored"),
    [
        ("id", 2**63 - 1, 2**63 - 1),
        ("id", 2**63, None),
        ("id", 2.5, None),
        ("price", 2**53 + 1, None),
        ("price", 2**53 + 2, 2.0**53 + 2),
        ("price", 10**400, None),
    ],
)
def test_a_kept_number_is_quarantined_if_its_column_cannot_hold_it(
    preprocessor: Preprocessor, tmp_path: Path, name: str, number: float, stored: float | None
) -> None:
    shard = encode_shard(
        preprocessor, items=(record(1, text="w5"), record(2, text="w6", **{name: number}))
    )
    line = build_writer(tmp_path).write(shard, VECTORS[: len(shard.records)])
    assert line["quarantined"] == (stored is None)
    column = pq.read_table(tmp_path / "shards" / "000000-00000.parquet")[name].to_pylist()
    assert column == [None] + [stored] * (stored is not None)


def test_an_outdated_quarantine_file_is_removed(preprocessor: Preprocessor, tmp_path: Path) -> None:
    shard_writer = build_writer(tmp_path)
    shard_writer.write(encode_shard(preprocessor), VECTORS)
    shard_writer.write(encode_shard(preprocessor, items=ITEMS[:1]), VECTORS[:1])
    assert file_names(tmp_path)["quarantine"] == []
    assert pq.read_table(tmp_path / "shards" / "000000-00000.parquet").num_rows == 1


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_the_npy_format_has_a_table_of_the_other_columns(
    preprocessor: Preprocessor, tmp_path: Path, dtype: str
) -> None:
    line = build_writer(tmp_path, format="npy", dtype=dtype).write(
        encode_shard(preprocessor), VECTORS
    )
    assert file_names(tmp_path)["shards"] == ["000000-00000.npy", "000000-00000.parquet"]
    assert sorted(line["bytes"]) == sorted(line["sha256"]) == file_names(tmp_path)["shards"]
    array = np.load(tmp_path / "shards" / "000000-00000.npy")
    assert (array.dtype, array.shape) == (np.dtype(dtype), (3, 2))
    column_names = pq.read_table(tmp_path / "shards" / "000000-00000.parquet").column_names
    assert column_names == ["id", "price", *(["scale"] if dtype == "int8" else [])]


def test_a_shard_without_valid_records_is_written(
    preprocessor: Preprocessor, tmp_path: Path
) -> None:
    empty = encode_shard(preprocessor, items=(ITEMS[1],))
    line = build_writer(tmp_path).write(empty, np.empty((0, 2), np.float32))
    assert (line["rows"], line["quarantined"], line["is_last"]) == (0, 1, True)
    table = pq.read_table(tmp_path / "shards" / "000000-00000.parquet")
    assert (table.num_rows, table.column_names) == (0, ["id", "price", "embedding"])


def test_generated_tokens_are_decoded(preprocessor: Preprocessor, tmp_path: Path) -> None:
    program = ProgramEntry(output_kind="text", output_size=2, inputs=())
    tokens = np.array([[5, 6], [7, -1], [-1, -1]], np.float32)
    build_writer(tmp_path, program).write(encode_shard(preprocessor), tokens)
    table = pq.read_table(tmp_path / "shards" / "000000-00000.parquet")
    assert table.column_names == ["id", "price", "generated_text"]
    assert table["generated_text"].to_pylist() == ["w5 w6", "w7", ""]
