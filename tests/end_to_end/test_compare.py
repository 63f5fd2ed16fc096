"""`regauge compare` as a user types it: verdicts, costs, codes, and the page that shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from distributed.conftest import runs, worlds
from distributed.jobs import lines
from distributed.runs import Runs
from regauge.config import merge

__all__ = ["runs", "worlds"]
PRICE = {"usd_per_hour": 3600.0}
EVALUATED = {"evaluation": {"every_steps": 4}, "execution": {"price": PRICE}}
PASSES, BAD_INPUT, FAILS, NOT_SHOWN = 0, 2, 68, 69


@pytest.fixture
def first(runs: Runs) -> Path:
    return runs.trained(1, "mlm", **EVALUATED)


def regauge(*words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the answer and the last line of a command."""
    command = [sys.executable, "-m", "regauge", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()
    return done.returncode, json.loads(done.stdout or "{}"), said[-1] if said else ""


def compare(*words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the answer and the last line of a comparison."""
    return regauge("compare", *words)


def test_a_run_in_another_order_of_its_sums_passes(runs: Runs, first: Path, tmp_path: Path) -> None:
    other = runs.trained(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    code, answer, _ = compare(first, other, f"output.folder={tmp_path}")
    assert code == PASSES
    told = answer[str(other)]
    assert told["verdict"] == "pass"
    assert "batch.microbatch_rows (2, 4)" in told["told"][-1]
    assert any("was not measured" in sentence for sentence in told["told"])
    rows = {row["name"]: row for row in answer["to_target"]}
    assert set(rows) == {str(first), str(other)}
    assert all(
        row["usd"] == pytest.approx(row["machine_seconds"], abs=2e-3) for row in rows.values()
    )
    assert "for least and saves" in answer["cost"][-1]
    page = Path(answer["report"]).read_text()
    header = page[: page.index("<main>")]
    assert "Pass:" in header
    assert "for least and saves" in header
    for title in ("heldout/loss", "difference from the first", "against dollars", "Slots per"):
        assert re.search(f"<figcaption>[^<]*{title}", page), title


def test_another_strategy_on_two_processes_passes(runs: Runs, first: Path) -> None:
    other = runs.trained(2, "mlm", **EVALUATED, strategy="fsdp")
    again = runs.trained(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    code, answer, line = compare(first, other, f"comparison.noise=['{again}']")
    assert code == PASSES, line
    (told,) = (" ".join(each["told"]) for each in answer.values() if "told" in each)
    assert "strategy.kind (single, fsdp)" in told
    assert "was not measured" not in told


def test_another_rate_is_not_comparable(runs: Runs, first: Path) -> None:
    other = runs.trained(1, "mlm", **EVALUATED, optimizer={"learning_rate": 0.004})
    code, _, line = compare(first, other)
    assert code == NOT_SHOWN
    assert "optimizer.learning_rate (0.003, 0.004)" in line


def test_a_band_that_is_too_narrow_fails(runs: Runs, first: Path) -> None:
    other = runs.trained(1, "mlm", **merge(EVALUATED, {"execution": {"precision": "bf16"}}))
    code, answer, line = compare(first, other, "comparison.band=1e-9")
    assert code == FAILS
    assert answer[str(other)]["verdict"] == "fail"
    assert "add --noise-floor" in line
    code, _, _ = compare(first, other, "comparison.band=1e-9", "comparison.on_difference=say")
    assert code == PASSES


def test_a_target_that_is_not_reached_says_what_came_nearest(runs: Runs, first: Path) -> None:
    other = runs.trained(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    target = ("comparison.target.metric=heldout/loss", "comparison.target.at_most=0.01")
    code, answer, line = compare(first, other, *target)
    assert code == NOT_SHOWN
    assert "never came to heldout/loss of at most 0.010: its best is" in line
    assert [row["usd"] for row in answer["to_target"]] == [None, None]


def test_prices_can_be_others_and_unknown_ones_are_not_ranked(runs: Runs, first: Path) -> None:
    other = runs.trained(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    prices = 'comparison.prices=[{instance="trn1.2xlarge"}, {}]'
    code, answer, _ = compare(first, other, prices)
    assert code == PASSES
    mine, theirs = answer["to_target"]
    assert (mine["usd_per_hour"], theirs["usd_per_hour"], theirs["usd"]) == (1.34375, None, None)
    told = " ".join(answer["cost"])
    assert "at 1.34375 USD an hour (the catalog, on demand in us-east-1, 2026-07-20)" in told
    assert "saves" not in told
    assert f"The dollars of {other} are unknown: set execution.price.instance" in told


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("comparison.prices=[{}]",), "2 runs need 2 prices"),
        (('comparison.prices=[{instance="p9.huge"}, {}]',), "'p9.huge' is not in the catalog"),
        (("comparison.target.metric=heldout/loss",), "set either at_least or at_most"),
        (
            ("comparison.target.metric=heldout/los", "comparison.target.at_most=1"),
            "did you mean 'heldout/loss'?",
        ),
        (('comparison.metrics=["heldout/acuracy"]',), "did you mean 'heldout/accuracy'?"),
    ],
)
def test_bad_input_is_one_line(first: Path, words: tuple[str, ...], problem: str) -> None:
    code, _, line = compare(first, first, *words)
    assert code == BAD_INPUT
    assert problem in line


def test_one_run_is_nothing_to_compare(first: Path) -> None:
    code, _, line = compare(first)
    assert code == BAD_INPUT
    assert "name two runs or more" in line


@pytest.mark.full
def test_steps_are_computed_again(first: Path, tmp_path: Path) -> None:
    """From the first weights and from a checkpoint; what comes out is what the run had logged."""
    ran = {line["step"]: line["train/loss"] for line in lines(first) if "train/loss" in line}
    state = first / "checkpoints" / "step-00000004"
    for begun, more in ((0, ()), (4, (f"replay.state={state}",))):
        folder = tmp_path / str(begun)
        own = (f"output.folder={folder}", f"replay.until={begun + 2}", f"replay.watch=[{begun}]")
        code, answer, line = regauge("replay", first / "run.json", *own, *more)
        assert code == PASSES, line
        assert answer["steps"] == begun + 2
        told = [json.loads(text) for text in (folder / "replay.jsonl").read_text().splitlines()]
        assert [each["step"] for each in told] == [begun + 1, begun + 2]
        assert all(each["loss"] == ran[each["step"]] for each in told)
        captured = json.loads((folder / f"capture-{begun:08d}.0.json").read_text())
        stages = {value["stage"] for value in captured["values"]}
        assert stages == {"rows", "forward", "backward", "gradient", "update"}
    code, _, line = regauge("replay", first / "run.json", *own, *more, "replay.until=3")
    assert code == BAD_INPUT
    assert "is at step 4, beyond the steps to compute again" in line


@pytest.mark.full
def test_the_place_where_runs_part_is_in_the_answer_and_in_the_report(
    runs: Runs, first: Path, tmp_path: Path
) -> None:
    other = runs.trained(1, "mlm", **merge(EVALUATED, {"execution": {"precision": "bf16"}}))
    own = (f"output.folder={tmp_path}", "comparison.on_difference=say", "--localise")
    code, answer, line = compare(first, other, *own)
    assert code == PASSES, line
    named = answer[f"{other} parts"]
    assert named.startswith("Step 0 computed again from one state: rounding explains every diff")
    assert escape(named) in Path(answer["report"]).read_text()
