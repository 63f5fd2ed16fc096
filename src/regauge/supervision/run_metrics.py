"""All metrics of a training run on this machine, and their exporter.

Three signals of a rank are separate. *Alive*: the process exists. *Progressing*: it is not stopped,
and has reported within half of the silence that ends the attempt. *Healthy*: it does not delay
other ranks, and its loss is finite. By default the limits are 30 s in steps, and 300 s in other
phases.

The supervisor exports for the processes it started. A process started by another launcher exports
for itself. The machine with rank 0 also exports metrics for the whole run.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regauge
from regauge.accelerators import open_device_counters, open_device_errors
from regauge.config import RUN_IDENTITY, find_saved_run
from regauge.config.run_names import hash_folder, name_run
from regauge.monitoring import vocabulary
from regauge.monitoring.exporter import export_metrics
from regauge.monitoring.polled_source import PolledSource
from regauge.monitoring.vocabulary import Sample
from regauge.supervision.heartbeat import PHASES
from regauge.supervision.run_files import RunFiles
from regauge.supervision.watchdog import Watchdog
from regauge.system.errors import DataError
from regauge.system.processes import STOPPED_STATES, inspect_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from regauge.accelerators import Accelerator
    from regauge.monitoring.vocabulary import Metric, RunLabels
    from regauge.run_folders.cost_meter import CostMeter
    from regauge.run_folders.node_status import Beat
    from regauge.supervision.heartbeat import Heartbeat
    from regauge.supervision.run_files import RankHealth
    from regauge.system.device_counters import DeviceCounters, DeviceErrors
    from regauge.system.processes import World
    from regauge.training.settings import TrainSettings

STALL_SHARE = 0.5
"""Share of the silence limit after which a rank does not count as progressing."""
DEAD_STATES = ("", "Z", "X")
"""Process states in `/proc/<pid>/stat` (proc(5)); empty if the process does not exist."""


@dataclass(frozen=True)
class LocalRanks:
    """This machine's ranks in an attempt."""

    watchdog: Watchdog
    pids: Sequence[int]
    first_rank: int

    def read_samples(self, run: RunLabels, health: RankHealth) -> Iterator[Sample]:
        heartbeats = self.watchdog.heartbeats
        beats = [heartbeats.read(number) for number in range(heartbeats.size)]
        for number, (pid, beat) in enumerate(zip(self.pids, beats, strict=True)):
            labels = (*run, str(self.first_rank + number))
            limit = self.watchdog.silence_limit(beat, beats)
            yield from _describe_process(labels, pid, beat, limit)
            yield from _describe_beat(labels, beat)
            is_late = health.straggler == self.first_rank + number
            delay = health.delay_seconds if is_late else 0.0
            yield Sample(vocabulary.RANK_DELAY, delay, labels)
            is_healthy = not is_late and health.is_loss_finite
            yield Sample(vocabulary.RANK_HEALTHY, is_healthy, labels)

    def read_end_samples(self, run: RunLabels) -> Iterator[Sample]:
        """Yield samples for every rank after the attempt has ended."""
        for number in range(len(self.pids)):
            labels = (*run, str(self.first_rank + number))
            yield Sample(vocabulary.RANK_ALIVE, 0, labels)
            yield Sample(vocabulary.RANK_PROGRESSING, 0, labels)


def _describe_process(
    labels: tuple[str, ...], pid: int, beat: Beat, limit: float
) -> Iterator[Sample]:
    """Yield whether a process exists, is stopped and reports, and its memory."""
    process = inspect_process(pid)
    is_alive = process.state not in DEAD_STATES
    is_silent = beat.phase != "end" and time.monotonic() - beat.at > STALL_SHARE * limit
    is_stopped = process.state in STOPPED_STATES
    is_progressing = is_alive and not is_stopped and not is_silent
    yield Sample(vocabulary.RANK_ALIVE, is_alive, labels)
    yield Sample(vocabulary.RANK_STOPPED, is_stopped, labels)
    yield Sample(vocabulary.RANK_PROGRESSING, is_progressing, labels)
    yield Sample(vocabulary.RANK_SILENCE_LIMIT, limit, labels)
    if process.state:
        yield Sample(vocabulary.RANK_MEMORY, process.resident_bytes, labels)


def _describe_beat(labels: tuple[str, ...], beat: Beat) -> Iterator[Sample]:
    """Yield step, phase and times from a heartbeat."""
    clock_offset = time.time() - time.monotonic()
    yield Sample(vocabulary.RANK_STEP, beat.step, labels)
    yield Sample(vocabulary.RANK_BEAT_TIMESTAMP, beat.at + clock_offset, labels)
    if beat.step_at:
        yield Sample(vocabulary.RANK_STEP_TIMESTAMP, beat.step_at + clock_offset, labels)
    if beat.device_memory_bytes:
        yield Sample(vocabulary.RANK_DEVICE_MEMORY, beat.device_memory_bytes, labels)
    for phase in PHASES:
        yield Sample(vocabulary.RANK_PHASE, phase == beat.phase, (*labels, phase))


class RunMetrics:
    """Collects a run's metrics; the exporter's thread reads them."""

    def __init__(self, settings: TrainSettings, read_devices: Callable[[], list[Sample]]) -> None:
        self._folder = Path(settings.output.folder)
        self._budget = settings.stop.usd
        self._read_devices = read_devices
        self._files = RunFiles(self._folder)
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
            self._ranks = LocalRanks(watchdog, tuple(pids), first_rank)
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
            run = self.find_run()
            run_samples = list(self._files.read_samples(run))
            if self._is_running:
                samples += self._ranks.read_samples(run, self._files.health)
            else:
                samples += self._ranks.read_end_samples(run)
            if self._ranks.first_rank == 0:
                samples += run_samples
                samples += self._describe_run(run)
            return samples

    def find_run(self) -> RunLabels:
        """Return the run's name and id; at first the id is a hash of the folder."""
        if self._run_id is None:
            try:
                document: dict[str, Any] = find_saved_run(self._folder, "remove it") or {}
            except DataError:
                document = {}
            self._run_id = document.get(RUN_IDENTITY, {}).get("run_id")
        return name_run(self._folder), self._run_id or hash_folder(self._folder)

    def _describe_run(self, run: RunLabels) -> Iterator[Sample]:
        """Yield the run's identity and cost."""
        yield Sample(vocabulary.RUN_INFO, 1, (*run, "train", regauge.__version__))
        usd = self._meter.read().usd if self._meter else self._files.usd
        if usd is not None:
            yield Sample(vocabulary.RUN_COST, usd, run)
        if self._budget is not None:
            yield Sample(vocabulary.RUN_BUDGET, self._budget, run)


@contextmanager
def export_run(
    settings: TrainSettings, local_rank: int = 0, *, waits_for_read: bool = True
) -> Iterator[RunMetrics | None]:
    """Serve a run's metrics within the block, if `monitoring.port` is set.

    `local_rank` is added to the port. With `waits_for_read`, the end waits until Prometheus has
    read a failure. Raises SettingsError if the address cannot be used.
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
            find_run=metrics.find_run if waits_for_read else None,
        ):
            yield metrics


@contextmanager
def export_process(settings: TrainSettings, world: World, heartbeat: Heartbeat) -> Iterator[None]:
    """Serve this unsupervised process's metrics within the block, if a port is set."""
    execution = settings.execution
    watchdog = Watchdog(
        heartbeat,
        execution.supervision.hang_timeout_seconds,
        float(execution.timeout_seconds),
    )
    with export_run(settings, world.local_rank, waits_for_read=False) as metrics:
        if metrics is None:
            yield
            return
        with metrics.watch(watchdog, [os.getpid()], world.rank):
            yield


METRIC_BY_COUNTER: dict[str, Metric] = {
    "utilization": vocabulary.DEVICE_UTILIZATION,
    "memory_used_bytes": vocabulary.DEVICE_MEMORY_USED,
    "memory_total_bytes": vocabulary.DEVICE_MEMORY_TOTAL,
    "power_watts": vocabulary.DEVICE_POWER,
    "temperature_celsius": vocabulary.DEVICE_TEMPERATURE,
}


@contextmanager
def watch_devices(accelerator: Accelerator | None) -> Iterator[Callable[[], list[Sample]]]:
    """Yield a function that returns samples for all devices on this machine.

    Counters and errors are read in separate threads: a driver that does not answer cannot delay a
    sample or hide errors it has already logged. Without an accelerator, the devices are those of
    the first kind that has any.
    """
    with (
        PolledSource(lambda: open_device_counters(accelerator)) as counters,
        PolledSource(lambda: open_device_errors(accelerator)) as errors,
    ):
        yield lambda: [
            *describe_counters(counters.read() or ()),
            *_describe_errors(errors.read() or ()),
        ]


def describe_counters(devices: Iterable[DeviceCounters]) -> Iterator[Sample]:
    """Yield samples for the counters each device has."""
    for counters in devices:
        for name, metric in METRIC_BY_COUNTER.items():
            value = getattr(counters, name)
            if value is not None:
                yield Sample(metric, value, (counters.device,))


def _describe_errors(devices: Iterable[DeviceErrors]) -> Iterator[Sample]:
    for errors in devices:
        yield Sample(vocabulary.DEVICE_ERRORS, errors.count, (errors.device,))
        yield Sample(vocabulary.DEVICE_ERROR_CODE, errors.last_code, (errors.device,))
