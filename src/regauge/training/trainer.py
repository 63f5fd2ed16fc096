"""The story of a run: steps, lines, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from regauge import jsonl
from regauge.data.loader import in_turn
from regauge.errors import LimitReachedError, PreemptedError, RegaugeError
from regauge.log import logger
from regauge.supervision.signals import Caught
from regauge.training.compile.warmup import GraphGuard
from regauge.training.divergence.inject import mistaken
from regauge.training.generation import FILE, samples
from regauge.training.guards import flip
from regauge.training.metrics import write_ledger
from regauge.training.optimizer_step import advance
from regauge.training.profile import profiler

if TYPE_CHECKING:
    from collections.abc import Generator

    from regauge.accelerators import Batch
    from regauge.data.batches import Arrays
    from regauge.trackers import Together
    from regauge.training.heldout import Heldout
    from regauge.training.session import Session


SHOWN = 60
"""Letters of a prompt and of its answer that a line of the log has."""
NOTHING, SECONDS, USD, TOKENS, SIGNAL = range(5)
AGAIN = "the same command goes on from there"


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
    closely = profiler.watching(session)
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


def evaluate(session: Session) -> dict[str, float]:
    """Return the held-out metrics of this moment of a run as `heldout/<metric>`.

    Those of one of several tasks are `heldout.<task>/<metric>`; those of another dataset that is
    mixed in have its name behind that. Empty where no rows are held out.
    """
    found: dict[str, float] = {}
    for split, heldout in session.heldout.items():
        with session.ledger.spend("evaluate"), session.computing():
            session.chaos.strike("evaluate", session.step)
            metrics = heldout.metrics(session.prepared.module)
            if heldout.task.writes and not heldout.part:
                _write_samples(session, heldout)
        found |= {f"{split}/{name}": value for name, value in metrics.items()}
    return found


def _write_samples(session: Session, heldout: Heldout) -> None:
    """Add what the model of this moment answers to samples.jsonl, and say the first one."""
    wanted, data = session.settings.evaluation.samples, Path(session.settings.aims[0].data.path)
    found = samples(heldout, session.prepared.module, wanted, data)
    if not session.world.first or not wanted.prompts:
        return
    for each in found:
        task = {"task": heldout.of} if heldout.of else {}
        document = {"attempt": session.attempt, "step": session.step, **task, **each}
        jsonl.append(session.folder / FILE, document)
    if found:
        prompt, answer = found[0]["prompt"][-SHOWN:], found[0]["answer"][:SHOWN]
        said = (session.step, len(found), prompt, answer)
        logger.info("step %d: %d prompts are answered, %r with %r", *said)
    else:
        logger.warning("no held-out row has a prompt to go on with: see evaluation.samples")


class Stopping(Caught):
    """Watches signals and limits while its block runs; a second signal is not caught."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._signalled = False
        self._asked: torch.Tensor | None = None

    def reason(self) -> int:
        """Return why all processes stop after this step, or NOTHING; called once a step."""
        found = self._found()
        if self._session.world.size == 1:
            return found
        told = int(self._asked) if self._asked is not None else NOTHING
        self._asked = torch.tensor(found, device=self._session.device)
        dist.all_reduce(self._asked, dist.ReduceOp.MAX)
        return told

    def caught(self, number: int) -> None:
        """Note a signal; the next one ends the process."""
        self._signalled = True
        self.give_back(number)

    def error(self, reason: int) -> RegaugeError:
        """Return the error that says how the run was stopped."""
        step = self._session.step
        if reason == SIGNAL:
            return PreemptedError(f"told to stop, and saved at step {step}", AGAIN)
        limit = {SECONDS: "stop.seconds", USD: "stop.usd", TOKENS: "stop.tokens"}[reason]
        remedy = f"raise {limit}, and {AGAIN}"
        return LimitReachedError(f"{limit} was reached and the run saved at step {step}", remedy)

    def _found(self) -> int:
        limits, ledger = self._session.settings.stop, self._session.ledger
        if self._signalled:
            return SIGNAL
        if limits.tokens is not None and ledger.tokens >= limits.tokens:
            return TOKENS
        if not self._session.world.first:
            return NOTHING
        if limits.seconds is not None and ledger.total_seconds >= limits.seconds:
            return SECONDS
        usd = ledger.paid.usd
        return USD if limits.usd is not None and usd is not None and usd >= limits.usd else NOTHING
