"""The result of a verb as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regauge import commands

ANSWER: dict[str, Any] = {
    "steps": 3,
    "final_loss": 0.123456789,
    "where": Path("out/a"),
    "batch_invariant": True,
    "rows": [{"method": "[bm25]", "recall": 0.75}, {"method": "both", "mrr": 0.5}],
    "time": {"data_wait": 1.5},
}


def test_text_output_has_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.show(ANSWER, as_json=False) is ANSWER
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[:3] == ["steps: 3", "final loss: 0.123457", "where: out/a"]
    assert lines[3] == "batch invariant: yes"
    assert lines[-1] == "time data wait: 1.5"
    assert "[bm25]" in printed
    assert all(word in printed for word in ("method", "recall", "mrr", "0.75", "both"))


def test_json_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    commands.show(ANSWER, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document == ANSWER | {"where": "out/a"}


def test_a_long_cell_is_folded_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    commands.show({"rows": [{"key": "k" * 300}]}, as_json=False)
    assert capsys.readouterr().out.count("k") == 301
