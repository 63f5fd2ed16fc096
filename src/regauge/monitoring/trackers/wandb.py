"""Sends metrics to Weights & Biases, or records them in the run folder for `wandb sync`.

All attempts in a run share one W&B run, with the run id as its id. If the service cannot be reached
at the start, or without an API key, the attempt is recorded offline and nothing is lost. All charts
have `step` as their axis.

W&B numbers a run's rows and drops a row whose number it already has. A row's number follows from
the step, so attempts never repeat a row. The client keeps offline records in memory and writes them
when it ends, so a killed attempt leaves an incomplete folder. A resumed attempt moves that folder
to `wandb/incomplete`, and records its steps again from `metrics.jsonl`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from regauge.config.output_files import METRICS
from regauge.monitoring.trackers import RunInfo
from regauge.monitoring.trackers._earlier_attempts import (
    has_train_metrics,
    read_earlier_lines,
)
from regauge.monitoring.trackers._service import FINISHED, ServiceTracker
from regauge.system import jsonl
from regauge.system.errors import first_line
from regauge.system.json_files import DocumentShape
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.monitoring.trackers._service import Deliver, MetricsLine

Mode = Literal["online", "offline", "disabled", "shared"]
FOLDER = "wandb"
INCOMPLETE, COMPLETE_FILE = "incomplete", "complete.jsonl"
ROWS_PER_STEP = 2
"""Rows per step: training, and evaluation."""
DEFAULT_PROJECT = "regauge"
INIT_SECONDS = 15.0
"""Longest wait for the service at the start; then the attempt is recorded offline."""
SESSION_VARIABLE = "WANDB_SERVICE"
"""Environment variable that is set while wandb's service process runs."""


class Wandb(ServiceTracker):
    """One W&B run with the settings, metrics by step, and the result as its summary."""

    peer_names: ClassVar[tuple[str, ...]] = ("weights_and_biases", "wb")

    mode: Literal["online", "offline"] | None = None
    """`offline` does not use the network. By default the variable `WANDB_MODE`, or `online`."""
    project: str | None = Field(default=None, min_length=1)
    """W&B project. By default the variable `WANDB_PROJECT`, or `regauge`."""
    entity: str | None = Field(default=None, min_length=1)
    """User or team that owns the project; by default the API key's entity."""
    group: str | None = Field(default=None, min_length=1)
    """Run group."""
    tags: tuple[str, ...] = Field(default=(), strict=False)
    """Run tags."""
    wait_seconds: float = Field(default=20.0, ge=0)
    """Maximum wait at the end of the run for values not yet delivered."""

    def list_packages(self) -> tuple[str, ...]:
        return ("wandb",)

    def name_destination(self, run: RunInfo) -> str:
        return f"wandb in {run.folder / FOLDER}"

    def list_variables(self, run: RunInfo) -> Mapping[str, str]:
        return {
            "WANDB_CACHE_DIR": str(run.folder.resolve() / FOLDER / "cache"),
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
        }

    def connect(self, run: RunInfo) -> Deliver:
        """Open a run's W&B run, offline if the service cannot be reached."""
        return _Session(self, run).deliver

    def is_permanent(self, error: Exception) -> bool:
        """Return True: the client retries requests, and its other errors are usage errors."""
        del error
        return True


class CompleteLine(DocumentShape):
    folder: str
    step: jsonl.Count


class OfflineFolders:
    """A run's offline records: one client folder per attempt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def move_incomplete(self, max_step: int) -> None:
        """Move the records from attempts that were killed, or that have later steps."""
        complete = self._read_complete()
        for record in sorted(self._folder.glob("offline-run-*")):
            if complete.get(record.name, max_step + 1) > max_step:
                (self._folder / INCOMPLETE).mkdir(exist_ok=True)
                record.rename(self._folder / INCOMPLETE / record.name)

    def count_steps(self) -> int:
        """Return the first step missing from all complete records."""
        complete = self._read_complete()
        steps = [complete.get(record.name, -1) for record in self._folder.glob("offline-run-*")]
        return max(steps, default=-1) + 1

    def wait_for_name(self) -> None:
        """Wait until folder names with the current second, as the client names them, are free.

        A new folder must not have the same name as one that was moved.
        """
        folders = self._folder, self._folder / INCOMPLETE
        while any(
            path
            for folder in folders
            for path in folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")
        ):
            time.sleep(POLL_SECONDS)

    def record_complete(self, record: Path, step: int) -> None:
        """Record that a folder has all rows up to a step."""
        jsonl.append_line(self._folder / COMPLETE_FILE, {"folder": record.name, "step": step})

    def _read_complete(self) -> dict[str, int]:
        lines = jsonl.read_lines(self._folder / COMPLETE_FILE, CompleteLine)
        return {line["folder"]: line["step"] for line in lines}


class _Session:
    """An open W&B run, and the client's service process."""

    def __init__(self, tracker: Wandb, run: RunInfo) -> None:
        self._tracker, self._info = tracker, run
        self._owns_process = SESSION_VARIABLE not in os.environ
        exit_functions = sys.exit, sys.excepthook
        self._folders = OfflineFolders(run.folder / FOLDER)
        if run.attempt > 1 and (run.folder / METRICS).is_file():
            self._folders.move_incomplete(run.resumed_step)
        try:
            self._run = self._open()
        finally:  # the client replaces them to find the exit code, which `_finish` passes
            sys.exit, sys.excepthook = exit_functions
        first_step = self._folders.count_steps() if self._run.offline else 0
        self._first_row = max(self._run.starting_step, first_step * ROWS_PER_STEP)
        if run.attempt > 1:
            self.deliver(read_earlier_lines(run))

    def deliver(self, lines: list[MetricsLine]) -> None:
        """Hand lines over to the client; the last one ends the run and waits for the upload."""
        for line in lines:
            if line.final_status:
                self._run.summary.update({**line.values, **line.tags})
                self._finish(line)
            else:
                self._log(line)

    def _log(self, line: MetricsLine) -> None:
        """Record a row not yet recorded by an earlier attempt."""
        number = line.step * ROWS_PER_STEP + (0 if has_train_metrics(line) else 1)
        if number >= self._first_row:
            self._run.log({"step": line.step, **line.values}, step=number, commit=True)

    def _open(self) -> Any:
        """Open the W&B run in the configured mode, or offline if that is not possible."""
        import wandb

        mode: Any = self._tracker.mode or os.environ.get("WANDB_MODE", "online")
        if self._owns_process:  # a login is refused while `WANDB_MODE` is offline
            wandb.setup(wandb.Settings(mode=mode))
        try:
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                raise wandb.errors.AuthenticationError("no API key is set")
            run = self._initialize(mode)
        except wandb.errors.Error as error:
            if mode == "offline":
                raise
            message = "wandb: recording offline: %s; %s uploads the records later"
            logger.warning(message, first_line(error), self._sync_command("offline-run-*"))
            self._end_process()
            run = self._initialize("offline")
        run.define_metric("*", step_metric="step")
        if not run.offline:
            logger.info("wandb: the run is at %s", run.url)
        return run

    def _sync_command(self, folders: str) -> str:
        return f"'wandb sync {self._info.folder / FOLDER / folders}'"

    def _initialize(self, mode: Mode) -> Any:
        import wandb

        tracker, run = self._tracker, self._info
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=tracker.wait_seconds or 0.1,
            finish_timeout_raises=True,
            init_timeout=INIT_SECONDS,
            label_disable=True,
            silent=True,
            symlink=False,
        )
        self._folders.wait_for_name()
        attempt = {"attempt": run.attempt, "folder": str(run.folder.resolve())}
        return wandb.init(
            entity=tracker.entity,
            project=tracker.project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            group=tracker.group,
            tags=tracker.tags or None,
            id=run.run_id,
            name=run.name,
            dir=run.folder.resolve(),
            config={**run.settings, "regauge": attempt},
            allow_val_change=True,
            mode=mode,
            resume="allow",
            reinit="create_new",
            settings=settings,
        )

    def _finish(self, line: MetricsLine) -> None:
        try:
            self._run.finish(exit_code=0 if line.final_status == FINISHED else 1)
        except TimeoutError:
            message = "wandb: the upload did not end within %g s; %s completes it"
            command = self._sync_command("run-*")
            logger.warning(message, self._tracker.wait_seconds, command)
        self._end_process()
        if self._run.offline:
            self._folders.record_complete(Path(self._run.sync_dir), line.step)

    def _end_process(self) -> None:
        """End the service process, unless other code in this process has started it."""
        import wandb

        if self._owns_process:
            wandb.teardown()
