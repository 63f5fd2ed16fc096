"""A job from its first look at the source to its sums: what it is of, who works, what it costs."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import config, jsonl
from regauge.artifacts import artifact as artifacts
from regauge.artifacts.postprocess import check
from regauge.errors import LimitReachedError, PreemptedError, SettingsError
from regauge.log import logger
from regauge.planning.catalog import rate
from regauge.prediction import fields
from regauge.prediction.job import (
    QUARANTINE,
    Job,
    facts_of,
    place_of,
    portable_facts,
    sums,
    write_result,
)
from regauge.prediction.progress import Pace
from regauge.prediction.shard_queue import Tickets
from regauge.prediction.worker import ASIDE, Order
from regauge.supervision.cost_meter import ATTEMPTS, Meter, last_seen, paid, say_seen
from regauge.supervision.folder_lock import Owner
from regauge.supervision.signals import Caught

if TYPE_CHECKING:
    from regauge.artifacts.artifact import Artifact
    from regauge.planning.catalog import Rate
    from regauge.prediction.settings import Predicting


@dataclass(frozen=True)
class Planned:
    """A job that can begin."""

    artifact: Artifact
    job: Job
    order: Order


def planned(settings: Predicting) -> Planned:
    """Return the job of settings: what is there to be answered, and which fields it has.

    Raises SettingsError for a field that no record has, or for an artifact that reads no texts,
    and what the source and the artifact raise.
    """
    artifact = artifacts.opened(settings.artifact)
    program = artifact.manifest.program
    if program.reads is None:
        raise SettingsError(
            f"{settings.artifact} reads no texts", "load it in Python: regauge.load"
        )
    program.reads.before(settings.predict.prompt)
    pieces = settings.source.pieces()
    kinds = fields.look(settings.source, pieces)
    texts = fields.answered(settings, program.fields.texts, kinds)
    kept = fields.beside(settings, texts, kinds)
    check(program, settings.output, list(kept))
    job = Job(settings, pieces, place_of(settings, os.environ))
    _check_limit(settings)
    order = Order(config.dump(settings), pieces, texts, kept, job.place)
    return Planned(artifact, job, order)


def check_answers(work: Planned) -> None:
    """Raise DataError for an output folder with other answers, or with anything else."""
    facts = portable_facts(work.job.settings, work.artifact, work.job.pieces, work.order.kept)
    work.job.check({**facts, "texts": list(work.order.texts)})


def predict(settings: Predicting) -> dict[str, Any]:
    """Answer all records of this job's share that are not answered yet; return the sums.

    Raises LimitReachedError at the dollars that may be spent, PreemptedError where it is told to
    stop, and what the parts of the work raise.
    """
    taken = time.time()
    found = planned(settings)
    job = found.job
    facts = facts_of(settings, found.artifact, job.pieces, found.order.kept)
    job.begin({**facts, "texts": list(found.order.texts)})
    with ExitStack() as stack:
        stack.enter_context(Owner(job.own))
        _clear(job)
        done = job.finished()
        tickets = Tickets(job.share, {shard: line["last"] for shard, line in done.items()})
        meter = _metered(job, taken)
        pace = Pace(job, done, meter)
        stop = stack.enter_context(_Stop())
        if job.place.count > 1:
            logger.info("job %d of %d: %d pieces", job.place.index, job.place.count, len(job.share))
        if job.place.count > len(job.pieces):
            few = "%d jobs share %d pieces, and some have nothing to do: see source.piece_mib"
            logger.warning(few, job.place.count, len(job.pieces))
        if tickets.left:
            _work(found, tickets, pace, stop)
        told = pace.paid()
        ended = {"began": taken, **meter.line, "ended": time.time(), **told}
        jsonl.append(job.own / ATTEMPTS, ended)
        answer = {"output": settings.output.folder, **sums(job.finished()), **pace.cost()}
        write_result(job)
    if answer["quarantined"]:
        remark = "%d records have no answer: they are in %s, each with its reason"
        logger.warning(remark, answer["quarantined"], job.folder / QUARANTINE)
    return answer


def _work(found: Planned, tickets: Tickets, pace: Pace, stop: _Stop) -> None:
    """Have shards computed and write their lines, until none is left or something says stop."""
    job = found.job
    limit = job.settings.predict.max_usd
    executor = job.settings.execution.executor
    with pace:
        for event in executor.run(found.order, tickets):
            if event["event"] == "ready" and not pace.begun:
                kept = ", ".join(found.order.kept) or "nothing"
                texts = " and ".join(found.order.texts)
                logger.info("answers to '%s', and beside them: %s", texts, kept)
            if event["event"] == "shard":
                job.commit({name: value for name, value in event.items() if name != "event"})
            pace.hear(event)
            say_seen(job.own)
            if stop.told:
                raise PreemptedError("told to stop", "run it again: it goes on where it is")
            if limit is not None and (pace.usd or 0) >= limit:
                problem = f"{pace.usd:.4f} USD are spent of at most {limit:g}"
                raise LimitReachedError(problem, "raise predict.max_usd: it goes on where it is")


class _Stop(Caught):
    """Notes that somebody told this process to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.told = False

    def caught(self, number: int) -> None:
        """Note a signal."""
        del number
        self.told = True


def _metered(job: Job, taken: float) -> Meter:
    """Return what counts on from what earlier commands have paid; it says that this one begins."""
    known = _rate(job.settings)
    before, since = paid(job.own, taken, last_seen(job.own))
    now = time.time()
    meter = Meter(
        before,
        time.monotonic() - max(0.0, now - since),
        machines=1,
        devices=1,
        usd_per_hour=None if known is None else known.usd_per_hour,
    )
    jsonl.append(job.own / ATTEMPTS, {"began": since, **meter.line})
    return meter


def _rate(settings: Predicting) -> Rate | None:
    price = settings.execution.price
    return rate(price) if price is not None else None


def _check_limit(settings: Predicting) -> None:
    """Raise SettingsError for a limit of dollars where nobody knows what a second costs."""
    if settings.predict.max_usd is not None and _rate(settings) is None:
        problem = "predict.max_usd is a limit, and the price of this machine is unknown"
        raise SettingsError(problem, "set execution.price.usd_per_hour or execution.price.instance")


def _clear(job: Job) -> None:
    """Remove what a killed command left half written."""
    shutil.rmtree(job.own / ASIDE, ignore_errors=True)
    (job.own / ASIDE).mkdir()
