"""Several layouts of one corpus, the stored texts of held-out rows, and duplicates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regauge import config
from regauge.commands import prepare as verb
from regauge.data import dataset, duplicates
from regauge.data.prepare import encode
from regauge.data.settings import SplitSettings
from regauge.data.tokenizer import LoadedTokenizer
from regauge.system.errors import DataError, SettingsError
from unit.preparing import (
    FIELDS,
    build_settings,
    build_tables,
    prepare_dataset,
    read_contents,
    write_corpus,
)

PACKED: dict[str, Any] = {"layout": "packed", "length": 64}
PAIRS: dict[str, Any] = {"layout": "fields", "fields": {"text": 32}, "integers": ["number"]}


def build_layout_tables(folder: Path, out: str = "out", **changes: Any) -> config.Tables:
    return {**build_tables(folder, out, **changes), "rows": {"text": PACKED, "pairs": PAIRS}}


def prepare_layouts(folder: Path, out: str = "out", **changes: Any) -> dict[str, dataset.Dataset]:
    verb.run(config.build(verb.PrepareSettings, build_layout_tables(folder, out, **changes)))
    return {name: dataset.Dataset(folder / out / name) for name in ("text", "pairs")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "a.jsonl", 400)
    return tmp_path


def test_a_layout_does_not_depend_on_the_others(folder: Path) -> None:
    both = prepare_layouts(folder)
    for name, rows in (("text", PACKED), ("pairs", PAIRS)):
        document = {**build_tables(folder, f"alone-{name}"), "rows": rows}
        verb.run(config.build(verb.PrepareSettings, document))
        alone = read_contents(folder / f"alone-{name}")
        del alone["inputs.json"]
        assert read_contents(both[name].folder) == alone
        both[name].verify()
    assert {path.name for path in (folder / "out").iterdir()} == {"text", "pairs", "inputs.json"}
    assert not (folder / "out.partial").exists()


def test_a_named_dataset_can_be_moved(folder: Path) -> None:
    prepare_layouts(folder)["pairs"].folder.rename(folder / "elsewhere")
    moved = dataset.Dataset(folder / "elsewhere")
    moved.verify()
    assert len(moved.read_texts("heldout")) == len(moved.rows("heldout")) > 0
    with pytest.raises(DataError, match=r"pairs/manifest.json is missing.*run again"):
        prepare_layouts(folder)


@pytest.mark.full
def test_the_number_of_processes_does_not_change_the_bytes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 3000)
    write_corpus(tmp_path / "b.jsonl", 300)
    prepare_layouts(tmp_path, "one")
    prepare_layouts(tmp_path, "two", prepare={"processes": 2})
    assert read_contents(tmp_path / "one") == read_contents(tmp_path / "two")


def test_encoded_pieces_are_not_encoded_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_layouts(folder, "whole")
    encode_piece = encode.encode_piece

    def broken(layout: Any, folder: Path, work: Path, item: Any) -> Any:
        if folder.name == "pairs":
            raise KeyboardInterrupt
        return encode_piece(layout, folder, work, item)

    monkeypatch.setattr(encode, "encode_piece", broken)
    with pytest.raises(KeyboardInterrupt):
        prepare_layouts(folder)
    assert not (folder / "out").exists()
    done = folder / "out.partial" / ".work" / "encode" / "text" / "000000.arrow"
    before = done.stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        prepare_layouts(folder)
    assert done.stat().st_mtime_ns == before
    monkeypatch.setattr(encode, "encode_piece", encode_piece)
    prepare_layouts(folder)
    assert read_contents(folder / "out") == read_contents(folder / "whole")


def test_sentence_pairs_are_consecutive_and_have_every_token_once(folder: Path) -> None:
    (folder / "b.jsonl").write_text('{"text": "word"}\n{"text": ""}\n')
    data = prepare_dataset(folder, rows={"layout": "sentence-pairs", "length": 33})
    tokenizer = LoadedTokenizer(data.folder / "tokenizer")
    documents = [
        ids.tolist()
        for ids in tokenizer.encode(
            [json.loads(line)["text"] for line in (folder / "a.jsonl").read_text().splitlines()]
        )
    ]
    assert data.manifest.skipped == {"empty 'text'": 1, "too short for two halves": 1}
    assert {name: field.max_length for name, field in data.manifest.columns.items()} == {
        "first": 17,
        "second": 16,
    }
    tokens_by_split = []
    for split in ("train", "heldout"):
        rows = data.rows(split)
        tokens: list[int] = []
        for row in rows.take(range(len(rows))):
            first, second = row["first"].tolist(), row["second"].tolist()
            assert (first[0], first[-1], second[-1]) == (2, 3, 3)
            assert 2 < len(first) <= 17
            assert 1 < len(second) <= 16
            assert abs(len(first) - 2 - (len(second) - 1)) <= 1
            tokens += [*first[1:-1], *second[:-1]]
        tokens_by_split.append(tokens)
    assert sorted(tokens_by_split[0] + tokens_by_split[1]) == sorted(
        token for ids in documents for token in ids
    )
    assert any(tokens_by_split[0][: len(ids)] == ids for ids in documents), (
        "a document is cut in its order"
    )


def test_finished_datasets_are_unchanged_and_other_ones_are_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_layouts(folder)
    with caplog.at_level("INFO", logger="regauge"):
        prepare_layouts(folder)
    assert "nothing to do" in caplog.text
    with pytest.raises(DataError, match=r"another dataset: rows.categories was unset and"):
        prepare_dataset(folder)
    changed = build_layout_tables(folder)
    changed["rows"]["pairs"] = {**PAIRS, "fields": {"text": 16}}
    with pytest.raises(DataError, match=r"rows.pairs.fields.text was 32 and is 16"):
        verb.run(config.build(verb.PrepareSettings, changed))


def test_files_of_other_settings_are_removed(folder: Path) -> None:
    whole = read_contents(prepare_dataset(folder, "whole").folder)
    prepare_layouts(folder).clear()
    (folder / "out").rename(folder / "out.partial")
    assert read_contents(prepare_dataset(folder).folder) == whole


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": {"lenght": 8}}, r"unknown key 'rows.a.lenght'; did you mean 'length'"),
        ({"a": {"layout": "fields"}}, r"'rows.a': layout 'fields' needs fields"),
        ({"A/b": {"length": 8}}, "invalid name 'A/b' of a layout"),
        ({"length": 8, "a": {"length": 8}}, "unknown key 'rows.a'"),
        ({"fields": {"text": 8}}, "'rows': layout 'packed' does not use 'fields'; remove it"),
        (
            {"a": {**PAIRS, "length": 8}},
            "'rows.a': layout 'fields' does not use 'length'; remove it",
        ),
    ],
)
def test_invalid_layouts_are_refused(folder: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config.build(verb.PrepareSettings, {**build_tables(folder), "rows": rows})


def test_layouts_can_be_saved_and_loaded(folder: Path) -> None:
    for document in (build_tables(folder), build_layout_tables(folder)):
        run_settings = config.build(verb.PrepareSettings, document)
        dumped = config.dump(run_settings)
        assert dumped["rows"].keys() >= document["rows"].keys()
        assert config.build(verb.PrepareSettings, dumped) == run_settings
    assert "" not in config.dump(build_settings(folder))["rows"]


def test_the_command_reports_every_layout(folder: Path) -> None:
    run_file = folder / "run.json"
    run_file.write_text(json.dumps(build_layout_tables(folder)))
    plan = verb.main(run_file, dry_run=True)
    assert plan["rows"]["pairs"]["max_lengths"] == {"text": 32, "number": 1}
    answer = verb.main(run_file, "rows.text.length=32")
    assert answer["text"]["layout"] == "packed"
    assert answer["pairs"]["dataset"] == str(folder / "out" / "pairs")
    assert dataset.Dataset(folder / "out" / "text").manifest.columns["tokens"].max_length == 32


def test_a_later_stage_can_read_one_layout(folder: Path) -> None:
    files = ["@corpus/text/*.json"]
    stages = [
        {"verb": "prepare", "name": "corpus"},
        {"verb": "prepare", "name": "again", "source": {"kind": "text", "files": files}},
    ]
    document = {
        **build_layout_tables(folder),
        "output": {"folder": str(folder / "pipe")},
        "stage": stages,
    }
    del document["data"]
    (folder / "run.json").write_text(json.dumps({**document, "data": {"workers": 0}}))
    command = [sys.executable, "-m", "regauge", "pipeline", str(folder / "run.json"), "--dry-run"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "depends on: corpus" in done.stdout


def test_heldout_texts_are_complete_and_in_the_order_of_the_rows(folder: Path) -> None:
    data = prepare_dataset(folder, **FIELDS)
    documents = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    heldout = data.rows("heldout")
    numbers = [row["number"] for row in heldout.take(range(len(heldout)))]
    expected = [{"title": documents[n]["title"], "text": documents[n]["text"]} for n in numbers]
    assert data.read_texts("heldout") == data.read_texts("heldout", 10**6) == expected
    assert data.read_texts("heldout", 3) == expected[:3]
    assert data.read_texts("heldout", 0) == data.read_texts("train", None) == []
    assert max(len(item["text"].split()) for item in expected) > 32
    with pytest.raises(DataError, match="no split 'test'"):
        data.read_texts("test")
    assert prepare_dataset(folder, "packed").read_texts("heldout") == []


def test_heldout_texts_are_verified(folder: Path) -> None:
    data = prepare_dataset(folder, **FIELDS)
    (file,) = data.manifest.splits["heldout"].text_files
    assert file.rows == data.manifest.splits["heldout"].rows
    path = data.folder / file.file
    path.write_bytes(path.read_bytes().replace(b"word", b"Word", 1))
    with pytest.raises(DataError, match=r"heldout-texts-00000.arrow differs from the hash"):
        data.verify()
    path.unlink()
    with pytest.raises(DataError, match=r"heldout-texts-00000.arrow is missing"):
        prepare_dataset(folder, **FIELDS)


def test_the_first_of_near_duplicates_is_kept(folder: Path) -> None:
    keep = prepare_dataset(folder, "keep", **FIELDS)
    drop = prepare_dataset(folder, "drop", **FIELDS, split={"near_duplicates": "drop"})
    all_numbers, remaining = (_read_numbers(data) for data in (keep, drop))
    assert all_numbers == list(range(400))
    assert drop.manifest.skipped == {"near duplicate": 400 - len(remaining)}
    dropped = set(all_numbers) - set(remaining)
    assert len(dropped) > 60
    assert all(number % 5 == 4 for number in dropped)
    heldout = set(_read_numbers(keep, "heldout"))
    assert set(_read_numbers(drop, "heldout")) == heldout - dropped


def test_an_equal_record_is_an_exact_duplicate(folder: Path) -> None:
    text = (folder / "a.jsonl").read_text()
    (folder / "b.jsonl").write_text(text)
    once = {"source": {"duplicates": "drop"}, "split": {"near_duplicates": "drop"}}
    data = prepare_dataset(folder, **config.merge(FIELDS, once))
    assert data.manifest.skipped["exact duplicate"] == 400
    assert len(_read_numbers(data)) == 400 - data.manifest.skipped["near duplicate"]


def _read_numbers(data: dataset.Dataset, *splits: str) -> list[int]:
    splits_rows = [data.rows(name) for name in splits or ("train", "heldout")]
    return sorted(row["number"] for rows in splits_rows for row in rows.take(range(len(rows))))


def test_at_similarity_1_only_equal_records_are_duplicates_and_no_signatures_are_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "b.jsonl").write_text((folder / "a.jsonl").read_text())
    monkeypatch.setattr(duplicates, "compute_signatures", None)
    keep = prepare_dataset(folder, "keep", **FIELDS, split={"similarity": 1})
    drop = prepare_dataset(
        folder, "drop", **FIELDS, split={"similarity": 1, "near_duplicates": "drop"}
    )
    assert drop.manifest.skipped == {"near duplicate": 400}
    heldout = _read_numbers(drop, "heldout")
    assert _read_numbers(keep, "heldout") == sorted([*heldout, *heldout])
    assert 40 < len(heldout) < 120


@pytest.mark.parametrize(
    ("split", "compares"),
    [
        ({}, True),
        ({"group_by": "number"}, False),
        ({"group_by": "number", "near_duplicates": "drop"}, True),
        ({"heldout_fraction": 0}, False),
        ({"heldout_fraction": 0, "near_duplicates": "drop"}, True),
        ({"similarity": 1, "near_duplicates": "drop"}, False),
    ],
)
def test_signatures_are_computed_if_they_are_needed(
    split: dict[str, Any], *, compares: bool
) -> None:
    assert SplitSettings(**split).needs_signatures is compares
