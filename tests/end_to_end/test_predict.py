"""Files in, files out: every record answered once, in its order, with the bits it has alone."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import regauge
from end_to_end.predicting import bits, exported, in_groups, table, texts, trained, vectors, written
from regauge import jsonl
from regauge.cli import main


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return exported(trained(folder), folder / "artifact")


def predict(artifact: Path, source: Path | str, folder: Path, *more: str) -> int:
    given = ["--source", str(source), "--to", str(folder), "execution.executor=inline", *more]
    return main(["predict", str(artifact), *given])


def test_every_record_is_answered_in_its_order(artifact: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "texts.jsonl", 300)
    assert predict(artifact, source, tmp_path / "out", "predict.rows=70") == 0
    found = table(tmp_path / "out")
    assert found["id"].to_pylist() == list(range(300))
    assert found.schema.field("vector").type == pa.list_(pa.float16(), 32)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["rows"], result["shards"], result["quarantined"]) == (300, 5, 0)
    assert result["tokens"] == sum(len(text.split()) + 1 for text in texts(300))
    every = jsonl.whole(tmp_path / "out" / "jobs" / "0-of-1" / "ledger.jsonl")
    assert [line["rows"] for line in every] == [70, 70, 70, 70, 20]
    assert [line["last"] for line in every] == [False] * 4 + [True]


@pytest.mark.parametrize("damage", ["weights", "nothing"])
def test_a_refused_artifact_leaves_no_folder(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    source, other = written(tmp_path / "texts.jsonl", 5), tmp_path / "other"
    if damage == "weights":
        shutil.copytree(artifact, other)
        weights = bytearray((other / "weights.safetensors").read_bytes())
        weights[-1] ^= 1
        (other / "weights.safetensors").write_bytes(weights)
    assert predict(other, source, tmp_path / "out") == (64 if damage == "weights" else 2)
    [line] = capsys.readouterr().err.strip().splitlines()
    absent = f"there is no {other}; name an artifact"
    told = "its hash is another" if damage == "weights" else absent
    assert told in line
    assert not (tmp_path / "out").exists()


def test_files_may_be_packed_in_several_ways(artifact: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "whole", 60).read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(data[:half]))
    (tmp_path / "2.jsonl.zst").write_bytes(zstandard.compress(data[half:]))
    assert predict(artifact, tmp_path / "*.jsonl.*", tmp_path / "out") == 0
    assert table(tmp_path / "out")["id"].to_pylist() == list(range(60))


def test_a_text_has_the_same_bits_alone_in_a_file_and_in_python(
    artifact: Path, tmp_path: Path
) -> None:
    source = written(tmp_path / "texts.jsonl", 200)
    for name, rows in (("one", 200), ("many", 33)):
        more = (f"predict.rows={rows}", "output.dtype=float32")
        assert predict(artifact, source, tmp_path / name, *more) == 0
    one, many = (vectors(table(tmp_path / name)) for name in ("one", "many"))
    loaded = regauge.load(artifact)
    assert np.array_equal(one, many)
    assert np.array_equal(one, loaded.encode(texts(200)))
    alone = np.stack([loaded.encode(text) for text in texts(200)[:40]])
    assert np.array_equal(one[:40], alone)
    assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-6)


def test_processes_of_their_own_write_the_same(artifact: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "texts.jsonl", 150)
    assert predict(artifact, source, tmp_path / "here", "predict.rows=20") == 0
    more = ["predict.rows=20", "execution.executor=local", "execution.workers=2"]
    assert predict(artifact, source, tmp_path / "apart", *more) == 0
    assert bits(tmp_path / "apart") == bits(tmp_path / "here")


def test_a_second_command_does_nothing_and_a_lost_file_is_made_again(
    artifact: Path, tmp_path: Path
) -> None:
    source = written(tmp_path / "texts.jsonl", 120)
    out = tmp_path / "out"
    assert predict(artifact, source, out, "predict.rows=50") == 0
    before = bits(out)
    assert predict(artifact, source, out, "predict.rows=50") == 0
    assert len(jsonl.whole(out / "jobs" / "0-of-1" / "ledger.jsonl")) == 3
    (out / "shards" / "000000-00001.parquet").unlink()
    assert predict(artifact, source, out, "predict.rows=50") == 0
    assert bits(out) == before
    assert len(jsonl.whole(out / "jobs" / "0-of-1" / "ledger.jsonl")) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["output.dtype=float32"], "output.dtype is 'float16' there and 'float32' here"),
        (["predict.rows=7"], "rows is"),
        (["predict.invariant=false"], "invariant is True there"),
        (["output.keep=[]"], "kept"),
    ],
)
def test_a_folder_with_other_answers_is_refused(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    told: str,
) -> None:
    source = written(tmp_path / "texts.jsonl", 20)
    assert predict(artifact, source, tmp_path / "out") == 0
    before = bits(tmp_path / "out")
    capsys.readouterr()
    assert predict(artifact, source, tmp_path / "out", *change) == 64
    error = capsys.readouterr().err
    assert told in error
    assert "name another output.folder" in error
    assert bits(tmp_path / "out") == before


def test_a_source_that_changed_is_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "texts.jsonl", 20)
    assert predict(artifact, source, tmp_path / "out") == 0
    written(source, 21)
    assert predict(artifact, source, tmp_path / "out") == 64
    assert "has other answers: pieces" in capsys.readouterr().err


def test_bad_records_are_set_aside_with_their_reasons(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.jsonl"
    records: list[Any] = [
        {"id": 0, "text": "w5 w6", "price": 1.5},
        {"id": "one", "text": "w7", "price": 2},
        {"id": 2, "price": 3.5},
        {"id": 3, "text": "", "price": None},
    ]
    source.write_text("\n".join([*map(json.dumps, records), "{broken", json.dumps({"text": 7})]))
    assert predict(artifact, source, tmp_path / "out") == 0
    found = table(tmp_path / "out")
    assert found["id"].to_pylist() == [0, 3]
    assert found["price"].to_pylist() == [1.5, None]
    bad = jsonl.whole(tmp_path / "out" / "quarantine" / "000000-00000.jsonl")
    assert [(each["place"], each["reason"]) for each in bad] == [
        ("line 2", "'id' is no integer"),
        ("line 3", "no text in 'text'"),
        ("line 5", "malformed JSON"),
        ("line 6", "no text in 'text'"),
    ]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["rows"], result["quarantined"]) == (2, 4)
    told = " ".join(capsys.readouterr().err.split())
    assert "4 records have no answer: they are in " in told


def test_jobs_that_have_nothing_to_do_are_told_of(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "texts.jsonl", 5)
    assert predict(artifact, source, tmp_path / "out", "--index", "1", "--count", "2") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "2 jobs share 1 pieces, and some have nothing to do: see source.piece_mib" in told
    assert "records have no answer" not in told


def test_half_a_character_costs_its_record_alone(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "texts.jsonl"
    records = ({"id": 1, "text": "w5"}, {"id": 2, "text": "w6 \ud83d"}, {"id": 3, "text": "w7"})
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert predict(artifact, source, tmp_path / "out") == 0
    assert "answers to 'text', and beside them: id" in capsys.readouterr().err
    assert table(tmp_path / "out")["id"].to_pylist() == [1, 3]
    (bad,) = jsonl.whole(tmp_path / "out" / "quarantine" / "000000-00000.jsonl")
    assert (bad["place"], bad["reason"]) == ("line 2", "undecodable bytes")


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "binary"])
@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_every_form_holds_the_same_vectors(
    artifact: Path, tmp_path: Path, form: str, dtype: str
) -> None:
    source = written(tmp_path / "texts.jsonl", 50)
    more = (f"output.format={form}", f"output.dtype={dtype}")
    assert predict(artifact, source, tmp_path / "out", *more) == 0
    exact = regauge.load(artifact).encode(texts(50))
    shards = tmp_path / "out" / "shards"
    beside = pq.read_table(shards / "000000-00000.parquet")
    array = shards / "000000-00000.npy"
    found = np.load(array) if form == "npy" else vectors(beside)
    assert beside["id"].to_pylist() == list(range(50))
    if dtype == "binary":
        assert np.array_equal(np.unpackbits(found, axis=1)[:, :32], exact > 0)
    elif dtype == "int8":
        back = found * beside["scale"].to_numpy()[:, None]
        assert found.dtype == np.int8
        assert np.abs(back - exact).max() <= np.abs(exact).max() / 127
    else:
        assert np.array_equal(found, exact.astype(dtype))


def test_several_jobs_share_a_folder(artifact: Path, tmp_path: Path) -> None:
    source = in_groups(tmp_path / "texts.parquet", groups=5, rows=18)
    assert predict(artifact, source, tmp_path / "alone") == 0
    out = tmp_path / "out"
    for index in (1, 0):
        assert not (out / "result.json").exists()
        more = ("--index", str(index), "--count", "2")
        assert predict(artifact, source, out, *more) == 0
    shares = [jsonl.whole(out / "jobs" / f"{index}-of-2" / "ledger.jsonl") for index in (0, 1)]
    assert [[line["piece"] for line in share] for share in shares] == [[0, 2, 4], [1, 3]]
    assert bits(out) == bits(tmp_path / "alone")
    assert table(out)["id"].to_pylist() == list(range(90))
    assert json.loads((out / "result.json").read_text())["rows"] == 90


def test_a_limit_of_dollars_stops_it_and_more_of_them_let_it_go_on(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "texts.jsonl", 90)
    price = ["execution.price.usd_per_hour=3600", "execution.price.market=own", "predict.rows=10"]
    out = tmp_path / "out"
    assert predict(artifact, source, out, "--max-usd", "0.01", *price) == 67
    assert "USD are spent of at most 0.01; raise predict.max_usd" in capsys.readouterr().err
    done = jsonl.whole(out / "jobs" / "0-of-1" / "ledger.jsonl")
    assert len(done) < 9
    assert predict(artifact, source, out, "--max-usd", "9999", *price) == 0
    assert table(out)["id"].to_pylist() == list(range(90))
    result = json.loads((out / "result.json").read_text())
    assert result["usd"] == pytest.approx(result["machine_seconds"], abs=2e-3)
    assert result["usd_per_million"] == pytest.approx(result["usd"] / 90 * 1e6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-usd", "1"], "the price of this machine is unknown"),
        (['predict.texts=["titel"]'], "have no text 'titel'; did you mean 'title'"),
        (["predict.prompt=query"], "no prompt is called 'query'; the artifact has none"),
        (['output.keep=["idd"]'], "have no text or number 'idd'; did you mean 'id'"),
        (["--index", "3", "--count", "2"], "predict.index = 3 is none of 2 jobs"),
        (["source.duplicates=drop"], "every record has an answer"),
    ],
)
def test_what_does_not_fit_is_refused(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"id": 1, "title": "w5"}))
    assert predict(artifact, source, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("shards/*"))


def test_a_damaged_artifact_is_refused_in_one_line(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, source = tmp_path / "damaged", written(tmp_path / "texts.jsonl", 3)
    shutil.copytree(artifact, damaged)
    weights = damaged / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    assert predict(damaged, source, tmp_path / "out") == 64
    error = capsys.readouterr().err
    assert "weights.safetensors is not what was exported" in error
    assert len(error.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("shards/*"))


def test_a_dry_run_says_what_would_be_read_and_writes_nothing(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "texts.jsonl", 10)
    assert predict(artifact, source, tmp_path / "out", "--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["answers"], told["texts"], told["kept"]) == ("vectors", ["text"], ["id"])
    assert told["shards_done"] == 0
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_finished_job_says_so_and_names_other_answers(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = written(tmp_path / "texts.jsonl", 10), tmp_path / "out"
    assert predict(artifact, source, out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert predict(artifact, source, out, "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["shards_done"] == 1
    assert "would_refuse" not in answer
    other = ("output.dtype=float32", "--dry-run", "--json")
    assert predict(artifact, source, out, *other) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["would_refuse"].startswith(f"{out} has other answers: output.dtype is 'float16'")
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert after == before


def test_a_dry_run_asks_no_store(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "s3://none-such/*.jsonl"
    assert predict(artifact, source, tmp_path / "out", "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == "s3://none-such/*.jsonl, which the job asks for"
    assert "pieces" not in answer
