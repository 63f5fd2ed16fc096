"""Trackers write metrics as JSON lines, on a terminal and for TensorBoard."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regauge import config
from regauge.monitoring.trackers import RunInfo, Tracker, start_trackers
from regauge.monitoring.trackers.console import (
    Console,
    Eta,
    format_duration,
    format_eval_metrics,
    format_number,
    format_train_metrics,
)
from regauge.monitoring.trackers.jsonl import Jsonl
from regauge.system.errors import SettingsError


def run_info(folder: Path, attempt: int = 1, resumed_step: int = 0) -> RunInfo:
    return RunInfo("pairs", "a1b2", folder, attempt, 600, resumed_step)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_writes_a_line_for_each_call_before_it_returns(tmp_path: Path) -> None:
    with start_trackers([Jsonl()], run_info(tmp_path)) as tracker:
        tracker.log(1, {"train/loss": 2.5})
        (line,) = lines(tmp_path)
        assert line.pop("seconds") < 60
        assert line == {"attempt": 1, "step": 1, "train/loss": 2.5}
        tracker.finish({"steps": 1})
        assert lines(tmp_path)[-1]["summary"] == {"steps": 1}


def test_jsonl_lines_after_an_incomplete_line_are_complete(tmp_path: Path) -> None:
    torn = '{"attempt": 1, "step": 7, "train/lo'
    (tmp_path / "metrics.jsonl").write_text(f'{{"attempt": 1, "step": 6}}\n{torn}')
    with start_trackers([Jsonl()], run_info(tmp_path, attempt=2, resumed_step=5)) as tracker:
        tracker.log(6, {"train/loss": 2.5})
    first, second, third = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 6
    assert second == torn
    assert json.loads(third)["attempt"] == 2


def test_jsonl_writes_valid_json_for_nan_and_infinity(tmp_path: Path) -> None:
    with start_trackers([Jsonl()], run_info(tmp_path)) as tracker:
        tracker.log(1, {"a": float("nan"), "b": float("-inf")})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=refuse)
    assert (line["a"], line["a_text"]) == (None, "NaN")
    assert (line["b"], line["b_text"]) == (None, "-Infinity")


def test_a_tracker_that_cannot_start_closes_the_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    first, second = Jsonl(), Jsonl()
    good = tmp_path / "good"

    class Elsewhere(Jsonl):
        def start(self, run: RunInfo) -> None:  # noqa: ARG002
            first.start(run_info(good))

    with (
        pytest.raises(SettingsError, match="is a folder, not a file"),
        start_trackers([Elsewhere(), second], run_info(tmp_path)),
    ):
        pytest.fail("it started")
    first.close()
    assert good.is_dir()


def test_console_prints_plain_lines_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_trackers([Console()], run_info(tmp_path)) as tracker:
        values = {
            "train/loss": 3.2141,
            "train/learning_rate": 4.8e-4,
            "train/tokens_per_second": 12345.4,
            "train/padding_fraction": 0.1,
        }
        tracker.log(120, values)
        tracker.log(120, {"heldout/loss": 2.9, "heldout/recall@10": 0.78765})
    assert capsys.readouterr().err.splitlines() == [
        "step 120/600  loss 3.214  lr 4.8e-04  12,345 tok/s",
        "step 120/600  heldout: loss 2.900  recall@10 0.788",
    ]


def test_console_prints_the_eta_from_the_second_line_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_trackers([Console()], run_info(tmp_path)) as tracker:
        tracker.log(1, {"train/loss": 3.0})
        tracker.log(2, {"train/loss": 3.0})
    first, second = capsys.readouterr().err.splitlines()
    assert "eta" not in first
    assert re.search(r"  eta 0:0\d:\d\d$", second)


def test_the_eta_follows_the_measured_speed() -> None:
    eta = Eta(600, 0)
    eta.record_step(20, 100.0)
    assert eta.seconds_left() is None
    eta.record_step(40, 110.0)
    assert eta.seconds_left() == (600 - 40) * 10 / 20


def test_a_line_omits_unknown_values() -> None:
    assert format_train_metrics({"train/loss": 1.0}) == "loss 1.000"
    assert format_train_metrics({"train/mfu": 0.41, "train/usd": 0.5}) == "mfu 41.0%  $0.5000"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (3.2141, "3.214"),
        (1e-5, "1e-05"),
        (12345.4, "12,345"),
        (27.0, "27"),
        (1.0, "1.000"),
        (1e999, "inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_evaluations_name_each_split_once() -> None:
    values = {"heldout/loss": 1.0, "heldout/mrr": 0.5, "heldout/items": 8.0, "other/loss": 2.0}
    line = "heldout: loss 1.000  mrr 0.500  items 8  other: loss 2.000"
    assert format_eval_metrics(values) == line


def test_duration_is_hours_minutes_seconds() -> None:
    assert [format_duration(0.4), format_duration(59.6), format_duration(3725)] == [
        "0:00:00",
        "0:01:00",
        "1:02:05",
    ]


LIVE = """
import sys, time, pathlib
from regauge.system import log
from regauge.monitoring.trackers import RunInfo, start_trackers
from regauge.monitoring.trackers.console import Console
log.configure()
run = RunInfo("pairs", "a1", pathlib.Path("."), total_steps=100)
with start_trackers([Console()], run) as tracker:
    for step in range(1, 31):
        tracker.log(step, {"train/loss": 3.0})
        time.sleep(0.02)
    tracker.log(30, {"heldout/mrr": 0.5})
    log.logger.warning("a line in between")
    sys.stdout.write("the answer\\n")
    if "fail" in sys.argv:
        raise SystemExit("failed")
    if "wait" in sys.argv:
        sys.stderr.write("interrupt me\\n")
        for _ in range(600):  # a signal that comes just before a wait ends the next one
            time.sleep(0.1)
    tracker.finish({})
"""


def run_on_terminal(*arguments: str, interrupt_at: bytes = b"") -> tuple[str, str]:
    """Run LIVE with a terminal as standard error; return its terminal and standard output."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, *arguments],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        os.close(theirs)
        screen = b""
        while data := read(ours):
            screen += data
            if interrupt_at and interrupt_at in screen:
                process.send_signal(signal.SIGINT)
                interrupt_at = b""
        os.close(ours)
        assert process.stdout
        answer = process.stdout.read().decode()
    return screen.decode(), answer


def read(terminal: int) -> bytes:
    """Return the next output of the terminal; nothing once the other side is closed."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def test_console_draws_a_bar_and_keeps_other_lines_above_it() -> None:
    screen, answer = run_on_terminal()
    assert screen.count(HIDDEN) == screen.count(SHOWN) == 1
    assert "step 30/100  heldout: mrr 0.500\r\n" in screen
    assert "warning: a line in between" in screen
    assert "30/100" in screen
    assert "loss 3.000" in screen
    assert screen.rstrip().endswith("loss 3.000"), "the last figures stay on the screen"
    assert answer == "the answer\n", "the bar changed standard output"


@pytest.mark.parametrize(
    ("how", "interrupt_at", "end"),
    [
        ("fail", b"", "failed"),
        ("wait", b"interrupt me", "KeyboardInterrupt"),
        ("wait", b"waiting for the first line", "KeyboardInterrupt"),
    ],
    ids=["failure", "Ctrl-C", "Ctrl-C at the start"],
)
def test_the_cursor_of_the_terminal_is_restored(how: str, interrupt_at: bytes, end: str) -> None:
    screen, _ = run_on_terminal(how, interrupt_at=interrupt_at)
    assert end in screen
    assert HIDDEN in screen
    assert screen.rindex(SHOWN) > screen.rindex(HIDDEN)


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_one_line_with_a_remedy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)  # as if it were not installed
    with pytest.raises(SettingsError, match=rf'package {kind}; pip install "regauge\[{kind}\]"'):
        config.parse_choice("trackers", kind)


def test_tensorboard_purges_repeated_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="not installed: tensorboard's resume is not proved")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker: Tracker = config.parse_choice("trackers", "tensorboard")
    for attempt, resumed, steps in ((1, 0, range(1, 6)), (2, 3, range(4, 8))):
        with start_trackers([tracker], run_info(tmp_path, attempt, resumed)) as group:
            for step in steps:
                group.log(step, {"train/loss": float(10 * attempt + step)})
    read_back = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = {event.step: event.value for event in read_back.Scalars("train/loss")}
    assert values == {1: 11, 2: 12, 3: 13, 4: 24, 5: 25, 6: 26, 7: 27}
