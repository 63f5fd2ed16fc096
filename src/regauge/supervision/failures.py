"""The kinds of failure that can end an attempt, and the policy for each: restart or exit code.

Errors are classified by class name and message. No torch here.
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

from regauge.system import choices
from regauge.system.errors import (
    DataError,
    DeviceError,
    LimitReachedError,
    NoCheckpointError,
    NoProgressError,
    PreemptedError,
    PreflightError,
    RegaugeError,
    RollbackError,
    SettingsError,
    TransientError,
)
from regauge.system.stop_signals import EXIT_CODES

MAX_TENSORS = 5
"""How many tensor groups an out-of-memory failure lists."""


@dataclass(frozen=True)
class Policy:
    """What happens after a failure of some kind."""

    exit_code: int
    """Exit code if the run is not restarted."""
    is_retried: bool = False
    is_counted: bool = True
    """Whether attempts failing this way at the same step are counted."""
    max_attempts: int | None = None
    """How many attempts may fail this way at one step; by default the run's setting."""
    advice: str = ""
    """Advice for reports whose problem has none."""
    wait_seconds: float = 0.0
    """Wait before the first restart; doubled for each further failure of this kind in a row."""


RESUME_ADVICE = "run the same command to resume; stacks and last log lines are below"
DEVICE_ADVICE = "check that device with `regauge doctor`, then run the same command"
STORAGE_ADVICE = "free some space, or repair the storage"
POLICIES = {
    "settings": Policy(2),
    "user": Policy(64, is_retried=True, max_attempts=2),
    "code": Policy(64),
    "data": Policy(64),
    "memory": Policy(64),
    "checkpoint": Policy(65),
    "progress": Policy(66),
    "values": Policy(66, is_retried=True, max_attempts=2),
    "limit": Policy(67),
    "preempted": Policy(143, is_counted=False),
    "device": Policy(75, is_retried=True, advice=DEVICE_ADVICE),
    "preflight": Policy(76),
    "process": Policy(75, is_retried=True, advice=RESUME_ADVICE),
    "hang": Policy(75, is_retried=True, advice=RESUME_ADVICE),
    "storage": Policy(75, is_retried=True, wait_seconds=1.0, advice=STORAGE_ADVICE),
    "network": Policy(
        75, is_retried=True, is_counted=False, wait_seconds=1.0, advice=RESUME_ADVICE
    ),
    "node": Policy(75, is_retried=True, is_counted=False, advice=RESUME_ADVICE),
    "resized": Policy(75, is_retried=True, is_counted=False, advice=RESUME_ADVICE),
}
"""Failure kind -> policy.

`user`: an exception unknown to Regauge. `code`: a bug in custom code. `process`: a process died by
a signal or left early. `memory`: a process ran out of memory. `values`: steps that must not be
kept, such as too many skipped ones. `node`: a node was lost or left. `resized`: another node
joined.
"""
COMMON_EXIT_CODES = {0, 67, *EXIT_CODES}
"""Exit codes with which all processes end at the same step."""
KIND_BY_ERROR: dict[type[RegaugeError], str] = {
    SettingsError: "settings",
    DataError: "data",
    NoCheckpointError: "checkpoint",
    RollbackError: "values",
    NoProgressError: "progress",
    LimitReachedError: "limit",
    PreemptedError: "preempted",
    PreflightError: "preflight",
    DeviceError: "device",
    TransientError: "storage",
}
STORAGE_ERRNOS = {errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.EFBIG}
MEMORY_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
)
NETWORK_PHRASES = (
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
BUG_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError)
"""Always bugs, never device or network failures."""
MAX_TRACE_LINES = 40


@dataclass(frozen=True)
class Failure:
    """How one process ended an attempt."""

    kind: str
    """Key in `POLICIES`."""
    rank: int
    step: int
    """Number of finished steps."""
    problem: str
    """One line."""
    host: str = field(default_factory=socket.gethostname)
    phase: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Exit code or signal, traceback, and the stacks of all processes."""

    @property
    def policy(self) -> Policy:
        return POLICIES[self.kind]

    @property
    def ends_all_ranks(self) -> bool:
        """Whether all processes end this way at the same step."""
        return self.policy.exit_code in COMMON_EXIT_CODES

    @property
    def has_lost_leader(self) -> bool:
        """Whether the node with rank 0, which records attempts, was lost or left."""
        return self.kind == "node" and self.rank == 0

    def is_same(self, other: Failure) -> bool:
        """Return whether kind and step are equal, and for `user` also the error location."""
        if (self.kind, self.step) != (other.kind, other.step):
            return False
        return self.kind != "user" or self.evidence.get("location_hash") == other.evidence.get(
            "location_hash"
        )

    def document(self) -> dict[str, Any]:
        """Return the failure as JSON."""
        return {**asdict(self), "retryable": self.policy.is_retried}


def parse_failure(document: dict[str, Any]) -> Failure:
    """Parse a failure from JSON; unknown fields are ignored."""
    known = Failure.__dataclass_fields__
    return Failure(**{name: value for name, value in document.items() if name in known})


def classify_error(error: BaseException) -> str:
    """Return the failure kind of an error."""
    for known, kind in KIND_BY_ERROR.items():
        if isinstance(error, known):
            return kind
    name, message = type(error).__name__, str(error).lower()
    is_memory_error = isinstance(error, MemoryError) or name == "OutOfMemoryError"
    if is_memory_error or _contains_any(message, MEMORY_PHRASES):
        return "memory"
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        return "storage"
    if name in DEVICE_CLASSES:
        return "device"
    is_network_error = name in NETWORK_CLASSES or isinstance(error, ConnectionError)
    if is_network_error or _contains_any(message, NETWORK_PHRASES):
        return "network"
    return "code" if is_custom_bug(error) else "user"


def is_custom_bug(error: BaseException) -> bool:
    """Return whether an error is a bug in custom code, which a restart does not fix.

    Either a frame is in custom code, or the error type is typical for bugs and custom code is in
    use: it may have returned a wrong value.
    """
    if not choices.has_custom_code():
        return False
    return isinstance(error, BUG_ERRORS) or choices.find_custom_frame(error) is not None


def collect_evidence(error: BaseException) -> dict[str, Any]:
    """Return an error's traceback and a hash of its location.

    For an out-of-memory error, also the largest tensors.
    """
    lines = traceback.format_exception(error)
    frames = [
        f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    location_hash = hashlib.sha256("\n".join([type(error).__name__, *frames]).encode()).hexdigest()[
        :12
    ]
    evidence: dict[str, Any] = {
        "traceback": "".join(lines).splitlines()[-MAX_TRACE_LINES:],
        "location_hash": location_hash,
    }
    if classify_error(error) == "memory":
        evidence["largest_tensors"] = find_largest_tensors()
    return evidence


def _contains_any(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text for phrase in phrases)


def find_largest_tensors(limit: int = MAX_TENSORS) -> list[dict[str, Any]]:
    """Group tensors by type and shape; return the groups that take the most bytes.

    `[{"tensors": "float32 [30522, 768]", "count": 3, "bytes": 281290752}]`. Tensors that autograd
    keeps for the backward pass are invisible to Python and not counted. Returns an empty list if
    torch was not imported; this function does not import it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    storages: dict[int, tuple[int, str, int]] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor):
            continue
        try:
            storage, num_values = item.untyped_storage(), item.numel()
            if storage.device.type == "meta":  # a fake tensor warns when asked for its address
                continue
            address, num_bytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a sharded tensor has no storage
            continue
        name = f"{str(item.dtype).removeprefix('torch.')} {list(item.shape)}"
        if address:  # the largest tensor of a shared storage names it
            known = storages.get(address, (0, "", 0))
            storages[address] = max(known, (num_values, name, num_bytes))
    groups: dict[str, list[int]] = defaultdict(list)
    for _, name, num_bytes in storages.values():
        groups[name].append(num_bytes)
    ordered = sorted(groups.items(), key=lambda group: -sum(group[1]))[:limit]
    return [{"tensors": name, "count": len(sizes), "bytes": sum(sizes)} for name, sizes in ordered]
