"""Report of a comparison: sentences, tables, charts, Markdown and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from regauge.evaluation.compare import sentences
from regauge.evaluation.compare.compare import ComparisonResult, DivergenceSummary, compare_runs
from regauge.evaluation.compare.first_divergence import build_value_table, describe_divergence
from regauge.evaluation.compare.settings import Comparison
from regauge.evaluation.report.comparison_section import build_run_comparison
from regauge.evaluation.report.drawing import draw
from regauge.evaluation.report.page import build_report
from regauge.evaluation.report.render import render_html, render_json, render_markdown
from regauge.machines.settings import Price
from regauge.training.divergence.localize import Divergence, ValueDifference, find_first
from unit.test_reporting import Page, write

STEPS = range(10, 101, 10)


def write_run(
    folder: Path, difference: float = 0.0, usd_per_hour: float | None = 36.0, **tables: Any
) -> str:
    """Write the folder of a run whose loss differs relatively from 5 - step / 50."""
    factor = 1 + difference
    lines = [
        {
            "attempt": 1,
            "step": step,
            "seconds": step / 10,
            "train/loss": (6 - step / 50) * factor,
            "train/tokens_per_second": 1000.0,
        }
        for step in STEPS
    ]
    lines += [
        {"attempt": 1, "step": step, "heldout/loss": (5 - step / 50) * factor} for step in (50, 100)
    ]
    ledger = [
        {
            "attempt": 1,
            "step": step,
            "machine_seconds": step * 2.0,
            "device_seconds": step * 4.0,
            "usd": None if usd_per_hour is None else step * 2 / 3600 * usd_per_hour,
            "padding_fraction": 0.2,
            "memory_bytes": {
                "weights": 4e9,
                "gradients": 4e9,
                "optimizer_state": 8e9,
                "peak": 20e9,
            },
        }
        for step in STEPS
    ]
    price = {} if usd_per_hour is None else {"price": {"usd_per_hour": usd_per_hour}}
    settings = {
        "task": {"kind": "mlm"},
        "execution": {"precision": "fp32", **price},
        "run": {
            "verb": "train",
            "run_id": folder.name,
            "weights_checksum": "w",
            "data_fingerprint": "d",
        },
    }
    write(folder, "run.json", {**settings, **tables})
    write(folder, "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write(folder, "ledger.jsonl", "".join(json.dumps(line) + "\n" for line in ledger))
    devices = tables.get("devices", 2)
    write(folder, "attempts.jsonl", json.dumps({"attempt": 1, "processes": devices}) + "\n")
    return str(folder)


@pytest.fixture
def three_runs(tmp_path: Path) -> ComparisonResult:
    """Return a baseline, a run within the tolerance at half the price, and a run beyond it."""
    runs = (
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", 0.0004, 18.0),
        write_run(tmp_path / "c", 0.02, None, devices=4),
    )
    noise = (write_run(tmp_path / "a-again", 0.0001),)
    return compare_runs(Comparison(runs=runs, noise_runs=noise))


def test_each_run_has_a_verdict(three_runs: ComparisonResult) -> None:
    first, second = build_run_comparison(three_runs).sections
    assert (first.verdict, second.verdict) == ("pass", "fail")
    assert first.sentences[0] == (
        "Pass: b is within 0.1% of a at all 2 evaluations; "
        "the largest difference is heldout/loss, 0.04% at step 50."
    )
    assert second.sentences[0].startswith(
        "Fail: c differs from a by 2% in heldout/loss at step 50; "
    )
    assert [row["is_within_limit"] for row in second.rows] == [False, False]
    assert second.rows[0]["limit"] == "0.1%"


def test_the_target_is_the_best_value_that_every_run_reached(three_runs: ComparisonResult) -> None:
    assert three_runs.target is not None
    assert three_runs.target.at_most == pytest.approx(3.06), "the last value of run c"
    baseline, cheap, unpriced = build_run_comparison(three_runs).cost_rows
    assert baseline["usd"] == "$1.94", "at step 97: 194 seconds at a cent each"
    assert baseline["machine_time"] == "3 min 14 s"
    assert cheap["is_cheapest"]
    assert (unpriced["usd"], unpriced["price"]) == ("unknown", "unknown")
    lines = sentences.describe_costs(three_runs)
    cheapest = "b reached heldout/loss of at most 3.060 at the lowest cost: 50.0% less than a."
    assert cheapest in lines
    assert any(line.startswith("The dollar cost of c is unknown; set ") for line in lines)
    assert not any("less than c" in line for line in lines)


def test_runs_that_cost_nothing_have_no_saving(three_runs: ComparisonResult) -> None:
    free = tuple(replace(cost, usd=0.0) for cost in three_runs.costs)
    (sentence,) = sentences.describe_cheapest(replace(three_runs, costs=free))
    assert sentence.endswith("of at most 3.060 at the lowest cost.")


def test_noise_and_tolerance_are_drawn_around_the_baseline(three_runs: ComparisonResult) -> None:
    charts = {chart.title: chart for chart in build_run_comparison(three_runs).charts}
    assert list(charts) == [
        "heldout/loss",
        "Training loss, smoothed",
        "Training loss: difference from the baseline",
        "heldout/loss against seconds of machine time",
        "Tokens per second, padding included",
        "Real tokens per second",
        "Memory of rank 0",
    ]
    pictures = {title: draw(chart, "x", "a run") for title, chart in charts.items()}
    assert "± 0.1%" in pictures["heldout/loss"]
    assert "run-to-run noise" in pictures["heldout/loss"]
    assert "tolerance, 0.1%" in pictures["Training loss: difference from the baseline"]
    speeds = charts["Tokens per second, padding included"].text
    assert "padding 250 tokens/s" in speeds
    assert "other 4,000 MB" in charts["Memory of rank 0"].text
    for title, picture in pictures.items():
        assert not re.search(r"#0\d0\d0\d", picture), "every colour comes from the page"
        assert charts[title].text in picture


def test_costs_are_drawn_in_dollars_if_all_prices_are_known(tmp_path: Path) -> None:
    def titles(**prices: Any) -> set[str]:
        comparison = compare_runs(Comparison(runs=runs, **prices))
        return {chart.title for chart in build_run_comparison(comparison).charts}

    runs = (write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.0, 18.0))
    assert "heldout/loss against dollars" in titles()
    one_price = (Price(usd_per_hour=1.0), Price())
    assert "heldout/loss against seconds of machine time" in titles(prices=one_price)


def test_page_markdown_and_json_have_the_comparison(three_runs: ComparisonResult) -> None:
    report = build_report(three_runs.runs, "Three runs", three_runs)
    text = render_html(report)
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids)), "ids are unique across charts"
    header = text[: text.index("<main>")]
    assert header.index("Pass: b") < header.index("Fail: c") < header.index("lowest cost")
    assert "| heldout/loss | 50 | 4 | 4.08 | 2% | 0.1% | NO |" in render_markdown(report)
    document = json.loads(render_json(report))
    assert [section["verdict"] for section in document["comparison_sections"]] == ["pass", "fail"]
    assert "comparison" not in document
    assert len(document["run_sections"]) == 3


def test_the_first_divergence_is_reported(three_runs: ComparisonResult) -> None:
    dtypes = ("float32",) * 2
    rounded = ValueDifference(3, "forward", "layer.0", "Linear", dtypes, 1e-7, 1e-6, (0.0, 1e-7))
    swapped = replace(
        rounded,
        name="layer.0.act",
        module_class="GELU",
        difference=3e-4,
        reference_distances=(1e-7, 3e-4),
    )
    later = replace(swapped, name="layer.1")
    values = (rounded, swapped, later)
    assert find_first(list(values)) is swapped
    divergence = Divergence(3, values, swapped, (("attention", "sdpa", "eager"),))
    sentence = describe_divergence(divergence)
    assert sentence == (
        "At step 3 the runs first differ in the output of a module: layer.0.act (GELU, float32), "
        "difference 0.0003, of which rounding explains 1e-06. The difference from the reference is "
        "1e-07 for the first run and 0.0003 for the other. Check the kernel of this module. "
        "Different execution settings: attention (sdpa, eager)."
    )
    summary = DivergenceSummary("c", sentence, build_value_table(divergence))
    comparison = replace(three_runs, divergences=(summary,))
    report = build_report(comparison.runs, None, comparison)
    assert escape(sentence) in render_html(report)
    assert "| layer.0.act | forward | GELU | float32 | 0.0003 |" in render_markdown(report)
    assert (
        json.loads(render_json(report))["comparison_sections"][1]["divergence"]["sentence"]
        == sentence
    )


def test_a_divergence_is_explained_by_rounding_or_not_reproduced() -> None:
    dtypes = ("float32",) * 2
    value = ValueDifference(3, "forward", "layer.0", "Linear", dtypes, 1e-7, 1e-6, (0.0, 1e-7))
    explained = "layer.0 (Linear, float32), difference 1e-07, of which rounding explains 1e-06."
    assert describe_divergence(Divergence(3, (value,))).endswith(explained)
    assert "not in their run files" in describe_divergence(Divergence(3, is_reproduced=False))


def test_runs_with_equal_names_are_named_by_their_folders(tmp_path: Path) -> None:
    folders = write_run(tmp_path / "x" / "match"), write_run(tmp_path / "y" / "match")
    comparison = compare_runs(Comparison(runs=folders))
    assert [run.name for run in comparison.runs] == list(folders)


def test_evaluations_of_saved_models_are_compared(tmp_path: Path) -> None:
    for name, recall in (("a", 0.8), ("b", 0.8004), ("c", 0.81)):
        write(
            tmp_path / name,
            "evaluation.json",
            {
                "rows": [{"name": "trained", "recall@10": recall}],
                "settings": {"seed": 1, "models": {"trained": name}},
                "identity": {"data_identity": "d"},
            },
        )
    folders = tuple(str(tmp_path / name) for name in "abc")
    near, far = build_run_comparison(compare_runs(Comparison(runs=folders))).sections
    assert (near.verdict, far.verdict) == ("pass", "fail")
    assert near.rows[0]["metric"] == "trained: recall@10"
