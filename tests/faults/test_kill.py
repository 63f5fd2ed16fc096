"""`kill -9` of a real run, at a random moment; the same command then ends it as if nothing was.

The uninterrupted run that it is compared with is done in the shared world. That is the same run:
what the command line did before it was killed, also after its checkpoint, has the same bits at
every size. So the largest runs also go on there; the others do with the same command.
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
from faults.families import descendants
from regauge.checkpoint.layout import LATEST
from regauge.config import dump

STEPS, SAVED = 48, 6
AGAIN = (1, 2)
"""Sizes at which the same command is given again: a process costs four seconds to start."""
Victim = Literal["the supervisor", "all processes"]


def changes(writing: str, strategy: str) -> dict[str, Any]:
    return {
        "stop": {"steps": STEPS},
        "output": {"checkpoint": {"every_steps": SAVED, "writing": writing}},
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
        """Kill -9 after the first checkpoint, at a step that is drawn; wait until all are gone."""
        step = draw.randrange(SAVED + 1, 16)
        while not (self.folder / "checkpoints" / LATEST).exists() or self.step() < step:
            assert process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.002)
        everyone = [*descendants(process.pid), process.pid]
        victims = everyone if victim == "all processes" else [process.pid]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert process.wait() != 0, "the run ended before it was killed"
        while any(Path(f"/proc/{pid}").exists() for pid in everyone):
            time.sleep(0.01)

    def step(self) -> int:
        """Return the last step that the run told."""
        path = self.folder / "metrics.jsonl"
        told = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in told if line.endswith("}")]
        return json.loads(whole[-1])["step"] if whole else 0


def command(runs: Runs, size: int, changed: dict[str, Any]) -> Command:
    folder = runs.folder(f"killed-{size}")
    run_file = folder.with_suffix(".json")
    tables = settings(folder, runs.data["packed"], "mlm", **changed, execution={"processes": size})
    run_file.write_text(json.dumps(dump(tables)))
    return Command(folder, run_file)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("size", "victim", "writing", "strategy"),
    [
        pytest.param(1, "all processes", "background", "single", marks=FULL),
        (2, "the supervisor", "blocking", "ddp"),
        pytest.param(3, "the supervisor", "background", "zero1", marks=FULL),
        pytest.param(4, "all processes", "background", "ddp", marks=FULL),
    ],
)
def test_a_killed_run_ends_as_the_uninterrupted_one(
    runs: Runs, size: int, victim: Victim, writing: str, strategy: str
) -> None:
    changed = changes(writing, strategy)
    killed = command(runs, size, changed)
    killed.kill(killed.start(), victim, random.Random(size))  # noqa: S311 - a seeded moment
    assert not (killed.folder / "result.json").exists()
    before = losses(lines(killed.folder))
    assert len(before) > SAVED
    if size in AGAIN:
        killed.finish(killed.start())
    else:
        runs.job("train", size, killed.folder, "mlm", changed)
    whole = runs.trained(size, "mlm", **changed)
    assert before == losses(lines(whole))[: len(before)]
    assert_same(whole, killed.folder)
    assert {line["attempt"] for line in lines(killed.folder)} == {1, 2}
    told = [json.loads(line) for line in (killed.folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told if line["attempt"] == 2][-1] == STEPS
    assert told[-1]["attempt"] == 2
    reached = [line["step"] for line in told if line["attempt"] == 1][-1]
    resumed = next(line["step"] for line in told if line["attempt"] == 2) - 1
    lost = told[-1]["seconds"]["lost"]
    assert lost > 0 if reached > resumed else lost == 0
