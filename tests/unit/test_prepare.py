"""`prepare`: the same bytes for any number of processes, resumed after kills, no overwrites."""

from __future__ import annotations

import json
import os
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

from regauge.commands import prepare as verb
from regauge.data import dataset, tokenizer
from regauge.data.prepare import process_pool, read_records, workdir
from regauge.data.prepare.prepare import PrepareJob
from regauge.data.prepare.read_records import RecordFilter
from regauge.data.sources import Piece
from regauge.system import stop_signals
from regauge.system.errors import DataError, PreflightError, SettingsError, TransientError
from regauge.system.json_files import CHECKSUM
from unit.preparing import (
    FIELDS,
    build_settings,
    build_tables,
    prepare_dataset,
    read_contents,
    write_corpus,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "a.jsonl", 400)
    return tmp_path


@pytest.mark.parametrize("layout", [{}, FIELDS], ids=["packed", "fields"])
def test_the_number_of_processes_does_not_change_the_bytes(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    write_corpus(tmp_path / "a.jsonl", 3000)
    write_corpus(tmp_path / "b.jsonl", 300)
    one = prepare_dataset(tmp_path, "one", **layout)
    two = prepare_dataset(tmp_path, "two", **layout, prepare={"processes": 2})
    assert len(json.loads((two.folder / "inputs.json").read_text())["pieces"]) > 2
    assert read_contents(one.folder) == read_contents(two.folder)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl", "one", "two"}


def test_a_killed_job_resumes_with_the_same_bytes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 10_000)
    run_file = tmp_path / "run.toml"
    whole = prepare_dataset(tmp_path, "whole", prepare={"processes": 2})
    document = build_tables(tmp_path, "killed", prepare={"processes": 2})
    run_file.with_suffix(".json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "regauge", "prepare", str(run_file.with_suffix(".json"))]
    partial = tmp_path / "killed.partial" / ".work"
    for phase, count in (("read", 1), ("encode", 1)):
        kill_after(command, partial / phase, count)
        assert not (tmp_path / "killed").exists()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "resuming in" in done.stderr
    assert read_contents(tmp_path / "killed") == read_contents(whole.folder)
    assert not (tmp_path / "killed.partial").exists()


def kill_after(command: list[str], folder: Path, count: int) -> None:
    """Start a command and kill it once a phase has committed the given number of pieces."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(list(folder.glob("*.json"))) < count:
        assert process.poll() is None, f"it ended before piece {count} of {folder.name}"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stderr
    process.stderr.read()  # ends when the workers, which inherited the pipe, have ended
    process.stderr.close()


def test_a_complete_dataset_is_moved_to_its_folder(folder: Path) -> None:
    whole = read_contents(prepare_dataset(folder).folder)
    (folder / "out").rename(folder / "out.partial")
    (folder / "out.partial" / ".work" / "read").mkdir(parents=True)
    before = (folder / "out.partial" / "train-00000.arrow").stat().st_mtime_ns
    assert read_contents(prepare_dataset(folder).folder) == whole
    assert (folder / "out" / "train-00000.arrow").stat().st_mtime_ns == before


def test_rows_are_memory_mapped(folder: Path) -> None:
    data = prepare_dataset(folder)
    before = pa.total_allocated_bytes()
    rows = data.rows("train")
    assert len(rows.take([len(rows) - 1])[0]["tokens"]) == 64
    assert pa.total_allocated_bytes() - before < 1000


def test_packed_rows_have_every_token_once_and_little_padding(folder: Path) -> None:
    data = prepare_dataset(folder, rows={"length": 32}, source={"columns": ["text"]})
    encoder = tokenizer.LoadedTokenizer(data.folder / "tokenizer")
    expected: Counter[tuple[int, ...]] = Counter()
    for line in (folder / "a.jsonl").read_text().splitlines():
        (ids,) = encoder.encode([json.loads(line)["text"]])
        expected.update(tuple(ids[at : at + 30].tolist()) for at in range(0, len(ids), 30))
    chunk_counts: Counter[tuple[int, ...]] = Counter()
    for name in ("train", "heldout"):
        rows = data.rows(name)
        for row in rows.take(range(len(rows))):
            assert len(row["tokens"]) == len(row["segments"]) == 32
            assert not row["tokens"][row["segments"] == 0].any()
            for number in range(1, row["segments"].max() + 1):
                chunk = row["tokens"][row["segments"] == number].tolist()
                assert (chunk[0], chunk[-1]) == (2, 3)
                chunk_counts[tuple(chunk[1:-1])] += 1
    assert chunk_counts == expected
    assert data.manifest.real_token_fraction >= 0.97
    lengths = data.manifest.columns["tokens"].lengths["train"]
    train = data.manifest.splits["train"]
    assert sum(size * count for size, count in enumerate(lengths)) == train.tokens
    assert sum(lengths) == train.rows


def test_fields_are_truncated_and_in_the_order_of_the_source(folder: Path) -> None:
    data = prepare_dataset(folder, **FIELDS)
    documents = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    encoder = tokenizer.LoadedTokenizer(data.folder / "tokenizer")
    for name in ("train", "heldout"):
        rows = data.rows(name).take(range(len(data.rows(name))))
        numbers = [row["number"] for row in rows]
        assert numbers == sorted(numbers)
        for row in rows:
            text = documents[row["number"]]["text"]
            assert (
                row["text"].tolist()
                == encoder.add_special_tokens(encoder.encode([text])[0][:30]).tolist()
            )
    manifest = data.manifest
    assert sum(split.rows for split in manifest.splits.values()) == 400
    long = sum(len(ids) > 30 for ids in encoder.encode([item["text"] for item in documents]))
    assert manifest.truncated["text"] == long > 0
    histogram = np.sum(list(manifest.columns["text"].lengths.values()), axis=0)
    assert histogram[32] >= long
    assert histogram.sum() == 400


def read_heldout_numbers(data: dataset.Dataset) -> set[int]:
    rows = data.rows("heldout")
    return {row["number"] for row in rows.take(range(len(rows)))}


def test_near_duplicates_are_in_the_same_split(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "a.jsonl", 2000, length=100)
    data = prepare_dataset(tmp_path, **FIELDS)
    assert len(json.loads((data.folder / "inputs.json").read_text())["pieces"]) > 1
    heldout = read_heldout_numbers(data)
    pairs = [
        (number, number // 2)
        for number in range(4, 2000, 5)
        if len(documents[number // 2]["text"].split()) > 30
    ]
    assert len(pairs) > 200
    assert all((one in heldout) == (other in heldout) for one, other in pairs)
    assert 200 < len(heldout) < 600
    assert any(one in heldout for one, _ in pairs)


def test_the_tokenizer_is_trained_without_heldout_records(tmp_path: Path) -> None:
    letters = np.random.default_rng(0).integers(97, 123, (60, 12), dtype=np.uint8)
    words = [row.tobytes().decode() for row in letters]
    lines = (json.dumps({"title": word, "text": f"{word} " * 40, "number": number})
             for number, word in enumerate(words))  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = prepare_dataset(tmp_path, **FIELDS, tokenizer={"vocab_size": 3000})
    encoded = tokenizer.LoadedTokenizer(data.folder / "tokenizer").encode(words)
    heldout = read_heldout_numbers(data)
    assert 3 < len(heldout) < 30
    assert {number for number, ids in enumerate(encoded) if len(ids) > 1} == heldout


def test_layouts_with_the_same_texts_have_the_same_split(folder: Path) -> None:
    rows = {"layout": "fields", "integers": ["number"]}
    first = prepare_dataset(folder, "first", rows={**rows, "fields": {"text": 32}})
    second = prepare_dataset(folder, "second", rows={**rows, "fields": {"text": 16}})
    packed = prepare_dataset(folder, "packed")
    assert read_heldout_numbers(first) == read_heldout_numbers(second)
    assert first.manifest.tokenizer == second.manifest.tokenizer == packed.manifest.tokenizer
    seeded = prepare_dataset(
        folder, "seeded", rows={**rows, "fields": {"text": 32}}, split={"seed": 1}
    )
    assert read_heldout_numbers(seeded) != read_heldout_numbers(first)
    encoder = tokenizer.LoadedTokenizer(packed.folder / "tokenizer")
    heldout = read_heldout_numbers(first)
    texts = [json.loads(line)["text"] for line in (folder / "a.jsonl").read_text().splitlines()]
    ids = encoder.encode([texts[number] for number in sorted(heldout)])
    real = sum(len(item) + 2 * -(-len(item) // 62) for item in ids)
    assert packed.manifest.splits["heldout"].tokens == real


@pytest.fixture
def write_invalid_records(folder: Path) -> Path:
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
    (folder / "b.jsonl").write_bytes(b"\n".join(lines))
    return folder


def test_invalid_records_are_counted_and_rejected(
    write_invalid_records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="regauge"):
        changes = {"source": {"duplicates": "drop"}, "split": {"seed": 1}}
        data = prepare_dataset(write_invalid_records, **FIELDS, **changes)
    assert data.manifest.skipped == {
        "empty 'text'": 1,
        "exact duplicate": 1,
        "malformed JSON": 1,
        "no integer field 'number'": 1,
        "no text in 'text'": 1,
        "undecodable bytes": 2,
    }
    lines = (data.folder / "rejected.jsonl").read_text().splitlines()
    rejections = {(item["location"], item["reason"]) for item in map(json.loads, lines)}
    assert rejections == {
        ("line 1", "malformed JSON"),
        ("line 2", "undecodable bytes"),
        ("line 3", "undecodable bytes"),
        ("line 4", "no text in 'text'"),
        ("line 5", "no integer field 'number'"),
    }
    assert all(
        item["file"] == str(write_invalid_records / "b.jsonl") for item in map(json.loads, lines)
    )
    assert sum(split.rows for split in data.manifest.splits.values()) == 401
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("rejected records: 5 ")


def test_long_documents_are_split_truncated_or_rejected(folder: Path) -> None:
    (folder / "b.jsonl").write_text(json.dumps({"text": "long " * 900}) + "\n")
    split, cut, rejected = (
        prepare_dataset(folder, too_long, rows={"length": 512, "too_long": too_long})
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
    with pytest.raises(DataError, match="the source has no records") as caught:
        prepare_dataset(tmp_path)
    assert caught.value.exit_code == 64
    (tmp_path / "a.jsonl").write_text("none\nnone\n")
    with pytest.raises(DataError, match=r"all records are rejected \(2 .*rejected.jsonl"):
        prepare_dataset(tmp_path)
    assert len((tmp_path / "out.partial" / "rejected.jsonl").read_text().splitlines()) == 2
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="has no training rows"):
        prepare_dataset(tmp_path)
    write_corpus(tmp_path / "a.jsonl", 50)
    assert prepare_dataset(tmp_path).manifest.splits["train"].rows


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_of_another_encoding_has_a_remedy(tmp_path: Path, encoding: str) -> None:
    lines = ["text", *(f"Größe {number} über alles" for number in range(20))]
    (tmp_path / "a.csv").write_text("\n".join(lines), encoding=encoding)
    source = {"kind": "csv", "files": [str(tmp_path / "a.csv")]}
    with pytest.raises(DataError, match=r"undecodable bytes.*; convert the files to UTF-8; see"):
        prepare_dataset(tmp_path, source=source)


def test_an_unknown_field_gets_a_suggestion(folder: Path) -> None:
    with pytest.raises(SettingsError, match="no field 'txt' with a value; did you mean 'text'"):
        prepare_dataset(folder, rows={"text": "txt"})
    with pytest.raises(SettingsError, match="no field 'titel' with a value; did you mean 'title'"):
        prepare_dataset(folder, "by", split={"group_by": "titel"})


def test_a_text_without_tokens_is_counted(folder: Path) -> None:
    path = str(prepare_dataset(folder).folder / "tokenizer")
    file = Path(path) / "tokenizer.json"
    document = json.loads(file.read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "-"}, "content": ""}
    document["pre_tokenizer"]["add_prefix_space"] = False
    file.write_text(json.dumps(document))
    with (folder / "a.jsonl").open("a") as lines:
        lines.write('{"text": "---"}\n')
    second = prepare_dataset(folder, "again", tokenizer={"path": path, "vocab_size": 8192})
    assert second.manifest.skipped == {"no token": 1}
    assert not (second.folder / "rejected.jsonl").read_text()


def test_a_finished_dataset_is_unchanged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = read_contents(prepare_dataset(folder).folder)
    times = {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir()}
    with caplog.at_level("INFO", logger="regauge"):
        prepare_dataset(folder, prepare={"processes": 2})
    assert "nothing to do" in caplog.text
    assert read_contents(folder / "out") == before
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir()}


def test_another_dataset_is_never_overwritten(folder: Path) -> None:
    before = read_contents(prepare_dataset(folder).folder)
    with pytest.raises(DataError, match=r"another dataset: rows.length was 64 and is 32"):
        prepare_dataset(folder, rows={"length": 32})
    (folder / "b.jsonl").write_text('{"text": "one more"}\n')
    with pytest.raises(DataError, match=r"another dataset: the source has changed \(.*a.jsonl"):
        prepare_dataset(folder)
    assert read_contents(folder / "out") == before
    (folder / "b.jsonl").unlink()
    (folder / "out" / "train-00000.arrow").unlink()
    with pytest.raises(DataError, match=r"train-00000.arrow is missing"):
        prepare_dataset(folder)


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_a_folder_with_other_files_is_refused(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"thesis.tex.*choose another data.path"):
        prepare_dataset(folder)
    assert read_contents(folder / name) == {"thesis.tex": b"years of work"}


def test_an_unfinished_build_of_other_settings_is_discarded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = read_contents(prepare_dataset(folder, "whole").folder)
    job = verb._build_job(build_settings(folder, rows={"length": 32}))
    with workdir.BuildDir(job.folder, job.collect_inputs()) as build_dir:
        (build_dir.scratch / "read").mkdir()
        (build_dir.scratch / "read" / "000000.json").write_text('{"records": 5}')
        (build_dir.scratch / "read" / ".000000.arrow.01234567.tmp").write_bytes(b"half")
    with workdir.BuildDir(job.folder, job.collect_inputs()) as build_dir:
        assert build_dir.is_resumed
        assert [path.name for path in (build_dir.scratch / "read").iterdir()] == ["000000.json"]
    with caplog.at_level("WARNING", logger="regauge"):
        assert read_contents(prepare_dataset(folder).folder) == whole
    assert "out.partial: rows.length was 32 and is 64" in caplog.text


def test_a_folder_is_locked(folder: Path) -> None:
    job: PrepareJob = verb._build_job(build_settings(folder))
    with (
        workdir.BuildDir(job.folder, job.collect_inputs()),
        pytest.raises(DataError, match="another prepare is writing to"),
    ):
        prepare_dataset(folder)
    assert prepare_dataset(folder).manifest


def test_insufficient_disk_space_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PreflightError, match=r"MB free; about .* MB are needed"):
        prepare_dataset(folder)
    assert not (folder / "out.partial").exists()


def test_an_unreadable_source_is_reported(folder: Path) -> None:
    job = verb._build_job(build_settings(folder, prepare={"processes": 2}))
    inputs = job.collect_inputs()
    (folder / "a.jsonl").unlink()
    (folder / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"a.jsonl cannot be read.*run again"):
        read_records.read_piece(
            job.sources,
            RecordFilter({}),
            read_records.RowFields(tuple(job.build_layouts().values())),
            folder,
            read_records.NumberedPiece(0, inputs.pieces[0]),
        )


def test_errors_of_worker_processes_are_raised(folder: Path) -> None:
    job = verb._build_job(build_settings(folder))
    missing_pieces = [Piece(f"{name}", 1, 1, "", (str(folder / name),)) for name in ("one", "two")]
    items = [
        read_records.NumberedPiece(number, piece) for number, piece in enumerate(missing_pieces)
    ]
    row_fields = read_records.RowFields(tuple(job.build_layouts().values()))
    read = partial(read_records.read_piece, job.sources, RecordFilter({}), row_fields, folder)
    with (
        pytest.raises(DataError, match=r"(one|two) cannot be read.*No such file"),
        process_pool.ProcessPool(2) as pool,
    ):
        read_records.process_pieces(pool, folder / "read", items, read, "read")


def kill_or_wait(number: int) -> None:
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_killed_worker_is_reported_and_sends_no_signal_to_the_command() -> None:
    """The executor then ends the other workers, which pass stop signals on to their parent."""
    with (
        stop_signals.record_signals(),
        pytest.raises(TransientError, match="a worker process was killed"),
        process_pool.ProcessPool(2) as pool,
    ):
        list(pool.map_unordered(kill_or_wait, [0, 1]))
    assert stop_signals.find_signal() is None


def test_the_largest_pieces_are_processed_first(tmp_path: Path) -> None:
    sizes = (3, 9, 4)
    pieces = [Piece(f"{size}", size, size, "", ()) for size in sizes]
    items = [read_records.NumberedPiece(number, piece) for number, piece in enumerate(pieces)]
    started: list[int] = []

    def count(item: read_records.NumberedPiece) -> tuple[int, read_records.Counts]:
        started.append(item.piece.bytes)
        return item.piece_index, {"bytes": item.piece.bytes}

    with process_pool.ProcessPool(1) as pool:
        counts = read_records.process_pieces(pool, tmp_path, items, count, "read")
    assert started == [9, 4, 3]
    assert [piece_counts["bytes"] for piece_counts in counts] == list(sizes)


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    before = read_contents(folder)
    answer = verb.plan(build_settings(folder, **FIELDS))
    assert read_contents(folder) == before
    assert answer["action"] == "prepare the dataset"
    assert answer["pieces"] == 1
    assert answer["bytes"] == (folder / "a.jsonl").stat().st_size
    assert answer["rows"]["max_lengths"] == {"title": 8, "text": 32, "number": 1}
    prepare_dataset(folder, **FIELDS)
    done = verb.plan(build_settings(folder, **FIELDS))
    assert done["action"].startswith("nothing")
    assert "error" not in done


def test_a_dry_run_reports_the_folder_of_another_dataset(folder: Path) -> None:
    prepare_dataset(folder, **FIELDS)
    before = read_contents(folder)
    answer = verb.plan(build_settings(folder))
    assert answer["action"] == "nothing"
    assert "has another dataset" in answer["error"]
    assert read_contents(folder) == before


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"fields": {"text": 8}}, "layout 'packed' does not use 'fields'"),
        ({"layout": "fields"}, "needs fields"),
        ({"layout": "fields", "fields": {"text": 3}}, "below 4 tokens"),
        ({"layout": "fields", "fields": {"a": 8}, "integers": ["a"]}, "'a' is listed twice"),
        ({"lenght": 8}, "did you mean 'length'"),
        ({"layout": "pakced"}, "no layout named 'pakced'; did you mean 'packed'"),
        ({"layout": 5}, "'rows.layout' must be a text, got 5"),
    ],
)
def test_invalid_rows_are_refused(folder: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_settings(folder, rows=rows)


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer folder"):
        prepare_dataset(folder, "third", tokenizer={"path": str(folder / "none")})


def test_the_command_prints_json_without_torch(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps(build_tables(folder)))
    code = (
        "import sys; from regauge.commands.prepare import main; from pathlib import Path;"
        f"main(Path({str(folder / 'run.json')!r}), 'rows.length=32', json=True);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    data = dataset.Dataset(folder / "out")
    data.verify()
    assert answer["train_rows"] == len(data.rows("train"))
    assert answer["fingerprint"] == data.manifest.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "it contains [1, 2], not an object; run 'regauge prepare' again"),
        ("{}", "has no format version; run 'regauge prepare' again"),
        ('{"format": 1, "layout"', "cannot be read: Expecting"),
        ('{"format": 2}', "is damaged: 'layout' is missing; run 'regauge prepare' again"),
        (
            '{"format": 99, "layout": "packed"}',
            "was written by a later Regauge (format 99); install the Regauge that reads format 99",
        ),
        (
            '{"format": 1, "layout": "packed"}',
            "was written by an earlier Regauge (format 1); run 'regauge prepare' again",
        ),
    ],
)
def test_an_invalid_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError) as caught:
        dataset.read_manifest(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_files_of_a_tokenizer_are_verified(folder: Path) -> None:
    data = prepare_dataset(folder, "out")
    names = [name for name in data.manifest.files if name != dataset.REJECTED]
    assert "tokenizer/tokenizer.json" in names
    paths = (data.folder / "tokenizer").iterdir()
    assert set(names) == {f"tokenizer/{path.name}" for path in paths}
    for name in names:
        content = (data.folder / name).read_bytes()
        flip_bit(data.folder / name)
        with pytest.raises(DataError, match=f"{name} differs from the hash in its manifest; run"):
            dataset.Dataset(data.folder)
        (data.folder / name).unlink()
        with pytest.raises(DataError, match=f"{name} is missing"):
            dataset.Dataset(data.folder)
        (data.folder / name).write_bytes(content)
    (data.folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(DataError, match=r"chat_template.jinja was added after .*; remove it"):
        dataset.Dataset(data.folder)


def test_a_manifest_of_an_earlier_version_is_read_without_hashes(folder: Path) -> None:
    data = prepare_dataset(folder, "out")
    path = data.folder / dataset.MANIFEST
    document = json.loads(path.read_text())
    del document["files"], document[CHECKSUM]
    path.write_text(json.dumps(document))
    flip_bit(data.folder / "tokenizer" / "tokenizer_config.json")
    earlier = dataset.Dataset(data.folder)
    assert earlier.manifest.fingerprint == data.manifest.fingerprint
    assert earlier.manifest.files == {}


def test_a_changed_number_of_a_manifest_is_refused(folder: Path) -> None:
    data = prepare_dataset(folder, "out")
    path = data.folder / dataset.MANIFEST
    size = data.manifest.tokenizer.vocab_size
    path.write_text(path.read_text().replace(f'"vocab_size": {size}', f'"vocab_size": {size + 1}'))
    with pytest.raises(DataError, match="has changed since it was written; run 'regauge prepare'"):
        dataset.read_manifest(data.folder)


def test_a_shard_with_other_rows_than_its_manifest_is_refused(folder: Path) -> None:
    data = prepare_dataset(folder, "out")
    shutil.copyfile(data.folder / "heldout-00000.arrow", data.folder / "train-00000.arrow")
    with pytest.raises(DataError, match=r"train-00000.arrow has \d+ rows; its manifest lists \d+"):
        data.rows("train")


def test_the_difference_between_inputs_has_its_key() -> None:
    old, new = ({"settings": tables, "pieces": {}} for tables in ({"a": {}}, {"a": {"b": 1}}))
    assert workdir.describe_difference(old, new) == "a.b was unset and is 1"
