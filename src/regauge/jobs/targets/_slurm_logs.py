"""A job's logs on the shared file system.

    <job>.log                     job script output
    <job>.attempts                one line per attempt
    <job>.interruptions           one line per attempt that Slurm interrupted
    <job>-<attempt>-<node>.log    a node's command output

An array job is `<array>_<index>`. A requeued job writes to the same files.
"""

from __future__ import annotations

import re
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from regauge.jobs.targets import JobEvent, LogRequest
from regauge.jobs.targets._slurm_jobs import SlurmRecord
from regauge.system.errors import ERROR_PREFIX, FIRST_SIGNAL_CODE, SettingsError
from regauge.system.line_tail import LineTail, read_end
from regauge.system.timing import REMOTE_POLL_SECONDS

KILLED = FIRST_SIGNAL_CODE + signal.SIGKILL
_EVENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) (.+)")
_TASK_END = re.compile(r"srun: error: (\S+): tasks? \d+\S*: (?:Exited with exit code (\d+)|Killed)")
_NODE_LINE = re.compile(r"attempt (\d+) on \d+ nodes: (.+); this is node (\d+)")
"""What a node logs when the nodes have met: hosts with their numbers of processes, by rank."""
_SIZE = re.compile(r"\((\d+)\)(?:, |$)")
_REASON = re.compile(
    r"CANCELLED AT \S+ DUE TO (?!JOB REQUEUE)(.+?) \*\*\*|stopped by Slurm: (?!requeue)(.+)"
)


@dataclass(frozen=True)
class LogFolder:
    folder: Path
    job: str
    """Job number; `array_index` for an array job."""

    @classmethod
    def find(cls, record: SlurmRecord) -> LogFolder:
        """Return a record's logs; raises SettingsError if Regauge did not submit the job."""
        if "logs" not in record.facts:
            problem = f"the comment of job {record.job_id} does not name a log folder"
            raise SettingsError(problem, "use the handle of a job that `launch` submitted")
        return cls(Path(record.work_folder, record.facts["logs"]), record.job_id)

    @property
    def script_log(self) -> Path:
        return self.folder / f"{self.job}.log"

    def count_attempts(self) -> int:
        """Return how many attempts have begun; 0 if the folder cannot be read."""
        with suppress(OSError):
            path = self.folder / f"{self.job}.attempts"
            return len(path.read_text(encoding="utf-8").splitlines())
        return 0

    def list_nodes(self, attempt: int) -> dict[int, Path]:
        """Return node number -> log for an attempt."""
        paths = self.folder.glob(f"{self.job}-{attempt}-*.log")
        nodes = {path.stem.rpartition("-")[2]: path for path in paths}
        return {int(node): nodes[node] for node in sorted(nodes, key=int)}

    def list_files(self) -> list[Path]:
        name = rf"{re.escape(self.job)}(_\d+)?(-\d+-\d+)?"
        pattern = re.compile(rf"{name}\.(log|attempts|interruptions)")
        return sorted(path for path in self.folder.glob("*") if pattern.fullmatch(path.name))

    def find_log(self, attempt: int, rank: int, num_nodes: int, *, is_last: bool) -> Path | None:
        """Return the log of a rank's node; None if it is not known yet.

        The rendezvous numbers the nodes, which meet again when one of them is lost. If they never
        met in an attempt that is over (`is_last`), the largest log has the reason.
        """
        logs = {}
        paths = self.list_nodes(attempt).values()
        for path in paths:
            lines = _NODE_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
            if lines:
                number, hosts, node = lines[-1]
                logs[int(number), int(node)] = (hosts, path)
            elif num_nodes == 1:
                return path
        if not logs:
            has_log = is_last and not rank
            return max(paths, key=lambda path: path.stat().st_size) if has_log and paths else None
        last = max(logs)[0]
        sizes = map(int, _SIZE.findall(next(logs[key][0] for key in logs if key[0] == last)))
        return logs.get((last, bisect_right([*accumulate(sizes)], rank)), (None, None))[1]

    def read_events(self) -> Iterator[JobEvent]:
        for line in read_end(self.script_log).splitlines():
            if match := _EVENT.fullmatch(line):
                yield JobEvent(match[1], "job script", match[2])

    def read_task_ends(self) -> dict[str, int]:
        """Return host -> exit code, for hosts that failed in the last attempt."""
        text = read_end(self.script_log).rpartition(" attempt ")[0].rpartition(" of ")[2]
        return {host: int(code or KILLED) for host, code in _TASK_END.findall(text)}

    def is_preempted(self) -> bool:
        """Return whether Slurm's last reason for ending an attempt is a preemption."""
        reasons = _REASON.findall(read_end(self.script_log))
        return reasons[-1:] in ([("PREEMPTION", "")], [("", "preemption")])

    def find_error(self) -> str:
        """Return the last attempt's last error line; empty without one."""
        for path in self.list_nodes(self.count_attempts()).values():
            lines = read_end(path).splitlines()
            if errors := [line for line in lines if line.startswith(ERROR_PREFIX)]:
                return errors[-1].removeprefix(ERROR_PREFIX)
        return ""


def read_lines(
    logs: LogFolder, request: LogRequest, is_final: Callable[[], bool], *, num_nodes: int
) -> Iterator[str]:
    """Yield the lines of a log; with `follow`, wait for new lines and later attempts.

    Without a rank it is the leader's log, or the job script's before the nodes have met. Raises
    SettingsError for a missing log.
    """
    attempt, rank = request.attempt or max(1, logs.count_attempts()), request.rank or 0
    path = logs.find_log(attempt, rank, num_nodes, is_last=not request.follow)
    if path is None and not request.follow:
        path = logs.script_log
        if request.rank is not None or request.attempt is not None or not path.exists():
            problem = f"{logs.folder} does not contain this log of attempt {attempt}"
            raise SettingsError(problem, "correct --rank and --attempt, or wait for the start")
    reader = LineTail(path) if path else None
    while True:
        has_next = request.attempt is None and logs.count_attempts() > attempt
        is_last = not request.follow or has_next or is_final()
        lines = reader.read(is_last=is_last) if reader else []
        yield from lines
        if request.follow and not lines:  # the log is not known yet, or its node was lost
            latest = logs.find_log(attempt, rank, num_nodes, is_last=is_last)
            if latest is not None and latest != path:
                path, reader = latest, LineTail(latest)
                yield from reader.read(is_last=is_last)
        if has_next and request.follow:
            attempt, path, reader = attempt + 1, None, None
        elif is_last:
            return
        else:
            time.sleep(REMOTE_POLL_SECONDS)
