"""Run metrics read from files: ledger, metrics, attempts and checkpoints.

Each file is read once, then only its new lines. A resumed run repeats steps, so ledger values may
fall; counters keep their largest value, because they must not fall.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from regauge.config.output_files import ATTEMPTS, LEDGER, METRICS
from regauge.monitoring import vocabulary
from regauge.monitoring.trackers import is_evaluation_metric
from regauge.monitoring.vocabulary import Sample
from regauge.run_folders.checkpoint_files import list_saved
from regauge.run_folders.documents import AttemptLine, LedgerLine
from regauge.run_folders.goodput import IDLE, compute_goodput
from regauge.supervision.failures import POLICIES
from regauge.system import jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.monitoring.vocabulary import Metric, RunLabels
    from regauge.run_folders.documents import Document

GAUGES: dict[str, Metric] = {
    "train/loss": vocabulary.TRAIN_LOSS,
    "train/grad_norm": vocabulary.TRAIN_GRADIENT_NORM,
    "train/learning_rate": vocabulary.TRAIN_LEARNING_RATE,
    "train/epoch": vocabulary.TRAIN_EPOCH,
    "train/tokens_per_second": vocabulary.TRAIN_TOKEN_RATE,
    "train/padding_fraction": vocabulary.TRAIN_PADDING,
    "train/mfu": vocabulary.TRAIN_MFU,
}
"""Metric in `metrics.jsonl` -> exported metric."""
SKIPPED_STEPS = "train/skipped_steps"
"""Metric in `metrics.jsonl` that counts from the start of each attempt; absent for 0."""
MAX_SCORES = 100
"""Maximum number of exported evaluation metrics."""
MAX_LEDGER_AGE_SECONDS = 60.0
"""If the last ledger line is younger, goodput does not count the time since then. The idle counter
never does: this time may be booked to another account by the next line."""


@dataclass(frozen=True)
class RankHealth:
    """What the ledger says about the ranks."""

    straggler: int | None = None
    """Rank delaying the others."""
    delay_seconds: float = 0.0
    """Delay per step."""
    is_loss_finite: bool = True


class RunFiles:
    """Reads the files in an output folder as samples."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._labels = folder, ("", "")
        self._ledger = jsonl.Tail(folder / LEDGER, LedgerLine)
        self._metrics = jsonl.Tail(folder / METRICS, jsonl.StepLine)
        self._attempts = jsonl.Tail(folder / ATTEMPTS, AttemptLine)
        self._launches: list[Document] = []
        self._written_at: float | None = None
        self._last_line: Document = {}
        self._max_seconds: dict[str, float] = {}
        self._max_tokens = [0, 0]
        self._graphs_by_attempt: dict[int, int] = {}
        self._skipped_by_attempt: dict[int, float] = {}
        self._gauges: dict[Metric, float] = {}
        self._scores: dict[str, float] = {}

    @property
    def usd(self) -> float | None:
        """Cost in dollars from the last ledger line, if known."""
        return self._last_line.get("usd")

    @property
    def health(self) -> RankHealth:
        """The straggler in the last ledger line, and whether the last loss is finite."""
        loss = self._gauges.get(vocabulary.TRAIN_LOSS, 0.0)
        straggler = self._last_line.get("straggler") or {"rank": None, "delay_seconds": 0.0}
        return RankHealth(straggler["rank"], straggler["delay_seconds"], math.isfinite(loss))

    def read_samples(self, run: RunLabels) -> Iterator[Sample]:
        """Read the new lines, and yield all samples."""
        self._labels = run
        self._launches += self._attempts.read()
        with suppress(OSError):  # before the lines, so that none is newer
            self._written_at = (self._folder / LEDGER).stat().st_mtime
        for line in self._ledger.read():
            self._add_ledger_line(line)
        for line in self._metrics.read():
            self._add_metrics(line)
        yield from self._describe_attempts()
        yield from self._describe_ledger()
        yield from self._describe_checkpoint()
        for metric, value in self._gauges.items():
            yield Sample(metric, value, self._labels)
        for name, value in self._scores.items():
            yield Sample(vocabulary.EVALUATION_SCORE, value, (*self._labels, name))

    def _add_ledger_line(self, line: Document) -> None:
        self._last_line = line
        for account, seconds in line.get("seconds", {}).items():
            self._max_seconds[account] = max(self._max_seconds.get(account, 0.0), seconds)
        tokens, padding = line.get("tokens") or 0, line.get("padding_fraction") or 0.0
        computed = round(tokens / (1 - padding)) if padding < 1 else 0
        pairs = zip(self._max_tokens, (tokens, computed), strict=True)
        self._max_tokens = [max(pair) for pair in pairs]
        if line.get("compiled_graphs") is not None:
            self._graphs_by_attempt[line["attempt"]] = line["compiled_graphs"]

    def _add_metrics(self, line: Document) -> None:
        for name, value in line.items():
            number = jsonl.parse_number(value)
            if number is None:
                continue
            if name == SKIPPED_STEPS:
                self._skipped_by_attempt[line["attempt"]] = number
            elif name in GAUGES:
                self._gauges[GAUGES[name]] = number
            elif is_evaluation_metric(name) and (
                name in self._scores or len(self._scores) < MAX_SCORES
            ):
                self._scores[name] = number

    def _describe_attempts(self) -> Iterator[Sample]:
        failures = Counter(line.get("outcome") for line in self._launches)
        for kind in POLICIES:
            yield Sample(vocabulary.RUN_FAILURES, failures[kind], (*self._labels, kind))
        planned = [line.get("planned_steps") for line in self._launches]
        if known := [steps for steps in planned if steps is not None]:
            yield Sample(vocabulary.RUN_PLANNED_STEPS, known[-1], self._labels)
        lines = (*self._launches[-1:], self._last_line)
        attempts = [line["attempt"] for line in lines if line]
        if attempts:
            yield Sample(vocabulary.RUN_ATTEMPT, max(attempts), self._labels)

    def _describe_ledger(self) -> Iterator[Sample]:
        if not self._last_line:
            return
        alive_at = max(self._written_at or 0.0, time.time() - MAX_LEDGER_AGE_SECONDS)
        goodput = compute_goodput(self._launches, self._last_line, alive_at)
        if goodput is not None and goodput.total_seconds > 0:
            yield Sample(vocabulary.RUN_GOODPUT, goodput.fraction, self._labels)
        booked = compute_goodput(self._launches, self._last_line, self._written_at)
        idle = 0.0 if booked is None else booked.seconds[IDLE]
        self._max_seconds[IDLE] = max(self._max_seconds.get(IDLE, 0.0), idle)
        for account, value in self._max_seconds.items():
            yield Sample(vocabulary.RUN_TIME, value, (*self._labels, account))
        tokens, computed_tokens = self._max_tokens
        yield Sample(vocabulary.TRAIN_TOKENS, tokens, self._labels)
        yield Sample(vocabulary.TRAIN_COMPUTED_TOKENS, computed_tokens, self._labels)
        graphs = sum(self._graphs_by_attempt.values())
        yield Sample(vocabulary.TRAIN_COMPILED_GRAPHS, graphs, self._labels)
        num_skipped = sum(self._skipped_by_attempt.values())
        yield Sample(vocabulary.TRAIN_SKIPPED_STEPS, num_skipped, self._labels)

    def _describe_checkpoint(self) -> Iterator[Sample]:
        """Yield step and time of the newest complete checkpoint."""
        for step, saved_at in islice(list_saved(self._folder), 1):
            yield Sample(vocabulary.RUN_CHECKPOINT_STEP, step, self._labels)
            yield Sample(vocabulary.RUN_CHECKPOINT_TIMESTAMP, saved_at, self._labels)
