"""Base class for trackers that send metrics to a service, in a background thread."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from pydantic import Field, PrivateAttr, model_validator

from regauge.monitoring.delivery import DeliveryThread
from regauge.monitoring.trackers import RunInfo, Tracker
from regauge.system.errors import SettingsError, first_line
from regauge.system.log import logger

MAX_QUEUED_LINES = 10_000
"""Queue capacity; lines beyond it are lost."""
MAX_LINES_PER_DELIVERY = 100
WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class MetricsLine:
    """A run's metrics and tags at one time."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """Texts about the run, not about a step."""
    final_status: str = ""
    """Final run status, in the destination's terms; empty while the run continues."""
    timestamp: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def __len__(self) -> int:
        return len(self.values) + len(self.tags)


Deliver = Callable[[list[MetricsLine]], None]


class Sender(DeliveryThread[MetricsLine]):
    """Delivers lines to a destination in their order, in a background thread.

    `connect` returns the function that delivers lines. Both are retried after an error until the
    run ends, unless `is_permanent` is true for the error. `destination` names it in warnings.
    """

    min_pause_seconds, max_pause_seconds = 0.5, 30.0

    def __init__(
        self,
        destination: str,
        connect: Callable[[], Deliver],
        is_permanent: Callable[[Exception], bool],
    ) -> None:
        super().__init__("sender")
        self._destination, self._connect, self._is_permanent = destination, connect, is_permanent
        self._num_queued = self._num_delivered = 0
        self._problem = ""
        self.start()

    def put(self, line: MetricsLine) -> None:
        """Queue a line without waiting; the line is lost if the queue is full."""
        with self._changed:
            self._num_queued += len(line)
            if len(self._queue) < MAX_QUEUED_LINES:
                self._queue.append(line)
                self._changed.notify()

    def close(self, seconds: float, on_wait: Callable[[], None] = lambda: None) -> int:
        """Wait up to `seconds` for the queued lines; return and log the number of lost values.

        `on_wait` is called repeatedly while it waits.
        """
        self.begin_close(time.monotonic() + seconds)
        while self.is_alive() and (seconds_left := self._seconds_left()) > 0:
            on_wait()
            self.join(min(seconds_left, WAIT_SECONDS))
        num_lost = self._num_queued - self._num_delivered
        if num_lost:
            reason = self._problem or f"no answer within {seconds:g} s"
            logger.warning("%d values not delivered to %s: %s", num_lost, self._destination, reason)
        return num_lost

    def run(self) -> None:
        deliver = self._retry(self._connect)
        while deliver is not None and self._wait_for_work():
            with self._changed:
                count = min(len(self._queue), MAX_LINES_PER_DELIVERY)
                lines = [self._queue.popleft() for _ in range(count)]
            self._num_delivered += self._retry(partial(_deliver, deliver, lines)) or 0

    def _gives_up(self, error: Exception) -> bool:
        is_first, is_permanent = not self._problem, self._is_permanent(error)
        self._problem = first_line(error)[:200]
        if is_first and not is_permanent:
            message = "%s is unreachable, retrying in the background: %s"
            logger.warning(message, self._destination, self._problem)
        return is_permanent


def _deliver(deliver: Deliver, lines: list[MetricsLine]) -> int:
    """Deliver lines; return how many values they contain."""
    deliver(lines)
    return sum(map(len, lines))


FINISHED, FAILED = "FINISHED", "FAILED"
"""Final run statuses."""


class ServiceTracker(Tracker):
    """A tracker that queues metrics, so that a run never waits for the service."""

    wait_seconds: float = Field(default=10.0, ge=0)
    """Maximum wait at the end of the run for values not yet delivered."""

    _sender: Sender | None = PrivateAttr(default=None)
    _changed_variables: tuple[str, ...] = PrivateAttr(default=())
    _is_finished: bool = PrivateAttr(default=False)
    _step: int = PrivateAttr(default=0)
    _run: RunInfo | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        for package in self.list_packages():
            if importlib.util.find_spec(package) is None:
                raise SettingsError(
                    f"the tracker '{self.kind}' needs the package {package}",
                    f'pip install "regauge[{self.kind}]", or remove the tracker',
                )
        return self

    def list_packages(self) -> tuple[str, ...]:
        """Return the packages that must be installed."""
        return ()

    def name_destination(self, run: RunInfo) -> str:
        """Return the service name for warnings."""
        raise NotImplementedError

    def list_variables(self, run: RunInfo) -> Mapping[str, str]:
        """Return the client's environment variables while a run is tracked.

        Variables already set are not changed.
        """
        del run
        return {}

    def connect(self, run: RunInfo) -> Deliver:
        """Find or create the run in the service; return a function that sends lines to it.

        A later attempt first sends the earlier lines that the service lacks. The returned function
        never sends a step's value again.
        """
        raise NotImplementedError

    def is_permanent(self, error: Exception) -> bool:
        """Return whether the service will raise the same error after every retry."""
        raise NotImplementedError

    def start(self, run: RunInfo) -> None:
        """Start the background thread, which imports the client and connects to the service."""
        self.close()
        run.folder.mkdir(parents=True, exist_ok=True)
        variables = self.list_variables(run)
        self._changed_variables = tuple(name for name in variables if name not in os.environ)
        os.environ.update({name: variables[name] for name in self._changed_variables})
        connect = partial(self.connect, run)
        self._sender = Sender(self.name_destination(run), connect, self.is_permanent)
        self._step, self._is_finished, self._run = run.resumed_step, False, run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        if self._sender:
            self._sender.put(MetricsLine(step, dict(values)))

    def finish(self, summary: Mapping[str, object]) -> None:
        """Queue the result: numbers as metrics `result/…`, texts as tags `result.…`."""
        numbers, texts = {}, {}
        for name, value in summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[f"result/{name}"] = float(value)
            else:
                texts[f"result.{name}"] = str(value)
        self._is_finished = True
        if self._sender:
            self._sender.put(MetricsLine(self._step, numbers, texts, final_status=FINISHED))

    def close(self) -> None:
        """Wait up to `wait_seconds` for queued values; lost values are logged."""
        if self._sender and self._run:
            if not self._is_finished:
                self._sender.put(MetricsLine(self._step, final_status=FAILED))
            self._sender.close(self.wait_seconds, self._run.on_wait)
        self._sender = None
        for name in self._changed_variables:
            os.environ.pop(name, None)
        self._changed_variables = ()
