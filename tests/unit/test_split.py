"""The split: groups are never guessed, and an unexpected share of held-out records is reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge.system.errors import DataError
from unit.preparing import prepare_dataset

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


def read_numbers(data: Any, split: str) -> set[int]:
    rows = data.rows(split)
    return {int(row["number"]) for row in rows.take(range(len(rows)))}


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
