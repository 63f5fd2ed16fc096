"""Training metrics between two log lines, and the ledger lines."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge.config.output_files import LEDGER
from regauge.data.loader import count_tokens
from regauge.models.tensors import local_shard
from regauge.monitoring.trackers import AVERAGED_STEPS, TRAIN_LOSS
from regauge.system import jsonl
from regauge.system.errors import NoProgressError
from regauge.training import optimizer as optimizers
from regauge.training.gradients import all_reduce_sum

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.accelerators import Accelerator, ChipPeak, Precision
    from regauge.system.processes import World
    from regauge.training.context import RunContext
    from regauge.training.ledger import Ledger
    from regauge.training.state import TrainState

IMPLAUSIBLE_MFU = 0.75
"""A measured peak is too low if the MFU exceeds this; it is then measured again."""
RUN_MFU_FORMULA = "real tokens/s x (6 N + 12 L h S) / (peak FLOP/s x processes)"


class MetricsWindow:
    """Sums the steps since the last log line; every process calls every method."""

    def __init__(
        self, device: torch.device, world: World, ledger: Ledger, tasks: tuple[str, ...] = ("",)
    ) -> None:
        self._device = device
        self._world = world
        self._ledger = ledger
        self._tasks = tasks
        self._local_counts = np.zeros(2, np.int64)
        self._norm = torch.zeros(())
        self.begin()

    def begin(self) -> None:
        """Start a window and its clock; the sums are sent to the device as data."""
        self._losses = [torch.zeros(2).to(self._device) for _ in self._tasks]
        self._counts = np.zeros(2, np.int64)
        self._num_steps = 0
        self._began = self._ledger.training_seconds

    def add(self, totals: Tensor, norm: Tensor, task: int = 0) -> None:
        self._losses[task] += totals
        self._norm = norm
        self._num_steps += 1

    def count(self, batches: list[dict[str, Any]]) -> None:
        for batch in batches:
            self._local_counts += count_tokens(batch)

    def flush(self, context: RunContext, state: TrainState) -> dict[str, float]:
        """Return the window's metrics, and begin the next one.

        Throughput is measured over training time, without evaluations and saves. Raises
        NoProgressError if the loss is not finite.
        """
        seconds = self._ledger.training_seconds - self._began
        self.all_reduce_counts()
        tokens, computed_tokens = self._counts.tolist()
        losses = self._mean_losses()
        metrics = {
            TRAIN_LOSS: sum(losses.values()) / len(losses) if losses else None,
            **{f"train.{name}/loss": loss for name, loss in losses.items() if name},
            AVERAGED_STEPS: self._num_steps,
            "train/learning_rate": state.lr_schedule.rate_at(state.step - 1),
            "train/grad_norm": float(self._norm),
            "train/skipped_steps": state.guard.num_skipped or None,
            "train/tokens_per_second": tokens / seconds,
            "train/padding_fraction": 1 - tokens / max(computed_tokens, 1),
            "train/epoch": state.step / context.steps_per_epoch,
            "train/mfu": context.mfu.measure(tokens / seconds),
            "train/usd": self._ledger.cost.usd,
        }
        self.begin()
        if not math.isfinite(metrics[TRAIN_LOSS] or 0.0):
            raise NoProgressError(
                f"the loss is {metrics[TRAIN_LOSS]} at step {state.step}",
                "lower optimizer.learning_rate, or resume from an earlier checkpoint",
            )
        return {name: value for name, value in metrics.items() if value is not None}

    def all_reduce_counts(self) -> None:
        """Add all processes' token counts since the last call to the ledger."""
        tokens, computed_tokens = self._local_counts.tolist()
        if self._world.size > 1:
            counts = torch.tensor([tokens, computed_tokens], device=self._device)
            tokens, computed_tokens = all_reduce_sum(counts).tolist()
        self._local_counts[:] = 0
        self._counts += (tokens, computed_tokens)
        self._ledger.tokens += tokens
        self._ledger.computed_tokens += computed_tokens

    def _mean_losses(self) -> dict[str, float]:
        """Task name -> mean loss, for tasks that had a step."""
        pairs = zip(self._tasks, (sums.tolist() for sums in self._losses), strict=True)
        return {name: loss / weight for name, (loss, weight) in pairs if weight}


class MfuMeter:
    """Model FLOPs utilization (`RUN_MFU_FORMULA`) against the chip's peak.

    An unknown chip's peak is measured when the run begins, perhaps while other programs use the
    chip. If the utilization is implausible, the peak is measured again.
    """

    def __init__(
        self, accelerator: Accelerator, precision: Precision, flops_per_token: float, processes: int
    ) -> None:
        self.chip: ChipPeak = accelerator.chip_peak(precision)
        self._accelerator = accelerator
        self._precision = precision
        self.flops_per_token = flops_per_token
        """Training FLOPs per token; for several tasks the mean over their steps."""
        self._processes = processes

    @property
    def peak(self) -> float | None:
        """Peak FLOP/s per chip in the run's precision; None if unknown."""
        return self.chip.flops_per_second.get(self._precision)

    def measure(self, tokens_per_second: float) -> float | None:
        """Return the MFU at a throughput in real tokens; None if the peak is unknown."""
        peak = self.peak
        if peak is None:
            return None
        achieved = tokens_per_second * self.flops_per_token / self._processes
        if achieved > IMPLAUSIBLE_MFU * peak and self.chip.is_measured:
            self._accelerator.clear_measurements()
            again = self._accelerator.chip_peak(self._precision)
            is_faster = again.flops_per_second[self._precision] > peak
            self.chip = again if is_faster else replace(self.chip, is_measured=False)  # confirmed
        return achieved / self.chip.flops_per_second[self._precision]


def memory_by_content(context: RunContext, state: TrainState) -> dict[str, int]:
    """Content -> bytes of this process, and the peak if it is known.

    The rest of `peak` is activations, buffers and libraries.
    """
    moments = optimizers.state_tensors(state.optimizer, state.model.masters()).values()
    peak = context.accelerator.peak_memory_bytes()
    return {
        **state.model.memory(),
        "optimizer_state": sum(local_shard(moment).nbytes for moment in moments),
        **({"peak": peak} if peak is not None else {}),
    }


def write_ledger(context: RunContext, state: TrainState) -> None:
    """Append a line to the ledger; every process calls this."""
    fields = context.hooks.ledger_fields()
    context.reporter.heartbeat.record_memory(context.accelerator.peak_memory_bytes() or 0)
    if not context.world.is_main_process:
        return
    ledger, mfu = context.ledger, context.mfu
    seconds = ledger.training_seconds
    tokens_per_second = ledger.tokens / seconds if seconds > 0 else 0.0
    document = {
        "attempt": state.attempt,
        "step": state.step,
        "seconds": {name: round(value, 6) for name, value in ledger.seconds.items()},
        "tokens": ledger.tokens,
        "compiled_graphs": context.accelerator.num_compiled_graphs(),
        **ledger.cost.document,
        "mfu": mfu.measure(tokens_per_second),
        "mfu_formula": RUN_MFU_FORMULA,
        "chip": mfu.chip.name,
        "peak_flops_per_second": mfu.peak,
        "peak_source": mfu.chip.source,
        "padding_fraction": ledger.padding_fraction,
        "straggler": None,
        **fields,
        "memory_bytes": memory_by_content(context, state),
        "device_counters": context.accelerator.counters(),
    }
    jsonl.append_line(context.folder / LEDGER, document)
