"""Faults that are injected on purpose, as a plan says: for tests, and for trust in a new cluster.

A plan is data (TOML or JSON) and does nothing without `--chaos FILE`. Before a fault strikes it is
written to `chaos.jsonl` in the output folder, so that what was survived can be proved.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from regauge import config, jsonl
from regauge.config import Settings

if TYPE_CHECKING:
    from collections.abc import Callable


RECORD = "chaos.jsonl"
SPIKE = 1000.0

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
    "learning-rate",
    "bf16-gradients",
    "dropout-seed",
    "attention-mask",
    "row-shift",
    "gelu",
]
MISTAKES: tuple[Kind, ...] = (
    "learning-rate",
    "bf16-gradients",
    "dropout-seed",
    "attention-mask",
    "row-shift",
    "gelu",
)
"""Those of a training stack: the run goes on, to another result."""


MOMENT = "order"


class Fault(Settings):
    """One fault: who is hit, when, and by what."""

    kind: Kind
    """`kill`, `stop` and `terminate` are signals; `leave` is an exit with code 0; `block` holds the
    interpreter; `flip` turns a bit of a weight; `corrupt` changes what a check sends or computes;
    `fail` raises the error of a full disk. Deliberate bugs are in
    `training/divergence/inject.py`."""
    at: str = "step"
    """Where: `step`, before its batches are computed; `gradients`, before they are used; `data`;
    `evaluate`; a moment of a save, as `save:staged`; or of a check, as `preflight:collective`."""
    rank: int = Field(default=0, ge=-1)
    """The process that is hit; -1 is every one."""
    step: int = Field(ge=0)
    """Steps that are done at that moment."""
    attempt: int = Field(default=1, ge=0)
    """The attempt that is hit, counted from 1; 0 is every one."""
    count: int = Field(default=1, ge=1)
    """Steps, one after the other, in which it strikes."""
    seconds: float = Field(default=0.5, ge=0)
    """How long a `sleep` lasts."""
    layer: int = Field(default=0, ge=0)
    """The repeated block that `gelu` hits."""


class Plan(Settings):
    """The faults of a run."""

    fault: tuple[Fault, ...]
    """Each of them."""


def read(path: Path) -> Plan:
    """Return a plan; raises SettingsError with the key that is wrong."""
    return config.build(Plan, config.read(path), (), str(path))


class Chaos:
    """The faults that may hit this process."""

    def __init__(self, plan: Plan | None, record: Path, rank: int, attempt: int) -> None:
        mine = plan.fault if plan else ()
        self._faults = [
            fault for fault in mine if fault.rank in (-1, rank) and fault.attempt in (0, attempt)
        ]
        self._record, self._attempt = record, attempt
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
            "memory": _exhaust,
            "file-limit": _limit_files,
            "fail": _fail,
        }

    @classmethod
    def of(cls, file: str | None, record: Path, rank: int, attempt: int) -> Self:
        """Return the faults of a plan's file; none where there is no file."""
        return cls(read(Path(file)) if file else None, record, rank, attempt)

    def strike(self, at: str, step: int) -> list[Fault]:
        """Let every fault strike that is due; return those that the caller must carry out."""
        due = [
            fault
            for fault in self._faults
            if fault.at == at and fault.step <= step < fault.step + fault.count
        ]
        left = []
        for fault in due:
            document = {**fault.model_dump(), "attempt": self._attempt, "pid": os.getpid()}
            jsonl.append(self._record, {**document, "struck_at_step": step, "time": time.time()})
            effect = self._effects.get(fault.kind)
            if effect is None:
                left.append(fault)
            else:
                effect(fault)
        return left

    def gradient_factor(self, step: int) -> float:
        """Return what this process's gradients are multiplied by in a step: 1, or a fault."""
        kinds = {fault.kind for fault in self.strike("gradients", step)}
        if "nan" in kinds:
            return float("nan")
        return SPIKE if "spike" in kinds else 1.0

    def flips(self, step: int) -> bool:
        """Return whether a bit of this process's weights turns after a step."""
        return any(fault.kind == "flip" for fault in self.strike("weights", step))


def _raise(_: Fault) -> None:
    raise RuntimeError("injected by the fault plan")


def _fail(_: Fault) -> None:
    raise OSError(28, "No space left on device (injected)")


def _block(_: Fault) -> None:
    """Hold the interpreter's lock in a thread: a regular expression that backtracks for ever."""
    threading.Thread(target=lambda: re.match(r"(a+)+$", "a" * 60 + "b"), daemon=True).start()
    time.sleep(0.1)


def _skip_collective(_: Fault) -> None:
    """Leave this process out of its next all-reduce."""
    import torch.distributed as dist

    whole = dist.all_reduce

    class Nothing:
        def wait(self) -> None:
            """Return at once."""

    def skipped(*_: Any, async_op: bool = False, **__: Any) -> Nothing | None:
        dist.all_reduce = whole
        return Nothing() if async_op else None

    dist.all_reduce = skipped


def _exhaust(_: Fault) -> None:
    """Ask for more memory than a limit of the process's address space leaves."""
    import torch

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_AS, (4 * used, resource.RLIM_INFINITY))
    torch.ones(8 * used, dtype=torch.uint8)


def _limit_files(_: Fault) -> None:
    """Let every file of this process end at 64 KiB, as on a full disk.

    Python ignores the signal that comes with it.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))


def shift(chaos: Chaos, step: int) -> int:
    """Return how many rows later than in the order a step's batch begins."""
    return sum(each.kind == "row-shift" for each in chaos.strike(MOMENT, step))
