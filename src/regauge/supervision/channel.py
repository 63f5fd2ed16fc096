"""What a supervisor tells the processes of an attempt, and what they leave for it.

<scratch>/orders.json             attempt, when it began, its token, the fault plan
<scratch>/pulse                   signs of life
<scratch>/asked                   the supervisor asks for the last collectives
<scratch>/collectives-<n>.json    what a process answered
<scratch>/failure-<n>.json        why it ended before the run's end
<scratch>/done-<n>                it came to the run's end
<scratch>/stack-<n>.txt           stacks of its threads

Processes are counted from 0 on each machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regauge import jsonl, processes, timing
from regauge.errors import PreemptedError, explain
from regauge.files import write_json
from regauge.supervision import folder_lock
from regauge.supervision.cost_meter import ATTEMPTS, Meter, metered
from regauge.supervision.failures import Failure, evidence_of, failure_of, kind_of
from regauge.supervision.heartbeat import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORDERS, PULSE, ASKED = "orders.json", "pulse", "asked"
T = TypeVar("T")
POLL_SECONDS = 0.2
COLLECTIVES = 8
"""Last collectives that a process tells of."""


@dataclass(frozen=True)
class AttemptSpec:
    """What one attempt must know."""

    scratch: Path
    attempt: int
    began: float
    """Seconds since the epoch when the supervisor started the attempt."""
    clock: float
    """The machine's monotonic clock at that moment: the other one may be set back."""
    preflight: bool
    """Whether its processes check their devices and what they tell each other first."""
    token: str
    """The attempt's right to publish checkpoints."""
    meter: Meter
    """What the run had paid when the attempt began, and what it pays since."""
    first: int = 0
    """Rank of this machine's first process."""
    fault_plan: str | None = None
    """File of a fault plan."""
    devices: tuple[int, ...] = ()
    """Indices of the devices that its processes take, where some are left out."""

    def write(self) -> None:
        """Write them where the processes read them."""
        document = asdict(self)
        del document["scratch"]
        (self.scratch / ORDERS).write_text(json.dumps(document))


def read_spec() -> AttemptSpec | None:
    """Return the orders of this process's supervisor; None where it has none."""
    place = os.environ.get(processes.SUPERVISED)
    if place is None:
        return None
    told = json.loads((Path(place) / ORDERS).read_text())
    return AttemptSpec(Path(place), **{**told, "meter": metered(told["meter"])})


class WorkerReporter:
    """What a process says of itself; to nobody where it has no supervisor."""

    def __init__(self, orders: AttemptSpec | None, rank: int) -> None:
        self.spec = orders
        self.began = orders.clock if orders else time.monotonic()
        """When the attempt did, by the machine's monotonic clock."""
        self._rank = rank
        self._number = rank - orders.first if orders else rank
        self._folder: Path | None = None
        self.heartbeat = Heartbeat(orders.scratch / PULSE if orders else None, self._number)
        self.step = 0

    def check_owner(self) -> None:
        """Raise PreemptedError where another attempt has taken this one's place."""
        if self.spec is not None and self._folder is not None:
            folder_lock.check(self._folder, self.spec.token)

    def begin(self, folder: Path) -> None:
        """Write that an attempt of the run has begun; the first process calls this."""
        self._folder = folder
        if self.spec is not None:
            document = {"attempt": self.spec.attempt, "began": round(self.spec.began, 3)}
            jsonl.append(folder / ATTEMPTS, {**document, **self.spec.meter.line})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that the block is a phase of its own within the start."""
        self.heartbeat.beat(name)
        yield
        self.heartbeat.beat("init")

    def wait_for(self, find: Callable[[], T], seconds: float) -> T:
        """Return what another process leaves, looked for until it is there or time is over."""
        return timing.wait_for(
            find, seconds, poll_seconds=POLL_SECONDS, on_poll=self.heartbeat.beat
        )

    def report_step(self, step: int) -> None:
        """Say how many steps are done."""
        self.step = step
        self.heartbeat.beat(step=step)

    @contextmanager
    def capture_exit(self) -> Iterator[None]:
        """Tell the supervisor how the block ends: done, or by which failure."""
        if self.spec is None:
            yield
            return
        scratch = self.spec.scratch
        stack = (scratch / f"stack-{self._number}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        faulthandler.enable(file=stack, all_threads=True)
        signal.signal(signal.SIGTERM, _told_to_stop)
        threading.Thread(target=self._answer, name="recorder", daemon=True).start()
        try:
            yield
        except BaseException as error:
            self._write(f"failure-{self._number}.json", self._failure(error))
            raise
        finally:
            self.heartbeat.beat("end")
        self._write(f"done-{self._number}", {})

    def _answer(self) -> None:
        """Wait until the supervisor asks, and write down this process's last collectives."""
        if self.spec is None:
            return
        asked = self.spec.scratch / ASKED
        timing.wait_for(asked.exists, poll_seconds=POLL_SECONDS)
        self._write(f"collectives-{self._number}.json", {"entries": _collectives()})

    def _failure(self, error: BaseException) -> dict[str, Any]:
        line, code = explain(error)
        failure = Failure(
            kind=kind_of(error),
            rank=self._rank,
            step=self.step,
            problem=line,
            evidence={**evidence_of(error), "exit_code": code, "collectives": _collectives()},
        )
        return {**failure.document(), "at": time.monotonic()}

    def _write(self, name: str, document: dict[str, Any]) -> None:
        if self.spec is not None:
            write_json(self.spec.scratch / name, document)


def _collectives() -> list[dict[str, Any]]:
    """Return the last collectives that torch's flight recorder knows, oldest first."""
    recorder = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if recorder is None:
        return []
    entries = json.loads(recorder(includeCollectives=True)).get("entries", [])
    wanted = ("collective_seq_id", "profiling_name", "state", "input_sizes", "process_group")
    return [{name: entry.get(name) for name in wanted} for entry in entries[-COLLECTIVES:]]


class WorkerReports:
    """What the processes of an attempt left, as their supervisor reads it."""

    def __init__(self, scratch: Path, size: int) -> None:
        self._scratch = scratch
        self._size = size

    def ask(self) -> None:
        """Ask every process for its last collectives."""
        (self._scratch / ASKED).touch()

    def is_done(self, number: int) -> bool:
        """Return whether a process came to the end of the run."""
        return (self._scratch / f"done-{number}").exists()

    def failure_of(self, number: int) -> Failure | None:
        """Return the failure that a process told of itself."""
        document = self._told(number)
        return failure_of(document) if document else None

    def failures(self) -> list[Failure]:
        """Return what all processes told, the first failure first."""
        told = filter(None, map(self._told, range(self._size)))
        return [failure_of(document) for document in sorted(told, key=itemgetter("at"))]

    def _told(self, number: int) -> dict[str, Any]:
        return _document(self._scratch / f"failure-{number}.json")

    def stack(self, number: int) -> list[str]:
        """Return the stacks of a process's threads, as it was asked or as it died."""
        return text(self._scratch / f"stack-{number}.txt").splitlines()

    def collectives(self, number: int) -> list[dict[str, Any]]:
        """Return a process's last collectives, oldest first; empty where it did not tell."""
        found: list[dict[str, Any]]
        found = _document(self._scratch / f"collectives-{number}.json").get("entries", [])
        failure = self.failure_of(number)
        return found or (failure.evidence.get("collectives", []) if failure else [])


def text(path: Path) -> str:
    """Return what a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _document(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(text(path))
    except ValueError:
        return {}
    return document


def _told_to_stop(_number: int, _frame: object) -> None:
    raise PreemptedError("told to stop where nothing is to be saved", "the same command goes on")
