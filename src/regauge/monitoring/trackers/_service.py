"""Base class for trackers that send metrics to a service, in a background thread."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import TYPE_CHECKING, Self

from pydantic import Field, PrivateAttr, model_validator

from regauge.monitoring.trackers import RunInfo, Tracker
from regauge.monitoring.trackers._sender import Deliver, MetricsLine, Sender
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
