"""The report in a real browser: no error, no network request, no overflow.

The test controls the browser through a pipe (`--remote-debugging-pipe`); no driver is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from regauge.comparison.compare import compare_runs
from regauge.comparison.settings import Comparison
from regauge.reporting.page import build_report
from regauge.reporting.render import render_html
from regauge.results.run_folder import read_run_folder
from regauge.trackers import RunInfo, start_trackers
from regauge.trackers.jsonl import Jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Load a file in a window of a width and a colour scheme, and wait until it is loaded."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width == PHONE,
        )
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: the report is not tested in a browser")
    profile = tmp_path_factory.mktemp("profile")
    with Browser(profile) as tab:
        yield tab
    shutil.rmtree(profile, ignore_errors=True)


def write_run(train: Path, factor: float = 1.0) -> None:
    """Write the folder of a run with two attempts, whose loss is multiplied by a factor."""
    for attempt, steps in enumerate((range(1, 80), range(61, 121)), start=1):
        facts = RunInfo("pairs", "a1", train, attempt, 120, steps.start - 1)
        with start_trackers([Jsonl()], facts) as tracker:
            for step in steps:
                loss = factor * 9 / step
                tracker.log(step, {"train/loss": loss, "train/tokens_per_second": 12_000.0})
                if step % 20 == 0:
                    tracker.log(step, {"heldout/loss": 1.05 * loss, "heldout/mrr": step / 200})
    seconds = {"init": 4.0, "compile": 11.0, "data_wait": 2.0, "step": 90.0, "lost": 7.0}
    state = {"attempt": 2, "seconds": seconds, "tokens": 3_000_000, "mfu": None}
    memory = {"weights": 4e8, "gradients": 4e8, "optimizer_state": 8e8, "peak": 3e9}
    costs = {
        "padding_fraction": 0.1,
        "memory_bytes": memory,
        "device_seconds": 114.0,
        "usd": 0.0342,
    }
    for step in (60, 120):
        line = {**state, **costs, "step": step, "machine_seconds": 0.95 * step}
        with (train / "ledger.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    settings = {
        "task": {"kind": "contrastive"},
        "data": {"path": "/a/long/path" * 20},
        "execution": {"price": {"instance": "trn1.32xlarge"}},
    }
    (train / "run.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report on a run, its evaluation, and its comparison with another run."""
    folder = tmp_path_factory.mktemp("out")
    train, evaluate = folder / "1-pairs", folder / "2-evaluate"
    evaluate.mkdir()
    write_run(train)
    write_run(folder / "pairs-in-another-precision", 1.0005)
    write_run(folder / "pairs-again", 1.0001)
    rows = [
        {"name": "untrained", "mrr": 0.09, "recall@10": 0.16, "recall@100": 0.3},
        {"name": "fusion of the trained encoder and BM25", "mrr": 0.7, "recall@10": 0.86},
    ]
    (evaluate / "evaluation.json").write_text(json.dumps({"title": "Held-out", "rows": rows}))
    path = folder / "report.html"
    comparison = Comparison(
        runs=(str(train), str(folder / "pairs-in-another-precision")),
        noise_runs=(str(folder / "pairs-again"),),
    )
    content = build_report(
        (read_run_folder(train), read_run_folder(evaluate)), None, compare_runs(comparison)
    )
    path.write_text(render_html(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_has_no_errors_and_no_requests(
    browser: Browser, report: Path, width: int, scheme: str
) -> None:
    browser.open(report, width, scheme)
    assert browser.value("document.querySelectorAll('figure svg').length") >= 3
    assert browser.events_of("Log.entryAdded") == []
    assert browser.events_of("Runtime.consoleAPICalled") == []
    assert browser.events_of("Runtime.exceptionThrown") == []
    urls = {request["request"]["url"] for request in browser.events_of("Network.requestWillBeSent")}
    assert {url for url in urls if not url.startswith("data:")} == {report.as_uri()}


@pytest.mark.parametrize("width", [PHONE, 768, DESKTOP])
def test_the_page_never_scrolls_sideways(browser: Browser, report: Path, width: int) -> None:
    browser.open(report, width)
    browser.value("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_text_is_readable_on_a_phone(browser: Browser, report: Path) -> None:
    """Chart text shrinks with the chart; its height on the screen must be large enough."""
    browser.open(report, PHONE)
    texts = "[...document.querySelectorAll('svg text')]"
    assert browser.value(f"{texts}.length") > 20
    assert browser.value(f"Math.min(...{texts}.map(t => t.getBoundingClientRect().height))") >= 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_have_the_colours_of_the_page(browser: Browser, report: Path, scheme: str) -> None:
    browser.open(report, DESKTOP, scheme)
    ink = "getComputedStyle(document.body).color"
    drawn = "getComputedStyle(document.querySelector('figure svg [style*=\"--ink\"]')).fill"
    light = browser.value(ink) == "rgb(27, 28, 31)"
    assert light == (scheme == "light")
    assert browser.value(drawn) == browser.value(ink)


def test_scrollable_elements_can_be_reached_with_the_keyboard(
    browser: Browser, report: Path
) -> None:
    browser.open(report, PHONE)
    scrolls = (
        "[...document.querySelectorAll('.scroll, pre')].every(element => element.tabIndex === 0)"
    )
    assert browser.value(scrolls) is True
    key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
    assert browser.value("document.activeElement.className") == "skip"
