"""What can end an attempt, what it is called, and whether the run starts again after it.

No torch here: errors are known by the names of their classes and by what they say.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import socket
import sys
import traceback
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from regauge.errors import (
    DataError,
    DeviceError,
    LimitReachedError,
    NoCheckpointError,
    NoProgressError,
    PreemptedError,
    PreflightError,
    RegaugeError,
    RollBackError,
    SettingsError,
    TransientError,
)

MOST = 5


@dataclass(frozen=True)
class Policy:
    """What follows a kind of failure."""

    code: int
    """The exit code where the run does not start again."""
    retried: bool = False
    """Whether the run starts again."""
    counted: bool = True
    """Whether attempts that fail so at the same step are counted."""
    most: int | None = None
    """Attempts that may fail so at the same step; None where the run's settings say it."""
    advice: str = ""
    """What to do where the run did not survive it and its line does not say."""
    wait_seconds: float = 0.0
    """First wait before it starts again; doubled each time in a row."""


AGAIN = "the same command goes on; its stacks and last log lines are below"
LOOK = "look at that device with `regauge doctor`, then run the same command"
POLICIES = {
    "settings": Policy(2),
    "user": Policy(64, retried=True, most=2),
    "data": Policy(64),
    "memory": Policy(64),
    "checkpoint": Policy(65),
    "progress": Policy(66),
    "values": Policy(66, retried=True, most=2),
    "limit": Policy(67),
    "preempted": Policy(143, counted=False),
    "device": Policy(75, retried=True, advice=LOOK),
    "preflight": Policy(76),
    "process": Policy(75, retried=True, advice=AGAIN),
    "hang": Policy(75, retried=True, advice=AGAIN),
    "storage": Policy(75, retried=True, wait_seconds=1.0, advice="make room, or mend the storage"),
    "network": Policy(75, retried=True, counted=False, wait_seconds=1.0, advice=AGAIN),
    "node": Policy(75, retried=True, counted=False, advice=AGAIN),
    "resized": Policy(75, retried=True, counted=False, advice=AGAIN),
}
"""By kind: a `process` died by a signal or left early, one of `memory` ran out of it; `values` must
not get into the weights; a `node` was lost or left, and where `resized`, another one came."""
TOGETHER = {0, 67, 143}
"""Codes with which all processes of a run end together."""
ERRORS: dict[type[RegaugeError], str] = {
    SettingsError: "settings",
    DataError: "data",
    NoCheckpointError: "checkpoint",
    RollBackError: "values",
    NoProgressError: "progress",
    LimitReachedError: "limit",
    PreemptedError: "preempted",
    PreflightError: "preflight",
    DeviceError: "device",
    TransientError: "storage",
}
STORAGE = {errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.EFBIG}
MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
NETWORK = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket",
    "timed out waiting",
    "gloo/transport",
)
NETWORK_CLASSES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
DEVICE_CLASSES = {"AcceleratorError"}
TRACE_LINES = 40


@dataclass(frozen=True)
class Failure:
    """How one process ended an attempt."""

    kind: str
    rank: int
    step: int
    problem: str
    """One line."""
    host: str = field(default_factory=socket.gethostname)
    phase: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Exit code or signal, traceback, stacks of all processes."""

    @property
    def policy(self) -> Policy:
        """What follows."""
        return POLICIES[self.kind]

    @property
    def together(self) -> bool:
        """Whether all processes of a run end so at the same step."""
        return self.policy.code in TOGETHER

    def same(self, other: Failure) -> bool:
        """Return whether this is the same failure at the same step."""
        if (self.kind, self.step) != (other.kind, other.step):
            return False
        return self.kind != "user" or self.evidence.get("place") == other.evidence.get("place")

    def document(self) -> dict[str, Any]:
        """Return what is written of it."""
        return {**asdict(self), "retryable": self.policy.retried}


def failure_of(document: dict[str, Any]) -> Failure:
    """Return the failure that a document tells of."""
    known = Failure.__dataclass_fields__
    return Failure(**{name: value for name, value in document.items() if name in known})


def kind_of(error: BaseException) -> str:
    """Return what kind of failure an error is."""
    for known, kind in ERRORS.items():
        if isinstance(error, known):
            return kind
    name, said = type(error).__name__, str(error).lower()
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or _says(said, MEMORY):
        return "memory"
    if isinstance(error, OSError) and error.errno in STORAGE:
        return "storage"
    if name in DEVICE_CLASSES:
        return "device"
    if name in NETWORK_CLASSES or isinstance(error, ConnectionError) or _says(said, NETWORK):
        return "network"
    return "user"


def evidence_of(error: BaseException) -> dict[str, Any]:
    """Return where an error was raised, and a hash of that place; what fills a full memory."""
    lines = traceback.format_exception(error)
    frames = [
        f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    place = hashlib.sha256("\n".join([type(error).__name__, *frames]).encode()).hexdigest()[:12]
    found = {"traceback": "".join(lines).splitlines()[-TRACE_LINES:], "place": place}
    return {**found, "largest": largest()} if kind_of(error) == "memory" else found


def _says(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def largest(most: int = MOST) -> list[dict[str, Any]]:
    """Return the tensors that take most bytes, those of one type and shape together.

    `[{"tensors": "float32 [30522, 768]", "count": 3, "bytes": 281290752}]`; no torch is imported,
    and where it was not, there are none. What autograd keeps for the backward pass and Python does
    not see is not counted.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    storages: dict[int, tuple[int, str, int]] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor):
            continue
        try:
            storage, values = one.untyped_storage(), one.numel()
            if storage.device.type == "meta":  # shapes alone: a fake tensor warns when asked where
                continue
            where, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a sharded tensor has none
            continue
        name = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
        if where:  # of those that share one, the largest gives its name
            storages[where] = max(storages.get(where, (0, "", 0)), (values, name, size))
    found: dict[str, list[int]] = defaultdict(list)
    for _, name, size in storages.values():
        found[name].append(size)
    ordered = sorted(found.items(), key=lambda each: -sum(each[1]))[:most]
    return [{"tensors": name, "count": len(sizes), "bytes": sum(sizes)} for name, sizes in ordered]
