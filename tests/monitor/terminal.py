"""A terminal of tmux in which `regauge` runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

WAIT_SECONDS = 120.0


@dataclass
class Terminal:
    """A terminal of a tmux server of its own."""

    name: str
    width: int = 80
    height: int = 24

    def run(self, *arguments: str) -> str:
        command = ["tmux", "-L", self.name, "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def start(self, *arguments: str, variables: dict[str, str] | None = None) -> None:
        """Start `regauge` with arguments; the terminal remains after its end."""
        self.run("new-session", "-d", "-x", str(self.width), "-y", str(self.height), "sh")
        self.run("set-option", "-g", "window-size", "manual")
        assignments = [f"{name}={value}" for name, value in (variables or {}).items()]
        command = shlex.join(["env", *assignments, sys.executable, "-m", "regauge", *arguments])
        self.run("send-keys", "-l", f"clear; {command}; echo code=$?")
        self.run("send-keys", "Enter")

    def press(self, key: str) -> None:
        self.run("send-keys", key)

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.run("resize-window", "-x", str(width), "-y", str(height))

    def read(self, *, with_colors: bool = False) -> str:
        return self.run("capture-pane", "-p", *(["-e"] if with_colors else []))

    def wait_for(self, condition: str | Callable[[str], object]) -> str:
        """Wait until the screen contains a text, or fulfils a condition; return the screen."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            screen = self.read()
            if condition in screen if isinstance(condition, str) else condition(screen):
                return screen
            assert time.monotonic() < deadline, screen
            time.sleep(0.1)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(f"test-top-{os.getpid()}")
    yield terminal
    command = ["tmux", "-L", terminal.name, "kill-server"]
    subprocess.run(command, capture_output=True, check=False)
