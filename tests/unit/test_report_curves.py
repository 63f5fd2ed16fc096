"""The report shows every held-out metric, and names unchanged ones once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regauge.evaluation.report.page import _describe_heldout
from regauge.evaluation.report.run_section import build_charts
from regauge.run_folders.run_folder import RunFolder, read_run_folder
from regauge.system import jsonl

START = {"attempt": 1, "seconds": 1.0}


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> RunFolder:
    """Write the metrics of a run and read it."""
    folder.mkdir()
    for row in rows:
        jsonl.append_line(folder / "metrics.jsonl", row)
    return read_run_folder(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    names = ("accuracy", "precision", "recall", "f1", "auc", "kappa")
    first = {f"heldout/{name}": 0.5 for name in names}
    first |= {"heldout/matthews": -0.5, "heldout/perplexity": 9.0, "heldout/items": 20.0}
    last = {**first, "heldout/accuracy": 0.75}
    return write_metrics(
        tmp_path / "run", [{**START, "step": 0, **first}, {**START, "step": 10, **last}]
    )


def test_every_heldout_metric_has_a_curve(run: RunFolder) -> None:
    charts = [chart for chart in build_charts(run) if chart.title.startswith("Held-out")]
    assert len(charts) == 3
    assert len({chart.title for chart in charts}) == 3
    text = " ".join(chart.text for chart in charts)
    for name in ("accuracy", "f1", "auc", "kappa", "matthews", "perplexity"):
        assert f"heldout/{name}" in text + " ".join(chart.title for chart in charts), name
    assert "items" not in text


def test_unchanged_metrics_share_a_sentence(run: RunFolder) -> None:
    changed, unchanged = _describe_heldout(run)
    assert changed == "run: heldout/accuracy changed from 0.500 to 0.750 between steps 0 and 10."
    assert unchanged.startswith("run: unchanged: heldout/precision 0.500, ")
    assert "heldout/perplexity 9.000" in unchanged
