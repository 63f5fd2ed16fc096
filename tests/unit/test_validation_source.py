"""Held-out rows from another source: a validation file beside the training file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge.commands import prepare as verb
from regauge.commands._parts.default_tables import complete_tables
from regauge.config import build
from regauge.data.dataset import Dataset
from regauge.data.prepare.dataset_build import DatasetBuild
from regauge.data.tokenizer import LoadedTokenizer
from regauge.system.errors import DataError, RegaugeError, SettingsError
from unit.preparing import WORDS, prepare_dataset, read_contents

Records = list[dict[str, Any]]
Prepare = Callable[..., Dataset]


def build_records(count: int, seed: int) -> Records:
    draw = np.random.default_rng(seed)
    return [
        {"text": " ".join(draw.choice(WORDS, 20)), "label": ["no", "yes"][index % 2]}
        for index in range(count)
    ]


def write(path: Path, records: Records) -> None:
    """Write records, unless the file has them: its time is part of the inputs."""
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


TRAIN, VALIDATION = build_records(60, 1), build_records(20, 2)
ROWS = {"layout": "fields", "fields": {"text": 64}, "labels": ["label"]}


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Return a function that prepares training and validation records."""

    def prepare_records(train: Records, heldout: Records, **changes: Any) -> Dataset:
        write(tmp_path / "train.jsonl", train)
        write(tmp_path / "validation" / "v.jsonl", heldout)
        source = {"kind": "jsonl", "files": [str(tmp_path / "validation" / "*.jsonl")]}
        table = {"source": source, **changes.pop("validation", {})}
        out = changes.pop("out", "out")
        split = {"heldout_fraction": 0.0, **changes.pop("split", {})}
        tables = {"rows": ROWS, "validation": table, "split": split, **changes}
        return prepare_dataset(tmp_path, out, **tables)

    return prepare_records


def read_texts(data: Dataset, split: str) -> list[str]:
    tokenizer = LoadedTokenizer(data.folder / "tokenizer")
    rows = data.rows(split)
    return [tokenizer.decode(row["text"]).strip() for row in rows.take(range(len(rows)))]


def list_texts(records: Records) -> list[str]:
    return [record["text"] for record in records]


def test_the_validation_records_are_the_held_out_rows(prepare: Prepare) -> None:
    data = prepare(TRAIN, VALIDATION)
    assert read_texts(data, "train") == list_texts(TRAIN)
    assert read_texts(data, "heldout") == list_texts(VALIDATION)
    assert [row["text"] for row in data.read_texts("heldout")] == list_texts(VALIDATION)
    assert data.manifest.columns["label"].class_counts == {"train": (30, 30), "heldout": (10, 10)}


def shorten(record: dict[str, Any]) -> dict[str, Any]:
    """Return a near-duplicate of a record."""
    return {**record, "text": record["text"].rpartition(" ")[0]}


@pytest.mark.parametrize("similarity", [0.7, 1.0])
def test_training_records_that_are_in_the_validation_source_are_left_out(
    prepare: Prepare, similarity: float, caplog: pytest.LogCaptureFixture
) -> None:
    train = [*TRAIN, VALIDATION[3], shorten(VALIDATION[5])]
    data = prepare(train, VALIDATION, split={"similarity": similarity})
    num_left_out = 2 if similarity < 1 else 1
    reason = "near duplicate of a validation record"
    assert data.manifest.skipped == {reason: num_left_out}
    expected = TRAIN if similarity < 1 else [*TRAIN, shorten(VALIDATION[5])]
    assert read_texts(data, "train") == list_texts(expected)
    assert read_texts(data, "heldout") == list_texts(VALIDATION)
    problem = "of 62 training records are near-duplicates of validation records and are left out"
    assert f"{num_left_out} {problem}" in caplog.text


def test_near_duplicates_may_be_kept_and_are_counted(prepare: Prepare) -> None:
    train = [*TRAIN, VALIDATION[3], shorten(VALIDATION[5])]
    data = prepare(train, VALIDATION, validation={"near_duplicates": "keep"})
    assert read_texts(data, "train") == list_texts(train)
    assert data.manifest.skipped == {}
    assert data.manifest.warnings == {"near duplicate of a validation record": 2}


def test_duplicates_are_dropped_in_each_source(prepare: Prepare) -> None:
    train, validation = [*TRAIN, TRAIN[0]], [*VALIDATION, VALIDATION[0], shorten(VALIDATION[1])]
    data = prepare(train, validation, source={"duplicates": "drop"})
    assert read_texts(data, "train") == list_texts(TRAIN)
    assert read_texts(data, "heldout") == list_texts(validation)
    data = prepare(train, validation, split={"near_duplicates": "drop"}, out="near")
    assert read_texts(data, "train") == list_texts(TRAIN)
    assert read_texts(data, "heldout") == list_texts(VALIDATION)
    assert data.manifest.skipped == {"near duplicate": 3}


def test_a_validation_record_is_no_duplicate_of_a_training_record(prepare: Prepare) -> None:
    train = [*TRAIN, VALIDATION[3]]
    keep = {"near_duplicates": "keep"}
    split = {"near_duplicates": "drop"}
    data = prepare(train, VALIDATION, validation=keep, split=split, source={"duplicates": "drop"})
    assert read_texts(data, "train") == list_texts(train)
    assert read_texts(data, "heldout") == list_texts(VALIDATION)


def test_a_training_file_of_validation_records_is_refused(prepare: Prepare) -> None:
    with pytest.raises(DataError, match=r"20 of 20 training .* are left out; name another val"):
        prepare(VALIDATION, VALIDATION)


def test_the_tokenizer_is_trained_on_the_training_records(prepare: Prepare, tmp_path: Path) -> None:
    with_validation = prepare(TRAIN, VALIDATION)
    other = prepare(TRAIN, build_records(9, 3), out="other")
    assert with_validation.manifest.tokenizer.sha256 == other.manifest.tokenizer.sha256
    write(tmp_path / "train.jsonl", [*TRAIN, *VALIDATION])
    both = prepare_dataset(tmp_path, "both", rows=ROWS, split={"heldout_fraction": 0.0})
    assert both.manifest.tokenizer.sha256 != other.manifest.tokenizer.sha256


@pytest.mark.full
def test_the_bytes_do_not_depend_on_the_processes(prepare: Prepare) -> None:
    train, validation = build_records(4000, 4), build_records(900, 5)
    train[100:120] = validation[:20]
    source = {"chunk_mib": 1}
    one = prepare(train, validation, source=source)
    two = prepare(train, validation, source=source, out="two", prepare={"processes": 2})
    assert read_contents(one.folder) == read_contents(two.folder)
    assert one.manifest.skipped == {"near duplicate of a validation record": 20}


def test_a_stopped_job_resumes_with_the_same_bytes(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = [*TRAIN, VALIDATION[3]]
    whole = prepare(train, VALIDATION)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DatasetBuild, "build", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(train, VALIDATION, out="stopped")
    resumed = prepare(train, VALIDATION, out="stopped")
    assert read_contents(resumed.folder) == read_contents(whole.folder)


def test_packed_rows_are_filled_from_one_source_each(prepare: Prepare) -> None:
    data = prepare(TRAIN, VALIDATION, rows={"layout": "packed", "length": 64})
    tokenizer = LoadedTokenizer(data.folder / "tokenizer")
    for split, records in (("train", TRAIN), ("heldout", VALIDATION)):
        rows = data.rows(split)
        words = [
            word
            for row in rows.take(range(len(rows)))
            for word in tokenizer.decode(row["tokens"]).split()
        ]
        assert sorted(words) == sorted(" ".join(list_texts(records)).split())


@pytest.mark.parametrize(
    ("validation", "error", "message"),
    [
        ([], DataError, "the validation source has no records; correct validation.source"),
        ([{"text": "a b"}], SettingsError, "validation.source: the source has no field 'label'"),
        (
            [{**VALIDATION[0], "label": "perhaps"}],
            DataError,
            "1 held-out record has the class 'perhaps' in 'label'",
        ),
        (
            [VALIDATION[0], *({"text": 7, "label": "no"} for _ in range(9))],
            DataError,
            "9 of 10 (9 no text in 'text'); correct rows or validation.source; see the records in",
        ),
        ([{"text": " ", "label": "no"}], DataError, "has no validation rows (1 empty 'text')"),
    ],
)
def test_a_validation_source_without_rows_is_refused(
    prepare: Prepare, validation: Records, error: type[RegaugeError], message: str
) -> None:
    with pytest.raises(error) as caught:
        prepare(TRAIN, validation)
    assert message in str(caught.value)


def test_the_validation_source_takes_missing_keys_from_the_source() -> None:
    source = {"kind": "csv", "files": ("a.csv",), "delimiter": ";"}
    tables = {"source": source, "validation": {"source": {"files": ("b.csv",)}}}
    completed = complete_tables(tables)
    assert completed["validation"]["source"] == {**source, "files": ("b.csv",)}
    assert completed["split"] == {"heldout_fraction": 0.0}
    other = {"kind": "jsonl", "files": ("b.jsonl",)}
    assert complete_tables({**tables, "validation": {"source": other}})["validation"] == {
        "source": other
    }


def test_a_held_out_fraction_beside_a_validation_source_is_refused(tmp_path: Path) -> None:
    tables = {
        "source": {"kind": "jsonl", "files": ["a.jsonl"]},
        "validation": {"source": {"files": ["b.jsonl"]}},
        "data": {"path": str(tmp_path)},
    }
    assert build(verb.PrepareSettings, tables).split.heldout_fraction == 0
    with pytest.raises(SettingsError, match=r"are held out, and no others; remove split\.heldout"):
        build(verb.PrepareSettings, {**tables, "split": {"heldout_fraction": 0.1}})
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    source = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")]}
    settings = build(verb.PrepareSettings, {**tables, "source": source})
    with pytest.raises(DataError, match=r"validation\.source: no file .*; correct validation\.s"):
        verb.run(settings)
