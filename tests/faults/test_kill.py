"""`kill -9` of a real run at a random step; the same command then ends as an uninterrupted run.

The uninterrupted run is done in the shared world of processes. It is the same run: the losses of
the killed command have the same bits at every size. Therefore the largest runs also resume in the
shared world; the others resume with the same command.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from distributed.jobs import lines, losses
from distributed.runs import Runs, settings
from distributed.test_resume import assert_same
from faults.conftest import FULL
from faults.families import list_descendants
from regauge.config import dump
from regauge.run_folders.checkpoint_files import LATEST

STEPS, SAVE_EVERY = 48, 6
RESUMED_SIZES = (1, 2)
"""Sizes at which the same command resumes: each process takes four seconds to start."""
Victim = Literal["the supervisor", "all processes"]


def build_changes(strategy: str, *, async_save: bool) -> dict[str, Any]:
    return {
        "stop": {"steps": STEPS},
        "output": {"checkpoint": {"every_steps": SAVE_EVERY, "async_save": async_save}},
        "strategy": strategy,
    }


@dataclass
class Command:
    """One `regauge train`, as a user starts it."""

    folder: Path
    run_file: Path

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "regauge", "train", str(self.run_file)]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        try:
            code = process.wait()
        finally:
            process.kill()
        assert code == 0, self.log.read_text()[-2000:]

    def kill(self, process: subprocess.Popen[bytes], victim: Victim, draw: random.Random) -> None:
        """Send SIGKILL at a random step after the first checkpoint; wait until all are gone."""
        step = draw.randrange(SAVE_EVERY + 1, 16)
        while not (self.folder / "checkpoints" / LATEST).exists() or self.step() < step:
            assert process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.002)
        family = [*list_descendants(process.pid), process.pid]
        victims = family if victim == "all processes" else [process.pid]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert process.wait() != 0, "the run ended before it was killed"
        while any(Path(f"/proc/{pid}").exists() for pid in family):
            time.sleep(0.01)

    def step(self) -> int:
        """Return the last step in the metrics of the run."""
        path = self.folder / "metrics.jsonl"
        texts = path.read_text().splitlines() if path.exists() else []
        complete = [text for text in texts if text.endswith("}")]
        return json.loads(complete[-1])["step"] if complete else 0


def build_command(runs: Runs, size: int, changed: dict[str, Any]) -> Command:
    folder = runs.folder(f"killed-{size}")
    run_file = folder.with_suffix(".json")
    tables = settings(folder, runs.data["packed"], "mlm", **changed, execution={"processes": size})
    run_file.write_text(json.dumps(dump(tables)))
    return Command(folder, run_file)


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="not proved here: this machine has no /proc"
)
@pytest.mark.parametrize(
    ("size", "victim", "async_save", "strategy"),
    [
        pytest.param(1, "all processes", True, "single", marks=FULL),
        (2, "the supervisor", False, "ddp"),
        pytest.param(3, "the supervisor", True, "zero1", marks=FULL),
        pytest.param(4, "all processes", True, "ddp", marks=FULL),
    ],
)
def test_a_killed_run_equals_the_uninterrupted_run(
    runs: Runs, size: int, victim: Victim, strategy: str, *, async_save: bool
) -> None:
    changed = build_changes(strategy, async_save=async_save)
    killed = build_command(runs, size, changed)
    killed.kill(killed.start(), victim, random.Random(size))  # noqa: S311 - a seeded moment
    assert not (killed.folder / "result.json").exists()
    before = losses(lines(killed.folder))
    assert len(before) > SAVE_EVERY
    if size in RESUMED_SIZES:
        killed.finish(killed.start())
    else:
        runs.job("train", size, killed.folder, "mlm", changed)
    whole = runs.train_once(size, "mlm", **changed)
    assert before == losses(lines(whole))[: len(before)]
    assert_same(whole, killed.folder)
    assert {line["attempt"] for line in lines(killed.folder)} == {1, 2}
    ledger = [
        json.loads(line) for line in (killed.folder / "ledger.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in ledger if line["attempt"] == 2][-1] == STEPS
    assert ledger[-1]["attempt"] == 2
    last_step = [line["step"] for line in ledger if line["attempt"] == 1][-1]
    resumed_step = next(line["step"] for line in ledger if line["attempt"] == 2) - 1
    lost = ledger[-1]["seconds"]["lost"]
    assert lost > 0 if last_step > resumed_step else lost == 0
