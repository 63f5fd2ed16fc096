"""What a profile says: how fast parts were beside the chip, and what to change first. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.training.profile.trace import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.accelerators import Chip
    from regauge.training.profile.breakdown import Breakdown, Part
    from regauge.training.settings import Training

WATCHED_MFU_FORMULA = "real tokens x FLOP a token / seconds / peak FLOP/s, of the watched process"
BYTES_A_WEIGHT = 28
"""AdamW in fp32 reads a weight, its gradient and two moments, and writes all but the gradient."""
LEAST_SHARE = 0.01
"""Of a step: less is not worth a change."""
SHOWN = 3
ENOUGH = 0.6
"""Of the peak: products that reach it are as large as they need to be."""


class Advice(NamedTuple):
    """A change that may shorten steps."""

    seconds: float
    """At most, of a step."""
    change: str
    reason: str


@dataclass(frozen=True)
class ProfileReport:
    """The profiled steps of a process."""

    times: Breakdown
    settings: Training
    chip: Chip
    peak: float | None
    """FLOP/s of the chip in the run's precision."""
    faster: tuple[str, float] | None
    """The device's preferred precision, and its peak by that of the run's."""
    bytes_per_second: float
    """Of the device's memory, measured."""
    model_flops: float
    """What the formula gives for the real tokens of all steps."""
    padding: float
    """Share of the slots that held no token."""
    weights: int
    """That this process updates."""
    processes: int

    def a_step(self, seconds: float) -> float:
        """Return a step's share of what all had."""
        return seconds / self.times.steps

    @property
    def mfu(self) -> float | None:
        """The achieved share of the peak."""
        return self.model_flops / self.times.wall / self.peak if self.peak else None

    @cached_property
    def products(self) -> tuple[float, float]:
        """Seconds of all products of matrices, and their floating-point operations."""
        parts = self.times.parts.values()
        return sum(part.products for part in parts), sum(part.flops for part in parts)

    @cached_property
    def advice(self) -> list[Advice]:
        """The changes that may save most, the first one first."""
        least = LEAST_SHARE * self.a_step(self.times.wall)
        found: dict[str, Advice] = {}
        for each in self._possible():
            if each.seconds < least:
                continue
            if same := found.get(each.change):
                reason = f"{same.reason}; {each.reason}"
                each = Advice(same.seconds + each.seconds, each.change, reason)  # noqa: PLW2901
            found[each.change] = each
        return sorted(found.values(), key=lambda each: -each.seconds)[:SHOWN]

    @property
    def sentences(self) -> Iterator[str]:
        """What is said of it in the log."""
        wall = self.times.wall
        shares = sorted(self.times.kinds.items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {seconds / wall:.0%}" for name, seconds in shares if seconds)
        mfu = "" if self.mfu is None else f"; MFU {self.mfu:.0%}"
        yield f"profile: {self.a_step(wall):.3g} s a step: {told}{mfu}"
        for each in self.advice:
            yield f"at most {each.seconds:.2g} s a step less: {each.change} ({each.reason})"

    @property
    def document(self) -> dict[str, Any]:
        """What is written of it: seconds are those of one step."""
        seconds, flops = self.products
        moved = sum(part.bytes for part in self.times.parts.values())
        return {
            "seconds_per_step": self.a_step(self.times.wall),
            "kinds": {name: self.a_step(value) for name, value in self.times.kinds.items()},
            "hidden_communication": self.a_step(self.times.hidden),
            "parts": [self._row(name, part) for name, part in self.times.parts.items()],
            "chip": {
                "name": self.chip.name,
                "flops_per_second": self.peak,
                "source": self.chip.source,
                "bytes_per_second": self.bytes_per_second,
                "bytes_source": "measured here: its memory is read and written",
            },
            "mfu": self.mfu,
            "mfu_formula": WATCHED_MFU_FORMULA,
            "padding_share": self.padding,
            "products": {
                "flops_per_second": flops / seconds if seconds else None,
                "share_of_peak": flops / seconds / self.peak if seconds and self.peak else None,
                "bytes_per_second": moved / seconds if seconds else None,
            },
            "advice": [each._asdict() for each in self.advice],
        }

    def _row(self, name: str, part: Part) -> dict[str, Any]:
        moved, seconds = part.bytes, part.products
        if name == OPTIMIZER:
            moved, seconds = BYTES_A_WEIGHT * self.weights * self.times.steps, part.seconds
        return {
            "name": name,
            "seconds": self.a_step(part.seconds),
            "forward": self.a_step(part.forward),
            "backward": self.a_step(part.backward),
            "flops": self.a_step(part.flops),
            "flops_per_second": part.flops / part.products if part.flops else None,
            "bytes_per_second": moved / seconds if moved and seconds else None,
        }

    def _possible(self) -> Iterator[Advice]:
        """Yield every change that may help, with the seconds of a step that it saves at most."""
        kinds = {name: self.a_step(value) for name, value in self.times.kinds.items()}
        yield from self._of_waiting(kinds)
        yield from self._of_computing(kinds)

    def _of_waiting(self, kinds: dict[Any, float]) -> Iterator[Advice]:
        settings = self.settings
        data, batch = settings.data, settings.batch
        ways = f"raise data.workers ({data.workers}) or data.prefetch_steps ({data.prefetch_steps})"
        yield Advice(kinds["data"], ways, "steps wait for their rows")
        if self.processes > 1:
            way = f"raise batch.rows ({batch.rows}), or use a faster link"
            reason = "processes wait for sums of gradients that no computing hides"
            yield Advice(kinds["communication"], way, reason)
        if settings.execution.compile != "blocks":
            way = 'set execution.compile = "blocks"'
        else:
            way = f"raise batch.microbatch_rows ({batch.microbatch_rows})"
        yield Advice(kinds["host"], way, "the device waits for Python")

    def _of_computing(self, kinds: dict[Any, float]) -> Iterator[Advice]:
        settings = self.settings
        execution, batch = settings.execution, settings.batch
        computing = sum(kinds.get(name, 0.0) for name in ("products", "other"))
        if execution.compile != "blocks":
            reason = "between the products, each operation reads and writes all its values"
            yield Advice(kinds.get("other", 0.0), 'set execution.compile = "blocks"', reason)
        if self.padding > 0:
            reason = f"{self.padding:.0%} of the slots hold no token"
            way = 'prepare the rows with rows.layout = "packed"'
            yield Advice(self.padding * computing, way, reason)
        if self.faster and self.faster[1] > 1:
            name, times = self.faster
            saved = kinds.get("products", 0.0) * (1 - 1 / times)
            reason = f"products are {times:.1f} times as fast in it"
            yield Advice(saved, f'set execution.precision = "{name}"', reason)
        if execution.activation_checkpointing != "none":
            again = self.a_step(sum(part.forward for part in self.times.parts.values()))
            way = 'set execution.activation_checkpointing = "none"'
            yield Advice(again, way, "activations are computed twice")
        seconds, flops = self.products
        if self.peak and seconds and flops / seconds < ENOUGH * self.peak:
            saved = self.a_step(seconds - flops / (ENOUGH * self.peak))
            way = f"raise batch.microbatch_rows ({batch.microbatch_rows})"
            reason = f"products reach {flops / seconds / self.peak:.0%} of the peak"
            yield Advice(saved, way, reason)
        once = kinds.get("optimizer", 0.0)
        way = f"raise batch.rows ({batch.rows}) and the learning rate with it"
        yield Advice(once / 2, way, "the optimizer works once a step, on any number of rows")
