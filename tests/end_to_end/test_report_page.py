"""The report in a real browser: no error, no network request, no overflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import DESKTOP, PHONE, Browser, open_browser
from regauge.evaluation.compare.compare import compare_runs
from regauge.evaluation.compare.settings import Comparison
from regauge.evaluation.report.page import build_report
from regauge.evaluation.report.render import render_html
from regauge.monitoring.trackers import RunInfo, start_trackers
from regauge.monitoring.trackers.jsonl import Jsonl
from regauge.run_folders.run_folder import read_run_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


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
    browser.open(report.as_uri(), width, scheme)
    assert browser.value("document.querySelectorAll('figure svg').length") >= 3
    assert browser.events_of("Log.entryAdded") == []
    assert browser.events_of("Runtime.consoleAPICalled") == []
    assert browser.events_of("Runtime.exceptionThrown") == []
    urls = {request["request"]["url"] for request in browser.events_of("Network.requestWillBeSent")}
    assert {url for url in urls if not url.startswith("data:")} == {report.as_uri()}


@pytest.mark.parametrize("width", [PHONE, 768, DESKTOP])
def test_the_page_never_scrolls_sideways(browser: Browser, report: Path, width: int) -> None:
    browser.open(report.as_uri(), width)
    browser.value("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_text_is_readable_on_a_phone(browser: Browser, report: Path) -> None:
    """Chart text shrinks with the chart; its height on the screen must be large enough."""
    browser.open(report.as_uri(), PHONE)
    texts = "[...document.querySelectorAll('svg text')]"
    assert browser.value(f"{texts}.length") > 20
    assert browser.value(f"Math.min(...{texts}.map(t => t.getBoundingClientRect().height))") >= 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_have_the_colours_of_the_page(browser: Browser, report: Path, scheme: str) -> None:
    browser.open(report.as_uri(), DESKTOP, scheme)
    ink = "getComputedStyle(document.body).color"
    drawn = "getComputedStyle(document.querySelector('figure svg [style*=\"--ink\"]')).fill"
    light = browser.value(ink) == "rgb(27, 28, 31)"
    assert light == (scheme == "light")
    assert browser.value(drawn) == browser.value(ink)


def test_scrollable_elements_can_be_reached_with_the_keyboard(
    browser: Browser, report: Path
) -> None:
    browser.open(report.as_uri(), PHONE)
    scrolls = (
        "[...document.querySelectorAll('.scroll, pre')].every(element => element.tabIndex === 0)"
    )
    assert browser.value(scrolls) is True
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "skip"
