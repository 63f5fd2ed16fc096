"""The story of a run: steps, lines, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from regauge.training.graphs import GraphGuard, warm_up
from regauge.training.optimizer import Rates, set_learning_rate
from regauge.training.progress import Interval, write_ledger
from regauge.training.scoring import evaluate
from regauge.training.step import Noise
from regauge.training.stopping import NOTHING, Stopping

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from regauge.accelerators import Batch
    from regauge.data.batches import Arrays
    from regauge.trackers import Together
    from regauge.training.session import Session


@dataclass
class Outcome:
    """How a run ended."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation; empty where no rows are held out."""
    reason: str = "finished"


def train(session: Session, trackers: Together) -> Outcome:
    """Run the steps that are left; a limit or a signal is raised as its error, after a save."""
    settings, ledger = session.settings, session.ledger
    total = settings.stop.total_steps(session.order.steps_per_epoch)
    rates, interval = _rates(session, total), Interval(session)
    with ledger.spend("compile"):
        warm_up(session)
    interval.begin()
    guard = GraphGuard(session.accelerator, settings.execution.recompile_budget)
    outcome, stop, last = Outcome(), NOTHING, True
    with Stopping(session) as stopping, ledger.spend("step"):
        for arrays, batches in _batches(session, total):
            with session.computing("step"):
                interval.add(*advance(session, batches, rates), arrays)
                session.accelerator.end_step()
            guard.check_step(session.step, batches)
            stop = stopping.reason()
            last = session.step == total
            if last or stop or _due(session.step, settings.output.every_steps):
                trackers.log(session.step, interval.line())
                write_ledger(session)
            measured: dict[str, float] = {}
            if last or _due(session.step, settings.evaluation.every_steps):
                outcome.metrics = measured = evaluate(session)
                guard.check_evaluation(session.step)
                if measured:
                    trackers.log(session.step, measured)
                if settings.stop.target and settings.stop.target.reached(outcome.metrics):
                    outcome.reason = f"reached {settings.stop.target.metric}"
            over = last or stop != NOTHING or outcome.reason != "finished"
            if over or _due(session.step, settings.output.checkpoint.every_steps):
                interval.settle()
                session.save(measured)
            if over:
                break
    with ledger.spend("checkpoint"):
        session.saver.wait()
    if last and not outcome.metrics:
        outcome.metrics = evaluate(session)
    write_ledger(session)
    if stop and not last:
        raise stopping.error(stop)
    return outcome


def advance(session: Session, batches: list[Batch], rates: Rates) -> tuple[Tensor, Tensor, float]:
    """Do one step; return [loss sum, weight] of the global batch, gradient norm and rate."""
    prepared, clip = session.prepared, session.settings.optimizer.clip_norm
    scale = session.scale.tensor(session.device)
    totals = session.gradients.of(batches, scale, _noise(session))
    rate, rate_there = rates.next()
    factor = 1 / (totals[1].clamp(min=1e-9) * scale)
    norm = prepared.gradient_norm() * factor
    if clip is not None:
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    if session.scale.accepts(norm):
        prepared.scale_gradients(factor)
        set_learning_rate(session.optimizer, rate_there)
        session.optimizer.step()
        prepared.publish()
    prepared.clear_gradients()
    session.step += 1
    return totals, norm, rate


def _rates(session: Session, total: int) -> Rates:
    steps = range(session.step, max(session.step, total))
    optimizer, lazy = session.settings.optimizer, session.accelerator.lazy
    return Rates(optimizer, steps, session.device, lazy=lazy)


def _batches(session: Session, total: int) -> Generator[tuple[list[Arrays], list[Batch]]]:
    """Yield each step's batches, as arrays and on the device; the wait for them is booked."""
    data = session.settings.data
    steps = session.feed.steps(
        session.order, session.step, total, workers=data.workers, ahead=data.prefetch_steps
    )
    counted: deque[list[Arrays]] = deque()
    host = _tensors(steps, counted)
    with closing(session.accelerator.wrap_loader(host, session.device)) as wrapped:
        while True:
            with session.ledger.spend("data_wait"):
                batches = next(wrapped, None)
            if batches is None:
                return
            yield counted.popleft(), batches


def _tensors(
    steps: Generator[list[Arrays]], counted: deque[list[Arrays]]
) -> Generator[list[Batch]]:
    """Yield each step's arrays as tensors of the host, and keep them to be counted."""
    with closing(steps):
        for arrays in steps:
            counted.append(arrays)
            yield [
                {name: torch.from_numpy(value) for name, value in part.items()} for part in arrays
            ]


def _noise(session: Session) -> Noise | None:
    if session.settings.model.dropout_kind == "counter":
        return None
    return Noise(session.accelerator, session.settings.seed, session.step, session.world.rank)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
