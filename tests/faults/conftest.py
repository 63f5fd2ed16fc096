"""Runs with a fault plan, started as users start them, and the same runs without a fault."""

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
from end_to_end.predicting import export_run, train_model
from regauge.config import dump, merge
from regauge.system.files import LOCK
from regauge.system.scratch import PREFIX, SHARED_MEMORY

__all__ = ["FULL", "runs", "worlds"]
BASE: dict[str, Any] = {
    "stop": {"steps": 24},
    "output": {"checkpoint": {"every_steps": 6, "keep_last": 3}},
    "execution": {
        "timeout_seconds": 60,
        "supervision": {"hang_timeout_seconds": 5.0, "preflight": "brief"},
    },
}


@dataclass
class Job:
    """One supervised run: its command, its exit code and its output."""

    folder: Path
    size: int
    changes: dict[str, Any]
    code: int = -1
    stderr: str = ""
    process: subprocess.Popen[str] | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    options: tuple[str, ...] = ()
    cwd: Path | None = None
    """Working folder of the command; by default that of the test."""

    def start(self) -> Job:
        """Start the command without waiting for it."""
        file = str(self.folder.with_suffix(".json"))
        command = [sys.executable, "-m", "regauge", "train", file, *self.options]
        if self.faults:
            plan = self.folder.with_suffix(".plan.json")
            plan.write_text(json.dumps({"fault": self.faults}))
            command += ["--chaos", str(plan)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.cwd
        )
        return self

    def wait(self) -> Job:
        """Wait for the end of the command."""
        assert self.process is not None
        try:
            _, self.stderr = self.process.communicate()
        finally:
            self.process.kill()
        self.code = self.process.returncode
        return self

    def finish(self, code: int = 0) -> Job:
        """Run the command to its end, and check its exit code."""
        self.start().wait()
        assert self.code == code, self.stderr
        return self

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics of the run contain a step."""
        path = self.folder / "metrics.jsonl"

        def has_step() -> bool:
            texts = path.read_text().splitlines() if path.exists() else []
            return any(json.loads(text)["step"] >= step for text in texts if text.endswith("}"))

        self._wait_until(has_step, f"step {step}")

    def wait_for_lock(self) -> float:
        """Wait until the command locks its folder; return that time by the monotonic clock."""
        assert self.process is not None
        lock, owner = self.folder / LOCK, f"process {self.process.pid} of"
        self._wait_until(lambda: lock.exists() and owner in lock.read_text(), "the lock")
        return time.monotonic()

    def _wait_until(self, condition: Callable[[], bool], name: str) -> None:
        assert self.process is not None
        while not condition():
            assert self.process.poll() is None, (
                f"{name} never came: {self.process.communicate()[1]}"
            )
            time.sleep(0.01)

    @property
    def triggered_faults(self) -> list[dict[str, Any]]:
        """The faults that the injector triggered."""
        path = self.folder / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The failure records, in the order of the attempts."""
        paths = sorted((self.folder / "failures").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that have ended, in their order."""
        texts = (self.folder / "attempts.jsonl").read_text().splitlines()
        return [line for text in texts if "outcome" in (line := json.loads(text))]

    @property
    def stderr_line(self) -> str:
        """The standard error of the command as one line, without the breaks of a terminal."""
        return " ".join(self.stderr.split())

    @property
    def losses(self) -> list[float]:
        """The loss of each step, from the last attempt that ran it."""
        return losses(lines(self.folder))


@dataclass
class Jobs:
    """Creates supervised runs, and compares them with the same runs without a fault."""

    runs: Runs
    created: list[Job] = field(default_factory=list)

    def create(self, *faults: dict[str, Any], size: int = 2, **changes: Any) -> Job:
        """Return a run of two processes that is not started yet."""
        folder = self.runs.folder("faulty")
        folder.rmdir()
        changed = merge(merge(BASE, changes), {"execution": {"processes": size}})
        run = settings(folder, self.runs.data["packed"], "mlm", **changed)
        folder.with_suffix(".json").write_text(json.dumps(dump(run)))
        job = Job(folder, size, changes, faults=list(faults))
        self.created.append(job)
        return job

    def kill_all(self) -> None:
        """Kill the processes that a failed test left behind."""
        for process in (job.process for job in self.created):
            if process is None:
                continue
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def assert_survives(self, job: Job) -> Job:
        """Run a job to its end, and assert that it ends as the same run without a fault."""
        job.finish()
        if job.faults:
            assert job.triggered_faults, "the fault was not triggered"
        assert_same(self.undisturbed_folder(job), job.folder)
        self.assert_nothing_is_left(job)
        return job

    def undisturbed_folder(self, job: Job) -> Path:
        """Return the folder of the same run without a fault."""
        return self.runs.train_once(job.size, "mlm", **merge(BASE, job.changes))

    def assert_nothing_is_left(self, job: Job) -> None:
        """Assert that no process and no folder of a run outlives it."""
        assert not _find_left_folders(job.folder)
        assert not list((job.folder / "checkpoints").glob(".step-*"))
        assert not [pid for pid in _list_pids() if str(job.folder) in _read_command(pid)]


def _find_left_folders(run: Path) -> list[Path]:
    """Return the scratch folders of a run whose supervisors are gone; live ones are locked.

    Other runs of this machine, such as a test that runs in parallel, may have left their folders.
    """
    folders = []
    parent = os.open(SHARED_MEMORY, os.O_RDONLY)
    fcntl.flock(parent, fcntl.LOCK_EX)  # supervisors hold it while they create and lock a folder
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # the folder is locked, has no run.json, or is gone
            folder = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folders += [path] * (json.dumps(str(run)) in (path / "run.json").read_text())
            finally:
                os.close(folder)
    os.close(parent)
    return folders


def _list_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a run that trained a small encoder; no test changes it."""
    return train_model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of that encoder; no test changes it."""
    return export_run(model, tmp_path_factory.mktemp("exported") / "artifact")


@pytest.fixture
def jobs(runs: Runs) -> Iterator[Jobs]:
    """Return a factory of runs for faults."""
    jobs = Jobs(runs)
    yield jobs
    jobs.kill_all()


def send_sigterm(job: Job) -> None:
    """Send SIGTERM to the command of a run, as a scheduler does."""
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGTERM)
