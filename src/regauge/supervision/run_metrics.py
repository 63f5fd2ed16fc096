"""All metrics of a training run on this machine, and their exporter.

The supervisor exports for the processes it started. A process started by another launcher exports
for itself. The machine with rank 0 also exports metrics for the whole run.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regauge
from regauge.config import RUN_IDENTITY, find_saved_run
from regauge.monitoring import vocabulary
from regauge.monitoring.exporter import export_metrics
from regauge.monitoring.samples import Sample
from regauge.supervision.device_metrics import watch_devices
from regauge.supervision.heartbeat import SingleHeartbeat
from regauge.supervision.rank_metrics import LocalRanks
from regauge.supervision.run_files import RunFiles
from regauge.supervision.watchdog import Watchdog
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from regauge.run_folders.cost_meter import CostMeter
    from regauge.supervision.heartbeat import Heartbeat
    from regauge.system.processes import World
    from regauge.training.settings import TrainSettings


class RunMetrics:
    """Collects a run's metrics; the exporter's thread reads them."""

    def __init__(self, settings: TrainSettings, read_devices: Callable[[], list[Sample]]) -> None:
        self._folder = Path(settings.output.folder)
        self._run = self._folder.resolve().name
        self._budget = settings.stop.usd
        self._read_devices = read_devices
        self._files = RunFiles(self._folder, self._run)
        self._run_id: str | None = None
        self._meter: CostMeter | None = None
        self._ranks: LocalRanks | None = None
        self._is_running = False
        self._lock = threading.Lock()
        """Held while samples are read, so that heartbeats stay mapped meanwhile."""

    @contextmanager
    def watch(
        self,
        watchdog: Watchdog,
        pids: Sequence[int],
        first_rank: int,
        meter: CostMeter | None = None,
    ) -> Iterator[None]:
        """Export an attempt's ranks within the block."""
        with self._lock:
            self._ranks = LocalRanks(self._run, watchdog, tuple(pids), first_rank)
            self._meter, self._is_running = meter, True
        try:
            yield
        finally:
            with self._lock:
                self._is_running = False

    def read_samples(self) -> list[Sample]:
        """Return all samples; reads new lines in files, but not devices."""
        with self._lock:
            samples = self._read_devices()
            if self._ranks is None:
                return samples
            run_samples = list(self._files.read_samples())
            if self._is_running:
                samples += self._ranks.read_samples(self._files.health)
            else:
                samples += self._ranks.read_end_samples()
            if self._ranks.first_rank == 0:
                samples += run_samples
                samples += self._describe_run()
            return samples

    def _describe_run(self) -> Iterator[Sample]:
        """Yield the run's identity and cost."""
        if run_id := self._find_run_id():
            labels = (self._run, run_id, "train", regauge.__version__)
            yield Sample(vocabulary.RUN_INFO, 1, labels)
        usd = self._meter.read().usd if self._meter else self._files.usd
        if usd is not None:
            yield Sample(vocabulary.RUN_COST, usd, (self._run,))
        if self._budget is not None:
            yield Sample(vocabulary.RUN_BUDGET, self._budget, (self._run,))

    def _find_run_id(self) -> str | None:
        """Return the run id, once the first attempt has written it."""
        if self._run_id is None:
            try:
                document: dict[str, Any] = find_saved_run(self._folder, "remove it") or {}
            except DataError:
                return None
            self._run_id = document.get(RUN_IDENTITY, {}).get("run_id")
        return self._run_id


@contextmanager
def export_run(settings: TrainSettings, local_rank: int = 0) -> Iterator[RunMetrics | None]:
    """Serve a run's metrics within the block, if `monitoring.port` is set.

    `local_rank` is added to the port. Raises SettingsError if the address cannot be used.
    """
    if settings.monitoring.port is None:
        yield None
        return
    with watch_devices(settings.accelerator) as read_devices:
        metrics = RunMetrics(settings, read_devices)
        with export_metrics(
            settings.monitoring,
            Path(settings.output.folder),
            metrics.read_samples,
            port_offset=local_rank,
        ):
            yield metrics


@contextmanager
def export_process(settings: TrainSettings, world: World, heartbeat: Heartbeat) -> Iterator[None]:
    """Serve this unsupervised process's metrics within the block, if a port is set."""
    execution = settings.execution
    watchdog = Watchdog(
        SingleHeartbeat(heartbeat),
        execution.supervision.hang_timeout_seconds,
        float(execution.timeout_seconds),
    )
    with export_run(settings, world.local_rank) as metrics:
        if metrics is None:
            yield
            return
        with metrics.watch(watchdog, [os.getpid()], world.rank):
            yield
