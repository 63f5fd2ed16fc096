"""The logs of a job on the shared file system.

    <job>.log                     output of the job script
    <job>.attempts                one line per attempt
    <job>-<attempt>-<node>.log    output of the command of a node

A job of an array is `<array>_<index>`. Successors of a preempted job write to its files.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.jobs.targets import JobEvent
from regauge.system.errors import ERROR_PREFIX, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.jobs.targets import LogRequest
    from regauge.jobs.targets._slurm_jobs import SlurmRecord

POLL_SECONDS = 0.5
_EVENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) (.+)")
_TASK_END = re.compile(r"srun: error: (\S+): tasks? \d+\S*: (?:Exited with exit code (\d+)|Killed)")
_CANCELLATION = re.compile(r"CANCELLED AT \S+ DUE TO (.+?) \*\*\*")
TAIL_BYTES = 65536
"""Number of bytes at the end of a log that are searched for events and errors."""


@dataclass(frozen=True)
class LogFolder:
    """The logs of a job, or of one job of an array."""

    folder: Path
    job: str
    """The number of the job that was submitted first; `array_index` for a job of an array."""

    @classmethod
    def find(cls, record: SlurmRecord) -> LogFolder:
        """Return the logs of a record; raises SettingsError if Regauge did not submit the job."""
        if "logs" not in record.facts:
            problem = f"the comment of job {record.job_id} has no folder of logs"
            raise SettingsError(problem, "use the handle of a job that `launch` submitted")
        job = record.facts.get("first", record.job_id)
        return cls(Path(record.work_folder, record.facts["logs"]), job)

    @property
    def script_log(self) -> Path:
        """Output of the job script."""
        return self.folder / f"{self.job}.log"

    def count_attempts(self) -> int:
        """Return the number of attempts that have begun; 0 if the folder cannot be read."""
        try:
            return len(
                (self.folder / f"{self.job}.attempts").read_text(encoding="utf-8").splitlines()
            )
        except OSError:
            return 0

    def list_nodes(self, attempt: int) -> dict[int, Path]:
        """Return the logs of the nodes of an attempt by the number of the node."""
        paths = self.folder.glob(f"{self.job}-{attempt}-*.log")
        nodes = {path.stem.rpartition("-")[2]: path for path in paths}
        return {int(node): nodes[node] for node in sorted(nodes, key=int)}

    def list_files(self) -> list[Path]:
        """Return all files of the job, and of the jobs of its array."""
        pattern = re.compile(rf"{re.escape(self.job)}(_\d+)?(-\d+-\d+)?\.(log|attempts)")
        return sorted(path for path in self.folder.glob("*") if pattern.fullmatch(path.name))

    def find_log(self, attempt: int, node: int | None) -> Path | None:
        """Return the log of a node, by default of the leader; None if it does not exist yet.

        The rendezvous chooses the leader. Its log is the largest, because only it logs progress.
        """
        nodes = self.list_nodes(attempt)
        if node is not None:
            return nodes.get(node)
        return max(nodes.values(), key=lambda path: path.stat().st_size, default=None)

    def read_events(self) -> Iterator[JobEvent]:
        """Yield the lines that the job script wrote."""
        for line in _read_text(self.script_log).splitlines():
            if match := _EVENT.fullmatch(line):
                yield JobEvent(match[1], "job script", match[2])

    def read_task_ends(self) -> dict[str, int]:
        """Return the exit code by host, for the hosts that failed in the last attempt."""
        text = _read_text(self.script_log).rpartition(" attempt ")
        codes = {}
        for host, code in _TASK_END.findall(text[0].rpartition(" of ")[2]):
            codes[host] = int(code or 137)
        return codes

    def is_preempted(self) -> bool:
        """Return whether the last reason for which Slurm ended an attempt is a preemption."""
        return _CANCELLATION.findall(_read_text(self.script_log))[-1:] == ["PREEMPTION"]

    def find_error(self) -> str:
        """Return the last error line of the last attempt; empty if there is none."""
        for path in self.list_nodes(self.count_attempts()).values():
            lines = _read_text(path).splitlines()
            errors = (line for line in reversed(lines) if line.startswith(ERROR_PREFIX))
            if error := next(errors, ""):
                return error.removeprefix(ERROR_PREFIX)
        return ""


def _read_text(path: Path) -> str:
    """Return the end of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


class _LineReader:
    """Reads the new whole lines of a file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self, *, is_last: bool) -> Iterator[str]:
        """Yield the lines since the last call; the last call also yields an unfinished line."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        end = len(content) if is_last else content.rfind(b"\n") + 1
        self._offset += end
        yield from content[:end].decode("utf-8", errors="replace").splitlines()


def read_lines(
    logs: LogFolder, request: LogRequest, node: int | None, is_final: Callable[[], bool]
) -> Iterator[str]:
    """Yield the lines of a log; with `follow`, wait for new lines and later attempts.

    Without a node it is the log of the leader, or of the job script before the nodes have started.
    Raises SettingsError if there is no such log.
    """
    attempt = request.attempt or max(1, logs.count_attempts())
    path = logs.find_log(attempt, node)
    if path is None and not request.follow:
        path = logs.script_log
        if node is not None or request.attempt is not None or not path.exists():
            problem = f"{logs.folder} has no such log of attempt {attempt}"
            raise SettingsError(problem, "correct --rank and --attempt, or wait for the start")
    reader = _LineReader(path) if path else None
    while True:
        has_next = request.attempt is None and logs.count_attempts() > attempt
        is_last = not request.follow or has_next or is_final()
        if reader is None and (path := logs.find_log(attempt, node)):
            reader = _LineReader(path)
        if reader is not None:
            yield from reader.read(is_last=is_last)
        if has_next and request.follow:
            attempt, reader = attempt + 1, None
        elif is_last:
            return
        else:
            time.sleep(POLL_SECONDS)
