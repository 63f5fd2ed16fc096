"""Tables in the output of a verb fit the width of the terminal."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from regauge import commands
from regauge.system import log

ROWS = [
    {
        "name": "eager fp32",
        "texts_per_second": 51.7,
        "min_cosine": 1.0,
        "quality_loss": 2.66823e-09,
    },
    {"name": "inductor fp32", "texts_per_second": 151.25, "min_cosine": None, "quality_loss": 0.0},
]


def read_cells(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the cells of each line of the table."""
    commands.show({"candidates": ROWS}, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    return [
        [cell.strip() for cell in line[1:-1].split(line[0])] for line in lines if line[0] in "┃│"
    ]


def test_a_heading_is_folded_to_the_width_of_its_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.stdout, "width", 50)
    lines = read_cells(capsys)
    assert [line[1] for line in lines[:3]] == ["texts", "per", "second"]
    assert lines[3:] == [
        ["eager fp32", "51.7", "1", "2.66823e-09"],
        ["inductor fp32", "151.25", "unknown", "0"],
    ]


def test_text_columns_are_folded_before_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.stdout, "width", 46)
    lines = read_cells(capsys)[3:]
    assert [line[0] for line in lines if line[0]] != ["eager fp32", "inductor fp32"]
    for column, cells in ((1, ["51.7", "151.25"]), (3, ["2.66823e-09", "0"])):
        assert [line[column] for line in lines if line[column]] == cells


def test_output_to_a_closed_terminal_is_discarded() -> None:
    control, terminal = os.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as file:
        console = log.Terminal(file=file)
        console.print("first")
        assert b"first" in os.read(control, 100)
        os.close(control)
        console.print("second")
        console.print("third")


def test_other_errors_of_output_are_raised(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    with path.open(encoding="utf-8") as file, pytest.raises(io.UnsupportedOperation):
        log.Terminal(file=file).print("line")


def test_a_line_number_is_not_an_emoji(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as file:
        log.Terminal(file=file).print("error in init.py:100: [bold]", markup=False)
    assert path.read_text(encoding="utf-8") == "error in init.py:100: [bold]\n"


def test_log_lines_begin_with_time_and_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.configure()
    log.show_times()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
    with monkeypatch.context() as patch:
        patch.setattr(log.stderr, "_file", None)
        log.logger.info("a line")
        log.logger.error("a problem")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{time} INFO a line", first)
    assert re.fullmatch(f"{time} ERROR a problem", second)
    log.configure()
    log.logger.error("a problem")
    assert capsys.readouterr().err == "error: a problem\n"
