"""The split: groups are never guessed, and an unexpected share of held-out records is reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge import config
from regauge.commands import prepare as verb
from regauge.data.prepare import split as split_module
from regauge.system.errors import DataError
from unit.preparing import WORDS as MANY_WORDS
from unit.preparing import build_tables, prepare_dataset

WORDS = ("river", "stone", "cloud", "lamp", "field", "chair", "paper", "train", "salt", "glass")


def write_records(folder: Path, records: list[dict[str, Any]]) -> None:
    lines = (json.dumps(record) + "\n" for record in records)
    (folder / "a.jsonl").write_text("".join(lines))


def build_records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    return [{"text": " ".join(draw.choice(WORDS, 12)), "number": index} for index in range(count)]


def prepare(folder: Path, **split: Any) -> Any:
    rows = {"layout": "fields", "fields": {"text": 32}, "integers": ("number",)}
    return prepare_dataset(folder, rows=rows, split=split)


def read_list(data: Any, split: str) -> list[int]:
    rows = data.rows(split)
    return [int(row["number"]) for row in rows.take(range(len(rows)))]


def read_numbers(data: Any, split: str) -> set[int]:
    return set(read_list(data, split))


@pytest.mark.parametrize("kind", ["hash", "text", "float", "nested"])
def test_records_of_one_group_are_in_one_split_whatever_its_values(
    tmp_path: Path, kind: str
) -> None:
    users = np.random.default_rng(1).integers(0, 2**64, 40, np.uint64).tolist()
    values = {
        "hash": users,
        "text": [f"user {user}" for user in users],
        "float": [user / 2**70 for user in users],
        "nested": [{"id": user} for user in users],
    }[kind]
    records = build_records(400)
    write_records(
        tmp_path,
        [
            {**record, "user": values[index % 40], "number": index % 40}
            for index, record in enumerate(records)
        ],
    )
    data = prepare(tmp_path, group_by="user", heldout_fraction=0.25)
    train, heldout = read_numbers(data, "train"), read_numbers(data, "heldout")
    assert not train & heldout
    assert len(train | heldout) == 40
    assert heldout


def test_records_without_a_group_are_rejected_and_counted(tmp_path: Path) -> None:
    records = build_records(100)
    for index, record in enumerate(records):
        if index % 5:
            record["user"] = index % 7
    write_records(tmp_path, records)
    data = prepare(tmp_path, group_by="user", heldout_fraction=0.25)
    assert data.manifest.skipped == {"no group in 'user'": 20}
    assert sum(split.rows for split in data.manifest.splits.values()) == 80


def test_prepare_fails_if_most_records_are_rejected(tmp_path: Path) -> None:
    records = build_records(100)
    for record in records[:51]:
        record["number"] = 0.5
    write_records(tmp_path, records)
    with pytest.raises(DataError, match=r"most records are rejected: 51 of 100 \(51 no integer"):
        prepare(tmp_path)
    (path,) = tmp_path.glob("*.partial/rejected.jsonl")
    assert len(path.read_text().splitlines()) == 51


@pytest.mark.parametrize(
    ("records", "split", "warning"),
    [
        (build_records(1), {}, "the source has one record; divide it into documents"),
        (
            [{"text": " ".join(WORDS) + f" {number}", "number": number} for number in range(60)],
            {"heldout_fraction": 0.1},
            "all records are one cluster of near-duplicates; set split.similarity = 1",
        ),
        (
            [{**record, "user": 0} for record in build_records(60)],
            {"heldout_fraction": 0.1, "group_by": "user"},
            "all records are one group of 'user'; name another field in split.group_by",
        ),
    ],
)
def test_a_share_far_from_the_requested_one_is_reported(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    records: list[dict[str, Any]],
    split: dict[str, Any],
    warning: str,
) -> None:
    write_records(tmp_path, records)
    prepare(tmp_path, **split)
    clause = r"(records are|1 record is) held out, and split\.heldout_fraction is"
    assert re.search(clause, caplog.text)
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("records", "split", "message"),
    [
        (
            [{"text": f"The same text{' ' * index}", "number": index} for index in range(30)],
            {},
            "one cluster of near-duplicates with the same texts; correct rows or source",
        ),
        (
            [{"text": " ".join(WORDS) + f" {index}", "number": index} for index in range(30)],
            {},
            "all records are one cluster of near-duplicates; set split.similarity = 1",
        ),
        (
            [{**record, "user": 0} for record in build_records(30)],
            {"group_by": "user"},
            "all records are one group of 'user'; name another field in split.group_by",
        ),
        (
            build_records(2) + build_records(1) * 30,
            {},
            'has 31 records; set split.near_duplicates = "drop" to keep one of several equal',
        ),
        (build_records(4), {}, "the split draws from only 4 units; set another split.seed"),
    ],
)
def test_a_split_without_training_records_is_refused_with_the_cause(
    tmp_path: Path, records: list[dict[str, Any]], split: dict[str, Any], message: str
) -> None:
    write_records(tmp_path, records)
    with pytest.raises(
        DataError, match=f"{len(records)} of {len(records)} records are held"
    ) as error:
        prepare(tmp_path, heldout_fraction=0.999, **split)
    assert message in str(error.value)


def test_the_requested_share_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path, build_records(2000))
    prepare(tmp_path, heldout_fraction=0.2)
    assert "split.heldout_fraction" not in caplog.text


def test_schemas_that_conversations_share_make_no_near_duplicates(tmp_path: Path) -> None:
    schema = [{"name": "weather", "description": " ".join(WORDS * 20)}]
    write_records(tmp_path, [{**record, "tools": schema} for record in build_records(100)])
    data = prepare(tmp_path, heldout_fraction=0.3)
    assert 0 < data.manifest.splits["heldout"].rows < 60


def build_texts(count: int, seed: int = 7) -> list[str]:
    """Return texts of which no two are similar."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(MANY_WORDS, 12)) for _ in range(count)]


def change_unread(text: str) -> str:
    """Return an equal text with another case and other white space."""
    return f" {text.upper().replace(' ', '  ', 3)}\n"


def build_record(layout: str, text: str) -> dict[str, Any]:
    """Return a record for a layout; a message has an id, which no row has."""
    words, answer = text.split(), {"role": "assistant", "content": "Yes."}
    fields: dict[str, dict[str, Any]] = {
        "packed": {"text": text},
        "fields": {"text": text, "number": 1},
        "tagged": {"tokens": words, "tags": ["O"] * len(words)},
        "chat": {"messages": [{"id": hash(text), "role": "user", "content": text}, answer]},
        "preferences": {"prompt": text, "chosen": "Yes.", "rejected": "No."},
    }
    return fields[layout]


LAYOUT_ROWS: dict[str, dict[str, Any]] = {
    "fields": {"fields": {"text": 32}, "integers": ["number"]},
    "tagged": {"fields": {"tokens": 32}},
    "chat": {"chat_template": "alpaca"},
    "preferences": {"chat_template": "alpaca"},
}


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the splits of all records, in the order of the source, for each `prepare`."""
    decide, decided = split_module.decide_splits, []

    def record_decisions(*arguments: Any) -> Any:
        answer = decide(*arguments)
        decided.append(answer[0].tolist())
        return answer

    monkeypatch.setattr(split_module, "decide_splits", record_decisions)
    return decided


@pytest.mark.parametrize("similarity", [0.7, 1])
@pytest.mark.parametrize("layout", ["packed", "fields", "tagged", "chat", "preferences"])
def test_equal_texts_are_in_one_split_whatever_else_a_record_has(
    tmp_path: Path,
    layout: str,
    similarity: float,
    decisions: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = []
    for number, text in enumerate(build_texts(80)):
        copy = build_record(layout, change_unread(text))
        extra = {"id": f"id-{number}", "url": f"https://a.example/{MANY_WORDS[number]}"}
        records += [{**build_record(layout, text), **extra}]
        records += [dict(reversed({**extra, "id": f"copy-{number}", **copy}.items()))]
    write_records(tmp_path, records)
    rows = {"layout": layout, **LAYOUT_ROWS.get(layout, {})}
    with caplog.at_level("INFO", logger="regauge"):
        prepare_dataset(
            tmp_path, rows=rows, split={"heldout_fraction": 0.3, "similarity": similarity}
        )
    (decided,) = decisions
    assert decided[::2] == decided[1::2]
    assert 10 < sum(decided[::2]) < 40
    assert "160 records" in caplog.text
    assert "80 with the texts of an earlier record" in caplog.text


def test_a_duplicate_by_one_of_several_layouts_is_in_the_same_split(
    tmp_path: Path, decisions: list[list[int]]
) -> None:
    titles, texts, spare = build_texts(60, 1), build_texts(60, 2), build_texts(120, 3)
    records = [
        {"title": title, "text": text, "id": number}
        for number, (title, text) in enumerate(
            [*zip(titles, spare[:60], strict=True), *zip(titles, texts, strict=True)]
        )
    ]
    records += [
        {"title": title, "text": text} for title, text in zip(spare[60:], texts, strict=True)
    ]
    write_records(tmp_path, records)
    rows = {name: {"layout": "fields", "fields": {name: 32}} for name in ("title", "text")}
    tables = build_tables(tmp_path, split={"heldout_fraction": 0.3})
    verb.run(config.build(verb.PrepareSettings, {**tables, "rows": rows}))
    (decided,) = decisions
    assert decided[:60] == decided[60:120] == decided[120:]
    assert 5 < sum(decided[:60]) < 30


@pytest.mark.parametrize("similarity", [0.7, 1])
def test_copies_of_validation_texts_are_left_out_whatever_else_they_have(
    tmp_path: Path, similarity: float
) -> None:
    texts = build_texts(50)
    write_records(tmp_path, [{"text": t, "number": 1, "id": str(n)} for n, t in enumerate(texts)])
    (tmp_path / "v").mkdir()
    copies = [{"id": f"v{n}", "number": 0, "text": change_unread(t)} for n, t in enumerate(texts)]
    write_records(tmp_path / "v", copies[:20])
    rows = {"layout": "fields", "fields": {"text": 32}, "integers": ["number"]}
    validation = {"source": {"kind": "jsonl", "files": [str(tmp_path / "v" / "a.jsonl")]}}
    split = {"heldout_fraction": 0.0, "similarity": similarity}
    data = prepare_dataset(tmp_path, rows=rows, split=split, validation=validation)
    assert data.manifest.skipped == {"near duplicate of a validation record": 20}
    assert {name: split.rows for name, split in data.manifest.splits.items()} == {
        "train": 30,
        "heldout": 20,
    }


def test_an_exact_duplicate_equals_an_earlier_record_in_all_that_rows_read(tmp_path: Path) -> None:
    texts = build_texts(40)
    records = [{"text": text, "number": n % 2, "id": n} for n, text in enumerate(texts * 2)]
    records += [{"text": text, "number": 1, "id": text} for text in texts[::2]]
    write_records(tmp_path, records)
    rows = {"layout": "fields", "fields": {"text": 32}, "integers": ["number"]}
    data = prepare_dataset(tmp_path, rows=rows, source={"duplicates": "drop"})
    assert data.manifest.skipped == {"exact duplicate": 40}
    packed = prepare_dataset(tmp_path, "packed", source={"duplicates": "drop"})
    assert packed.manifest.skipped == {"exact duplicate": 60}


def test_equal_texts_of_several_groups_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = build_texts(40)
    records = [{"text": text, "number": n % 40, "user": n} for n, text in enumerate(texts * 2)]
    write_records(tmp_path, records)
    data = prepare(tmp_path, group_by="user", heldout_fraction=0.3)
    train, heldout = (read_list(data, name) for name in ("train", "heldout"))
    shared = sum(number in train for number in heldout)
    assert shared > 3
    warning = "held-out record with the texts of a training record"
    assert data.manifest.warnings == {warning: shared}
    assert f"{shared} of {len(heldout)} held-out records have the texts of" in caplog.text


def test_the_tokenizer_is_trained_on_the_texts_that_rows_read(tmp_path: Path) -> None:
    records = build_records(50)
    write_records(tmp_path, records)
    alone = prepare(tmp_path)
    write_records(tmp_path, [{**record, "id": f"uuid{record['number']:036}"} for record in records])
    rows = {"layout": "fields", "fields": {"text": 32}, "integers": ("number",)}
    beside = prepare_dataset(tmp_path, "beside", rows=rows)
    assert beside.manifest.tokenizer == alone.manifest.tokenizer
