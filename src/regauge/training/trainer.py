"""The training loop: steps, log lines, evaluations, checkpoints, and reasons to stop."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from regauge.config import FORMAT
from regauge.config.output_files import CLASS_REPORTS, SAMPLES
from regauge.data.loader import prefetch_batches
from regauge.system import jsonl, stop_signals
from regauge.system.errors import LimitReachedError, PreemptedError, RegaugeError
from regauge.system.files import write_json
from regauge.system.log import logger
from regauge.training.checkpointing import is_best, save_checkpoint
from regauge.training.compile.warmup import RecompileMonitor
from regauge.training.early_stopping import count_evaluation, find_stop_reason
from regauge.training.generation import generate_samples
from regauge.training.guards import check_replicas
from regauge.training.metrics import write_ledger
from regauge.training.optimizer import optimizer_step
from regauge.training.run_record import TARGET_REACHED

if TYPE_CHECKING:
    from collections.abc import Generator

    from regauge.accelerators import Batch
    from regauge.data.batches import Arrays
    from regauge.monitoring.trackers import TrackerGroup
    from regauge.tasks import ClassReport
    from regauge.training.context import RunContext
    from regauge.training.heldout import HeldoutSet
    from regauge.training.state import TrainState

LOGGED_CHARACTERS = 60
NO_STOP, SECONDS, USD, TOKENS, SIGNAL = range(5)
"""Reasons to stop; if processes have several, the largest one counts. A signal adds its number to
SIGNAL."""
FINISHED = "finished"
RESUME_HINT = "run the same command to resume"


@dataclass
class Outcome:
    """How a run ended."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation; empty if no rows are held out."""
    stop_reason: str = FINISHED
    """FINISHED, or the target or early stop that ended the run before its last step."""


def train(context: RunContext, state: TrainState, trackers: TrackerGroup) -> Outcome:
    """Run the remaining steps; every process calls this.

    Raises LimitReachedError or PreemptedError, after a save, if a limit or a signal stops the run.
    """
    settings, total_steps = context.settings, context.total_steps
    context.metrics.begin()
    state.guard.begin()
    state.lr_schedule.seek(state.step)
    graphs = RecompileMonitor(context.accelerator, settings.execution.recompile_budget)
    outcome, stop, is_last = Outcome(), NO_STOP, True
    outcome.stop_reason = find_stop_reason(context, state) or FINISHED
    steps = _batches(context, state)
    stop_condition = StopCondition(context, state)
    with stop_signals.record_signals(), stop_signals.defer_stop():
        with closing(context.hooks), context.hooks.phase("step"), closing(steps):
            for arrays, batches in steps if outcome.stop_reason == FINISHED else ():
                _run_step(context, state, arrays, batches)
                graphs.check_step(state.step, batches)
                stop = stop_condition.reason()
                is_last = state.step == total_steps
                if is_last or stop or _is_due(state.step, settings.output.log_every_steps):
                    state.guard.raise_if_needed(state.step)
                    trackers.log(state.step, context.metrics.flush(context, state))
                    write_ledger(context, state)
                metrics: dict[str, float] = {}
                if is_last or _is_due(state.step, settings.evaluation.every_steps):
                    outcome.metrics = metrics = evaluate(context, state)
                    graphs.check_evaluation(state.step)
                    if metrics:
                        trackers.log(state.step, metrics)
                    outcome.stop_reason = _find_stop_reason(context, state, metrics)
                is_over = is_last or stop != NO_STOP or outcome.stop_reason != FINISHED
                is_save_due = is_best(context, state, metrics) or _is_due(
                    state.step, settings.output.checkpoint.every_steps
                )
                if is_over or (is_save_due and state.guard.raise_if_needed(state.step)):
                    context.metrics.all_reduce_counts()
                    save_checkpoint(context, state, metrics)
                if is_over:
                    break
        with context.hooks.phase("checkpoint"):
            context.saver.wait()
        if is_last and not outcome.metrics:
            outcome.metrics = evaluate(context, state)
        write_ledger(context, state)
        if stop and not is_last:
            raise stop_condition.error(stop)
    return outcome


def _find_stop_reason(context: RunContext, state: TrainState, metrics: dict[str, float]) -> str:
    """Return why the run ends after an evaluation, or FINISHED; counts a scheduled evaluation."""
    target = context.settings.stop.target
    if _is_due(state.step, context.settings.evaluation.every_steps):
        count_evaluation(context, state, metrics)
    if target and target.is_reached(metrics):
        return f"{TARGET_REACHED}{target.metric}"
    return find_stop_reason(context, state) or FINISHED


def _run_step(
    context: RunContext, state: TrainState, arrays: list[Arrays], batches: list[Batch]
) -> None:
    with context.hooks.around_step(state.step, batches):
        optimizer_step(context, state, batches)
        state.step += 1
        context.metrics.count(arrays)
        context.reporter.report_step(state.step)
        context.saver.check_save()
        context.hooks.after_step(state.step)
        if _is_due(state.step, context.settings.optimizer.guard.check_replicas_every_steps):
            check_replicas(state.model.replicated_tensors(), context.world, state.step)


def _batches(context: RunContext, state: TrainState) -> Generator[tuple[list[Arrays], list[Batch]]]:
    """Yield each remaining step's batches, as arrays and as tensors on the device."""
    data = context.settings.data
    steps = prefetch_batches(
        context.read_batches,
        state.step,
        context.total_steps,
        workers=data.workers,
        max_ahead=data.prefetch_steps,
    )
    pending: deque[list[Arrays]] = deque()
    host = _as_tensors(steps, pending)
    with closing(context.accelerator.wrap_loader(host, context.device)) as loader:
        while True:
            context.hooks.before_batches(state.step)
            with context.hooks.phase("data_wait"):
                batches = next(loader, None)
            if batches is None:
                return
            yield pending.popleft(), batches


def _as_tensors(
    steps: Generator[list[Arrays]], pending: deque[list[Arrays]]
) -> Generator[list[Batch]]:
    """Yield each step's arrays as host tensors; `pending` keeps the arrays in order."""
    with closing(steps):
        for arrays in steps:
            pending.append(arrays)
            yield [
                {name: torch.from_numpy(value) for name, value in batch.items()} for batch in arrays
            ]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def evaluate(context: RunContext, state: TrainState) -> dict[str, float]:
    """Evaluate the state, as `heldout/<metric>`; every process calls this.

    With several tasks, metrics are named `heldout.<task>/<metric>`. Metrics on a dataset that is
    mixed in have its name after that. Empty if no rows are held out. `classes.json` gets the
    per-class metrics, unless the final model will have another step's weights.
    """
    metrics: dict[str, float] = {}
    reports: dict[str, ClassReport] = {}
    for prefix, heldout in context.heldout.items():
        with context.hooks.phase("evaluate"), context.hooks.compilation():
            context.hooks.before_evaluation(state.step)
            values, outputs = heldout.evaluate(state.model.module)
            if report := heldout.class_report(outputs):
                reports[prefix] = report
            if heldout.task.generative and not heldout.dataset_name:
                _write_samples(context, state, heldout)
        metrics |= {f"{prefix}/{name}": value for name, value in values.items()}
    keeps_earlier = context.settings.has_best_final_model and state.best_step is not None
    is_final = not keeps_earlier or is_best(context, state, metrics)
    if is_final and context.world.is_main_process:
        _write_class_reports(context.folder / CLASS_REPORTS, state.step, reports)
    if metrics:
        context.hooks.after_evaluation(state.step, metrics)
    return metrics


def _write_class_reports(path: Path, step: int, reports: dict[str, ClassReport]) -> None:
    """Write per-class metrics; without any, remove those of an earlier step."""
    if reports:
        write_json(path, {"format": FORMAT, "step": step, "classes": reports})
    else:
        path.unlink(missing_ok=True)


def _write_samples(context: RunContext, state: TrainState, heldout: HeldoutSet) -> None:
    """Append completions of held-out prompts to samples.jsonl, and log the first one."""
    options = context.settings.evaluation.samples
    dataset = Path(context.settings.task_configs[0].data.path)
    samples = generate_samples(heldout, state.model.module, options, dataset)
    if not context.world.is_main_process or not options.prompts:
        return
    for sample in samples:
        task = {"task": heldout.task_name} if heldout.task_name else {}
        document = {"attempt": state.attempt, "step": state.step, **task, **sample}
        jsonl.append_line(context.folder / SAMPLES, document)
    if samples:
        prompt = samples[0]["prompt"][-LOGGED_CHARACTERS:]
        completion = samples[0]["completion"][:LOGGED_CHARACTERS]
        count = len(samples)
        logger.info("step %d: %d completions; %r -> %r", state.step, count, prompt, completion)
    else:
        logger.warning("no held-out row has a prompt: see evaluation.samples")


class StopCondition:
    """Watches signals and limits."""

    def __init__(self, context: RunContext, state: TrainState) -> None:
        self._context = context
        self._state = state
        self._shared_reason: torch.Tensor | None = None

    def reason(self) -> int:
        """Return why all processes stop after this step, or NO_STOP; called after each step.

        With several processes the answer belongs to the step before, so no process waits for
        it.
        """
        reason = self._local_reason()
        if self._context.world.size == 1:
            return reason
        agreed = int(self._shared_reason) if self._shared_reason is not None else NO_STOP
        self._shared_reason = torch.tensor(reason, device=self._context.device)
        dist.all_reduce(self._shared_reason, dist.ReduceOp.MAX)
        return agreed

    def error(self, reason: int) -> RegaugeError:
        step = self._state.step
        if reason >= SIGNAL:
            problem = f"stopped by a signal, saved at step {step}"
            return PreemptedError(problem, RESUME_HINT, reason - SIGNAL)
        limit = {SECONDS: "stop.seconds", USD: "stop.usd", TOKENS: "stop.tokens"}[reason]
        remedy = f"raise {limit}, then {RESUME_HINT}"
        return LimitReachedError(f"{limit} is reached; the run is saved at step {step}", remedy)

    def _local_reason(self) -> int:
        limits, ledger = self._context.settings.stop, self._context.ledger
        if number := stop_signals.find_signal():
            return SIGNAL + number
        if limits.tokens is not None and ledger.tokens >= limits.tokens:
            return TOKENS
        if not self._context.world.is_main_process:
            return NO_STOP
        if limits.seconds is not None and ledger.total_seconds >= limits.seconds:
            return SECONDS
        usd = ledger.cost.usd
        is_spent = limits.usd is not None and usd is not None and usd >= limits.usd
        return USD if is_spent else NO_STOP
