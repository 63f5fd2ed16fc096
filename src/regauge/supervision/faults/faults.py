"""Fault injection: a fault plan, and the hook that triggers the faults in a process.

A plan is data (TOML or JSON) and does nothing without `--chaos FILE`. Each fault is appended to
`faults.jsonl` in the output folder before it is triggered, as proof of what the run survived.

    [[fault]]
    kind = "kill"
    rank = 1
    step = 12
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

from pydantic import Field

from regauge import config
from regauge.config import Settings
from regauge.system import jsonl
from regauge.system.hooks import Hook
from regauge.system.json_files import DocumentShape
from regauge.system.jsonl import Count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from regauge.accelerators import Batch
    from regauge.supervision.faults.bugs import LearningRateSchedule

SPIKE_FACTOR = 1000.0
FLIPPED_BIT = 20

Bug = Literal[
    "learning-rate", "bf16-gradients", "dropout-seed", "attention-mask", "row-shift", "gelu"
]
BUGS: tuple[Bug, ...] = get_args(Bug)
"""Deliberate training bugs: the run continues, to another result."""
Kind = Literal[
    "kill",
    "raise",
    "segfault",
    "abort",
    "leave",
    "stop",
    "block",
    "skip-collective",
    "sleep",
    "terminate",
    "nan",
    "spike",
    "flip",
    "corrupt",
    "memory",
    "file-limit",
    "fail",
    Bug,
]


class TrainedModel(Protocol):
    """A model as wrapped by a strategy."""

    module: nn.Module

    def replicated_tensors(self) -> list[Tensor]:
        """Return the tensors that are equal on all processes."""
        ...


class Fault(Settings):
    """One fault: which process it hits, when, and how."""

    kind: Kind
    """`kill`, `stop` and `terminate` are signals; `leave` is an exit with code 0; `block` holds the
    interpreter lock; `flip` changes one weight bit; `corrupt` changes the data of a check;
    `fail` raises a full disk error. `bugs.py` describes the deliberate bugs."""
    at: str = "step"
    """The point: `step` (before its batches are computed), `gradients` (before they are used),
    `data`, `evaluate`, a point in a save such as `save:staged`, or in a check such as
    `preflight:collective`."""
    rank: int = Field(default=0, ge=-1)
    """Affected rank; -1 for every rank."""
    step: int = Field(ge=0)
    """Number of finished steps when the fault is triggered."""
    attempt: int = Field(default=1, ge=0)
    """Affected attempt, counted from 1; 0 for every attempt."""
    count: int = Field(default=1, ge=1)
    """How many consecutive steps trigger the fault."""
    seconds: float = Field(default=0.5, ge=0)
    """Duration of a `sleep`."""
    layer: int = Field(default=0, ge=0)
    """Block changed by `gelu`."""


class FaultLine(DocumentShape):
    kind: str
    at: str
    rank: int
    layer: int
    triggered_at_step: Count


class Plan(Settings):
    """A run's faults."""

    fault: tuple[Fault, ...]
    """All faults, in any order."""


def read_plan(path: Path) -> Plan:
    """Return a plan; raises SettingsError with the wrong key."""
    return config.build(Plan, config.read(path), (), str(path))


class FaultInjector(Hook):
    """Triggers a plan's faults for this process."""

    def __init__(self, plan: Plan, record: Path | None, rank: int, attempt: int) -> None:
        self._faults = [
            fault
            for fault in plan.fault
            if fault.rank in (-1, rank) and fault.attempt in (0, attempt)
        ]
        self._record, self._attempt = record, attempt
        self._model: TrainedModel | None = None
        self._schedule: LearningRateSchedule | None = None
        self._effects: dict[str, Callable[[Fault], Any]] = {
            "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
            "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
            "raise": _raise,
            "segfault": lambda _: ctypes.string_at(1),
            "abort": lambda _: os.abort(),
            "leave": lambda _: os._exit(0),
            "block": _block,
            "skip-collective": _skip_collective,
            "sleep": lambda fault: time.sleep(fault.seconds),
            "memory": _exhaust_memory,
            "file-limit": _limit_files,
            "fail": _fail,
        }

    @classmethod
    def read(cls, path: str, record: Path | None, rank: int, attempt: int = 1) -> Self:
        """Build an injector from a plan file."""
        return cls(read_plan(Path(path)), record, rank, attempt)

    def attach(self, model: TrainedModel, schedule: LearningRateSchedule) -> None:
        """Set the model and learning rate schedule for `flip` and the bugs to change."""
        self._model, self._schedule = model, schedule

    def trigger(self, point: str, step: int) -> list[Fault]:
        """Trigger every fault that is due; return those for the caller to simulate."""
        due = [
            fault
            for fault in self._faults
            if fault.at == point and fault.step <= step < fault.step + fault.count
        ]
        left = []
        for fault in due:
            document = {**fault.model_dump(), "attempt": self._attempt, "pid": os.getpid()}
            document |= {"triggered_at_step": step, "triggered_at": time.time()}
            if self._record is not None:
                jsonl.append_line(self._record, document)
            effect = self._effects.get(fault.kind)
            if effect is None:
                left.append(fault)
            else:
                effect(fault)
        return left

    def inject(self, point: str) -> Sequence[str]:
        """Return the fault kinds for a health check to simulate: an `Inject`."""
        return [fault.kind for fault in self.trigger(point, 0)]

    def before_batches(self, step: int) -> None:
        self.trigger("data", step)

    def row_offset(self, step: int) -> int:
        return sum(fault.kind == "row-shift" for fault in self.trigger("order", step))

    @contextmanager
    def around_step(self, step: int, batches: list[Batch]) -> Iterator[None]:
        from regauge.supervision.faults.bugs import inject_bugs

        faults = self.trigger("step", step)
        if not faults or self._model is None or self._schedule is None:
            yield
            return
        with inject_bugs(self._model.module, self._schedule, batches, faults):
            yield

    def gradient_factor(self, step: int) -> float:
        kinds = {fault.kind for fault in self.trigger("gradients", step)}
        if "nan" in kinds:
            return float("nan")
        return SPIKE_FACTOR if "spike" in kinds else 1.0

    def after_step(self, step: int) -> None:
        flips = any(fault.kind == "flip" for fault in self.trigger("weights", step))
        if flips and self._model is not None:
            _flip_bit(next(iter(self._model.replicated_tensors())))

    def before_evaluation(self, step: int) -> None:
        self.trigger("evaluate", step)

    def during_save(self, point: str, step: int) -> None:
        self.trigger(f"save:{point}", step)


def _flip_bit(weight: Tensor) -> None:
    """Flip one bit, as faulty memory does."""
    from regauge.models.tensors import INTEGERS

    first = weight.detach().view(-1)[:1]
    words = first.view(INTEGERS[weight.element_size()])
    words.bitwise_xor_(words.new_ones(()) << FLIPPED_BIT)


def _raise(_: Fault) -> None:
    raise RuntimeError("injected by the fault plan")


def _fail(_: Fault) -> None:
    raise OSError(28, "No space left on device (injected)")


def _block(_: Fault) -> None:
    """Hold the interpreter lock in a thread, with an endlessly backtracking regular expression."""
    threading.Thread(target=lambda: re.match(r"(a+)+$", "a" * 60 + "b"), daemon=True).start()
    time.sleep(0.1)


def _skip_collective(_: Fault) -> None:
    """Leave this process out of its next all-reduce."""
    import torch.distributed as dist

    original = dist.all_reduce

    class Nothing:
        def wait(self) -> None:
            """Return at once."""

    def skip(*_: Any, async_op: bool = False, **__: Any) -> Nothing | None:
        dist.all_reduce = original
        return Nothing() if async_op else None

    dist.all_reduce = skip


def _exhaust_memory(_: Fault) -> None:
    """Request more memory than the limit on the process's address space leaves."""
    import torch

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_AS, (4 * used, resource.RLIM_INFINITY))
    torch.ones(8 * used, dtype=torch.uint8)


def _limit_files(_: Fault) -> None:
    """Cut this process's files off at 64 KiB, as on a full disk.

    Python ignores the accompanying signal.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
