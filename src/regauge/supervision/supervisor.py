"""A run over as many attempts as it takes to end it.

The supervisor computes nothing and imports no torch. Every attempt has new processes and a new
meeting place. What ends one is written to `failures/`, and decides whether the run starts again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import accelerators
from regauge.errors import ChildError, PreflightError
from regauge.health.examination import examine
from regauge.health.findings import require
from regauge.health.machine import check_machine
from regauge.log import logger
from regauge.supervision.attempt import FAILURES, Attempt
from regauge.supervision.chaos import RECORD
from regauge.supervision.failures import POLICIES, Failure
from regauge.supervision.owner import Owner
from regauge.supervision.scratch import scratch
from regauge.supervision.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.training.settings import Training

LONGEST_WAIT_SECONDS = 60.0
SUSPECT = ("device", "network", "hang")
"""Kinds of failure after which devices and network are checked again."""


def supervise(settings: Training, size: int, chaos: str | None = None) -> None:
    """Run `size` processes of a run until it ends; raises ChildError where it ends by a failure."""
    folder = Path(settings.output.folder)
    limit = settings.execution.supervision.attempts_at_a_step
    failures: list[Failure] = []
    with Owner(folder) as owner, scratch() as place, Signals() as signals:
        while True:
            require(check_machine(folder, settings.output.checkpoint.root))
            one = Attempt(
                settings,
                size,
                place,
                chaos,
                preflight=_checks(settings, failures),
                token=owner.admit(),
                signals=signals,
            )
            failure = one.run()
            if failure is not None and failure.kind == "preflight":
                failure = _examined(failure, settings, size, chaos)
            one.note(failure)
            if failure is None:
                return
            failures.append(failure)
            wait = _wait_before_next(failures, limit)
            if wait is None or signals.told:
                raise _last_word(failures, settings)
            when = f"in {wait:g} s" if wait else "now"
            logger.warning("%s; starting again %s", _told(failure), when)
            signals.sleep(wait)


def _checks(settings: Training, failures: list[Failure]) -> bool:
    """Return whether the processes of the next attempt check their devices and each other."""
    if settings.execution.supervision.preflight == "brief":
        return False
    return not failures or failures[-1].kind in SUSPECT


def _examined(failure: Failure, settings: Training, size: int, chaos: str | None) -> Failure:
    """Return a failed check with who is at fault, as an examination of all devices finds it."""
    accelerator = settings.accelerator or accelerators.choose()[0]
    record = Path(settings.output.folder) / RECORD
    found = examine(accelerator, size, chaos=chaos, record=record)
    try:
        require(found.findings)
    except PreflightError as error:
        rows = [finding.row() for finding in found.findings if not finding.ok]
        return replace(failure, problem=str(error), evidence={**failure.evidence, "found": rows})
    return failure


def _wait_before_next(failures: list[Failure], limit: int) -> float | None:
    """Return the seconds before the next attempt; None where there is none."""
    last = failures[-1]
    if not last.policy.retried:
        return None
    if last.policy.counted and _in_a_row(failures, last.same) >= (last.policy.most or limit):
        return None
    in_a_row = _in_a_row(failures, lambda failure: failure.kind == last.kind)
    return min(LONGEST_WAIT_SECONDS, math.ldexp(last.policy.wait_seconds, in_a_row - 1))


def _in_a_row(failures: list[Failure], alike: Callable[[Failure], bool]) -> int:
    """Return how many of the last failures are alike."""
    return sum(1 for _ in takewhile(alike, reversed(failures)))


def _last_word(failures: list[Failure], settings: Training) -> ChildError:
    error = ChildError(*_summary(failures, settings))
    if trace := failures[-1].evidence.get("traceback"):
        error.add_note("\n".join([f"In process {failures[-1].rank}:", *trace]))
    return error


def _summary(failures: list[Failure], settings: Training) -> tuple[int, str]:
    """Return the exit code and the line for failures that the run does not start again after."""
    last, folder = failures[-1], Path(settings.output.folder)
    policy, limit = last.policy, settings.execution.supervision.attempts_at_a_step
    if last.kind == "memory":
        rows = max(1, settings.batch.microbatch_rows // 2)
        remedy = f"try batch.microbatch_rows = {rows}, or execution.activation_checkpointing"
        return policy.code, f"{last.problem} (process {last.rank}); {remedy}"
    if not policy.retried or policy.most is not None:
        return policy.code, last.problem
    same = _in_a_row(failures, last.same)
    if policy.counted and same >= limit:
        line = f"{same} attempts failed at step {last.step} in the same way: {last.problem}"
        return POLICIES["progress"].code, f"{line}; see {folder / FAILURES}"
    return policy.code, f"{last.problem}; see {folder / FAILURES}"


def _told(failure: Failure) -> str:
    who = f"process {failure.rank}"
    named = failure.problem if who in failure.problem else f"{who}: {failure.problem}"
    return f"{named}, after step {failure.step}"
