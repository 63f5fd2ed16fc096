"""Checkpoints in an object store that is slow, breaks off or lists the past: rows 25 and 26."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from s3fs import S3FileSystem

from distributed.jobs import weights
from faults.conftest import BASE, FULL, Job, Jobs
from faults.stores import Rule, Store, started
from regauge import object_store
from regauge.checkpoint import layout, remote
from regauge.checkpoint.remote import Remote
from regauge.errors import SettingsError, TransientError

BUCKET = "checkpoints"
ROOT = f"s3://{BUCKET}/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with started() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        client().create_bucket(Bucket=BUCKET)
        S3FileSystem.clear_instance_cache()
        yield found


def client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def keys() -> set[str]:
    found = client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {entry["Key"].removeprefix("run/") for entry in found}


def committed() -> list[int]:
    manifests = (key.partition("/")[0] for key in keys() if key.endswith(layout.MANIFEST))
    return sorted(step for name in manifests if (step := layout.number_of(name)) is not None)


def remembered(jobs: Jobs, *faults: dict[str, Any]) -> Job:
    """Return a run whose checkpoints go to the store, too."""
    return jobs.job(*faults, output={"checkpoint": {"root": ROOT}})


def assert_equal_to_whole(jobs: Jobs, job: Job) -> None:
    expected, found = weights(jobs.runs.trained(job.size, "mlm", **BASE)), weights(job.folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@FULL
def test_a_run_goes_on_on_a_machine_that_has_nothing(jobs: Jobs, store: Store) -> None:
    job = remembered(jobs, {"kind": "terminate", "rank": 0, "step": 14, "attempt": 1})
    job.start().wait()
    assert job.code == 143, job.said
    assert committed()[-1] in (15, 16)
    assert not store.rules
    shutil.rmtree(job.folder)
    job.faults = []
    job.start().wait()
    assert job.code == 0, job.said
    assert "Resuming from step" in job.told
    assert committed()[-1] == 24
    assert len(committed()) == 3
    assert_equal_to_whole(jobs, job)


@FULL
@pytest.mark.parametrize(("how", "count"), [("slow", 8), ("reset", 8), ("late", 1)])
def test_a_store_that_fails_one_process_for_a_while_is_waited_for(
    jobs: Jobs, store: Store, how: str, count: int
) -> None:
    store.rules = [Rule("PUT", "step-00000012/shard-00002", how, count)]
    job = remembered(jobs)
    job.start().wait()
    assert job.code == 0, job.said
    assert store.rules[0].struck == count
    assert "was not saved" not in job.told
    assert "hang" not in job.told
    assert committed() == [12, 18, 24]


@FULL
def test_a_checkpoint_without_all_its_files_is_never_committed(jobs: Jobs, store: Store) -> None:
    store.rules = [Rule("PUT", "step-00000012/shard-00002", "slow", count=10**6)]
    job = remembered(jobs)
    job.start().wait()
    assert job.code == 0, job.said
    assert "the checkpoint of step 12 was not saved, and training goes on" in job.told
    assert committed() == [6, 18, 24]
    assert not [key for key in keys() if key.startswith("step-00000012/")], "it was not tidied"


@FULL
def test_a_listing_that_lags_behind_does_not_hide_the_newest(jobs: Jobs, store: Store) -> None:
    job = remembered(jobs, {"kind": "terminate", "rank": 0, "step": 18, "attempt": 1})
    job.start().wait()
    assert job.code == 143
    newest = committed()[-1]
    shutil.rmtree(job.folder)
    store.rules = [Rule("GET", layout.name_of(newest), "hide", count=0)]
    job.faults = []
    job.start().wait()
    assert job.code == 0, job.said
    assert f"Resuming from step {newest}" in job.told
    assert_equal_to_whole(jobs, job)


@pytest.mark.parametrize("missing", ["credentials", "bucket"])
def test_a_store_that_cannot_be_written_is_known_before(
    jobs: Jobs, store: Store, monkeypatch: pytest.MonkeyPatch, missing: str, tmp_path: Path
) -> None:
    job = jobs.job(
        output={"checkpoint": {"root": ROOT if missing == "credentials" else "s3://nowhere/run"}}
    )
    if missing == "credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
    job.start().wait()
    assert job.code == 76, job.said
    line = job.said.splitlines()[-1]
    assert "object store: cannot be written" in line
    assert "s3://" in line
    assert not job.folder.exists()
    assert not store.rules


# The store itself


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_WAIT_SECONDS", 0.01)


def part(tmp_path: Path, size: int = 100) -> Path:
    path = tmp_path / "part"
    path.mkdir()
    (path / "a.safetensors").write_bytes(os.urandom(size))
    (path / layout.MANIFEST).write_text('{"files": {"a.safetensors": {}}}')
    return path


@pytest.mark.usefixtures("soon")
def test_a_multipart_upload_that_breaks_off_is_done_again(store: Store, tmp_path: Path) -> None:
    source = part(tmp_path, 110 << 20)
    store.rules = [Rule("PUT", "partNumber=2", "reset", count=3)]
    found = Remote(ROOT)
    found.put(source, 4, ["a.safetensors"])
    assert found.steps() == [4]
    assert not found.fetch(4, tmp_path / "here"), "there is no manifest yet"
    found.commit(source / layout.MANIFEST, 4)
    assert found.fetch(4, tmp_path / "here")
    assert store.rules[0].struck == 3
    copy = tmp_path / "here" / layout.name_of(4) / "a.safetensors"
    assert copy.read_bytes() == (source / "a.safetensors").read_bytes()


def test_what_is_withdrawn_is_no_checkpoint(store: Store, tmp_path: Path) -> None:
    assert not store.rules
    source, found = part(tmp_path), Remote(ROOT)
    for step in (2, 4, 6):
        found.put(source, step, ["a.safetensors"])
        found.commit(source / layout.MANIFEST, step)
    found.withdraw(6)
    assert not found.fetch(6, tmp_path / "here")
    found.retain([4], 6)
    assert committed() == [4]
    assert found.steps() == [6, 4], "the pointer still names what was withdrawn"
    assert Remote(f"s3://{BUCKET}/other").steps() == []


def test_a_store_is_asked_for_as_long_as_it_may_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, found = part(tmp_path), Remote(str(tmp_path / "root"))
    seen: list[bool] = []
    monkeypatch.setattr(found, "_copied", lambda *_: seen.append(found.asking))
    found.put(source, 2, ["a.safetensors"])
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.0)
    found.put(source, 2, ["a.safetensors"])
    assert seen == [True, False]
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 120.0)
    monkeypatch.setattr(found, "_copied", lambda *_: (_ for _ in ()).throw(PermissionError))
    with pytest.raises(TransientError):
        found.put(source, 2, ["a.safetensors"])
    assert not found.asking


def test_a_folder_is_a_root_as_well(tmp_path: Path) -> None:
    source, found = part(tmp_path), Remote(str(tmp_path / "root"))
    assert found.check() is None
    found.put(source, 2, ["a.safetensors"])
    found.commit(source / layout.MANIFEST, 2)
    assert found.steps() == [2]
    assert found.fetch(2, tmp_path / "here")


@FULL
@pytest.mark.usefixtures("soon")
def test_a_store_that_is_gone_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "TRIES", 2)
    store.rules = [Rule("GET", "", "slow", count=10**6)]
    with pytest.raises(TransientError, match=r"s3://checkpoints/run does not answer"):
        Remote(ROOT).steps()


@pytest.mark.parametrize("root", ["nothing://a/b", "s5://bucket"])
def test_a_root_that_nothing_knows_is_refused(root: str) -> None:
    with pytest.raises(SettingsError, match=r"output\.checkpoint\.root = "):
        Remote(root)
