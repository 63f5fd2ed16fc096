"""Files at addresses: the same records as from this machine, or one line that says the way out."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3fs import S3FileSystem

from faults.stores import Rule, Store, started
from regauge import config, object_store
from regauge.data.sources import Source, _files, _remote
from regauge.errors import DataError, RegaugeError, SettingsError, TransientError
from regauge.verbs import prepare as verb
from unit.preparing import contents, corpus, prepared, settings
from unit.reads import everything, fields
from unit.web import Web, serving

BUCKET = "texts"
ROWS = [
    {"text": f"row {number} " + "x" * (number % 500), "label": number} for number in range(4000)
]


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with started() as found:
        yield found


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(object_store, "LONGEST_WAIT_SECONDS", 0.01)
    server.rules = []
    S3FileSystem.clear_instance_cache()
    client().create_bucket(Bucket=BUCKET)
    for name, data in forms().items():
        client().put_object(Bucket=BUCKET, Key=f"deep/{name}", Body=data)
    return server


def client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


@cache
def forms() -> dict[str, bytes]:
    """Return the same rows in every form."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    table = pa.Table.from_pylist(ROWS)
    packed, indexed, stream = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(table, packed, row_group_size=1000)
    for sink, new in ((indexed, pa.ipc.new_file), (stream, pa.ipc.new_stream)):
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=500)
    values = b"text,label\n" + b"".join(b"%s,%d\n" % (row["text"].encode(), row["label"])
                                        for row in ROWS)  # fmt: skip
    return {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.csv": values,
        "a.parquet": packed.getvalue(),
        "a.arrow": indexed.getvalue(),
        "a.stream": stream.getvalue(),
    }


def source(name: str) -> Source:
    kinds = {"jsonl": "jsonl", "gz": "jsonl", "csv": "csv", "parquet": "parquet"}
    kind = kinds.get(name.rpartition(".")[2], "arrow")
    more = {"integers": ["label"]} if kind == "csv" else {}
    found: Source = config.choose(
        "data/sources", config._tuples({"kind": kind, "files": [name], **more})
    )
    return found


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", list(forms()))
def test_a_store_has_the_rows_of_a_folder(name: str) -> None:
    read = source(f"s3://{BUCKET}/deep/{name}")
    assert fields(read) == ROWS
    assert {found.file for found in everything(read)} == {f"s3://{BUCKET}/deep/{name}"}


@pytest.mark.usefixtures("store")
def test_a_large_file_comes_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "AHEAD_BYTES", 2**18)
    name = f"s3://{BUCKET}/deep/a.jsonl"
    read = config.choose("data/sources", {"kind": "jsonl", "files": (name,), "piece_mib": 1})
    assert len(read.pieces()) == 2
    assert fields(read) == ROWS


@pytest.mark.usefixtures("store")
def test_files_are_found_by_globs_and_their_change_is_noticed() -> None:
    found = _files.find((f"s3://{BUCKET}/*/a.jsonl*", f"s3://{BUCKET}/**/a.csv"))
    assert [file.name.rpartition("/")[2] for file in found] == ["a.csv", "a.jsonl", "a.jsonl.gz"]
    assert [file.bytes for file in found] == [len(forms()[name]) for name in
                                              ("a.csv", "a.jsonl", "a.jsonl.gz")]  # fmt: skip
    before = source(f"s3://{BUCKET}/deep/a.csv").pieces()
    client().put_object(Bucket=BUCKET, Key="deep/a.csv", Body=forms()["a.csv"].replace(b"9", b"8"))
    (after,) = source(f"s3://{BUCKET}/deep/a.csv").pieces()
    assert (after.bytes, after.stamp != before[0].stamp) == (before[0].bytes, True)


@pytest.mark.usefixtures("store")
def test_a_folder_here_and_one_in_a_store_make_one_dataset(tmp_path: Path) -> None:
    documents = corpus(tmp_path / "b.jsonl", 300)
    data = "".join(json.dumps(document) + "\n" for document in documents)
    client().put_object(Bucket=BUCKET, Key="more/a.jsonl.gz", Body=gzip.compress(data.encode()))
    mixed = {"files": [f"file://{tmp_path}/*.jsonl", f"s3://{BUCKET}/more/*"]}
    one = prepared(tmp_path, "one", source=mixed)
    two = prepared(tmp_path, "two", source=mixed, prepare={"processes": 2})
    assert contents(one.folder) == contents(two.folder)
    assert sum(split.rows for split in one.manifest.splits.values()) > 0


@pytest.mark.parametrize(("how", "count"), [("cut", 2), ("reset", 2), ("slow", 8)])
def test_a_connection_that_breaks_is_made_again(store: Store, how: str, count: int) -> None:
    read = source(f"s3://{BUCKET}/deep/a.jsonl")
    (piece,) = read.pieces()
    store.rules = [Rule("GET", "deep/a.jsonl", how, count)]
    assert [found.fields for found in read.read(piece)] == ROWS  # type: ignore[union-attr]
    assert store.rules[0].struck == count


def test_a_store_that_stays_away_ends_in_one_line_and_the_next_run_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_store, "TRIES", 2)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    several = {"files": [f"s3://{BUCKET}/deep/a.jsonl.gz", f"s3://{BUCKET}/deep/a.jsonl"]}
    whole = contents(prepared(tmp_path, "whole", source=several).folder)
    store.rules = [Rule("GET", "deep/a.jsonl.gz", "reset", 100)]
    with pytest.raises(TransientError, match=r"a.jsonl.gz does not answer.*continues where it was"):
        prepared(tmp_path, "out", source=several)
    store.rules = []
    with caplog.at_level("INFO", logger="regauge"):
        assert contents(prepared(tmp_path, "out", source=several).folder) == whole
    assert "going on with" in caplog.text


@pytest.mark.usefixtures("store")
def test_a_file_that_changes_while_it_is_read_is_not_mended() -> None:
    with _remote.Remote(f"s3://{BUCKET}/deep/a.jsonl", ahead=False) as file:
        assert file.read(10) == forms()["a.jsonl"][:10]
        client().put_object(Bucket=BUCKET, Key="deep/a.jsonl", Body=b"x" * len(forms()["a.jsonl"]))
        with pytest.raises(DataError, match="has changed while it was read; run the same command"):
            file.read(10)


def refused(files: str) -> RegaugeError:
    with pytest.raises(RegaugeError) as caught:
        source(files).pieces()
    return caught.value


@pytest.mark.usefixtures("store")
def test_what_is_not_there_is_named() -> None:
    assert "no file matches" in str(refused(f"s3://{BUCKET}/none/*.jsonl"))
    assert f"there is no s3://{BUCKET}/none.jsonl" in str(refused(f"s3://{BUCKET}/none.jsonl"))
    assert "is a folder; name files" in str(refused(f"s3://{BUCKET}/deep"))
    assert "bucket does not exist" in str(refused("s3://none-such/*.jsonl"))
    assert refused("s3://none-such/a.jsonl").exit_code == 64
    assert "file in a file" in str(refused(f"zip://a.jsonl::s3://{BUCKET}/a.zip"))
    unknown = refused("s4://texts/a.jsonl")
    assert (unknown.exit_code, "Protocol not known: s4" in str(unknown)) == (2, True)


def test_credentials_that_do_not_do_are_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.rules = [Rule("GET", BUCKET, "deny", 10), Rule("HEAD", BUCKET, "deny", 10)]
    for name in (f"s3://{BUCKET}/deep/*.jsonl", f"s3://{BUCKET}/deep/a.jsonl"):
        error = refused(name)
        assert "may not be read" in error.problem
        assert "AWS_ACCESS_KEY_ID" in error.remedy
    store.rules = []
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    S3FileSystem.clear_instance_cache()
    error = refused(f"s3://{BUCKET}/deep/*.jsonl")
    assert "Unable to locate credentials" in error.problem
    assert error.exit_code == 64


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, "s3", raising=False)
    with pytest.raises(SettingsError, match=r"'s3://a/b': .*; pip install 'regauge\[s3\]'"):
        source("s3://a/b").pieces()


def test_a_dry_run_asks_nobody(tmp_path: Path) -> None:
    files = {"files": ["s3://none-such/*.jsonl"]}
    answer = verb.plan(settings(tmp_path, source=files))
    assert answer["would_do"] == "ask for s3://none-such/*.jsonl, and prepare it"
    assert "pieces" not in answer


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(object_store, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(object_store, "LONGEST_WAIT_SECONDS", 0.01)
    for name, data in forms().items():
        (tmp_path / name).write_bytes(data)
    with serving(tmp_path) as found:
        yield found


@pytest.mark.parametrize("name", list(forms()))
def test_the_web_has_the_rows_of_a_folder(web: Web, name: str) -> None:
    assert fields(source(f"{web.url}/{name}")) == ROWS


def test_a_server_that_tells_no_parts_is_read_as_a_whole(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_remote, "AHEAD_BYTES", 2**16)
    web.parts = False
    name = f"{web.url}/a.jsonl"
    read = config.choose("data/sources", {"kind": "jsonl", "files": (name,), "piece_mib": 1})
    assert len(read.pieces()) == 1
    web.breaks = 1
    assert fields(read) == ROWS
    assert web.breaks == 0
    error = refused(f"{web.url}/a.parquet")
    assert "does not tell parts" in error.problem
    assert error.remedy == "copy it to this machine first"


def test_only_what_is_needed_of_a_table_comes_over(web: Web) -> None:
    table = pa.table({"label": range(2000), "text": [f"{number} " * 500 for number in range(2000)]})
    path = web.folder / "large.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False)
    columns = {"files": (f"{web.url}/large.parquet",), "columns": ("label",)}
    read = config.choose("data/sources", {"kind": "parquet", **columns})
    assert [row["label"] for row in fields(read)] == list(range(2000))
    assert web.told_bytes < path.stat().st_size / 20


def test_a_file_that_becomes_shorter_is_not_taken_for_whole(web: Web) -> None:
    path = web.folder / "a.jsonl"
    with _remote.Remote(f"{web.url}/a.jsonl", ahead=False) as file:
        assert file.read(10) == path.read_bytes()[:10]
        path.write_bytes(path.read_bytes()[:5])
        with pytest.raises(DataError, match="has changed while it was read"):
            file.read(10)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(404, 64, "there is no"), (403, 64, "may not be read"), (503, 75, "run the same command")],
)
def test_what_the_web_answers_is_told(web: Web, status: int, code: int, words: str) -> None:
    web.status = status
    error = refused(f"{web.url}/a.jsonl?token=1")
    assert error.exit_code == code
    assert words in str(error)
