"""Batch inference: each record is computed once, in order, bitwise equal to its result alone."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import regauge
from end_to_end.predicting import (
    export_run,
    random_texts,
    read_output_files,
    read_table,
    train_model,
    vector_column,
    write_records,
    write_row_groups,
)
from regauge.cli import main
from regauge.system import files, jsonl


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return export_run(train_model(folder), folder / "artifact")


def predict(artifact: Path, source: Path | str, folder: Path, *more: str) -> int:
    options = ["--source", str(source), "--to", str(folder), "execution.executor=inline", *more]
    return main(["predict", str(artifact), *options])


def test_every_record_is_computed_in_order(artifact: Path, tmp_path: Path) -> None:
    source = write_records(tmp_path / "texts.jsonl", 300)
    assert predict(artifact, source, tmp_path / "out", "predict.shard_records=70") == 0
    table = read_table(tmp_path / "out")
    assert table["id"].to_pylist() == list(range(300))
    assert table.schema.field("embedding").type == pa.list_(pa.float16(), 32)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["rows"], result["shards"], result["quarantined"]) == (300, 5, 0)
    assert result["tokens"] == sum(len(text.split()) + 1 for text in random_texts(300))
    lines = jsonl.read_lines(tmp_path / "out" / "jobs" / "0-of-1" / "ledger.jsonl")
    assert [line["rows"] for line in lines] == [70, 70, 70, 70, 20]
    assert [line["is_last"] for line in lines] == [False] * 4 + [True]


@pytest.mark.parametrize("file_format", ["parquet", "npy"])
def test_the_last_line_is_the_command_that_searches_the_vectors(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file_format: str
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 5)
    folder = tmp_path / "the out"
    assert predict(artifact, source, folder, f"output.format={file_format}") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    command = f"next: regauge serve {artifact} 'serve.search.vectors={folder}'"
    assert (line == command) == (file_format == "parquet")
    assert line.startswith("next:") == (file_format == "parquet")


@pytest.mark.parametrize("damage", ["weights", "nothing"])
def test_a_refused_artifact_leaves_no_folder(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    source, other = write_records(tmp_path / "texts.jsonl", 5), tmp_path / "other"
    if damage == "weights":
        shutil.copytree(artifact, other)
        weights = bytearray((other / "weights.safetensors").read_bytes())
        weights[-1] ^= 1
        (other / "weights.safetensors").write_bytes(weights)
    assert predict(other, source, tmp_path / "out") == (64 if damage == "weights" else 2)
    [line] = capsys.readouterr().err.strip().splitlines()
    absent = f"{other} does not exist; name a model's folder"
    changed = "weights.safetensors has changed since it was exported: its hash differs"
    assert (changed if damage == "weights" else absent) in line
    assert not (tmp_path / "out").exists()


def test_compressed_files_are_read(artifact: Path, tmp_path: Path) -> None:
    data = write_records(tmp_path / "whole", 60).read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(data[:half]))
    (tmp_path / "2.jsonl.zst").write_bytes(zstandard.compress(data[half:]))
    assert predict(artifact, tmp_path / "*.jsonl.*", tmp_path / "out") == 0
    assert read_table(tmp_path / "out")["id"].to_pylist() == list(range(60))


def test_a_text_has_the_same_bits_alone_in_a_file_and_in_python(
    artifact: Path, tmp_path: Path
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 200)
    for name, rows in (("one", 200), ("many", 33)):
        more = (f"predict.shard_records={rows}", "output.dtype=float32")
        assert predict(artifact, source, tmp_path / name, *more) == 0
    one, many = (vector_column(read_table(tmp_path / name)) for name in ("one", "many"))
    loaded = regauge.load(artifact)
    assert np.array_equal(one, many)
    assert np.array_equal(one, loaded.encode(random_texts(200)))
    alone = np.stack([loaded.encode(text) for text in random_texts(200)[:40]])
    assert np.array_equal(one[:40], alone)
    assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-6)


def test_worker_processes_write_the_same_files(artifact: Path, tmp_path: Path) -> None:
    source = write_records(tmp_path / "texts.jsonl", 150)
    assert predict(artifact, source, tmp_path / "here", "predict.shard_records=20") == 0
    more = ["predict.shard_records=20", "execution.executor=local", "execution.workers=2"]
    assert predict(artifact, source, tmp_path / "apart", *more) == 0
    assert read_output_files(tmp_path / "apart") == read_output_files(tmp_path / "here")


def test_a_second_command_only_recomputes_a_missing_file(artifact: Path, tmp_path: Path) -> None:
    source = write_records(tmp_path / "texts.jsonl", 120)
    out = tmp_path / "out"
    assert predict(artifact, source, out, "predict.shard_records=50") == 0
    before = read_output_files(out)
    assert predict(artifact, source, out, "predict.shard_records=50") == 0
    assert len(jsonl.read_lines(out / "jobs" / "0-of-1" / "ledger.jsonl")) == 3
    (out / "shards" / "000000-00001.parquet").unlink()
    assert predict(artifact, source, out, "predict.shard_records=50") == 0
    assert read_output_files(out) == before
    assert len(jsonl.read_lines(out / "jobs" / "0-of-1" / "ledger.jsonl")) == 4


@pytest.mark.parametrize("name", ["shards/000000-00001.parquet", "quarantine/000000-00000.jsonl"])
def test_a_second_command_recomputes_a_changed_file(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, out = write_records(tmp_path / "texts.jsonl", 120), tmp_path / "out"
    source.write_text("{\n" + source.read_text())
    assert predict(artifact, source, out, "predict.shard_records=50") == 0
    before, ledger = read_output_files(out), out / "jobs" / "0-of-1" / "ledger.jsonl"
    content = bytearray((out / name).read_bytes())
    content[len(content) // 2] ^= 1
    (out / name).write_bytes(content)
    sizes_only = ("predict.shard_records=50", "predict.verify_shards=false")
    assert predict(artifact, source, out, *sizes_only) == 0
    assert read_output_files(out) != before
    capsys.readouterr()
    assert predict(artifact, source, out, "predict.shard_records=50") == 0
    assert f"1 changed, computing again: {Path(name).stem}" in capsys.readouterr().err
    assert read_output_files(out) == before
    assert len(jsonl.read_lines(ledger)) == 4
    assert predict(artifact, source, out, "predict.shard_records=50") == 0
    assert len(jsonl.read_lines(ledger)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["output.dtype=float32"], "output.dtype is 'auto', not 'float32'"),
        (["predict.shard_records=7"], "shard_records is"),
        (["predict.batch_invariant=false"], "batch_invariant is True, not False"),
        (["output.keep_fields=[]"], "keep_fields"),
    ],
)
def test_the_output_folder_of_another_job_is_refused(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    message: str,
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 20)
    assert predict(artifact, source, tmp_path / "out") == 0
    before = read_output_files(tmp_path / "out")
    capsys.readouterr()
    assert predict(artifact, source, tmp_path / "out", *change) == 64
    error = capsys.readouterr().err
    assert message in error
    assert "name another output.folder" in error
    assert read_output_files(tmp_path / "out") == before


def test_a_source_that_is_written_again_with_equal_content_continues_a_job(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_records(tmp_path / "texts.jsonl", 20), tmp_path / "out"
    assert predict(artifact, source, out, "predict.shard_records=5") == 0
    before, modified = read_output_files(out), source.stat().st_mtime_ns
    (out / "result.json").unlink()
    ledger = out / "jobs" / "0-of-1" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:2]))
    content = source.read_bytes()
    source.unlink()
    source.write_bytes(content)
    os.utime(source, ns=(modified + 10**9, modified + 10**9))
    assert predict(artifact, source, out, "predict.shard_records=5") == 0
    assert "has changed" not in capsys.readouterr().err
    assert read_output_files(out) == before
    assert len(jsonl.read_lines(ledger)) == 4
    source.write_bytes(content.replace(b"w1", b"w2", 1))
    assert predict(artifact, source, out, "predict.shard_records=5") == 64
    assert "texts.jsonl' of the source has changed;" in capsys.readouterr().err


def test_an_unchanged_source_is_hashed_once(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_records(tmp_path / "texts.jsonl", 20), tmp_path / "out"
    hashed: list[Path] = []
    original = files.sha256

    def record(path: Path) -> str:
        hashed.append(path)
        return original(path)

    monkeypatch.setattr(files, "sha256", record)
    assert predict(artifact, source, out) == 0
    assert hashed.count(source) == 1
    assert predict(artifact, source, out) == 0
    assert hashed.count(source) == 1, "its size and its time are the same"


def test_another_source_is_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 20)
    assert predict(artifact, source, tmp_path / "out") == 0
    other = write_records(tmp_path / "more.jsonl", 20)
    assert predict(artifact, other, tmp_path / "out") == 64
    error = capsys.readouterr().err
    assert "more.jsonl' is only in this source;" in error


def test_invalid_records_are_quarantined_with_their_reasons(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.jsonl"
    records: list[Any] = [
        {"id": 0, "text": "w5 w6", "price": 1.5},
        {"id": "one", "text": "w7", "price": 2},
        {"id": 2, "price": 3.5},
        {"id": 3, "text": "", "price": None},
        {"id": 4, "text": "w8"},
        {"id": 5, "text": "w9"},
    ]
    source.write_text("\n".join([*map(json.dumps, records), "{broken", json.dumps({"text": 7})]))
    assert predict(artifact, source, tmp_path / "out") == 0
    table = read_table(tmp_path / "out")
    assert table["id"].to_pylist() == [0, 3, 4, 5]
    assert table["price"].to_pylist() == [1.5, None, None, None]
    bad = jsonl.read_lines(tmp_path / "out" / "quarantine" / "000000-00000.jsonl")
    assert [(line["location"], line["reason"]) for line in bad] == [
        ("line 2", "'id' is not of type integer"),
        ("line 3", "no text in 'text'"),
        ("line 7", "malformed JSON"),
        ("line 8", "no text in 'text'"),
    ]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["rows"], result["quarantined"]) == (4, 4)
    error = " ".join(capsys.readouterr().err.split())
    assert "4 of 8 records are rejected; see " in error
    (tmp_path / "texts.jsonl").write_text("\n".join([json.dumps(records[0]), *["{broken"] * 2]))
    assert predict(artifact, source, tmp_path / "most") == 64
    error = " ".join(capsys.readouterr().err.split())
    assert "most records are rejected: 2 of 3; correct them" in error


def test_values_are_written_exactly_or_reported(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.jsonl"
    ids = [2**64 - 1 - number for number in range(1200)]
    records: list[Any] = [{"id": ids[0], "text": "w5", "meta": {"a": [1]}, "flag": True}]
    records += [{"id": number, "text": "w6"} for number in ids[1:]]
    records[1100]["url"] = "late"
    source.write_text("\n".join(map(json.dumps, records)))
    assert predict(artifact, source, tmp_path / "all") == 0
    table = read_table(tmp_path / "all")
    assert table["id"].to_pylist() == ids
    assert (table["meta"][0].as_py(), table["flag"][0].as_py()) == ('{"a": [1]}', True)
    assert "url" not in table.column_names
    error = " ".join(capsys.readouterr().err.split())
    assert "left out: url (1 record); keep them with: output.keep_fields" in error
    named = ['output.keep_fields=["id", "url"]']
    assert predict(artifact, source, tmp_path / "named", *named) == 0
    table = read_table(tmp_path / "named")
    assert [value for value in table["url"].to_pylist() if value] == ["late"]
    assert "1,199 records have no 'url'" in " ".join(capsys.readouterr().err.split())
    typed = ['output.keep_fields={ id = "decimal" }']
    assert predict(artifact, source, tmp_path / "typed", *typed) == 0
    assert read_table(tmp_path / "typed")["id"].to_pylist() == list(map(str, ids))


def test_jobs_without_pieces_are_reported(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 5)
    assert predict(artifact, source, tmp_path / "out", "--index", "1", "--count", "2") == 0
    error = " ".join(capsys.readouterr().err.split())
    assert "2 jobs share 1 pieces, so some jobs have none; lower source.chunk_mib" in error
    assert "are rejected" not in error


def test_a_lone_surrogate_rejects_only_its_record(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.jsonl"
    records = ({"id": 1, "text": "w5"}, {"id": 2, "text": "w6 \ud83d"}, {"id": 3, "text": "w7"})
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert predict(artifact, source, tmp_path / "out") == 0
    assert "Text fields: text; kept fields: id" in capsys.readouterr().err
    assert read_table(tmp_path / "out")["id"].to_pylist() == [1, 3]
    (bad,) = jsonl.read_lines(tmp_path / "out" / "quarantine" / "000000-00000.jsonl")
    assert (bad["location"], bad["reason"]) == ("line 2", "undecodable bytes")


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "binary"])
@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_every_format_has_the_same_vectors(
    artifact: Path, tmp_path: Path, form: str, dtype: str
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 50)
    more = (f"output.format={form}", f"output.dtype={dtype}")
    assert predict(artifact, source, tmp_path / "out", *more) == 0
    exact = regauge.load(artifact).encode(random_texts(50))
    shards = tmp_path / "out" / "shards"
    table = pq.read_table(shards / "000000-00000.parquet")
    array = shards / "000000-00000.npy"
    vectors = np.load(array) if form == "npy" else vector_column(table)
    assert table["id"].to_pylist() == list(range(50))
    if dtype == "binary":
        assert np.array_equal(np.unpackbits(vectors, axis=1)[:, :32], exact > 0)
    elif dtype == "int8":
        back = vectors * table["scale"].to_numpy()[:, None]
        assert vectors.dtype == np.int8
        assert np.abs(back - exact).max() <= np.abs(exact).max() / 127
    else:
        assert np.array_equal(vectors, exact.astype(dtype))


def test_several_jobs_share_an_output_folder(artifact: Path, tmp_path: Path) -> None:
    source = write_row_groups(tmp_path / "texts.parquet", groups=5, rows=18)
    assert predict(artifact, source, tmp_path / "alone") == 0
    out = tmp_path / "out"
    for index in (1, 0):
        assert not (out / "result.json").exists()
        more = ("--index", str(index), "--count", "2")
        assert predict(artifact, source, out, *more) == 0
    shares = [jsonl.read_lines(out / "jobs" / f"{index}-of-2" / "ledger.jsonl") for index in (0, 1)]
    assert [[line["piece"] for line in share] for share in shares] == [[0, 2, 4], [1, 3]]
    assert read_output_files(out) == read_output_files(tmp_path / "alone")
    assert read_table(out)["id"].to_pylist() == list(range(90))
    assert json.loads((out / "result.json").read_text())["rows"] == 90


@pytest.mark.parametrize("step", [3600, -3600])
def test_the_cost_is_that_of_the_passed_time_if_the_clock_is_set(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 9)
    out = tmp_path / "out"
    set_at = time.time() + 0.02
    clock = time.time

    def read_set_clock() -> float:
        now = clock()
        return now if now < set_at else now + step

    monkeypatch.setattr("time.time", read_set_clock)
    started_at = time.monotonic()
    price = ["execution.price.usd_per_hour=3600", "execution.price.market=own"]
    assert predict(artifact, source, out, *price) == 0
    seconds = time.monotonic() - started_at
    result = json.loads((out / "result.json").read_text())
    assert 0.02 < result["machine_seconds"] <= seconds
    assert result["usd"] == pytest.approx(result["machine_seconds"], abs=2e-3)


def test_a_job_stops_at_its_cost_limit_and_resumes_with_a_higher_one(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 90)
    price = ["execution.price.usd_per_hour=3600", "execution.price.market=own"]
    price.append("predict.shard_records=10")
    out = tmp_path / "out"
    assert predict(artifact, source, out, "--max-usd", "0.01", *price) == 67
    assert (
        "USD are spent, predict.max_usd is 0.01; raise predict.max_usd" in capsys.readouterr().err
    )
    done = jsonl.read_lines(out / "jobs" / "0-of-1" / "ledger.jsonl")
    assert len(done) < 9
    assert predict(artifact, source, out, "--max-usd", "9999", *price) == 0
    assert read_table(out)["id"].to_pylist() == list(range(90))
    result = json.loads((out / "result.json").read_text())
    assert result["usd"] == pytest.approx(result["machine_seconds"], abs=2e-3)
    assert result["usd_per_million_rows"] == pytest.approx(result["usd"] / 90 * 1e6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-usd", "1"], "predict.max_usd needs the price of this machine, which is unknown"),
        (['predict.text_fields=["titel"]'], "have no text 'titel'; did you mean 'title'"),
        (["predict.prompt_name=query"], "no prompt is called 'query'; the artifact has none"),
        (['output.keep_fields=["idd"]'], "have no field 'idd'; did you mean 'id'"),
        (
            ["--index", "3", "--count", "2"],
            "predict.job_index = 3 is not below the number of jobs, 2",
        ),
        (["source.duplicates=drop"], "predict processes every record; remove source.duplicates"),
    ],
)
def test_invalid_options_are_refused(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"id": 1, "title": "w5"}))
    assert predict(artifact, source, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("shards/*"))


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 10)
    assert predict(artifact, source, tmp_path / "out", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    expected = {"output_kind": "vectors", "text_fields": ["text"], "keep_fields": ["id"]}
    assert (expected | {"finished_shards": 0}).items() <= plan.items()
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_finished_shards_and_a_refusal(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_records(tmp_path / "texts.jsonl", 10), tmp_path / "out"
    assert predict(artifact, source, out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert predict(artifact, source, out, "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finished_shards"] == 1
    assert "error" not in answer
    webhook = "monitoring.notifications.webhook.url_variable=NO_SUCH_URL"
    assert predict(artifact, source, out, webhook, "--dry-run", "--json") == 2
    assert "NO_SUCH_URL is not set" in json.loads(capsys.readouterr().out)["error"]
    other = ("output.dtype=float32", "--dry-run", "--json")
    assert predict(artifact, source, out, *other) == 64
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"].startswith(
        f"{out} has the output of another job: output.dtype is 'auto'"
    )
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert after == before


def test_a_dry_run_does_not_contact_an_object_store(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://none-such/*.jsonl"
    assert predict(artifact, source, tmp_path / "out", "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == "s3://none-such/*.jsonl (not read in a dry run)"
    assert "pieces" not in answer
