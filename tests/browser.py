"""Headless Chromium, controlled through a pipe (`--remote-debugging-pipe`); no driver is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = Path("/usr/bin/chromium")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

AS_3_AND_4 = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, theirs in zip(ours, (3, 4)):
    os.dup2(end, theirs)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Wrapper that executes the browser with the pipe at its file descriptors 3 and 4."""

PHONE, DESKTOP = 360, 1280
MAX_WAIT_MILLISECONDS = 20_000
"""Time limit for a condition of a page."""
PAGE_TEXT = "document.body.innerText"
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}
"""Codes of the keys that tests press."""


class Browser:
    """One tab of a headless Chromium; `events` has the events that it sent during commands."""

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        command = (CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank")
        self._process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(commands), str(answers), *map(str, command)],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(profile)},
        )
        os.close(commands)
        os.close(answers)
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""
        self._session = ""
        target = next(
            info["targetId"]
            for info in self.call("Target.getTargets")["targetInfos"]
            if info["type"] == "page"
        )
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are stored."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, url: str, width: int, scheme: str = "light") -> None:
        """Load a page in a window of a width and a colour scheme, and wait until it is loaded."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width <= PHONE,
        )
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true in the page; fail after a time limit."""
        code = (
            f"(async () => {{ const end = Date.now() + {MAX_WAIT_MILLISECONDS};"
            f" while (!({expression})) {{ if (Date.now() > end) return false;"
            " await new Promise(resolve => setTimeout(resolve, 5)); } return true; })()"
        )
        options = {"awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", expression=code, **options)
        assert result["result"].get("value") is True, (expression, self.value(PAGE_TEXT))

    def type(self, text: str) -> None:
        """Type text, one character at a time."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def press(self, key: str) -> None:
        """Press and release a key by its name."""
        names = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def save_screenshot(self, path: Path) -> None:
        """Write a picture of the whole page as PNG."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(result["data"]))

    def list_accessible(self) -> list[tuple[str, str]]:
        """Return the role and the name of every element that a screen reader presents."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        shown = (node for node in nodes if not node["ignored"])
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]

    def events_of(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium for the duration of a block; skip the test if it is not installed."""
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: the page is not tested in a browser")
    with Browser(profile) as tab:
        yield tab
    shutil.rmtree(profile, ignore_errors=True)
