"""Runs that a fault plan hits, as a user starts them, beside the same runs without a fault."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distributed.conftest import runs, worlds
from distributed.jobs import lines, losses
from distributed.runs import FULL, Runs, settings
from distributed.test_resume import assert_same
from regauge.config import dump, merge
from regauge.files import LOCK
from regauge.scratch import PREFIX, SHARED

__all__ = ["FULL", "runs", "worlds"]
BASE: dict[str, Any] = {
    "stop": {"steps": 24},
    "output": {"checkpoint": {"every_steps": 6, "keep": 3}},
    "execution": {
        "timeout_seconds": 60,
        "supervision": {"hang_seconds": 5.0, "preflight": "brief"},
    },
}


@dataclass
class Job:
    """One supervised run: how it was started, and what it left."""

    folder: Path
    size: int
    changes: dict[str, Any]
    code: int = -1
    said: str = ""
    process: subprocess.Popen[str] | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    options: tuple[str, ...] = ()
    place: Path | None = None
    """Where the command runs, if not here."""

    def start(self) -> Job:
        """Start the command and do not wait."""
        file = str(self.folder.with_suffix(".json"))
        command = [sys.executable, "-m", "regauge", "train", file, *self.options]
        if self.faults:
            plan = self.folder.with_suffix(".plan.json")
            plan.write_text(json.dumps({"fault": self.faults}))
            command += ["--chaos", str(plan)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.place
        )
        return self

    def wait(self) -> Job:
        """Wait for the end of the command."""
        assert self.process is not None
        try:
            _, self.said = self.process.communicate()
        finally:
            self.process.kill()
        self.code = self.process.returncode
        return self

    def until(self, step: int) -> None:
        """Wait until the run has told of a step."""
        path = self.folder / "metrics.jsonl"

        def came() -> bool:
            told = path.read_text().splitlines() if path.exists() else []
            return any(json.loads(line)["step"] >= step for line in told if line.endswith("}"))

        self._until(came, f"step {step}")

    def until_held(self) -> float:
        """Wait until the command has its folder; return when it had, by the monotonic clock."""
        assert self.process is not None
        lock, mine = self.folder / LOCK, f"process {self.process.pid} of"
        self._until(lambda: lock.exists() and mine in lock.read_text(), "the lock")
        return time.monotonic()

    def _until(self, came: Callable[[], bool], what: str) -> None:
        assert self.process is not None
        while not came():
            assert self.process.poll() is None, (
                f"{what} never came: {self.process.communicate()[1]}"
            )
            time.sleep(0.01)

    @property
    def struck(self) -> list[dict[str, Any]]:
        """What the injector says it did."""
        path = self.folder / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The failure records, in the order of the attempts."""
        found = sorted((self.folder / "failures").glob("*.json"))
        return [json.loads(path.read_text()) for path in found]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that have ended, in their order."""
        told = (self.folder / "attempts.jsonl").read_text().splitlines()
        return [line for text in told if "end" in (line := json.loads(text))]

    @property
    def told(self) -> str:
        """What the command said, as one line: a terminal's breaks are left out."""
        return " ".join(self.said.split())

    @property
    def losses(self) -> list[float]:
        """The loss of each step, as the last attempt that came to it has it."""
        return losses(lines(self.folder))


@dataclass
class Jobs:
    """Supervised runs, and the same ones without a fault."""

    runs: Runs
    made: list[Job] = field(default_factory=list)

    def job(self, *faults: dict[str, Any], size: int = 2, **changes: Any) -> Job:
        """Return a run of two processes that is not started yet."""
        folder = self.runs.folder("faulty")
        folder.rmdir()
        changed = merge(merge(BASE, changes), {"execution": {"processes": size}})
        run = settings(folder, self.runs.data["packed"], "mlm", **changed)
        folder.with_suffix(".json").write_text(json.dumps(dump(run)))
        job = Job(folder, size, changes, faults=list(faults))
        self.made.append(job)
        return job

    def end(self) -> None:
        """Kill what a failed test has left running."""
        for process in (job.process for job in self.made):
            if process is None:
                continue
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def survives(self, job: Job) -> Job:
        """Run a job to its end, and assert that it ends as the same run without a fault."""
        job.start().wait()
        assert job.code == 0, job.said
        if job.faults:
            assert job.struck, "the fault did not strike"
        assert_same(self.whole(job), job.folder)
        self.nothing_is_left(job)
        return job

    def whole(self, job: Job) -> Path:
        """Return the folder of the same run without a fault."""
        return self.runs.trained(job.size, "mlm", **merge(BASE, job.changes))

    def nothing_is_left(self, job: Job) -> None:
        """Assert that no process and no folder of a run outlives it."""
        assert not _left_behind(job.folder)
        assert not list((job.folder / "checkpoints").glob(".step-*"))
        assert not [pid for pid in _pids() if str(job.folder) in _command(pid)]


def _left_behind(run: Path) -> list[Path]:
    """Return folders in memory of a run whose supervisors are gone; that of a live one is locked.

    Other runs of this machine, a test beside this one perhaps, may have left theirs.
    """
    found = []
    place = os.open(SHARED, os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)  # supervisors make and lock theirs with it
    for path in SHARED.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, without orders, or gone by now
            folder = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found += [path] * (json.dumps(str(run)) in (path / "run.json").read_text())
            finally:
                os.close(folder)
    os.close(place)
    return found


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def jobs(runs: Runs) -> Iterator[Jobs]:
    """Return what makes runs for faults to hit."""
    found = Jobs(runs)
    yield found
    found.end()


def terminate(job: Job) -> None:
    """Send SIGTERM to the command of a run, as a scheduler does."""
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGTERM)
