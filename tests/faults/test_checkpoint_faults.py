"""Saves that are killed, fail or wait, and damaged checkpoints: rows 15 to 24 of the matrix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.conftest import FULL, Job, Jobs
from regauge.run_folders import checkpoint_files
from regauge.system import files

SHARED_POINTS = ("begin", "staged", "written")
"""Points of a save that every process reaches."""
COMMIT_POINTS = ("manifest", "rename", "latest", "retention")
"""Points that only process 0 reaches."""
CASES = [(point, rank) for point in SHARED_POINTS for rank in (0, 1)] + [
    (name, 0) for name in COMMIT_POINTS
]
LATE_POINTS = ("latest", "retention")
"""Points at which the new checkpoint is already committed."""


@FULL
def test_a_killed_save_leaves_the_previous_checkpoint(jobs: Jobs) -> None:
    job = jobs.create({"kind": "kill", "at": "save:rename", "rank": 0, "step": 12})
    jobs.assert_survives(job)
    (failure,) = job.failures
    assert failure["kind"] == "process"
    assert find_first_step(job, 2) == 7


@FULL
def test_a_kill_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(jobs: Jobs) -> None:
    """Every attempt is killed in a later save, at another point or on another process."""
    faults = [
        {"kind": "kill", "at": f"save:{point}", "rank": rank, "step": 6 + 6 * n, "attempt": n}
        for n, (point, rank) in enumerate(CASES, start=1)
    ]
    job = jobs.assert_survives(jobs.create(*faults, stop={"steps": 12 + 6 * len(CASES)}))
    assert [failure["kind"] for failure in job.failures] == ["process"] * len(CASES)
    assert [failure["rank"] for failure in job.failures] == [rank for _, rank in CASES]
    for attempt, (point, _) in enumerate(CASES, start=1):
        step = 6 + 6 * attempt
        assert find_first_step(job, attempt + 1) == step + (1 if point in LATE_POINTS else -5), (
            point
        )


def find_first_step(job: Job, attempt: int) -> int:
    """Return the first step that an attempt ran."""
    return min(int(line["step"]) for line in read_metrics(job) if line["attempt"] == attempt)


@FULL
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_the_two(jobs: Jobs) -> None:
    """The run skips a damaged step 18, saves it again, and is killed between two renames."""
    job = stop_at_18(jobs, lambda root: flip(root / checkpoint_files.checkpoint_name(18)))
    job.faults = [{"kind": "kill", "at": "save:swap", "rank": 0, "step": 18, "attempt": 2}]
    jobs.assert_survives(job)
    assert find_first_step(job, 3) == 19


def flip(path: Path) -> None:
    """Flip one bit in the tensors of a checkpoint."""
    file = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-9] ^= 16
    file.write_bytes(content)


def truncate(path: Path) -> None:
    file = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-64])


def empty(path: Path) -> None:
    max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size).write_bytes(b"")


def lose_a_shard(path: Path) -> None:
    min(path.glob("*.safetensors")).unlink()


def lose_the_manifest(path: Path) -> None:
    (path / checkpoint_files.MANIFEST).unlink()


def swap_shards(path: Path) -> None:
    """Copy a shard of the previous checkpoint into a checkpoint."""
    previous = path.with_name(checkpoint_files.checkpoint_name(12))
    name = min(path.glob("*.safetensors")).name
    shutil.copy(previous / name, path / name)


@FULL
@pytest.mark.parametrize(
    "harm",
    [flip, truncate, empty, lose_a_shard, lose_the_manifest, swap_shards],
    ids=lambda harm: harm.__name__,
)
def test_a_damaged_checkpoint_is_reported_and_skipped(
    jobs: Jobs, harm: Callable[[Path], None]
) -> None:
    job = stop_at_18(jobs, lambda root: harm(root / checkpoint_files.checkpoint_name(18)))
    jobs.assert_survives(job)
    assert "skipping a damaged checkpoint: " in job.stderr
    assert checkpoint_files.checkpoint_name(18) in job.stderr
    assert find_first_step(job, 2) == 13


@FULL
def test_a_run_with_only_damaged_checkpoints_does_not_start_from_scratch(jobs: Jobs) -> None:
    def damage_all(root: Path) -> None:
        for path in root.glob("step-*"):
            flip(path)

    job = stop_at_18(jobs, damage_all).finish(65)
    assert "no checkpoint in" in job.stderr.splitlines()[-1]
    assert "can be loaded" in job.stderr.splitlines()[-1]
    assert {line["attempt"] for line in read_metrics(job)} == {1}


@FULL
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_stays_full_is_logged_each_time(jobs: Jobs, rank: int) -> None:
    """Three saves in a row fail, including the last one: then the run is restarted."""
    fault = {"kind": "file-limit", "at": "save:staged", "rank": rank, "step": 12}
    job = jobs.assert_survives(jobs.create(fault))
    (failure,) = job.failures
    assert failure["kind"] == "storage"
    assert failure["step"] == 24
    assert "could not" in failure["problem"]
    for step in (12, 18):
        assert f"the checkpoint of step {step} was not saved; training continues" in job.stderr
    assert find_first_step(job, 2) == 7


@FULL
@pytest.mark.parametrize(
    ("async_save", "point", "rank"),
    [
        (True, "staged", 1),
        (True, "begin", 0),
        (True, "written", 1),
        (False, "written", 0),
    ],
)
def test_a_failed_save_is_logged_and_training_continues(
    jobs: Jobs, point: str, rank: int, *, async_save: bool
) -> None:
    fault = {"kind": "fail", "at": f"save:{point}", "rank": rank, "step": 12}
    job = jobs.assert_survives(
        jobs.create(fault, output={"checkpoint": {"async_save": async_save}})
    )
    assert not (job.folder / "failures").exists()
    assert "the checkpoint of step 12 was not saved; training continues" in job.stderr
    assert "No space left on device" in job.stderr


@FULL
def test_a_failed_last_save_fails_the_run(jobs: Jobs) -> None:
    fault = {"kind": "fail", "at": "save:staged", "rank": 0, "step": 24, "attempt": 0}
    job = jobs.create(fault, output={"checkpoint": {"async_save": True}}).finish(66)
    assert not (job.folder / "result.json").exists()


@FULL
def test_slow_storage_delays_one_save_only(jobs: Jobs) -> None:
    fault = {"kind": "sleep", "at": "save:staged", "rank": 0, "step": 6, "seconds": 4}
    job = jobs.assert_survives(jobs.create(fault, output={"checkpoint": {"async_save": True}}))
    assert not (job.folder / "failures").exists()
    last = read_ledger(job)[-1]
    assert 1 < last["seconds"]["checkpoint"] < 10


def stop_at_18(jobs: Jobs, harm: Callable[[Path], None]) -> Job:
    """Return a run that was stopped at its third checkpoint, and damage its checkpoints."""
    job = jobs.create()
    shutil.copytree(jobs.undisturbed_folder(job), job.folder)
    root = job.folder / "checkpoints"
    shutil.rmtree(root / checkpoint_files.checkpoint_name(24))
    files.write_atomic(root / checkpoint_files.LATEST, f"{checkpoint_files.checkpoint_name(18)}\n")
    shutil.rmtree(job.folder / "model")
    (job.folder / "result.json").unlink()
    path = job.folder / "metrics.jsonl"
    texts = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text for text in texts if json.loads(text)["step"] <= 18))
    harm(root)
    return job


def read_metrics(job: Job) -> list[dict[str, float]]:
    texts = (job.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(text) for text in texts]


def read_ledger(job: Job) -> list[dict[str, dict[str, float]]]:
    return [json.loads(line) for line in (job.folder / "ledger.jsonl").read_text().splitlines()]
