"""Rehearsal: run a plan's processes on this machine, with and without a node loss.

The run file gets small shapes (`small_run`) and a temporary output folder. The launcher plans it
like the real job, and lists the commands and variables in the documents. They run twice: once
without a fault, and once with the last node killed. Both runs must give the same model.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from regauge.config.output_files import METRICS, RESULT
from regauge.jobs.job_spec import IMAGE_FOLDER, LaunchRequest
from regauge.jobs.planning import plan_job
from regauge.jobs.settings import Launch
from regauge.jobs.small_run import CHECKPOINT_STEPS, STEPS, list_changes, shrink_request
from regauge.jobs.targets import Launcher, LaunchPlan, LeaderAddress, NodeCommand
from regauge.jobs.targets._job_runner import JobRunner, build_log_path
from regauge.jobs.targets._nodes import clear_scheduler_variables
from regauge.monitoring.trackers import TRAIN_LOSS
from regauge.run_folders.documents import StepMetrics
from regauge.system import choices, jsonl, stop_signals
from regauge.system.errors import ChildError, DifferenceError, SettingsError
from regauge.system.json_files import read_json
from regauge.system.line_tail import read_last_lines
from regauge.system.log import logger

HOURS = 0.25
MIN_ATTEMPTS = 3
LOG_LINES = 10
KILL_STEP = 2 * CHECKPOINT_STEPS + 2
"""Step after which a node is killed: between two checkpoints."""
TOLERANCE = 1e-4
"""Maximum relative difference in losses and metrics if the node count changed."""
PROGRAM = "regauge"


@dataclass(frozen=True)
class RehearsalReport:
    target: str
    nodes: int
    steps: int
    lost_node: int
    lost_after_step: int
    attempts: int
    """Attempts in the run that lost a node."""
    weights_equal: bool
    """Whether both runs' weights agree bit for bit."""
    max_weight_difference: float
    """Largest weight difference, relative to the largest weight in the tensor."""
    rows_equal: bool
    """Whether both runs used the same tokens, and had the same loss in every step."""
    metrics_equal: bool
    is_elastic: bool
    """Whether the node count changed, and with it the summation order. Losses and metrics are then
    equal within a relative tolerance of 1e-4, and weights may differ."""
    recovery_seconds: float
    """Seconds from the node loss to the next completed step."""
    undisturbed_seconds: float
    disturbed_seconds: float
    changes: list[str]
    """Run file keys changed by the rehearsal."""

    @property
    def is_equal(self) -> bool:
        """Whether the job that lost a node has the same result as the undisturbed job."""
        is_same_model = self.weights_equal or self.is_elastic
        return is_same_model and self.rows_equal and self.metrics_equal


class _Outcome(NamedTuple):
    output: Path
    seconds: float
    attempts: int
    last_step: int
    """Last step before the node loss; 0 without a loss."""
    recovery_seconds: float


def rehearse_job(request: LaunchRequest, launch: Launch, launcher: Launcher) -> RehearsalReport:
    """Run a job here twice, with small shapes, and compare the runs.

    Writes only to a temporary folder. Raises SettingsError for a verb without a rehearsal,
    ChildError if a run fails, and DifferenceError if the two runs differ.
    """
    if request.verb != "train":
        raise SettingsError(f"'{request.verb}' cannot be rehearsed", "rehearse 'train'")
    with tempfile.TemporaryDirectory(prefix="regauge-rehearsal-") as name:
        first, second = (
            Rehearsal(request, launch, launcher, Path(name) / kind)
            for kind in ("undisturbed", "disturbed")
        )
        lost_node = first.plan.job.max_nodes - 1
        outcomes = (first.run(), second.run(lost_node))
        report = _compare(launcher.kind, second, outcomes, lost_node)
    if not report.is_equal:
        problem = "the job that lost a node differs from the undisturbed job"
        parts = {"rows": report.rows_equal, "metrics": report.metrics_equal}
        different = "".join(f", {name} differ" for name, is_equal in parts.items() if not is_equal)
        details = f"weights by {report.max_weight_difference:.2g}{different}"
        raise DifferenceError(f"{problem}: {details}", "report this as a bug with the run file")
    return report


class Rehearsal:
    """A job with small shapes, in a separate folder."""

    def __init__(
        self, request: LaunchRequest, launch: Launch, launcher: Launcher, folder: Path
    ) -> None:
        folder.mkdir()
        self._logs = folder / "logs"
        self._output = folder / "output"
        self._request = shrink_request(request, folder, self._output)
        self.changes = list_changes(request.tables, self._request.tables)
        attempts = max(launch.max_attempts, MIN_ATTEMPTS)
        launch = launch.model_copy(update={"max_attempts": attempts})
        self._launcher = launcher
        self.plan: LaunchPlan = plan_job(self._request, launch, launcher)

    def run(self, lost_node: int | None = None) -> _Outcome:
        """Run the job to its end, and kill `lost_node` after KILL_STEP.

        Raises ChildError if the job fails, and DifferenceError if no step follows the loss.
        """
        job = replace(self.plan.job, hours=HOURS)
        environment = {
            **clear_scheduler_variables(os.environ),
            **choices.module_folders_environment(),
        }
        runner = JobRunner(job, self._list_commands, self._logs, environment)
        fault = _NodeFault(self._output / METRICS, runner, lost_node)
        began_at = time.monotonic()
        runner.run(fault.update)
        self._check_success(runner)
        if lost_node is not None and fault.recovery_seconds is None:
            problem = f"no step followed the loss of node {lost_node}"
            raise DifferenceError(problem, "report this as a bug with the run file")
        seconds = round(time.monotonic() - began_at, 1)
        recovery = fault.recovery_seconds or 0.0
        return _Outcome(self._output, seconds, runner.attempt, fault.step, recovery)

    def _list_commands(self, leader: LeaderAddress) -> list[NodeCommand]:
        nodes = self._launcher.list_node_commands(self.plan, leader)
        return [replace(node, command=self._localize(node.command)) for node in nodes]

    def _localize(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return a document's command, with this Python and the run file here."""
        image_path = str(IMAGE_FOLDER / self._request.run_file.name)
        run_file = str(self._request.run_file)
        words: list[str] = []
        for word in command:  # the program follows the words of a shell that starts it again
            is_program = word == PROGRAM and sys.executable not in words
            words += (sys.executable, "-m", PROGRAM) if is_program else (word,)
        return tuple(word.replace(image_path, run_file) for word in words)

    def _check_success(self, runner: JobRunner) -> None:
        """Raise ChildError with the leader log's last line if the job failed."""
        if runner.state == "succeeded":
            return
        lines = read_last_lines(build_log_path(self._logs, 1, 0), LOG_LINES)
        line = lines[-1] if lines else "it wrote no log; run it alone"
        logger.error("the job of the rehearsal failed:\n%s", "\n".join(lines))
        raise ChildError(runner.exit_code or 1, line)


class _NodeFault:
    """Kills a node after KILL_STEP, and measures the time to the next step in seconds."""

    def __init__(self, metrics: Path, runner: JobRunner, node: int | None) -> None:
        self._metrics, self._runner, self._node = metrics, runner, node
        self._killed_at: float | None = None
        self._attempt = 0
        self.step = 0
        self.recovery_seconds: float | None = None

    def update(self) -> None:
        """Read the run's last step; kill the node, or measure the recovery."""
        stop_signals.check_stop()
        if self._node is None or self.recovery_seconds is not None:
            return
        line = jsonl.read_last_line(self._metrics, StepMetrics)
        if line is None:
            return
        if self._killed_at is None:
            if KILL_STEP <= line["step"] < STEPS:
                self._runner.kill_node(self._node)
                self._killed_at = time.monotonic()
                self._attempt, self.step = line["attempt"], line["step"]
                logger.info("node %d is killed after step %d", self._node, self.step)
        elif line["attempt"] > self._attempt and line["step"] > self.step:
            self.recovery_seconds = round(time.monotonic() - self._killed_at, 1)


def _compare(
    target: str, rehearsal: Rehearsal, outcomes: tuple[_Outcome, _Outcome], lost_node: int
) -> RehearsalReport:
    undisturbed, disturbed = outcomes
    folders = [outcome.output for outcome in outcomes]
    difference = compute_max_difference(*(folder / "model" for folder in folders))
    job = rehearsal.plan.job
    tolerance = TOLERANCE if job.is_elastic else 0.0
    results = [read_json(folder / RESULT, "rehearse again") for folder in folders]
    has_equal_tokens = results[0]["tokens"] == results[1]["tokens"]
    losses = [_read_losses(folder) for folder in folders]
    return RehearsalReport(
        target=target,
        nodes=job.max_nodes,
        steps=STEPS,
        lost_node=lost_node,
        lost_after_step=disturbed.last_step,
        attempts=disturbed.attempts,
        weights_equal=difference == 0.0,
        max_weight_difference=difference,
        rows_equal=has_equal_tokens and _are_close(losses[0], losses[1], tolerance),
        metrics_equal=_are_close(results[0]["metrics"], results[1]["metrics"], tolerance),
        is_elastic=job.is_elastic,
        recovery_seconds=disturbed.recovery_seconds,
        undisturbed_seconds=undisturbed.seconds,
        disturbed_seconds=disturbed.seconds,
        changes=rehearsal.changes,
    )


def _are_close(first: Mapping[Any, float], second: Mapping[Any, float], tolerance: float) -> bool:
    """Return whether two mappings have equal keys, and values within a relative tolerance."""
    return first.keys() == second.keys() and all(
        math.isclose(value, second[key], rel_tol=tolerance) for key, value in first.items()
    )


def _read_losses(folder: Path) -> dict[int, float]:
    """Return step -> training loss, from the last attempt that ran the step."""
    lines = jsonl.read_lines(folder / METRICS, StepMetrics)
    return {line["step"]: line[TRAIN_LOSS] for line in lines if TRAIN_LOSS in line}


def compute_max_difference(first: Path, second: Path) -> float:
    """Return the largest weight difference, relative to the largest weight in its tensor.

    The result is 0 if all weights are equal, and infinity if the folders have different tensors.
    """
    import numpy as np
    from safetensors.numpy import load_file

    models = [
        {
            name: tensor
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for folder in (first, second)
    ]
    if not models[0] or models[0].keys() != models[1].keys():
        return math.inf
    largest = 0.0
    for name, tensor in models[0].items():
        other = models[1][name]
        if tensor.shape != other.shape:
            return math.inf
        if np.array_equal(tensor, other):
            continue
        scale = max(float(np.abs(tensor).max()), sys.float_info.min)
        largest = max(largest, float(np.abs(tensor - other).max()) / scale)
    return largest
