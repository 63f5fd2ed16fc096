"""One attempt of a run, from its settings to its final model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge.checkpoint.layout import steps, write_json
from regauge.choices import did_you_mean
from regauge.config import FORMAT, dump
from regauge.errors import PreflightError, SettingsError
from regauge.health.machine import free_bytes
from regauge.log import logger
from regauge.supervision import channel
from regauge.supervision.channel import Report
from regauge.trackers import RunFacts, started
from regauge.training import objectives, run_record, warm_start
from regauge.training.batch_finder import finder
from regauge.training.compile import decision
from regauge.training.compile.warmup import settle, warm_up
from regauge.training.defaults import decide
from regauge.training.export_models import write_models
from regauge.training.session import Session
from regauge.training.session_setup import open_session
from regauge.training.trainer import Outcome, evaluate, train

if TYPE_CHECKING:
    from regauge.processes import World
    from regauge.training.settings import Training

VALUES_PER_WEIGHT = 3
"""In a checkpoint: the weight, and two moments of it."""


def attempt(settings: Training, world: World) -> dict[str, Any]:
    """Start or go on with a run and return its result; every process of it calls this.

    Where a supervisor started the process, it hears signs of life and how the attempt ends.
    """
    report = Report(channel.received(), world.rank)
    with report.kept():
        return _attempt(settings, world, report)


def _attempt(settings: Training, world: World, report: Report) -> dict[str, Any]:
    report.pulse.beat("init")
    folder = Path(settings.output.folder)
    settings = warm_start.started(settings, world, report)
    manifests = objectives.manifests(settings)
    identity = objectives.identity(manifests)
    run_id = run_record.check_same_run(folder, settings, identity)
    settings = decide(run_record.inherit(settings, folder), world, report)
    settings = finder.settled(settings, world, report)
    joined = dist.is_initialized()
    session = open_session(settings, world, report)
    session.ledger.book("init", time.monotonic() - report.began)
    try:
        _check_room(session)
        decision.settle(session)
        if world.first:
            run_record.write(folder, session.settings, identity, run_id, session.weights)
            report.begin(folder)
        return _finish(session, _tracked(session, run_id))
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def _check_room(session: Session) -> None:
    """Raise PreflightError where no checkpoint fits on the disk; warn where not all that are kept.

    A checkpoint is taken to hold every weight that is trained and two moments of it, in fp32.
    """
    kept = session.settings.output.checkpoint
    parameters = session.prepared.module.parameters()
    count = sum(value.numel() for value in parameters if value.requires_grad)
    needed = count * VALUES_PER_WEIGHT * torch.float32.itemsize
    free = free_bytes(session.folder)
    copies = kept.keep + 1 + (kept.best is not None)
    there = len(steps(session.folder / "checkpoints"))
    told = f"a checkpoint has about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
    if free < needed:
        remedy = "make room, or name another output.folder"
        raise PreflightError(f"{told} at {session.folder}", remedy)
    if session.world.first and free < needed * (copies - there):
        logger.warning("%s: not enough for the %d that are kept at a time", told, copies)


def _tracked(session: Session, run_id: str) -> Outcome:
    with session.ledger.spend("compile"):
        warm_up(session, session.shapes)
    compiling = session.ledger.seconds["compile"]
    resumed = session.resume()
    session.report.done(session.step)
    if session.report.orders:
        session.attempt = session.report.orders.attempt
    settle(session)
    if not resumed:
        if session.settings.model.init_from is not None:
            session.go_on(session.settings.model.init_from)
        session.before = evaluate(session)
    session.seal(compiling)
    _check_metrics(session)
    facts = RunFacts(
        name=session.folder.name,
        run_id=run_id,
        folder=session.folder,
        attempt=session.attempt,
        total_steps=session.total_steps,
        resumed_step=session.step,
        settings=dump(session.settings),
    )
    own = session.settings.output.trackers if session.world.first else ()
    if session.world.first and resumed:
        logger.info("going on from step %d, attempt %d", session.step, session.attempt)
    if session.world.first and not session.before:
        logger.info("no rows are held out: the run is not evaluated")
    with started(own, facts) as trackers:
        if not resumed and session.before:
            trackers.log(0, session.before)
        outcome = train(session, trackers)
        trackers.finish({"steps": session.step, "reason": outcome.reason, **outcome.metrics})
    return outcome


def _check_metrics(session: Session) -> None:
    """Raise SettingsError for a metric that the run waits for and no evaluation gives."""
    settings, known = session.settings, tuple(session.before)
    target, best = settings.stop.target, settings.output.checkpoint.best
    wanted = {
        "stop.target.metric": target.metric if target else None,
        "output.checkpoint.best": best,
    }
    for key, name in wanted.items():
        if name is not None and name not in known:
            remedy = did_you_mean(name, known) if known else "hold rows out, or leave it out"
            raise SettingsError(f"{key} = '{name}' is not measured in this run", remedy)


def _finish(session: Session, outcome: Outcome) -> dict[str, Any]:
    """Write the final model and the result."""
    session.seal()
    write_models(session)
    result = {
        "format": FORMAT,
        "output": str(session.folder),
        "steps": session.step,
        "reason": outcome.reason,
        "before": session.before,
        "metrics": outcome.metrics,
        "seconds": round(session.ledger.total_seconds, 3),
        "tokens": session.ledger.tokens,
        **session.ledger.paid.document,
    }
    if session.world.first:
        write_json(session.folder / run_record.RESULT, result)
    return result
