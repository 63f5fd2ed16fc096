"""Shows a target's snapshots on the terminal until the user quits.

A thread reads the target, so that a slow file system or server does not delay a key. The last
snapshot stays on the screen with its age.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from regauge.commands._top.screen import render
from regauge.system import stop_signals
from regauge.system.errors import RegaugeError, describe_error
from regauge.system.log import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from regauge.commands._top.snapshot import Snapshot, SnapshotReader

REFRESH_SECONDS = 0.5
STALE_SECONDS = 3.0
"""Snapshot age from which the screen shows it."""
JOIN_SECONDS = 1.0
SIZE_VARIABLES = ("COLUMNS", "LINES")
QUIT_KEYS = frozenset(b"qQ\x04")
"""Keys that end the view: q, and Ctrl-D."""


class SnapshotPoller:
    """Reads a target again and again; raises RegaugeError if it cannot be read at the start."""

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self._problem = ""
        self._stop = threading.Event()
        self.latest = reader.read()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Read in a thread within the block."""
        thread = threading.Thread(target=self._poll, name="snapshots", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(JOIN_SECONDS)  # a hanging file system must not delay the end

    def _poll(self) -> None:
        while not self._stop.wait(self._reader.poll_seconds):
            try:
                self.latest, self._problem = self._reader.read(), ""
            except (RegaugeError, OSError) as error:
                self._problem = describe_error(error).line

    @property
    def note(self) -> str:
        """Why the target cannot be read, or an old snapshot's age."""
        age = time.time() - self.latest.read_at
        is_old = age > STALE_SECONDS + self._reader.poll_seconds
        return self._problem or (f"the data is {age:.0f} s old" if is_old else "")


def is_live_terminal() -> bool:
    """Return whether standard input and output are a terminal that can show a live view."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def show_live(reader: SnapshotReader) -> Snapshot:
    """Show a target until the user quits; return the last snapshot.

    Raises RegaugeError if the target cannot be read at the start.
    """
    poller = SnapshotPoller(reader)
    # Without the variables of a fixed size, because the terminal may be resized.
    environment = {name: os.environ[name] for name in os.environ if name not in SIZE_VARIABLES}
    console = Terminal(_environ=environment)
    view = Live(console=console, screen=True, auto_refresh=False)
    with (
        stop_signals.raise_interrupts(),
        _read_keys(sys.stdin.fileno()) as handle,
        poller.run(),
        view,
        suppress(KeyboardInterrupt),
    ):
        while True:
            view.update(render(poller.latest, *console.size, poller.note), refresh=True)
            stop_signals.check_stop()
            if _wait_for_quit(handle):
                break
    return poller.latest


def _wait_for_quit(handle: int) -> bool:
    """Wait until the next refresh; return whether the user pressed a key that quits."""
    if not select.select([handle], [], [], REFRESH_SECONDS)[0]:
        return False
    try:
        keys = os.read(handle, 1024)
    except OSError:  # the terminal was closed
        return True
    return not keys or not QUIT_KEYS.isdisjoint(keys)


@contextmanager
def _read_keys(handle: int) -> Iterator[int]:
    """Read single keys without an echo in a block, also if a stop signal ends the process."""
    before = termios.tcgetattr(handle)

    def restore() -> None:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(handle, termios.TCSADRAIN, before)

    tty.setcbreak(handle)
    try:
        with stop_signals.call_at_limit(restore):
            yield handle
    finally:
        restore()


def show_once(snapshot: Snapshot, console: Console) -> None:
    console.print(render(snapshot, console.width, None), soft_wrap=False)
    console.print(Text(""), end="")
