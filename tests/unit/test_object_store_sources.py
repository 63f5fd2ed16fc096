"""Remote files: the same records as local ones, or an error of one line with a remedy."""

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

from faults.stores import Rule, Store, start_store
from regauge import config
from regauge.commands import prepare as verb
from regauge.data.sources import Source, _files, _remote
from regauge.system import object_store
from regauge.system.errors import DataError, RegaugeError, SettingsError, TransientError
from unit.preparing import build_settings, prepare_dataset, read_contents, write_corpus
from unit.reads import read_fields, read_items
from unit.web import Web, serve_folder

BUCKET = "texts"
ROWS = [
    {"text": f"row {number} " + "x" * (number % 500), "label": number} for number in range(4000)
]


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with start_store() as store:
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "MIN_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(object_store, "MAX_WAIT_SECONDS", 0.01)
    server.rules = []
    S3FileSystem.clear_instance_cache()
    client().create_bucket(Bucket=BUCKET)
    for name, data in build_files().items():
        client().put_object(Bucket=BUCKET, Key=f"deep/{name}", Body=data)
    return server


def client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


@cache
def build_files() -> dict[str, bytes]:
    """Return files with the same rows in every format."""
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
    remote_source: Source = config.parse_choice(
        "data/sources", config._convert_value({"kind": kind, "files": [name], **more})
    )
    return remote_source


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", list(build_files()))
def test_a_store_has_the_rows_of_a_folder(name: str) -> None:
    read = source(f"s3://{BUCKET}/deep/{name}")
    assert read_fields(read) == ROWS
    assert {item.file for item in read_items(read)} == {f"s3://{BUCKET}/deep/{name}"}


@pytest.mark.usefixtures("store")
def test_a_large_file_is_downloaded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "READ_AHEAD_BYTES", 2**18)
    name = f"s3://{BUCKET}/deep/a.jsonl"
    read = config.parse_choice("data/sources", {"kind": "jsonl", "files": (name,), "chunk_mib": 1})
    assert len(read.list_pieces()) == 2
    assert read_fields(read) == ROWS


@pytest.mark.usefixtures("store")
def test_globs_find_files_and_changes_change_the_stamp() -> None:
    files = _files.find_files((f"s3://{BUCKET}/*/a.jsonl*", f"s3://{BUCKET}/**/a.csv"))
    assert [file.name.rpartition("/")[2] for file in files] == ["a.csv", "a.jsonl", "a.jsonl.gz"]
    assert [file.bytes for file in files] == [len(build_files()[name]) for name in
                                              ("a.csv", "a.jsonl", "a.jsonl.gz")]  # fmt: skip
    before = source(f"s3://{BUCKET}/deep/a.csv").list_pieces()
    client().put_object(
        Bucket=BUCKET, Key="deep/a.csv", Body=build_files()["a.csv"].replace(b"9", b"8")
    )
    (after,) = source(f"s3://{BUCKET}/deep/a.csv").list_pieces()
    assert (after.bytes, after.stamp != before[0].stamp) == (before[0].bytes, True)


@pytest.mark.usefixtures("store")
def test_local_and_remote_files_give_the_same_dataset(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "b.jsonl", 300)
    data = "".join(json.dumps(document) + "\n" for document in documents)
    client().put_object(Bucket=BUCKET, Key="more/a.jsonl.gz", Body=gzip.compress(data.encode()))
    mixed = {"files": [f"file://{tmp_path}/*.jsonl", f"s3://{BUCKET}/more/*"]}
    one = prepare_dataset(tmp_path, "one", source=mixed)
    two = prepare_dataset(tmp_path, "two", source=mixed, prepare={"processes": 2})
    assert read_contents(one.folder) == read_contents(two.folder)
    assert sum(split.rows for split in one.manifest.splits.values()) > 0


@pytest.mark.parametrize(("how", "count"), [("cut", 2), ("reset", 2), ("slow", 8)])
def test_a_broken_connection_is_reopened(store: Store, how: str, count: int) -> None:
    read = source(f"s3://{BUCKET}/deep/a.jsonl")
    (piece,) = read.list_pieces()
    store.rules = [Rule("GET", "deep/a.jsonl", how, count)]
    assert [item.fields for item in read.read(piece)] == ROWS  # type: ignore[union-attr]
    assert store.rules[0].num_triggered == count


def test_an_unreachable_store_is_reported_and_the_next_run_resumes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_store, "MAX_TRIES", 2)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    several = {"files": [f"s3://{BUCKET}/deep/a.jsonl.gz", f"s3://{BUCKET}/deep/a.jsonl"]}
    whole = read_contents(prepare_dataset(tmp_path, "whole", source=several).folder)
    store.rules = [Rule("GET", "deep/a.jsonl.gz", "reset", 100)]
    with pytest.raises(TransientError, match=r"cannot read .*a.jsonl.gz.*it resumes"):
        prepare_dataset(tmp_path, "out", source=several)
    store.rules = []
    with caplog.at_level("INFO", logger="regauge"):
        assert read_contents(prepare_dataset(tmp_path, "out", source=several).folder) == whole
    assert "resuming in" in caplog.text


@pytest.mark.usefixtures("store")
def test_a_file_that_changes_while_it_is_read_is_refused() -> None:
    with _remote.RemoteFile(f"s3://{BUCKET}/deep/a.jsonl", read_ahead=False) as file:
        assert file.read(10) == build_files()["a.jsonl"][:10]
        client().put_object(
            Bucket=BUCKET, Key="deep/a.jsonl", Body=b"x" * len(build_files()["a.jsonl"])
        )
        with pytest.raises(DataError, match="has changed while it was read; run the same command"):
            file.read(10)


def catch_error(files: str) -> RegaugeError:
    with pytest.raises(RegaugeError) as caught:
        source(files).list_pieces()
    return caught.value


@pytest.mark.usefixtures("store")
def test_missing_files_are_reported() -> None:
    assert "no file matches" in str(catch_error(f"s3://{BUCKET}/none/*.jsonl"))
    assert f"no file s3://{BUCKET}/none.jsonl" in str(catch_error(f"s3://{BUCKET}/none.jsonl"))
    assert "is a folder; set source.files to" in str(catch_error(f"s3://{BUCKET}/deep"))
    assert "bucket does not exist" in str(catch_error("s3://none-such/*.jsonl"))
    assert catch_error("s3://none-such/a.jsonl").exit_code == 64
    assert "is a file within an archive" in str(catch_error(f"zip://a.jsonl::s3://{BUCKET}/a.zip"))
    unknown = catch_error("s4://texts/a.jsonl")
    assert (unknown.exit_code, "Protocol not known: s4" in str(unknown)) == (2, True)


def test_denied_access_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.rules = [Rule("GET", BUCKET, "deny", 10), Rule("HEAD", BUCKET, "deny", 10)]
    for name in (f"s3://{BUCKET}/deep/*.jsonl", f"s3://{BUCKET}/deep/a.jsonl"):
        error = catch_error(name)
        assert f"access to {name} denied" in error.problem
        assert "AWS_ACCESS_KEY_ID" in error.remedy
    store.rules = []
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    S3FileSystem.clear_instance_cache()
    error = catch_error(f"s3://{BUCKET}/deep/*.jsonl")
    assert "Unable to locate credentials" in error.problem
    assert error.exit_code == 64


def test_a_missing_extra_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(registry, "s3", raising=False)
    with pytest.raises(SettingsError, match=r"'s3://a/b': .*; pip install 'regauge\[s3\]'"):
        source("s3://a/b").list_pieces()


def test_a_dry_run_sends_no_requests(tmp_path: Path) -> None:
    files = {"files": ["s3://none-such/*.jsonl"]}
    answer = verb.plan(build_settings(tmp_path, source=files))
    assert answer["action"] == "read s3://none-such/*.jsonl and prepare the dataset"
    assert "pieces" not in answer


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(object_store, "MIN_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(object_store, "MAX_WAIT_SECONDS", 0.01)
    for name, data in build_files().items():
        (tmp_path / name).write_bytes(data)
    with serve_folder(tmp_path) as server:
        yield server


@pytest.mark.parametrize("name", list(build_files()))
def test_a_web_server_has_the_rows_of_a_folder(web: Web, name: str) -> None:
    assert read_fields(source(f"{web.url}/{name}")) == ROWS


def test_a_server_without_range_requests_sends_complete_files(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_remote, "READ_AHEAD_BYTES", 2**16)
    web.supports_ranges = False
    name = f"{web.url}/a.jsonl"
    read = config.parse_choice("data/sources", {"kind": "jsonl", "files": (name,), "chunk_mib": 1})
    assert len(read.list_pieces()) == 1
    web.num_interruptions = 1
    assert read_fields(read) == ROWS
    assert web.num_interruptions == 0
    error = catch_error(f"{web.url}/a.parquet")
    assert "does not support range requests" in error.problem
    assert error.remedy == "copy the file to this machine and set source.files to it"


def test_only_the_needed_byte_ranges_of_a_table_are_downloaded(web: Web) -> None:
    table = pa.table({"label": range(2000), "text": [f"{number} " * 500 for number in range(2000)]})
    path = web.folder / "large.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False)
    columns = {"files": (f"{web.url}/large.parquet",), "columns": ("label",)}
    read = config.parse_choice("data/sources", {"kind": "parquet", **columns})
    assert [row["label"] for row in read_fields(read)] == list(range(2000))
    assert web.sent_bytes < path.stat().st_size / 20


def test_a_file_that_becomes_shorter_is_refused(web: Web) -> None:
    path = web.folder / "a.jsonl"
    with _remote.RemoteFile(f"{web.url}/a.jsonl", read_ahead=False) as file:
        assert file.read(10) == path.read_bytes()[:10]
        path.write_bytes(path.read_bytes()[:5])
        with pytest.raises(DataError, match="has changed while it was read"):
            file.read(10)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(404, 64, "no file http"), (403, 64, "denied: 403"), (503, 75, "run the same command")],
)
def test_http_errors_are_reported(web: Web, status: int, code: int, words: str) -> None:
    web.status = status
    error = catch_error(f"{web.url}/a.jsonl?token=1")
    assert error.exit_code == code
    assert words in str(error)
