"""Runs beside each other as they are told: sentences, tables, charts, Markdown and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from regauge.comparison import sentences
from regauge.comparison.compare import Compared, Place, compared
from regauge.comparison.first_divergence import sentence, table
from regauge.comparison.settings import Comparison
from regauge.planning.settings import Price
from regauge.reporting import comparison_charts
from regauge.reporting.comparison_section import accounts, told
from regauge.reporting.page import tell
from regauge.reporting.render import document, markdown, page
from regauge.training.divergence.localize import Localised, Spot, first
from unit.test_reporting import Page, write

STEPS = range(10, 101, 10)


def trained(folder: Path, share: float = 0.0, usd_per_hour: float | None = 36.0, **own: Any) -> str:
    """Write the folder of a run whose loss differs by a share from 5 - step / 50."""
    factor = 1 + share
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
            "padding_share": 0.2,
            "memory": {"weights": 4e9, "gradients": 4e9, "moments": 8e9, "peak": 20e9},
        }
        for step in STEPS
    ]
    price = {} if usd_per_hour is None else {"price": {"usd_per_hour": usd_per_hour}}
    settings = {
        "task": {"kind": "mlm"},
        "execution": {"precision": "fp32", **price},
        "run": {"verb": "train", "id": folder.name, "weights": "w", "data_identity": "d"},
    }
    write(folder, "run.json", {**settings, **own})
    write(folder, "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write(folder, "ledger.jsonl", "".join(json.dumps(line) + "\n" for line in ledger))
    devices = own.get("devices", 2)
    write(folder, "attempts.jsonl", json.dumps({"attempt": 1, "processes": devices}) + "\n")
    return str(folder)


@pytest.fixture
def three(tmp_path: Path) -> Compared:
    """Return the first run, one within the band at half its price, and one beyond it, unpriced."""
    runs = (
        trained(tmp_path / "a"),
        trained(tmp_path / "b", 0.0004, 18.0),
        trained(tmp_path / "c", 0.02, None, devices=4),
    )
    noise = (trained(tmp_path / "a-again", 0.0001),)
    return compared(Comparison(runs=runs, noise=noise))


def test_each_run_has_its_verdict(three: Compared) -> None:
    first, second = told(three)
    assert (first.verdict, second.verdict) == ("pass", "fail")
    assert first.sentences[0].startswith("Pass: b is within 0.1% of a at all 2 evaluations")
    assert second.sentences[0].startswith("Fail: c differs from a, most in heldout/loss by 2%")
    assert [row.within for row in second.rows] == [False, False]
    assert second.rows[0].limit == "0.1%"


def test_the_target_is_what_every_run_came_to(three: Compared) -> None:
    assert three.target is not None
    assert three.target.at_most == pytest.approx(3.06), "where c ended"
    mine, cheap, unknown = accounts(three)
    assert mine.usd == "$1.94", "at step 97: 194 seconds at a cent each"
    assert mine.machine == "3 min 14 s"
    assert cheap.cheapest
    assert (unknown.usd, unknown.price) == ("unknown", "unknown")
    lines = sentences.cost_sentences(three)
    assert any(
        "b came to heldout/loss of at most 3.060 for least and saves 50.0% over a" in x
        for x in lines
    )
    assert any(line.startswith("The dollars of c are unknown: set ") for line in lines)
    assert not any("over c" in line for line in lines)


def test_the_first_run_s_noise_and_the_band_are_drawn(three: Compared) -> None:
    drawn = {chart.title: chart for chart in comparison_charts.charts(three, "x")}
    assert list(drawn) == [
        "heldout/loss",
        "Training loss, smoothed",
        "Training loss: difference from the first",
        "heldout/loss against seconds of machine time",
        "Slots per second",
        "Real tokens per second",
        "Memory of a process",
    ]
    assert "± 0.1%" in drawn["heldout/loss"].svg
    assert "noise of the first" in drawn["heldout/loss"].svg
    assert "band, 0.1%" in drawn["Training loss: difference from the first"].svg
    assert "padding 250.000 slots/s" in drawn["Slots per second"].text
    assert "all else 4,000 MB" in drawn["Memory of a process"].text
    for chart in drawn.values():
        assert not re.search(r"#0\d0\d0\d", chart.svg), "every colour is the page's"
        assert chart.text in chart.svg


def test_known_prices_are_drawn_in_dollars(tmp_path: Path) -> None:
    found = compared(Comparison(runs=(trained(tmp_path / "a"), trained(tmp_path / "b", 0.0, 18.0))))
    assert "heldout/loss against dollars" in {
        chart.title for chart in comparison_charts.charts(found, "x")
    }
    own = Price(usd_per_hour=1.0)
    again = Comparison(runs=(str(tmp_path / "a"), str(tmp_path / "b")), prices=(own, Price()))
    titles = {chart.title for chart in comparison_charts.charts(compared(again), "x")}
    assert "heldout/loss against seconds of machine time" in titles


def test_page_markdown_and_json_say_it(three: Compared) -> None:
    story = tell(three.runs, "Three runs", three)
    text = page(story)
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids)), "ids are told apart between charts"
    header = text[: text.index("<main>")]
    assert header.index("Pass: b") < header.index("Fail: c") < header.index("saves")
    assert "| heldout/loss | 50 | 4 | 4.08 | 2% | 0.1% | NO |" in markdown(story)
    found = json.loads(document(story))
    assert [each["verdict"] for each in found["beside"]] == ["pass", "fail"]
    assert "compared" not in found
    assert len(found["chapters"]) == 3


def test_the_place_where_runs_part_is_told(three: Compared) -> None:
    rounded = Spot(3, "forward", "layer.0", "Linear", ("float32",) * 2, 1e-7, 1e-6, (0.0, 1e-7))
    swapped = replace(rounded, name="layer.0.act", kind="GELU", apart=3e-4, off=(1e-7, 3e-4))
    later = replace(swapped, name="layer.1")
    spots = (rounded, swapped, later)
    assert first(list(spots)) is swapped
    where = Localised(3, spots, swapped, (("attention", "sdpa", "eager"),))
    named = sentence(where)
    assert named.startswith("At step 3 they part in what a module returns: layer.0.act (GELU, f")
    assert "0.0003 apart where rounding explains 1e-06" in named
    assert named.endswith(
        "look at this module's kernel; chosen differently: attention (sdpa, eager)."
    )
    found = replace(three, places=(Place("c", named, table(where)),))
    story = tell(found.runs, None, found)
    assert escape(named) in page(story)
    assert "| layer.0.act | forward | GELU | float32 | 0.0003 |" in markdown(story)
    assert json.loads(document(story))["beside"][1]["place"]["named"] == named
    explained = "layer.0 (Linear, float32), 1e-07 apart where rounding explains 1e-06."
    assert sentence(Localised(3, spots[:1])).endswith(explained)
    assert "not in their run files" in sentence(Localised(3, again=False))


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = trained(tmp_path / "x" / "match"), trained(tmp_path / "y" / "match")
    found = compared(Comparison(runs=(one, other)))
    assert [run.name for run in found.runs] == [one, other]


def test_evaluations_of_saved_models_are_compared(tmp_path: Path) -> None:
    for name, recall in (("a", 0.8), ("b", 0.8004), ("c", 0.81)):
        write(
            tmp_path / name,
            "evaluation.json",
            {
                "rows": [{"name": "trained", "recall@10": recall}],
                "settings": {"seed": 1, "subjects": {"models": {"trained": name}}},
                "facts": {"data_identity": "d"},
            },
        )
    folders = tuple(str(tmp_path / name) for name in "abc")
    near, far = told(compared(Comparison(runs=folders)))
    assert (near.verdict, far.verdict) == ("pass", "fail")
    assert near.rows[0].metric == "trained: recall@10"
