"""The two sides of a comparison: sources, caches and child processes that share nothing.

A side runs the command line of one commit. `PYTHONPATH` names its sources, and its caches, state
and outputs are in a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND_SECONDS = 900.0
"""Limit of one command."""
MAX_REASON = 300
"""Characters of a log in a reason."""


class CannotMeasureError(Exception):
    """A side cannot run a workload."""


@dataclass
class Side:
    """One commit, with a folder for everything that its commands write."""

    name: str
    source: Path
    """Its folder `src`."""
    folder: Path
    datasets: dict[str, Path] = field(default_factory=dict)
    """Prepared datasets by layout."""
    artifacts: list[Path] = field(default_factory=list)
    """Exported models, in order."""
    num_starts: Counter[str] = field(default_factory=Counter)
    """Starts of programs that read an artifact."""
    _numbers: Iterator[int] = field(default_factory=count)

    def new_path(self, name: str) -> Path:
        """Return a path that does not exist yet."""
        return self.folder / f"{name}-{next(self._numbers)}"

    def start(self, *arguments: str) -> Child:
        """Start a command of Regauge."""
        return self.start_python("-m", "regauge", *arguments)

    def start_python(self, *arguments: str) -> Child:
        """Start the Python of this environment with the sources of this side."""
        variables = {
            "PYTHONPATH": str(self.source),
            "TMPDIR": str(self.folder),
            "HF_HUB_OFFLINE": "1",
        }
        for variable in ("CACHE", "STATE", "DATA"):
            variables[f"XDG_{variable}_HOME"] = str(self.folder / variable.lower())
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "cache" / "inductor")
        log = self.new_path("log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        words = " ".join(word for word in arguments[:3] if word != "-m")
        return Child(f"{self.name}: {words}", process, log)

    def run(self, *arguments: str) -> float:
        """Run a command of Regauge and return its seconds."""
        began = time.perf_counter()
        self.start(*arguments).finish()
        return time.perf_counter() - began


@dataclass
class Child:
    """A process with its descendants."""

    title: str
    process: subprocess.Popen[bytes]
    log: Path

    def finish(self) -> str:
        """Wait for the end and return the output; raises CannotMeasureError if it failed."""
        try:
            code = self.process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            reason = f"{self.title} has not ended in {COMMAND_SECONDS:.0f} s"
            raise CannotMeasureError(reason) from None
        finally:
            self.kill()
        if code:
            raise self.build_error(f"ended with exit code {code}")
        return self.log.read_text(errors="replace")

    def check(self) -> None:
        """Raise CannotMeasureError if the process has ended."""
        if self.process.poll() is not None:
            raise self.build_error(f"ended with exit code {self.process.returncode}")

    def build_error(self, problem: str) -> CannotMeasureError:
        """Return an error with the last lines of the log."""
        lines = self.log.read_text(errors="replace").split("\n")
        last = " ".join(" ".join(lines[-6:]).split())[-MAX_REASON:]
        return CannotMeasureError(f"{self.title} {problem}: {last}")

    def pause(self) -> None:
        """Stop the process and its descendants until `resume`, so that the other side can run."""
        stopped: set[int] = set()
        while new := self._list_processes() - stopped:  # they fork until they stop
            _send(new, signal.SIGSTOP)
            stopped |= new

    def resume(self) -> None:
        """Continue after `pause`."""
        _send(self._list_processes(), signal.SIGCONT)

    def kill(self) -> None:
        """End the process and its descendants, also those whose parents have ended."""
        self.pause()
        _send(self._list_processes(), signal.SIGKILL)
        self.process.wait()

    def _list_processes(self) -> set[int]:
        """Return the ids of the processes of the session, and of their descendants."""
        root, parents, sessions = self.process.pid, {}, {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                words = path.read_text().rpartition(")")[2].split()
                if words[0] != "Z":
                    pid = int(path.parent.name)
                    parents[pid], sessions[pid] = int(words[1]), int(words[3])
        tree = [pid for pid, session in sessions.items() if session == root]
        for pid in tree:
            tree += [child for child in parents if parents[child] == pid and child not in tree]
        return set(tree)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def open_side(name: str, commit: str | None, scratch: Path) -> Iterator[Side]:
    """Yield a side: a temporary worktree of a commit, or a copy of the sources as they are."""
    folder, tree = scratch / name, scratch / f"{name}-tree"
    folder.mkdir()
    try:
        if commit is None:
            hidden = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "src", tree / "src", ignore=hidden)
        else:
            run_git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        side = Side(name, tree / "src", folder)
        _check_sources(side)
        yield side
    finally:
        if commit is not None and tree.exists():
            run_git("worktree", "remove", "--force", str(tree))


def _check_sources(side: Side) -> None:
    """Compile the sources; raise CannotMeasureError if this side does not import them."""
    side.start_python("-m", "compileall", "-q", "-j", "0", str(side.source)).finish()
    path = side.start_python("-c", "import regauge; print(regauge.__file__)").finish().strip()
    if not Path(path).is_relative_to(side.source):
        raise CannotMeasureError(f"{side.name} imports {path} instead of {side.source}")
    side.run("--help")


def run_git(*arguments: str) -> str:
    """Run git in the repository and return its output; raises CannotMeasureError if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasureError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
