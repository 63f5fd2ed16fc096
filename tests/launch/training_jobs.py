"""Jobs that train a tiny model on simulated nodes, for tests of every target."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import datasets
from distributed.jobs import lines
from distributed.runs import settings
from regauge.config import dump, merge
from regauge.system import timing

STEPS = 120
WAIT_SECONDS = 300.0
BASE: dict[str, Any] = {
    "stop": {"steps": STEPS},
    "output": {"checkpoint": {"every_steps": 10, "keep_last": 2}},
    "execution": {
        "processes": 1,
        "timeout_seconds": 60,
        "nodes": {"join_seconds": 60.0},
        "supervision": {"preflight": "brief"},
    },
}


@dataclass
class Answer:
    """The end of a command: its exit code and its output."""

    code: int
    output: str
    error: str

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.output)
        return document


@dataclass
class Workplace:
    """A folder with run files, a state folder, and the handles of launched jobs."""

    root: Path
    data: Path
    handles: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.root / "state")}

    def write_run(self, name: str = "run", /, **changes: Any) -> Path:
        """Write a run file whose output folder has its name; return its path."""
        run = settings(self.root / f"out-{name}", self.data, "mlm", **merge(BASE, changes))
        path = self.root / f"{name}.json"
        path.write_text(json.dumps(dump(run)))
        return path

    def run(self, *arguments: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "regauge", *arguments],
            env=self.environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def launch(self, run_file: Path, verb: str, *arguments: str) -> str:
        answer = self.run("launch", str(run_file), verb, *arguments, "-o", "json")
        assert answer.code == 0, answer.error
        handle: str = answer.document["handle"]
        self.handles.append(handle)
        return handle

    def read_status(self, handle: str) -> dict[str, Any]:
        answer = self.run("job", "status", handle, "--why", "-o", "json")
        assert answer.code == 0, answer.error
        return answer.document

    def read_events(self, handle: str) -> list[dict[str, Any]]:
        """Return the events of a job of simulated nodes, from its folder."""
        path = find_folder(handle) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def find_pid(self, handle: str, node: int) -> int:
        starts = [event for event in self.read_events(handle) if event.get("node") == node]
        return int(starts[-1]["pid"])

    def kill_node(self, handle: str, node: int) -> None:
        """Kill the process group of a node, as the loss of its machine does."""
        os.killpg(self.find_pid(handle, node), signal.SIGKILL)

    def clean_up(self) -> None:
        """Cancel and remove the jobs that a test left behind."""
        for handle in self.handles:
            self.run("job", "cancel", handle)
            self.run("job", "cleanup", handle)


def find_folder(handle: str) -> Path:
    """Return the folder of a job of simulated nodes."""
    return Path("/") / handle.partition("://")[2].partition("/")[2]


def wait_until(condition: Callable[[], bool], name: str) -> None:
    """Wait for a condition; fails with its name after a time limit."""
    assert timing.wait_for(condition, WAIT_SECONDS, poll_seconds=0.05), f"{name} did not happen"


def count_steps(folder: Path) -> int:
    """Return the last step in the metrics of a run; 0 if there is none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    texts = [text for text in path.read_text().splitlines() if text.endswith("}")]
    return int(json.loads(texts[-1])["step"]) if texts else 0


def find_recovery_seconds(folder: Path, lost_at: float, step: int) -> float:
    """Return the seconds from the loss of a node to the first later step of the next attempt."""
    wait_until(lambda: max(line["attempt"] for line in lines(folder)) > 1, "the next attempt")
    wait_until(lambda: count_steps(folder) > step, "the next step")
    return time.time() - lost_at


def create_workplace(root: Path) -> Workplace:
    """Create a folder with a small dataset."""
    root.mkdir(parents=True, exist_ok=True)
    return Workplace(root, datasets.write_packed(root / "data", 40, 10))
