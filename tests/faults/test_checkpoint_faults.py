"""Saves that are killed, fail or wait, and checkpoints that are damaged: rows 15 to 24."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.conftest import FULL, Job, Jobs
from regauge import files
from regauge.checkpoint import layout

MOMENTS = ("begin", "staged", "written")
"""Those that every process comes to."""
COMMIT = ("manifest", "rename", "latest", "retention")
"""Those of the first process alone."""
CASES = [(moment, rank) for moment in MOMENTS for rank in (0, 1)] + [(name, 0) for name in COMMIT]
LATE = ("latest", "retention")
"""Moments at which the new checkpoint is the newest already."""


@FULL
def test_a_save_that_is_killed_leaves_the_one_before(jobs: Jobs) -> None:
    job = jobs.job({"kind": "kill", "at": "save:rename", "rank": 0, "step": 12})
    jobs.survives(job)
    (failure,) = job.failures
    assert failure["kind"] == "process"
    assert first_step(job, 2) == 7


@FULL
def test_a_kill_at_any_moment_of_a_save_leaves_one_of_the_two(jobs: Jobs) -> None:
    """Every attempt is killed in a later save, each at another moment or on another process."""
    faults = [
        {"kind": "kill", "at": f"save:{moment}", "rank": rank, "step": 6 + 6 * n, "attempt": n}
        for n, (moment, rank) in enumerate(CASES, start=1)
    ]
    job = jobs.survives(jobs.job(*faults, stop={"steps": 12 + 6 * len(CASES)}))
    assert [failure["kind"] for failure in job.failures] == ["process"] * len(CASES)
    assert [failure["rank"] for failure in job.failures] == [rank for _, rank in CASES]
    for attempt, (moment, _) in enumerate(CASES, start=1):
        step = 6 + 6 * attempt
        assert first_step(job, attempt + 1) == step + (1 if moment in LATE else -5), moment


def first_step(job: Job, attempt: int) -> int:
    """Return the first step that an attempt did."""
    return min(int(line["step"]) for line in metrics(job) if line["attempt"] == attempt)


@FULL
def test_a_checkpoint_that_takes_another_s_place_is_one_of_the_two(jobs: Jobs) -> None:
    """The run passes over a damaged step 12, writes it again, and is killed between two renames."""
    job = stopped_at_18(jobs, lambda root: flip(root / layout.name_of(18)))
    job.faults = [{"kind": "kill", "at": "save:swap", "rank": 0, "step": 18, "attempt": 2}]
    jobs.survives(job)
    assert first_step(job, 3) == 19


def flip(path: Path) -> None:
    """Turn one bit of the tensors of a checkpoint."""
    file = max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-9] ^= 16
    file.write_bytes(content)


def truncate(path: Path) -> None:
    file = max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    file.write_bytes(file.read_bytes()[:-64])


def empty(path: Path) -> None:
    max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size).write_bytes(b"")


def lose_a_shard(path: Path) -> None:
    min(path.glob("*.safetensors")).unlink()


def lose_the_manifest(path: Path) -> None:
    (path / layout.MANIFEST).unlink()


def swap_shards(path: Path) -> None:
    """Put a shard of the step before into a checkpoint."""
    other = path.with_name(layout.name_of(12))
    name = min(path.glob("*.safetensors")).name
    shutil.copy(other / name, path / name)


@FULL
@pytest.mark.parametrize(
    "harm",
    [flip, truncate, empty, lose_a_shard, lose_the_manifest, swap_shards],
    ids=lambda harm: harm.__name__,
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    jobs: Jobs, harm: Callable[[Path], None]
) -> None:
    job = stopped_at_18(jobs, lambda root: harm(root / layout.name_of(18)))
    jobs.survives(job)
    assert "checkpoint passed over" in job.said
    assert layout.name_of(18) in job.said
    assert first_step(job, 2) == 13


@FULL
def test_without_a_whole_checkpoint_a_run_does_not_begin_again(jobs: Jobs) -> None:
    def every(root: Path) -> None:
        for path in root.glob("step-*"):
            flip(path)

    job = stopped_at_18(jobs, every)
    job.start().wait()
    assert job.code == 65
    assert "no checkpoint in" in job.said.splitlines()[-1]
    assert "can be loaded" in job.said.splitlines()[-1]
    assert {line["attempt"] for line in metrics(job)} == {1}


@FULL
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_stays_full_is_said_each_time(jobs: Jobs, rank: int) -> None:
    """Three saves in a row are lost, the last of them too: then the run starts again."""
    fault = {"kind": "file-limit", "at": "save:staged", "rank": rank, "step": 12}
    job = jobs.survives(jobs.job(fault))
    (failure,) = job.failures
    assert failure["kind"] == "storage"
    assert failure["step"] == 24
    assert "could not" in failure["problem"]
    for step in (12, 18):
        assert f"the checkpoint of step {step} was not saved, and training goes on" in job.said
    assert first_step(job, 2) == 7


@FULL
@pytest.mark.parametrize(
    ("writing", "moment", "rank"),
    [
        ("background", "staged", 1),
        ("background", "begin", 0),
        ("background", "written", 1),
        ("blocking", "written", 0),
    ],
)
def test_a_save_that_fails_once_is_said_and_training_goes_on(
    jobs: Jobs, writing: str, moment: str, rank: int
) -> None:
    fault = {"kind": "fail", "at": f"save:{moment}", "rank": rank, "step": 12}
    job = jobs.survives(jobs.job(fault, output={"checkpoint": {"writing": writing}}))
    assert not (job.folder / "failures").exists()
    assert "the checkpoint of step 12 was not saved, and training goes on" in job.said
    assert "No space left on device" in job.said


@FULL
def test_a_last_save_that_fails_is_no_success(jobs: Jobs) -> None:
    fault = {"kind": "fail", "at": "save:staged", "rank": 0, "step": 24, "attempt": 0}
    job = jobs.job(fault, output={"checkpoint": {"writing": "background"}})
    job.start().wait()
    assert job.code == 66
    assert not (job.folder / "result.json").exists()


@FULL
def test_slow_storage_stops_no_more_than_one_save(jobs: Jobs) -> None:
    fault = {"kind": "sleep", "at": "save:staged", "rank": 0, "step": 6, "seconds": 4}
    job = jobs.survives(jobs.job(fault, output={"checkpoint": {"writing": "background"}}))
    assert not (job.folder / "failures").exists()
    last = ledger(job)[-1]
    assert 1 < last["seconds"]["checkpoint"] < 10


def stopped_at_18(jobs: Jobs, harm: Callable[[Path], None]) -> Job:
    """Return a run that was stopped at its third checkpoint, and then came to harm."""
    job = jobs.job()
    whole = jobs.whole(job)
    shutil.copytree(whole, job.folder)
    root = job.folder / "checkpoints"
    shutil.rmtree(root / layout.name_of(24))
    files.write_atomic(root / layout.LATEST, f"{layout.name_of(18)}\n")
    shutil.rmtree(job.folder / "model")
    (job.folder / "result.json").unlink()
    path = job.folder / "metrics.jsonl"
    told = path.read_text().splitlines(keepends=True)
    kept = [line for line in told if json.loads(line)["step"] <= 18]
    path.write_text("".join(kept))
    harm(root)
    return job


def metrics(job: Job) -> list[dict[str, float]]:
    told = (job.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in told]


def ledger(job: Job) -> list[dict[str, dict[str, float]]]:
    return [json.loads(line) for line in (job.folder / "ledger.jsonl").read_text().splitlines()]
