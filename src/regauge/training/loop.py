"""The story of a run: steps, lines, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from regauge.data.loader import in_turn
from regauge.training import profiling
from regauge.training.graphs import GraphGuard
from regauge.training.mistakes import mistaken
from regauge.training.progress import write_ledger
from regauge.training.replicas import flip
from regauge.training.scoring import evaluate
from regauge.training.stopping import NOTHING, Stopping
from regauge.training.update import advance

if TYPE_CHECKING:
    from collections.abc import Generator

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
    total = session.total_steps
    interval = session.interval
    interval.begin()
    session.guard.begin()
    session.rates.begin(session.step)
    guard = GraphGuard(session.accelerator, settings.execution.recompile_budget)
    outcome, stop, last = Outcome(), NOTHING, True
    closely = profiling.watching(session)
    with closely as watched, Stopping(session) as stopping, ledger.spend("step"):
        for arrays, batches in _batches(session, total):
            with watched(arrays):
                _step(session, arrays, batches)
            guard.check_step(session.step, batches)
            stop = stopping.reason()
            last = session.step == total
            if last or stop or _due(session.step, settings.output.every_steps):
                session.guard.look(session.step)
                trackers.log(session.step, interval.line(session))
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
            due = _due(session.step, settings.output.checkpoint.every_steps)
            if over or (due and session.guard.look(session.step)):
                interval.settle(session)
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


def _step(session: Session, arrays: list[Arrays], batches: list[Batch]) -> None:
    """Do one step, and what watches over it."""
    with mistaken(session, batches, session.chaos.strike("step", session.step)):
        advance(session, batches)
    session.step += 1
    session.interval.count(arrays)
    session.report.done(session.step)
    session.saver.look()
    if session.chaos.flips(session.step):
        flip(next(iter(session.prepared.replicas())))
    if _due(session.step, session.settings.optimizer.guard.check_every_steps):
        session.check_replicas()


def _batches(session: Session, total: int) -> Generator[tuple[list[Arrays], list[Batch]]]:
    """Yield each step's batches, as arrays and on the device; the wait for them is booked."""
    data = session.settings.data
    steps = in_turn(
        session.arrays, session.step, total, workers=data.workers, ahead=data.prefetch_steps
    )
    counted: deque[list[Arrays]] = deque()
    host = _tensors(steps, counted)
    with closing(session.accelerator.wrap_loader(host, session.device)) as wrapped:
        while True:
            session.pace.begin()
            with session.ledger.spend("data_wait"):
                session.chaos.strike("data", session.step)
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


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
