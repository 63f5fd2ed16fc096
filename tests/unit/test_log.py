"""Tables of answers as they fit a terminal."""

from __future__ import annotations

import pytest

from regauge import log, verbs

ROWS = [
    {"name": "eager fp32", "texts_per_second": 51.7, "cosine_least": 1.0, "loss": 2.66823e-09},
    {"name": "inductor fp32", "texts_per_second": 151.25, "cosine_least": None, "loss": 0.0},
]


def shown(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the cells of each line of the table."""
    verbs.show({"candidates": ROWS}, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    return [
        [cell.strip() for cell in line[1:-1].split(line[0])] for line in lines if line[0] in "┃│"
    ]


def test_a_column_is_as_narrow_as_its_cells_and_its_name_is_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.stdout, "width", 50)
    lines = shown(capsys)
    assert [line[1] for line in lines[:3]] == ["texts", "per", "second"]
    assert lines[3:] == [
        ["eager fp32", "51.7", "1", "2.66823e-09"],
        ["inductor fp32", "151.25", "unknown", "0"],
    ]


def test_words_are_folded_before_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.stdout, "width", 46)
    lines = shown(capsys)[3:]
    assert [line[0] for line in lines if line[0]] != ["eager fp32", "inductor fp32"]
    for place, cells in ((1, ["51.7", "151.25"]), (3, ["2.66823e-09", "0"])):
        assert [line[place] for line in lines if line[place]] == cells
