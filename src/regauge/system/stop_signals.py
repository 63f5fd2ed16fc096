"""Stop signals: SIGINT, SIGTERM, SIGHUP and SIGQUIT.

A handler only records the signal, because an exception in a handler may be raised inside a
destructor or an exit hook, where it is lost. The main thread raises it at chosen points:
`check_stop`, called by the package's waits. In a command, a thread ends the process if that takes
longer than `LIMIT_SECONDS`.

Signals within `REPEAT_SECONDS` of the first one are one request, because a terminal, a scheduler
and a supervisor may each send it. A later signal also limits otherwise unlimited work, such as a
save.

A helper process passes a stop signal on to its parent, which decides for all of its processes.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.errors import StopSignalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object] | int | None
    """A function, or SIG_DFL or SIG_IGN; None for a handler that Python did not set."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
EXIT_CODES = frozenset(StopSignalError(number).exit_code for number in STOP_SIGNALS)
"""Exit codes after a stop signal, as in shells."""
LIMIT_SECONDS = 3.0
"""Time from a signal to the error in `check_stop`, and from there to the end of a command."""
REPEAT_SECONDS = 2.0
NATIVE_PREFIX = "native-"
"""Prefix of the names of daemon threads that call native code, such as torch's stores."""
IDLE_SECONDS = 1.0
"""Maximum wait for a signal before a command's thread checks the limit again."""


class StopRecorder:
    """Records this process's stop signals."""

    def __init__(self) -> None:
        self.is_active = self.is_command = False
        """Whether signals are recorded, and whether until this process ends."""
        self.num_deferrals = self.num_unlimited = 0
        """Number of open `defer_stop` blocks, and of those without a limit."""
        self.raises_interrupts = False
        """Whether SIGINT raises KeyboardInterrupt instead of being a stop signal."""
        self.wakeup_fd = -1
        """Where a command's thread reads signals."""
        self.callbacks: list[Callable[[], object]] = []
        """What the end of the process at the limit calls, the last one first."""
        self.reset()

    def reset(self) -> None:
        """Forget the recorded signals."""
        self.number: int | None = None
        """The first signal."""
        self.is_raised = self.is_repeated = False
        self._began_at = self._limit_began_at = 0.0

    def record(self, number: int) -> None:
        """Record a signal."""
        now = time.monotonic()
        if self.number is None:
            self._began_at = self._limit_began_at = now
            self.number = number
        elif not self.is_repeated and now - self._began_at >= REPEAT_SECONDS:
            self._limit_began_at = now
            self.is_repeated = True

    def restart_limit(self) -> None:
        """Begin the limit again, unless a repeated signal has begun it."""
        if not self.is_repeated:
            self._limit_began_at = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit; infinity without a limit."""
        if self.number is None or (self.num_unlimited and not self.is_repeated):
            return math.inf
        return self._limit_began_at + LIMIT_SECONDS - time.monotonic()


_recorder = StopRecorder()


def start_command() -> None:
    """Record stop signals until this process ends, and limit the time that it takes to end.

    The last exit hook ignores them, because Python then restores their default effect.
    """
    _recorder.is_active = _recorder.is_command = True
    atexit.register(_set_handlers, signal.SIG_IGN)
    _set_handlers(_handle_signal)
    receiver, sender = os.pipe()
    for end in (receiver, sender):
        os.set_blocking(end, False)
    _recorder.wakeup_fd = sender
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    threading.Thread(target=_limit_stop, args=(receiver,), name="stop-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def watch_signals() -> None:
    """Let a command's thread read signals again, after an event loop took over."""
    if _recorder.is_command:
        signal.set_wakeup_fd(_recorder.wakeup_fd, warn_on_full_buffer=False)


@contextmanager
def record_signals() -> Iterator[None]:
    """Record stop signals in a block, instead of their usual effect; nested blocks do nothing.

    A signal not raised in the block is raised at the end. Only the main thread can record signals;
    in another thread the block does nothing.
    """
    if _recorder.is_active or threading.current_thread() is not threading.main_thread():
        yield
        return
    _recorder.is_active = True
    previous_handlers = _set_handlers(_handle_signal)
    try:
        yield
        check_stop()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        _recorder.reset()
        _recorder.is_active = False


def find_signal() -> int | None:
    """Return the first stop signal received by this process, or None."""
    return _recorder.number


def is_repeated() -> bool:
    """Return whether another stop signal arrived `REPEAT_SECONDS` or more after the first one."""
    return _recorder.is_repeated


def check_stop() -> None:
    """Raise StopSignalError if a stop signal has arrived.

    It is raised once, in the main thread, and not in a block of `defer_stop`.
    """
    if _recorder.number is None or _recorder.is_raised or _recorder.num_deferrals:
        return
    if threading.current_thread() is threading.main_thread():
        _recorder.is_raised = True
        _recorder.restart_limit()
        raise StopSignalError(_recorder.number)


@contextmanager
def defer_stop(*, has_limit: bool = True) -> Iterator[None]:
    """Run a block that ends by itself after a stop signal: `check_stop` does nothing in it.

    Without a limit it may take any time until the signal is repeated, for example to save.
    """
    _recorder.num_deferrals += 1
    _recorder.num_unlimited += not has_limit
    try:
        yield
    finally:
        _recorder.num_deferrals -= 1
        if not has_limit:
            _recorder.num_unlimited -= 1
            _recorder.restart_limit()


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT in a block, for commands that talk with the user."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    _recorder.raises_interrupts = True
    try:
        yield
    finally:
        _recorder.raises_interrupts = False
        signal.signal(signal.SIGINT, handler)


@contextmanager
def call_at_limit(callback: Callable[[], object]) -> Iterator[None]:
    """Call a function also if the block is left because the limit ends the process."""
    _recorder.callbacks.append(callback)
    try:
        yield
    finally:
        _recorder.callbacks.remove(callback)


@contextmanager
def block_signals() -> Iterator[None]:
    """Block stop signals in this thread; a process that it starts begins with them blocked.

    The process receives them as soon as it calls `start_command` or `pass_to_parent`.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def exit_command(code: int) -> int:
    """Return the exit code, or exit now while a daemon thread is in native code.

    Python ends such a thread when it returns to Python, and C++ then aborts the process (code 134).
    """
    if any(thread.name.startswith(NATIVE_PREFIX) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def pass_to_parent() -> None:
    """Pass stop signals on to this process's parent from now on."""
    parent = os.getppid()

    def pass_on(number: int, _frame: object) -> None:
        if os.getppid() == parent:  # otherwise the parent has ended
            with suppress(ProcessLookupError):
                os.kill(parent, number)

    _set_handlers(pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def restore_defaults() -> None:
    """Give stop signals their default effect again."""
    _set_handlers(signal.SIG_DFL)


def is_stop_exit(code: int | None) -> bool:
    """Return whether an exit code means that a stop signal ended the process.

    The code is negative if the process did not handle the signal.
    """
    return code is not None and (code in EXIT_CODES or -code in STOP_SIGNALS)


def _set_handlers(handler: Handler) -> dict[signal.Signals, Handler]:
    """Set the handler of all stop signals; return the previous ones.

    An ignored signal stays ignored, as for a command under `nohup`.
    """
    previous_handlers: dict[signal.Signals, Handler] = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) not in {signal.SIG_IGN, None}:
            previous_handlers[number] = signal.signal(number, handler)
    return previous_handlers


def _reset_child() -> None:
    """Give a forked process the default handlers, and disconnect it from the parent's pipe."""
    if _recorder.is_active:
        signal.set_wakeup_fd(-1)
        _set_handlers(signal.SIG_DFL)
        _recorder.is_active = _recorder.is_command = False


os.register_at_fork(after_in_child=_reset_child)


def _handle_signal(number: int, _frame: object) -> None:
    """Record a signal; in a command the thread records repeated ones, because it is not late."""
    if _recorder.number is None or not _recorder.is_command:
        _recorder.record(number)


def _limit_stop(receiver: int) -> None:
    """Record the signals that arrive in a pipe, and end this process at the limit."""
    while _recorder.seconds_left > 0:
        select.select([receiver], [], [], max(0.0, min(IDLE_SECONDS, _recorder.seconds_left)))
        with suppress(BlockingIOError):
            for number in os.read(receiver, 4096):
                is_interrupt = number == signal.SIGINT and _recorder.raises_interrupts
                if number in STOP_SIGNALS and not is_interrupt:
                    _recorder.record(number)
    _end_process(StopSignalError(_recorder.number or signal.SIGTERM).exit_code)


def _end_process(code: int) -> None:
    """Kill the child processes, call the callbacks, and end this process without exit hooks."""
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in path.read_text(encoding="utf-8").split():
                os.kill(int(pid), signal.SIGKILL)
    for callback in reversed(_recorder.callbacks):
        with suppress(Exception):
            callback()
    os._exit(code)
