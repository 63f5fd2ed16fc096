"""What happened since the last line of metrics."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge import jsonl
from regauge.errors import NoProgressError
from regauge.log import logger
from regauge.models.tensors import local
from regauge.training import optimizer as optimizers
from regauge.training.defaults import offered
from regauge.training.gradients import summed

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.processes import World
    from regauge.training.ledger import Ledger
    from regauge.training.session import Session


SUSPECT_SHARE = 0.75
"""Of a timed peak: no run comes so near to the products that it consists of."""
MFU_FORMULA = "real tokens/s x (6 N + 12 L h S) / (peak FLOP/s x processes)"


LATE_SHARE = 0.2
"""Of a step's seconds: who is later than the others by more holds them up."""
LEAST_SECONDS = 0.02
"""Less than that is what the first process does for all."""
LINES = 2
"""Lines of metrics in a row in which it must."""


class Interval:
    """Sums the steps since the last line; every method is called by all processes."""

    def __init__(
        self, device: torch.device, ledger: Ledger, tasks: tuple[str, ...] = ("",)
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._tasks = tasks
        self._counts = np.zeros(2, np.int64)
        self._norm = torch.zeros(())
        self.begin()

    def begin(self) -> None:
        """Start an interval and its clock; sums are sent to the device as data."""
        self._totals = [torch.zeros(2).to(self._device) for _ in self._tasks]
        self._settled = np.zeros(2, np.int64)
        self._began = self._ledger.training_seconds

    def add(self, totals: Tensor, norm: Tensor, task: int = 0) -> None:
        """Add a step's [loss sum, weight] and gradient norm to those of its task."""
        self._totals[task] += totals
        self._norm = norm

    def count(self, batches: list[dict[str, Any]]) -> None:
        """Count the tokens and slots of a step's arrays."""
        for batch in batches:
            self._counts += tokens_and_slots(batch)

    def line(self, session: Session) -> dict[str, float]:
        """Return the values of a line of training, and begin the next interval.

        Tokens a second are those of training: evaluations and saves in between do not count.
        """
        seconds = self._ledger.training_seconds - self._began
        self.settle(session)
        tokens, slots = self._settled.tolist()
        losses = self._losses()
        values = {
            "train/loss": sum(losses.values()) / len(losses) if losses else None,
            **{f"train.{name}/loss": loss for name, loss in losses.items() if name},
            "train/learning_rate": session.rates.at(session.step - 1),
            "train/gradient_norm": float(self._norm),
            "train/tokens_per_second": tokens / seconds,
            "train/padding_share": 1 - tokens / max(slots, 1),
            "train/epoch": session.step / session.steps_per_epoch,
            "train/mfu": _mfu(session, tokens / seconds),
            "train/usd": session.ledger.paid.usd,
        }
        self.begin()
        if not math.isfinite(values["train/loss"] or 0.0):
            raise NoProgressError(
                f"the loss is {values['train/loss']} at step {session.step}",
                "lower optimizer.learning_rate, or go on from an earlier checkpoint",
            )
        return {name: value for name, value in values.items() if value is not None}

    def _losses(self) -> dict[str, float]:
        """Return the mean losses by the names of the tasks that had a step."""
        pairs = zip(self._tasks, (each.tolist() for each in self._totals), strict=True)
        return {name: loss / weight for name, (loss, weight) in pairs if weight}

    def settle(self, session: Session) -> None:
        """Book the tokens and slots of all processes since the last call."""
        tokens, slots = self._counts.tolist()
        if session.world.size > 1:
            counts = torch.tensor([tokens, slots], device=self._device)
            tokens, slots = summed(counts).tolist()
        self._counts[:] = 0
        self._settled += (tokens, slots)
        session.ledger.tokens += tokens
        session.ledger.slots += slots


def _mfu(session: Session, tokens_per_second: float) -> float | None:
    """Return the achieved share of the peak; one that seems to be timed too low is timed again.

    It was timed when the run began, perhaps beside a compiler or another run.
    """
    precision = session.settings.execution.precision
    peak = session.chip.flops_per_second.get(precision)
    if peak is None:
        return None
    achieved = tokens_per_second * session.flops_per_token / session.world.size
    if achieved > SUSPECT_SHARE * peak and session.chip.measured:
        session.accelerator.measure_again()
        again = session.accelerator.chip(offered(session.accelerator, precision))
        faster = again.flops_per_second[precision] > peak
        session.chip = again if faster else replace(session.chip, measured=False)  # it is so
    return achieved / session.chip.flops_per_second[precision]


def tokens_and_slots(batch: dict[str, Any]) -> tuple[int, int]:
    """Return the real tokens and all slots of a batch of arrays."""
    segments = batch["segments"]
    return int(np.count_nonzero(segments)), int(segments.size)


def memory(session: Session) -> dict[str, int]:
    """Return the bytes of this process by part, and the most it had at a time where that is known.

    What is in `peak` and in no other part is activations, buffers and the libraries.
    """
    moments = optimizers.tensors(session.optimizer, session.prepared.masters()).values()
    peak = session.accelerator.peak_memory_bytes()
    return {
        **session.prepared.held(),
        "moments": sum(local(each).nbytes for each in moments),
        **({"peak": peak} if peak is not None else {}),
    }


def write_ledger(session: Session) -> None:
    """Append where time and money went so far to ledger.jsonl; all processes call this."""
    slowest = session.pace.look()
    if not session.world.first:
        return
    ledger = session.ledger
    spent = ledger.training_seconds
    rate = ledger.tokens / spent if spent > 0 else 0.0
    document = {
        "attempt": session.attempt,
        "step": session.step,
        "seconds": {name: round(value, 6) for name, value in ledger.seconds.items()},
        "tokens": ledger.tokens,
        **ledger.paid.document,
        "mfu": _mfu(session, rate),
        "mfu_formula": MFU_FORMULA,
        "chip": session.chip.name,
        "peak_flops_per_second": session.chip.flops_per_second.get(
            session.settings.execution.precision
        ),
        "peak_source": session.chip.source,
        "padding_share": ledger.padding_share,
        "slowest": slowest,
        "memory": memory(session),
        "device": session.accelerator.counters(),
    }
    jsonl.append(session.folder / "ledger.jsonl", document)


class Pace:
    """The seconds of each step before this process waits for others; all processes call `look`."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._began: float | None = None
        self._own = 0.0
        self._steps = 0
        self._since = time.perf_counter()
        self._suspect: int | None = None
        self._lines = 0

    def begin(self) -> None:
        """Begin a step, before its batches are there."""
        self._began = time.perf_counter()

    def arrive(self) -> None:
        """Note that this process comes to what it may wait in; only the first time in a step."""
        if self._began is not None:
            self._own += time.perf_counter() - self._began
            self._steps += 1
            self._began = None

    def look(self) -> dict[str, float] | None:
        """Return the process that holds the others up since the last look; None for none.

        `{"rank": 1, "seconds": 0.5}`: by how much it comes later in each step.
        """
        now, steps = time.perf_counter(), max(self._steps, 1)
        took, own = (now - self._since) / steps, self._own / steps
        self._since, self._own, self._steps = now, 0.0, 0
        if self._world.size == 1:
            return None
        everyone = torch.zeros(self._world.size)
        everyone[self._world.rank] = own
        seconds = summed(everyone.to(self._device)).tolist()
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(seconds[:slowest] + seconds[slowest + 1 :])
        late = seconds[slowest] - others
        if late <= max(LATE_SHARE * took, LEAST_SECONDS):
            self._suspect = None
            return None
        self._lines = self._lines + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        if self._lines < LINES:
            return None
        if self._lines == LINES and self._world.first:
            logger.warning(
                "process %d holds the others up: %.2f s a step before it first waits, they %.2f s",
                slowest,
                seconds[slowest],
                others,
            )
        return {"rank": slowest, "seconds": round(late, 6)}
