"""`prepare`: the same bytes by any road, nothing lost on it, nothing written over."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from regauge.data import dataset, tokenizer
from regauge.data.sources import Piece
from regauge.errors import DataError, PreflightError, SettingsError
from regauge.preparation import process_pool, read_records, workdir
from regauge.preparation.prepare import Job
from regauge.verbs import prepare as verb
from unit.preparing import FIELDS, contents, corpus, prepared, settings, tables


@pytest.fixture
def small(tmp_path: Path) -> Path:
    corpus(tmp_path / "a.jsonl", 400)
    return tmp_path


@pytest.mark.parametrize("layout", [{}, FIELDS], ids=["packed", "fields"])
def test_two_processes_write_the_bytes_of_one(tmp_path: Path, layout: dict[str, Any]) -> None:
    corpus(tmp_path / "a.jsonl", 3000)
    corpus(tmp_path / "b.jsonl", 300)
    one = prepared(tmp_path, "one", **layout)
    two = prepared(tmp_path, "two", **layout, prepare={"processes": 2})
    assert len(json.loads((two.folder / "inputs.json").read_text())["pieces"]) > 2
    assert contents(one.folder) == contents(two.folder)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl", "one", "two"}


def test_kill_and_go_on_gives_the_same_bytes(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 10_000)
    run_file = tmp_path / "run.toml"
    whole = prepared(tmp_path, "whole", prepare={"processes": 2})
    document = tables(tmp_path, "killed", prepare={"processes": 2})
    run_file.with_suffix(".json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "regauge", "prepare", str(run_file.with_suffix(".json"))]
    partial = tmp_path / "killed.partial" / ".work"
    for phase, count in (("read", 1), ("encode", 1)):
        kill_when(command, partial / phase, count)
        assert not (tmp_path / "killed").exists()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "going on with" in done.stderr
    assert contents(tmp_path / "killed") == contents(whole.folder)
    assert not (tmp_path / "killed.partial").exists()


def kill_when(command: list[str], folder: Path, count: int) -> None:
    """Start a command and kill it when so many pieces of a phase are committed."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(list(folder.glob("*.json"))) < count:
        assert process.poll() is None, f"it ended before piece {count} of {folder.name}"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stderr
    process.stderr.read()  # ends when the workers, which inherited it, are gone
    process.stderr.close()


def test_a_dataset_that_only_waits_to_be_moved_is_moved(small: Path) -> None:
    whole = contents(prepared(small).folder)
    (small / "out").rename(small / "out.partial")
    (small / "out.partial" / ".work" / "read").mkdir(parents=True)
    before = (small / "out.partial" / "train-00000.arrow").stat().st_mtime_ns
    assert contents(prepared(small).folder) == whole
    assert (small / "out" / "train-00000.arrow").stat().st_mtime_ns == before


def test_rows_are_mapped_and_not_copied(small: Path) -> None:
    data = prepared(small)
    before = pa.total_allocated_bytes()
    rows = data.split("train")
    assert len(rows.take([len(rows) - 1])[0]["tokens"]) == 64
    assert pa.total_allocated_bytes() - before < 1000


def test_packed_rows_hold_every_token_once_and_hardly_any_padding(small: Path) -> None:
    data = prepared(small, rows={"length": 32}, source={"columns": ["text"]})
    encoder = tokenizer.Encoder(data.folder / "tokenizer")
    expected: Counter[tuple[int, ...]] = Counter()
    for line in (small / "a.jsonl").read_text().splitlines():
        (ids,) = encoder.encode([json.loads(line)["text"]])
        expected.update(tuple(ids[at : at + 30].tolist()) for at in range(0, len(ids), 30))
    found: Counter[tuple[int, ...]] = Counter()
    for name in ("train", "heldout"):
        rows = data.split(name)
        for row in rows.take(range(len(rows))):
            assert len(row["tokens"]) == len(row["segments"]) == 32
            assert not row["tokens"][row["segments"] == 0].any()
            for number in range(1, row["segments"].max() + 1):
                chunk = row["tokens"][row["segments"] == number].tolist()
                assert (chunk[0], chunk[-1]) == (2, 3)
                found[tuple(chunk[1:-1])] += 1
    assert found == expected
    assert data.manifest.real_token_share >= 0.97
    lengths = data.manifest.fields["tokens"].lengths["train"]
    train = data.manifest.splits["train"]
    assert sum(size * count for size, count in enumerate(lengths)) == train.tokens
    assert sum(lengths) == train.rows


def test_fields_are_cut_counted_and_in_the_order_of_the_source(small: Path) -> None:
    data = prepared(small, **FIELDS)
    documents = [json.loads(line) for line in (small / "a.jsonl").read_text().splitlines()]
    encoder = tokenizer.Encoder(data.folder / "tokenizer")
    for name in ("train", "heldout"):
        rows = data.split(name).take(range(len(data.split(name))))
        numbers = [row["number"] for row in rows]
        assert numbers == sorted(numbers)
        for row in rows:
            text = documents[row["number"]]["text"]
            assert row["text"].tolist() == encoder.wrap(encoder.encode([text])[0][:30]).tolist()
    manifest = data.manifest
    assert sum(split.rows for split in manifest.splits.values()) == 400
    long = sum(len(ids) > 30 for ids in encoder.encode([item["text"] for item in documents]))
    assert manifest.truncated["text"] == long > 0
    histogram = np.sum(list(manifest.fields["text"].lengths.values()), axis=0)
    assert histogram[32] >= long
    assert histogram.sum() == 400


def heldout_numbers(data: dataset.Dataset) -> set[int]:
    rows = data.split("heldout")
    return {row["number"] for row in rows.take(range(len(rows)))}


def test_near_duplicates_never_straddle(tmp_path: Path) -> None:
    documents = corpus(tmp_path / "a.jsonl", 2000, length=100)
    data = prepared(tmp_path, **FIELDS)
    assert len(json.loads((data.folder / "inputs.json").read_text())["pieces"]) > 1
    held = heldout_numbers(data)
    pairs = [
        (number, number // 2)
        for number in range(4, 2000, 5)
        if len(documents[number // 2]["text"].split()) > 30
    ]
    assert len(pairs) > 200
    assert all((one in held) == (other in held) for one, other in pairs)
    assert 200 < len(held) < 600
    assert any(one in held for one, _ in pairs)


def test_the_tokenizer_has_not_seen_what_is_held_out(tmp_path: Path) -> None:
    letters = np.random.default_rng(0).integers(97, 123, (60, 12), dtype=np.uint8)
    words = [row.tobytes().decode() for row in letters]
    lines = (json.dumps({"title": word, "text": f"{word} " * 40, "number": number})
             for number, word in enumerate(words))  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = prepared(tmp_path, **FIELDS, tokenizer={"vocabulary": 3000})
    encoded = tokenizer.Encoder(data.folder / "tokenizer").encode(words)
    held = heldout_numbers(data)
    assert 3 < len(held) < 30
    assert {number for number, ids in enumerate(encoded) if len(ids) > 1} == held


def test_the_layout_does_not_change_what_is_held_out(small: Path) -> None:
    first = prepared(small, "first", **FIELDS)
    other = {"rows": {"layout": "fields", "fields": {"text": 16}, "numbers": ["number"]}}
    second = prepared(small, "second", **other)
    packed = prepared(small, "packed")
    assert heldout_numbers(first) == heldout_numbers(second)
    assert first.manifest.tokenizer == second.manifest.tokenizer == packed.manifest.tokenizer
    seeded = prepared(small, "seeded", **FIELDS, split={"seed": 1})
    assert heldout_numbers(seeded) != heldout_numbers(first)
    encoder = tokenizer.Encoder(packed.folder / "tokenizer")
    held = heldout_numbers(first)
    texts = [json.loads(line)["text"] for line in (small / "a.jsonl").read_text().splitlines()]
    ids = encoder.encode([texts[number] for number in sorted(held)])
    real = sum(len(item) + 2 * -(-len(item) // 62) for item in ids)
    assert packed.manifest.splits["heldout"].tokens == real


@pytest.fixture
def bad(small: Path) -> Path:
    lines = [
        b'{"text": "no end',
        b'{"text": "undecodable \xff"}',
        b'{"text": "lone \\ud800 surrogate", "title": "a", "number": 1}',
        b'{"title": "no text", "number": 1}',
        b'{"text": "no number", "title": "a", "number": 1.5}',
        b'{"text": "  ", "title": "empty", "number": 1}',
        b'{"text": "again", "title": "twice", "number": 7}',
        b'{"text": "again", "title": "twice", "number": 7}',
    ]
    (small / "b.jsonl").write_bytes(b"\n".join(lines))
    return small


def test_bad_records_are_counted_and_in_quarantine(
    bad: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="regauge"):
        data = prepared(bad, **FIELDS, source={"duplicates": "drop"})
    assert data.manifest.skipped == {
        "empty 'text'": 1,
        "exact duplicate": 1,
        "malformed JSON": 1,
        "no integer field 'number'": 1,
        "no text in 'text'": 1,
        "undecodable bytes": 2,
    }
    lines = (data.folder / "rejected.jsonl").read_text().splitlines()
    found = {(item["place"], item["reason"]) for item in map(json.loads, lines)}
    assert found == {
        ("line 1", "malformed JSON"),
        ("line 2", "undecodable bytes"),
        ("line 3", "undecodable bytes"),
        ("line 4", "no text in 'text'"),
        ("line 5", "no integer field 'number'"),
    }
    assert all(item["file"] == str(bad / "b.jsonl") for item in map(json.loads, lines))
    assert sum(split.rows for split in data.manifest.splits.values()) == 401
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("rejected records: 5 ")


def test_long_documents_are_split_cut_or_rejected(small: Path) -> None:
    (small / "b.jsonl").write_text(json.dumps({"text": "long " * 900}) + "\n")
    split, cut, rejected = (
        prepared(small, too_long, rows={"length": 512, "too_long": too_long})
        for too_long in ("split", "truncate", "reject")
    )
    tokens = [
        sum(split.tokens for split in data.manifest.splits.values())
        for data in (split, cut, rejected)
    ]
    assert tokens[0] > tokens[1] == tokens[2] + 512
    assert cut.manifest.truncated == {"text": 1}
    assert rejected.manifest.skipped == {"longer than 512 tokens": 1}
    (line,) = (rejected.folder / "rejected.jsonl").read_text().splitlines()
    assert int(json.loads(line)["detail"].removesuffix(" tokens")) > 900


def test_a_source_without_a_usable_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no record") as caught:
        prepared(tmp_path)
    assert caught.value.exit_code == 64
    (tmp_path / "a.jsonl").write_text("none\nnone\n")
    with pytest.raises(DataError, match=r"all 2 records are rejected.*rejected.jsonl"):
        prepared(tmp_path)
    assert len((tmp_path / "out.partial" / "rejected.jsonl").read_text().splitlines()) == 2
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no record became a row"):
        prepared(tmp_path)
    corpus(tmp_path / "a.jsonl", 50)
    assert prepared(tmp_path).manifest.splits["train"].rows


def test_a_field_that_no_record_has_is_answered(small: Path) -> None:
    with pytest.raises(SettingsError, match="no field 'txt'; did you mean 'text'"):
        prepared(small, rows={"text": "txt"})
    with pytest.raises(SettingsError, match="no field 'titel'; did you mean 'title'"):
        prepared(small, "by", split={"by": "titel"})


def test_a_text_that_the_tokenizer_leaves_nothing_of_is_counted(small: Path) -> None:
    path = str(prepared(small).folder / "tokenizer")
    file = Path(path) / "tokenizer.json"
    document = json.loads(file.read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "-"}, "content": ""}
    document["pre_tokenizer"]["add_prefix_space"] = False
    file.write_text(json.dumps(document))
    with (small / "a.jsonl").open("a") as lines:
        lines.write('{"text": "---"}\n')
    again = prepared(small, "again", tokenizer={"path": path, "vocabulary": 8192})
    assert again.manifest.skipped == {"no token": 1}
    assert not (again.folder / "rejected.jsonl").read_text()


def test_a_finished_dataset_is_left_alone(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(prepared(small).folder)
    times = {path: path.stat().st_mtime_ns for path in (small / "out").iterdir()}
    with caplog.at_level("INFO", logger="regauge"):
        prepared(small, prepare={"processes": 2})
    assert "nothing to do" in caplog.text
    assert contents(small / "out") == before
    assert times == {path: path.stat().st_mtime_ns for path in (small / "out").iterdir()}


def test_another_dataset_is_never_written_over(small: Path) -> None:
    before = contents(prepared(small).folder)
    with pytest.raises(DataError, match=r"another dataset: rows.length was 64 and is 32"):
        prepared(small, rows={"length": 32})
    (small / "b.jsonl").write_text('{"text": "one more"}\n')
    with pytest.raises(DataError, match=r"another dataset: the source has changed \(.*a.jsonl"):
        prepared(small)
    assert contents(small / "out") == before
    (small / "b.jsonl").unlink()
    (small / "out" / "train-00000.arrow").unlink()
    with pytest.raises(DataError, match=r"train-00000.arrow is gone"):
        prepared(small)


@pytest.mark.parametrize("place", ["out", "out.partial"])
def test_a_foreign_folder_is_refused(small: Path, place: str) -> None:
    (small / place).mkdir()
    (small / place / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"thesis.tex.*choose another data.path"):
        prepared(small)
    assert contents(small / place) == {"thesis.tex": b"years of work"}


def test_unfinished_work_of_other_settings_is_begun_anew(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = contents(prepared(small, "whole").folder)
    job = verb._job(settings(small, rows={"length": 32}))
    with workdir.Work(job.folder, job.inputs()) as place:
        (place.work / "read").mkdir()
        (place.work / "read" / "000000.json").write_text('{"records": 5}')
        (place.work / "read" / ".000000.arrow.01234567.tmp").write_bytes(b"half")
    with workdir.Work(job.folder, job.inputs()) as place:
        assert place.started
        assert [path.name for path in (place.work / "read").iterdir()] == ["000000.json"]
    with caplog.at_level("WARNING", logger="regauge"):
        assert contents(prepared(small).folder) == whole
    assert "begun anew: rows.length was 32 and is 64" in caplog.text


def test_one_folder_has_one_worker(small: Path) -> None:
    job: Job = verb._job(settings(small))
    with (
        workdir.Work(job.folder, job.inputs()),
        pytest.raises(DataError, match="another prepare works"),
    ):
        prepared(small)
    assert prepared(small).manifest


def test_a_full_disk_is_foreseen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(small)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PreflightError, match=r"MB free and about .* MB are needed"):
        prepared(small)
    assert not (small / "out.partial").exists()


def test_a_source_that_cannot_be_read_is_named(small: Path) -> None:
    job = verb._job(settings(small, prepare={"processes": 2}))
    inputs = job.inputs()
    (small / "a.jsonl").unlink()
    (small / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"a.jsonl cannot be read.*run again"):
        read_records.read_piece(job.source, {}, small, read_records.Numbered(0, inputs.pieces[0]))


def test_what_a_process_finds_wrong_is_said_by_the_command(small: Path) -> None:
    job = verb._job(settings(small))
    lost = [Piece(f"{name}", 1, 1, "", (str(small / name),)) for name in ("one", "two")]
    items = [read_records.Numbered(number, piece) for number, piece in enumerate(lost)]
    read = partial(read_records.read_piece, job.source, {}, small)
    with (
        pytest.raises(DataError, match=r"(one|two) cannot be read.*No such file"),
        process_pool.Pool(2) as pool,
    ):
        read_records.over_pieces(pool, small / "read", items, read, "read")


def test_the_largest_pieces_come_first(tmp_path: Path) -> None:
    sizes = (3, 9, 4)
    pieces = [Piece(f"{size}", size, size, "", ()) for size in sizes]
    items = [read_records.Numbered(number, piece) for number, piece in enumerate(pieces)]
    begun: list[int] = []

    def count(item: read_records.Numbered) -> tuple[int, read_records.Counts]:
        begun.append(item.piece.bytes)
        return item.number, {"bytes": item.piece.bytes}

    with process_pool.Pool(1) as pool:
        counts = read_records.over_pieces(pool, tmp_path, items, count, "read")
    assert begun == [9, 4, 3]
    assert [found["bytes"] for found in counts] == list(sizes)


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(small: Path) -> None:
    before = contents(small)
    answer = verb.plan(settings(small, **FIELDS))
    assert contents(small) == before
    assert answer["would_do"] == "prepare it"
    assert answer["pieces"] == 1
    assert answer["bytes"] == (small / "a.jsonl").stat().st_size
    assert answer["rows"]["limits"] == {"title": 8, "text": 32, "number": 1}
    prepared(small, **FIELDS)
    done = verb.plan(settings(small, **FIELDS))
    assert done["would_do"].startswith("nothing")
    assert "would_refuse" not in done


def test_a_dry_run_says_that_the_folder_of_another_dataset_would_be_refused(small: Path) -> None:
    prepared(small, **FIELDS)
    before = contents(small)
    answer = verb.plan(settings(small))
    assert answer["would_do"] == "nothing"
    assert "holds another dataset" in answer["would_refuse"]
    assert contents(small) == before


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"fields": {"text": 8}}, "no part of rows of layout 'packed'"),
        ({"layout": "fields"}, "needs fields"),
        ({"layout": "fields", "fields": {"text": 3}}, "below 4 tokens"),
        ({"layout": "fields", "fields": {"a": 8}, "numbers": ["a"]}, "'a' is named twice"),
        ({"lenght": 8}, "did you mean 'length'"),
        ({"layout": "pakced"}, "no layouts named 'pakced'; did you mean 'packed'"),
        ({"layout": 5}, "'rows.layout': Input should be a valid string"),
    ],
)
def test_impossible_rows_are_refused(small: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(small, rows=rows)


def test_a_tokenizer_that_was_trained_before_is_used(small: Path) -> None:
    first = prepared(small, "first")
    path = str(first.folder / "tokenizer")
    second = prepared(small, "second", tokenizer={"path": path}, rows={"length": 32})
    assert second.manifest.tokenizer == first.manifest.tokenizer
    with pytest.raises(DataError, match="no tokenizer folder"):
        prepared(small, "third", tokenizer={"path": str(small / "none")})


def test_the_verb_answers_in_json_without_torch(small: Path) -> None:
    (small / "run.json").write_text(json.dumps(tables(small)))
    code = (
        "import sys; from regauge.verbs.prepare import main; from pathlib import Path;"
        f"main(Path({str(small / 'run.json')!r}), 'rows.length=32', json=True);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    data = dataset.Dataset(small / "out")
    data.verify()
    assert answer["train_rows"] == len(data.split("train"))
    assert answer["identity"] == data.manifest.identity


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "is damaged: all of it: Input should be an object"),
        ('{"format": 1, "layout"', "is damaged: all of it: Invalid JSON"),
        ('{"format": 1}', "is damaged: layout: Field required; run 'regauge prepare' again"),
        ('{"format": 99, "layout": "packed"}', "is of a later Regauge; update Regauge to read it"),
    ],
)
def test_a_manifest_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError) as caught:
        dataset.read_manifest(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_differs_between_two_inputs_is_told_by_its_key() -> None:
    old, new = ({"settings": each, "pieces": {}} for each in ({"a": {}}, {"a": {"b": 1}}))
    assert workdir.difference(old, new) == "a.b was 'not set' and is 1"
