"""Checkpoints in an object store that is slow, fails or has outdated listings: rows 25 and 26."""

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
from faults.stores import Rule, Store, start_store
from regauge.run_folders import checkpoint_files, remote_checkpoints
from regauge.run_folders.remote_checkpoints import RemoteCheckpoints
from regauge.system import object_store
from regauge.system.errors import SettingsError, TransientError

BUCKET = "checkpoints"
ROOT = f"s3://{BUCKET}/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with start_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        client().create_bucket(Bucket=BUCKET)
        S3FileSystem.clear_instance_cache()
        yield store


def client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def list_keys() -> set[str]:
    entries = client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {entry["Key"].removeprefix("run/") for entry in entries}


def list_committed() -> list[int]:
    manifests = (
        key.partition("/")[0] for key in list_keys() if key.endswith(checkpoint_files.MANIFEST)
    )
    return sorted(
        step for name in manifests if (step := checkpoint_files.parse_step(name)) is not None
    )


def create_with_remote(jobs: Jobs, *faults: dict[str, Any]) -> Job:
    """Return a run that keeps a copy of its checkpoints in the store."""
    return jobs.create(*faults, output={"checkpoint": {"remote": ROOT}})


def assert_equals_undisturbed(jobs: Jobs, job: Job) -> None:
    expected, actual = weights(jobs.runs.train_once(job.size, "mlm", **BASE)), weights(job.folder)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@FULL
def test_a_run_resumes_on_an_empty_machine(jobs: Jobs, store: Store) -> None:
    job = create_with_remote(jobs, {"kind": "terminate", "rank": 0, "step": 14, "attempt": 1})
    job.finish(143)
    assert list_committed()[-1] in (15, 16)
    assert not store.rules
    shutil.rmtree(job.folder)
    job.faults = []
    job.finish()
    assert "Resuming from step" in job.stderr_line
    assert list_committed()[-1] == 24
    assert len(list_committed()) == 3
    assert_equals_undisturbed(jobs, job)


@FULL
@pytest.mark.parametrize(("effect", "count"), [("slow", 8), ("reset", 8), ("late", 1)])
def test_a_store_that_fails_for_a_while_is_retried(
    jobs: Jobs, store: Store, effect: str, count: int
) -> None:
    store.rules = [Rule("PUT", "step-00000012/shard-00002", effect, count)]
    job = create_with_remote(jobs)
    job.finish()
    assert store.rules[0].num_triggered == count
    assert "was not saved" not in job.stderr_line
    assert "hang" not in job.stderr_line
    assert list_committed() == [12, 18, 24]


@FULL
def test_a_checkpoint_with_missing_files_is_never_committed(jobs: Jobs, store: Store) -> None:
    store.rules = [Rule("PUT", "step-00000012/shard-00002", "slow", count=10**6)]
    job = create_with_remote(jobs)
    job.finish()
    assert "the checkpoint of step 12 was not saved; training continues" in job.stderr_line
    assert list_committed() == [6, 18, 24]
    assert not [key for key in list_keys() if key.startswith("step-00000012/")], (
        "the failed save was not removed"
    )


@FULL
def test_an_outdated_listing_does_not_hide_the_newest_checkpoint(jobs: Jobs, store: Store) -> None:
    job = create_with_remote(jobs, {"kind": "terminate", "rank": 0, "step": 18, "attempt": 1})
    job.finish(143)
    newest = list_committed()[-1]
    shutil.rmtree(job.folder)
    store.rules = [Rule("GET", checkpoint_files.checkpoint_name(newest), "hide", count=0)]
    job.faults = []
    job.finish()
    assert f"Resuming from step {newest}" in job.stderr_line
    assert_equals_undisturbed(jobs, job)


@pytest.mark.parametrize("missing", ["credentials", "bucket"])
def test_a_store_that_cannot_be_written_is_refused_before_the_start(
    jobs: Jobs, store: Store, monkeypatch: pytest.MonkeyPatch, missing: str, tmp_path: Path
) -> None:
    job = jobs.create(
        output={"checkpoint": {"remote": ROOT if missing == "credentials" else "s3://nowhere/run"}}
    )
    if missing == "credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
    job.finish(76)
    line = job.stderr.splitlines()[-1]
    assert "object store: cannot be written" in line
    assert "s3://" in line
    assert not job.folder.exists()
    assert not store.rules


# The store itself


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MIN_WAIT_SECONDS", 0.01)


def write_staging_folder(tmp_path: Path, size: int = 100) -> Path:
    path = tmp_path / "part"
    path.mkdir()
    (path / "a.safetensors").write_bytes(os.urandom(size))
    (path / checkpoint_files.MANIFEST).write_text('{"files": {"a.safetensors": {}}}')
    return path


@pytest.mark.usefixtures("no_waits")
def test_a_broken_multipart_upload_is_retried(store: Store, tmp_path: Path) -> None:
    source = write_staging_folder(tmp_path, 110 << 20)
    store.rules = [Rule("PUT", "partNumber=2", "reset", count=3)]
    checkpoints = RemoteCheckpoints(ROOT)
    checkpoints.upload(source, 4, ["a.safetensors"])
    assert checkpoints.list_steps() == [4]
    assert not checkpoints.download(4, tmp_path / "here"), "there is no manifest yet"
    checkpoints.commit(source / checkpoint_files.MANIFEST, 4)
    assert checkpoints.download(4, tmp_path / "here")
    assert store.rules[0].num_triggered == 3
    copy = tmp_path / "here" / checkpoint_files.checkpoint_name(4) / "a.safetensors"
    assert copy.read_bytes() == (source / "a.safetensors").read_bytes()


def test_a_withdrawn_checkpoint_is_not_downloaded(store: Store, tmp_path: Path) -> None:
    assert not store.rules
    source, checkpoints = write_staging_folder(tmp_path), RemoteCheckpoints(ROOT)
    for step in (2, 4, 6):
        checkpoints.upload(source, step, ["a.safetensors"])
        checkpoints.commit(source / checkpoint_files.MANIFEST, step)
    checkpoints.withdraw(6)
    assert not checkpoints.download(6, tmp_path / "here")
    checkpoints.retain([4], 6)
    assert list_committed() == [4]
    assert checkpoints.list_steps() == [6, 4], "LATEST still names the withdrawn one"
    assert RemoteCheckpoints(f"s3://{BUCKET}/other").list_steps() == []


def test_an_upload_waits_for_the_store_until_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, checkpoints = write_staging_folder(tmp_path), RemoteCheckpoints(str(tmp_path / "root"))
    waiting: list[bool] = []
    monkeypatch.setattr(checkpoints, "_copy", lambda *_: waiting.append(checkpoints.is_waiting))
    checkpoints.upload(source, 2, ["a.safetensors"])
    monkeypatch.setattr(remote_checkpoints, "ANSWER_SECONDS", 0.0)
    checkpoints.upload(source, 2, ["a.safetensors"])
    assert waiting == [True, False]
    monkeypatch.setattr(remote_checkpoints, "ANSWER_SECONDS", 120.0)
    monkeypatch.setattr(checkpoints, "_copy", lambda *_: (_ for _ in ()).throw(PermissionError))
    with pytest.raises(TransientError):
        checkpoints.upload(source, 2, ["a.safetensors"])
    assert not checkpoints.is_waiting


def test_a_local_folder_can_be_the_root(tmp_path: Path) -> None:
    source, checkpoints = write_staging_folder(tmp_path), RemoteCheckpoints(str(tmp_path / "root"))
    assert checkpoints.find_problem() is None
    checkpoints.upload(source, 2, ["a.safetensors"])
    checkpoints.commit(source / checkpoint_files.MANIFEST, 2)
    assert checkpoints.list_steps() == [2]
    assert checkpoints.download(2, tmp_path / "here")


@FULL
@pytest.mark.usefixtures("no_waits")
def test_a_lost_store_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MAX_TRIES", 2)
    store.rules = [Rule("GET", "", "slow", count=10**6)]
    with pytest.raises(TransientError, match=r"s3://checkpoints/run does not answer"):
        RemoteCheckpoints(ROOT).list_steps()


@pytest.mark.parametrize("root", ["nothing://a/b", "s5://bucket"])
def test_an_unknown_root_is_refused(root: str) -> None:
    with pytest.raises(SettingsError, match=r"output\.checkpoint\.remote = "):
        RemoteCheckpoints(root)
