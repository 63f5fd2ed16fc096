"""How values read on one line: the console's numbers, names and the time that is left."""

from __future__ import annotations

import math
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WINDOW = 20
"""Lines over which the pace is measured: long enough to hold evaluations and saves."""


class Pace:
    """How far the run is, how fast it goes and how long it will take; it has no clock itself."""

    def __init__(self, total_steps: int | None, step: int) -> None:
        self.total_steps = total_steps
        self.step = step
        self._seen: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def seen(self, step: int, now: float) -> None:
        """Take note that a step was over at a time, in seconds of any clock."""
        self.step = step
        if not self._seen or self._seen[-1][0] < step:
            self._seen.append((step, now))

    def progress(self) -> str:
        """Return `step/total`, or the step alone where no total is known."""
        return f"{self.step}" if self.total_steps is None else f"{self.step}/{self.total_steps}"

    def seconds_left(self) -> float | None:
        """Return the seconds to the last step; None before two lines have been seen.

        The first line only starts the clock: what comes before it holds the compilation.
        """
        if self.total_steps is None or len(self._seen) < 2:  # noqa: PLR2004  (two make a pace)
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return max(self.total_steps - self.step, 0) * (ended - began) / (last - first)

    def eta(self) -> str:
        """Return `  eta h:mm:ss`, or nothing while it cannot be told."""
        left = self.seconds_left()
        return "" if left is None else f"  eta {duration(left)}"


def training(values: Mapping[str, float]) -> str:
    """Return the words of a line of training, `loss 3.214  lr 4.8e-04  12,345 tok/s`.

    The losses of several tasks stand behind their mean, in brackets.
    """
    known = {name.removeprefix("train/"): value for name, value in values.items()}
    words = [word(known[name]) for name, word in _TRAINING.items() if name in known]
    tasks = [
        f"{name.removeprefix('train.').removesuffix('/loss')} {number(value)}"
        for name, value in values.items()
        if name.startswith("train.")
    ]
    return "  ".join([*words[:1], *([f"({', '.join(tasks)})"] if tasks else []), *words[1:]])


def evaluation(values: Mapping[str, float]) -> str:
    """Return the words of an evaluation, `heldout: loss 2.914  recall@10 0.787`."""
    ordered = groupby(values.items(), key=lambda item: item[0].rpartition("/")[0])
    return "  ".join(
        (f"{split}: " if split else "")
        + "  ".join(f"{name.rpartition('/')[2]} {number(value)}" for name, value in items)
        for split, items in ordered
    )


def number(value: float) -> str:
    """Return a value with three decimals, or four digits where that says nothing or too much."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.3f}"
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:,.4g}"  # noqa: PLR2004


def dollars(value: float) -> str:
    """Return an amount in cents, or finer below a dollar."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def duration(seconds: float) -> str:
    """Return `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


_TRAINING: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {number(value)}",
    "learning_rate": lambda value: f"lr {value:.1e}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "usd": dollars,
}
"""The values of a line of training that the console shows; the other trackers have them all."""
