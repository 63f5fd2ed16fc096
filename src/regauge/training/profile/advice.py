"""Derives rates and advice from the profiled steps' breakdown; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.packing import MAX_PACKED_SHARE
from regauge.training.profile.trace import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.accelerators import ChipPeak
    from regauge.training.profile.trace import Breakdown, PartTime
    from regauge.training.settings import TrainSettings

PROFILE_MFU_FORMULA = "real tokens x FLOP per token / seconds / peak FLOP/s, of the profiled rank"
OPTIMIZER_BYTES_PER_WEIGHT = 28
"""AdamW in fp32 reads a weight, its gradient and two moments, and writes all but the gradient."""
MIN_STEP_SHARE = 0.01
"""Smallest saving worth a change, as a fraction of a step."""
MAX_ADVICE = 3
GOOD_PEAK_SHARE = 0.6
"""Fraction of the peak reached by large matrix products."""


class Advice(NamedTuple):
    """A change that may shorten steps."""

    max_saved_seconds: float
    """Per step."""
    change: str
    """Imperative that names the settings to change."""
    reason: str


@dataclass(frozen=True)
class ProfileReport:
    """One process's profiled steps, with everything that rates and advice need."""

    breakdown: Breakdown
    settings: TrainSettings
    chip: ChipPeak
    peak: float | None
    """Peak FLOP/s per chip in the run's precision; None if unknown."""
    faster_precision: tuple[str, float] | None
    """The device's preferred precision, and its peak relative to `peak`; None if unknown."""
    bytes_per_second: float
    """Measured device memory bandwidth."""
    model_flops: float
    """FLOPs for the real tokens in all profiled steps, by the FLOP formula."""
    padding_fraction: float
    """Fraction of computed tokens that are padding."""
    num_weights: int
    num_processes: int

    def per_step(self, total: float) -> float:
        return total / self.breakdown.steps

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (`PROFILE_MFU_FORMULA`); None if the peak is unknown."""
        return self.model_flops / self.breakdown.wall / self.peak if self.peak else None

    @cached_property
    def matmuls(self) -> tuple[float, float]:
        parts = self.breakdown.by_module.values()
        return sum(part.matmul_seconds for part in parts), sum(part.flops for part in parts)

    @cached_property
    def advice(self) -> list[Advice]:
        """Changes with the largest savings, in falling order.

        Savings from the same change are added.
        """
        min_seconds = MIN_STEP_SHARE * self.per_step(self.breakdown.wall)
        by_change: dict[str, Advice] = {}
        for advice in self._find_advice():
            if advice.max_saved_seconds < min_seconds:
                continue
            seconds, reason = advice.max_saved_seconds, advice.reason
            if earlier := by_change.get(advice.change):
                seconds, reason = earlier.max_saved_seconds + seconds, f"{earlier.reason}; {reason}"
            by_change[advice.change] = Advice(seconds, advice.change, reason)
        return sorted(by_change.values(), key=lambda advice: -advice.max_saved_seconds)[:MAX_ADVICE]

    @property
    def lines(self) -> Iterator[str]:
        wall = self.breakdown.wall
        kinds = sorted(self.breakdown.by_kind.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {seconds / wall:.0%}" for name, seconds in kinds if seconds)
        mfu = "" if self.mfu is None else f"; MFU {self.mfu:.0%}"
        yield f"profile: {self.per_step(wall):.3g} s per step: {shares}{mfu}"
        for advice in self.advice:
            saving = f"saves up to {advice.max_saved_seconds:.2g} s per step"
            yield f"{saving}: {advice.change} ({advice.reason})"

    @property
    def document(self) -> dict[str, Any]:
        """Content for profile.json; all seconds are per step."""
        seconds, flops = self.matmuls
        num_bytes = sum(part.bytes for part in self.breakdown.by_module.values())
        return {
            "seconds_per_step": self.per_step(self.breakdown.wall),
            "by_kind": {
                name: self.per_step(value) for name, value in self.breakdown.by_kind.items()
            },
            "overlapped_communication": self.per_step(self.breakdown.overlapped_communication),
            "by_module": [
                self._part_row(name, part) for name, part in self.breakdown.by_module.items()
            ],
            "chip": {
                "name": self.chip.name,
                "peak_flops_per_second": self.peak,
                "peak_source": self.chip.source,
                "memory_bytes_per_second": self.bytes_per_second,
                "memory_bandwidth_source": "measured by reading and writing device memory",
            },
            "mfu": self.mfu,
            "mfu_formula": PROFILE_MFU_FORMULA,
            "padding_fraction": self.padding_fraction,
            "matmul": {
                "flops_per_second": flops / seconds if seconds else None,
                "peak_fraction": flops / seconds / self.peak if seconds and self.peak else None,
                "bytes_per_second": num_bytes / seconds if seconds else None,
            },
            "advice": [advice._asdict() for advice in self.advice],
        }

    def _part_row(self, name: str, part: PartTime) -> dict[str, Any]:
        num_bytes, seconds = part.bytes, part.matmul_seconds
        if name == OPTIMIZER:
            num_bytes = OPTIMIZER_BYTES_PER_WEIGHT * self.num_weights * self.breakdown.steps
            seconds = part.seconds
        return {
            "name": name,
            "seconds": self.per_step(part.seconds),
            "forward_seconds": self.per_step(part.forward),
            "backward_seconds": self.per_step(part.backward),
            "flops": self.per_step(part.flops),
            "flops_per_second": part.flops / part.matmul_seconds if part.flops else None,
            "bytes_per_second": num_bytes / seconds if num_bytes and seconds else None,
        }

    def _find_advice(self) -> Iterator[Advice]:
        kinds = {name: self.per_step(value) for name, value in self.breakdown.by_kind.items()}
        yield from self._find_waiting_advice(kinds)
        yield from self._find_compute_advice(kinds)

    def _find_waiting_advice(self, kinds: dict[Any, float]) -> Iterator[Advice]:
        data, batch = self.settings.data, self.settings.batch
        change = (
            f"raise data.workers ({data.workers}) or data.prefetch_steps ({data.prefetch_steps})"
        )
        yield Advice(kinds["data"], change, "steps wait for data")
        if self.num_processes > 1:
            change = f"raise batch.rows ({batch.rows}), or use a faster link"
            reason = "gradient reductions do not overlap with computation"
            yield Advice(kinds["communication"], change, reason)
        if self.settings.execution.compile != "blocks":
            change = 'set execution.compile = "blocks"'
        else:
            change = f"raise batch.microbatch_rows ({batch.microbatch_rows})"
        yield Advice(kinds["host"], change, "the device waits for Python")

    def _find_compute_advice(self, kinds: dict[Any, float]) -> Iterator[Advice]:
        execution, batch = self.settings.execution, self.settings.batch
        compute_seconds = sum(kinds.get(name, 0.0) for name in ("matmul", "other"))
        if execution.compile != "blocks":
            reason = "each eager operation reads and writes all of its values"
            yield Advice(kinds.get("other", 0.0), 'set execution.compile = "blocks"', reason)
        if self.padding_fraction > 1 - MAX_PACKED_SHARE:
            reason = f"{self.padding_fraction:.0%} of the tokens are padding"
            max_buckets = [
                config.task.max_buckets
                for config in self.settings.task_configs
                if hasattr(config.task, "max_buckets")
            ]
            change = 'prepare the rows with rows.layout = "packed"'
            if max_buckets:
                change = f"raise task.max_buckets ({max(max_buckets)})"
            yield Advice(self.padding_fraction * compute_seconds, change, reason)
        if self.faster_precision and self.faster_precision[1] > 1:
            name, speedup = self.faster_precision
            saving = kinds.get("matmul", 0.0) * (1 - 1 / speedup)
            reason = f"its matrix products are {speedup:.1f} times as fast"
            yield Advice(saving, f'set execution.precision = "{name}"', reason)
        if execution.activation_checkpointing != "none":
            forward = self.per_step(sum(part.forward for part in self.breakdown.by_module.values()))
            change = 'set execution.activation_checkpointing = "none"'
            yield Advice(forward, change, "activations are computed twice")
        seconds, flops = self.matmuls
        if self.peak and seconds and flops / seconds < GOOD_PEAK_SHARE * self.peak:
            saving = self.per_step(seconds - flops / (GOOD_PEAK_SHARE * self.peak))
            change = f"raise batch.microbatch_rows ({batch.microbatch_rows})"
            reason = f"matrix products reach {flops / seconds / self.peak:.0%} of the peak"
            yield Advice(saving, change, reason)
        change = f"raise batch.rows ({batch.rows}) and the learning rate with it"
        reason = "the optimizer runs once per step, for any number of rows"
        yield Advice(kinds.get("optimizer", 0.0) / 2, change, reason)
