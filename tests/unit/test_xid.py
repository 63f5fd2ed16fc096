"""XIDs of NVIDIA GPUs, read from the real log of the kernel."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from regauge.accelerators import _nvidia
from regauge.accelerators.cuda import Cuda
from regauge.monitoring import vocabulary
from regauge.monitoring.vocabulary import Metric
from regauge.supervision.run_metrics import watch_devices
from regauge.system.device_counters import DeviceErrors, ErrorReader
from regauge.system.timing import wait_for

LogMessage = Callable[[str], None]
WAIT_SECONDS = 60.0


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Create the driver's folder of two GPUs, which no machine has; return their addresses."""
    domain = f"{uuid.uuid4().int % 0xF000 + 0x0FFF:04x}"
    for bus in ("a1", "1b"):
        (tmp_path / f"{domain}:{bus}:00.0").mkdir()
    monkeypatch.setattr(_nvidia, "GPUS", tmp_path)
    return f"{domain}:1b:00", f"{domain}:a1:00"


@pytest.fixture
def log_message() -> LogMessage:
    try:
        with _nvidia.KERNEL_LOG.open("w", encoding="utf-8"):
            pass
    except OSError as error:
        pytest.skip(f"the log of the kernel cannot be written: {error}")

    def write(text: str) -> None:
        with _nvidia.KERNEL_LOG.open("w", encoding="utf-8") as file:
            file.write(f"<6>{text}\n")

    return write


@pytest.fixture
def read_errors(gpus: tuple[str, str], log_message: LogMessage) -> ErrorReader:
    log_message(f"NVRM: Xid (PCI:{gpus[0]}): 48, before the log is opened")
    return _nvidia.open_errors()


def test_new_xids_are_counted_by_device(
    read_errors: ErrorReader, gpus: tuple[str, str], log_message: LogMessage
) -> None:
    assert read_errors() == (DeviceErrors("0"), DeviceErrors("1"))
    log_message(f"NVRM: Xid (PCI:{gpus[1].upper()}): 79, pid=7, GPU has fallen off the bus.")
    log_message(f"NVRM: Xid (PCI:{gpus[1]}.0): 31, a page fault")
    log_message(f"NVRM: Xid (PCI:{gpus[1][:4]}:2c:00): 13, a GPU of another container")
    assert read_errors() == (DeviceErrors("0"), DeviceErrors("1", 2, 31))
    log_message(f"NVRM: Xid (PCI:{gpus[0]}): 31, again")
    assert read_errors() == (DeviceErrors("0", 1, 31), DeviceErrors("1", 2, 31))


def test_a_driver_that_does_not_answer_hides_no_error(
    gpus: tuple[str, str], log_message: LogMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(Cuda, "open_counters", lambda _: lambda: ended.wait() and ())
    with watch_devices(Cuda()) as read:

        def read_values() -> dict[tuple[Metric, tuple[str, ...]], float]:
            return {(s.metric, s.labels): s.value for s in read()}

        first_count = (vocabulary.DEVICE_ERRORS, ("0",))
        wait_for(lambda: read_values().get(first_count) == 0, WAIT_SECONDS, poll_seconds=0.05)
        log_message(f"NVRM: Xid (PCI:{gpus[0]}): 79, GPU has fallen off the bus.")
        wait_for(lambda: read_values().get(first_count) != 0, WAIT_SECONDS, poll_seconds=0.05)
        samples = read_values()
        ended.set()
    assert samples == {
        (vocabulary.DEVICE_ERRORS, ("0",)): 1,
        (vocabulary.DEVICE_ERROR_CODE, ("0",)): 79,
        (vocabulary.DEVICE_ERRORS, ("1",)): 0,
        (vocabulary.DEVICE_ERROR_CODE, ("1",)): 0,
    }


def test_messages_that_the_kernel_has_overwritten_are_skipped(
    read_errors: ErrorReader, gpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bytes | int] = [
        errno.EPIPE,
        f"6,1,2,-;NVRM: Xid (PCI:{gpus[0]}): 94, x".encode(),
        errno.EAGAIN,
    ]

    def read(_descriptor: int, _length: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    monkeypatch.setattr(os, "read", read)
    assert read_errors()[0] == DeviceErrors("0", 1, 94)
    assert answers == []


def test_a_machine_without_the_driver_has_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nvidia, "GPUS", tmp_path / "missing")
    assert Cuda().open_errors()() == ()


@pytest.mark.usefixtures("gpus")
def test_without_the_right_to_read_the_log_nothing_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nvidia, "KERNEL_LOG", tmp_path / "missing")
    assert Cuda().open_errors()() == ()
    with watch_devices(Cuda()) as read:
        assert read() == []
