"""Several layouts of one corpus, the texts that are held out, and repeats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regauge import config
from regauge.data import dataset, duplicates
from regauge.data.settings import Split
from regauge.data.tokenizer import Encoder
from regauge.errors import DataError, SettingsError
from regauge.preparation import encode
from regauge.verbs import prepare as verb
from unit.preparing import FIELDS, contents, corpus, prepared, settings, tables

PACKED: dict[str, Any] = {"layout": "packed", "length": 64}
PAIRS: dict[str, Any] = FIELDS["rows"]


def several(folder: Path, out: str = "out", **changes: Any) -> config.Tables:
    return {**tables(folder, out, **changes), "rows": {"text": PACKED, "pairs": PAIRS}}


def made(folder: Path, out: str = "out", **changes: Any) -> dict[str, dataset.Dataset]:
    verb.run(config.build(verb.Prepare, several(folder, out, **changes)))
    return {name: dataset.Dataset(folder / out / name) for name in ("text", "pairs")}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    corpus(tmp_path / "a.jsonl", 400)
    return tmp_path


def test_a_layout_among_others_is_the_one_that_is_made_alone(small: Path) -> None:
    both = made(small)
    for name, rows in (("text", PACKED), ("pairs", PAIRS)):
        document = {**tables(small, f"alone-{name}"), "rows": rows}
        verb.run(config.build(verb.Prepare, document))
        alone = contents(small / f"alone-{name}")
        del alone["inputs.json"]
        assert contents(both[name].folder) == alone
        both[name].verify()
    assert {path.name for path in (small / "out").iterdir()} == {"text", "pairs", "inputs.json"}
    assert not (small / "out.partial").exists()


def test_a_named_dataset_can_be_moved_alone(small: Path) -> None:
    made(small)["pairs"].folder.rename(small / "elsewhere")
    moved = dataset.Dataset(small / "elsewhere")
    moved.verify()
    assert len(moved.texts("heldout")) == len(moved.split("heldout")) > 0
    with pytest.raises(DataError, match=r"pairs/manifest.json is gone.*run again"):
        made(small)


@pytest.mark.full
def test_two_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 3000)
    corpus(tmp_path / "b.jsonl", 300)
    made(tmp_path, "one")
    made(tmp_path, "two", prepare={"processes": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_what_was_encoded_is_not_encoded_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(small, "whole")
    encode_piece = encode.encode_piece

    def broken(layout: Any, folder: Path, work: Path, item: Any) -> Any:
        if folder.name == "pairs":
            raise KeyboardInterrupt
        return encode_piece(layout, folder, work, item)

    monkeypatch.setattr(encode, "encode_piece", broken)
    with pytest.raises(KeyboardInterrupt):
        made(small)
    assert not (small / "out").exists()
    done = small / "out.partial" / ".work" / "encode" / "text" / "000000.arrow"
    before = done.stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        made(small)
    assert done.stat().st_mtime_ns == before
    monkeypatch.setattr(encode, "encode_piece", encode_piece)
    made(small)
    assert contents(small / "out") == contents(small / "whole")


def test_halves_follow_one_another_and_hold_every_token_once(small: Path) -> None:
    (small / "b.jsonl").write_text('{"text": "word"}\n{"text": ""}\n')
    data = prepared(small, rows={"layout": "halves", "length": 33})
    encoder = Encoder(data.folder / "tokenizer")
    known = [
        ids.tolist()
        for ids in encoder.encode(
            [json.loads(line)["text"] for line in (small / "a.jsonl").read_text().splitlines()]
        )
    ]
    assert data.manifest.skipped == {"empty 'text'": 1, "too short for two halves": 1}
    assert {name: field.limit for name, field in data.manifest.fields.items()} == {
        "first": 17,
        "second": 16,
    }
    found = []
    for split in ("train", "heldout"):
        rows = data.split(split)
        whole: list[int] = []
        for row in rows.take(range(len(rows))):
            first, second = row["first"].tolist(), row["second"].tolist()
            assert (first[0], first[-1], second[-1]) == (2, 3, 3)
            assert 2 < len(first) <= 17
            assert 1 < len(second) <= 16
            assert abs(len(first) - 2 - (len(second) - 1)) <= 1
            whole += [*first[1:-1], *second[:-1]]
        found.append(whole)
    assert sorted(found[0] + found[1]) == sorted(token for ids in known for token in ids)
    assert any(found[0][: len(ids)] == ids for ids in known), "a document is cut in its order"


def test_a_finished_pair_is_left_alone_and_another_one_is_refused(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(small)
    with caplog.at_level("INFO", logger="regauge"):
        made(small)
    assert "nothing to do" in caplog.text
    with pytest.raises(DataError, match=r"another dataset: rows.categories was 'not set' and"):
        prepared(small)
    changed = several(small)
    changed["rows"]["pairs"] = {**PAIRS, "fields": {"text": 16}}
    with pytest.raises(DataError, match=r"rows.pairs.fields.text was 32 and is 16"):
        verb.run(config.build(verb.Prepare, changed))


def test_nothing_of_other_settings_is_left_over(small: Path) -> None:
    whole = contents(prepared(small, "whole").folder)
    made(small).clear()
    (small / "out").rename(small / "out.partial")
    assert contents(prepared(small).folder) == whole


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": {"lenght": 8}}, r"unknown key 'rows.a.lenght'; did you mean 'length'"),
        ({"a": {"layout": "fields"}}, r"'rows.a': layout 'fields' needs fields"),
        ({"A/b": {"length": 8}}, "'A/b' cannot name rows"),
        ({"length": 8, "a": {"length": 8}}, "unknown key 'rows.a'"),
        ({"fields": {"text": 8}}, "'rows': 'fields' is no part of rows of layout 'packed'"),
        ({"a": {**PAIRS, "length": 8}}, "'rows.a': 'length' is no part of rows of layout 'fields'"),
    ],
)
def test_impossible_layouts_are_refused(small: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config.build(verb.Prepare, {**tables(small), "rows": rows})


def test_layouts_are_dumped_as_they_are_written(small: Path) -> None:
    for document in (tables(small), several(small)):
        built = config.build(verb.Prepare, document)
        dumped = config.dump(built)
        assert dumped["rows"].keys() >= document["rows"].keys()
        assert config.build(verb.Prepare, dumped) == built
    assert "" not in config.dump(settings(small))["rows"]


def test_the_verb_answers_for_every_layout(small: Path) -> None:
    run_file = small / "run.json"
    run_file.write_text(json.dumps(several(small)))
    plan = verb.main(run_file, dry_run=True)
    assert plan["rows"]["pairs"]["limits"] == {"title": 8, "text": 32, "number": 1}
    answer = verb.main(run_file, "rows.text.length=32")
    assert answer["text"]["layout"] == "packed"
    assert answer["pairs"]["dataset"] == str(small / "out" / "pairs")
    assert dataset.Dataset(small / "out" / "text").manifest.fields["tokens"].limit == 32


def test_a_later_stage_reads_one_of_them(small: Path) -> None:
    files = ["@corpus/text/*.json"]
    stages = [
        {"verb": "prepare", "name": "corpus"},
        {"verb": "prepare", "name": "again", "source": {"kind": "text", "files": files}},
    ]
    document = {**several(small), "output": {"folder": str(small / "pipe")}, "stage": stages}
    del document["data"]
    (small / "run.json").write_text(json.dumps({**document, "data": {"workers": 0}}))
    command = [sys.executable, "-m", "regauge", "pipeline", str(small / "run.json"), "--dry-run"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "known after: corpus" in done.stdout


def test_held_out_texts_are_whole_and_in_the_order_of_the_rows(small: Path) -> None:
    data = prepared(small, **FIELDS)
    documents = [json.loads(line) for line in (small / "a.jsonl").read_text().splitlines()]
    held = data.split("heldout")
    numbers = [row["number"] for row in held.take(range(len(held)))]
    expected = [{"title": documents[n]["title"], "text": documents[n]["text"]} for n in numbers]
    assert data.texts("heldout") == data.texts("heldout", 10**6) == expected
    assert data.texts("heldout", 3) == expected[:3]
    assert data.texts("heldout", 0) == data.texts("train", None) == []
    assert max(len(item["text"].split()) for item in expected) > 32
    with pytest.raises(DataError, match="no split 'test'"):
        data.texts("test")
    assert prepared(small, "packed").texts("heldout") == []


def test_held_out_texts_are_verified(small: Path) -> None:
    data = prepared(small, **FIELDS)
    (file,) = data.manifest.splits["heldout"].texts
    assert file.rows == data.manifest.splits["heldout"].rows
    path = data.folder / file.file
    path.write_bytes(path.read_bytes().replace(b"word", b"Word", 1))
    with pytest.raises(DataError, match=r"heldout-texts-00000.arrow is not what"):
        data.verify()
    path.unlink()
    with pytest.raises(DataError, match=r"heldout-texts-00000.arrow is gone"):
        prepared(small, **FIELDS)


def test_of_near_duplicates_the_first_is_left(small: Path) -> None:
    keep = prepared(small, "keep", **FIELDS)
    drop = prepared(small, "drop", **FIELDS, split={"repeats": "drop"})
    kept, left = (_numbers(data) for data in (keep, drop))
    assert kept == list(range(400))
    assert drop.manifest.skipped == {"near duplicate": 400 - len(left)}
    gone = set(kept) - set(left)
    assert len(gone) > 60
    assert all(number % 5 == 4 for number in gone)
    held = set(_numbers(keep, "heldout"))
    assert set(_numbers(drop, "heldout")) == held - gone


def test_an_equal_record_counts_as_an_exact_duplicate(small: Path) -> None:
    text = (small / "a.jsonl").read_text()
    (small / "b.jsonl").write_text(text)
    once = {"source": {"duplicates": "drop"}, "split": {"repeats": "drop"}}
    data = prepared(small, **config.merge(FIELDS, once))
    assert data.manifest.skipped["exact duplicate"] == 400
    assert len(_numbers(data)) == 400 - data.manifest.skipped["near duplicate"]


def _numbers(data: dataset.Dataset, *splits: str) -> list[int]:
    found = [data.split(name) for name in splits or ("train", "heldout")]
    return sorted(row["number"] for rows in found for row in rows.take(range(len(rows))))


def test_at_similarity_1_only_equal_records_are_repeats_and_no_words_are_compared(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "b.jsonl").write_text((small / "a.jsonl").read_text())
    monkeypatch.setattr(duplicates, "signatures", None)
    keep = prepared(small, "keep", **FIELDS, split={"similarity": 1})
    drop = prepared(small, "drop", **FIELDS, split={"similarity": 1, "repeats": "drop"})
    assert drop.manifest.skipped == {"near duplicate": 400}
    held = _numbers(drop, "heldout")
    assert _numbers(keep, "heldout") == sorted([*held, *held])
    assert 40 < len(held) < 120


@pytest.mark.parametrize(
    ("split", "compares"),
    [
        ({}, True),
        ({"by": "number"}, False),
        ({"by": "number", "repeats": "drop"}, True),
        ({"heldout_share": 0}, False),
        ({"heldout_share": 0, "repeats": "drop"}, True),
        ({"similarity": 1, "repeats": "drop"}, False),
    ],
)
def test_words_are_compared_where_something_depends_on_it(
    split: dict[str, Any], *, compares: bool
) -> None:
    assert Split(**split).compares_words is compares
