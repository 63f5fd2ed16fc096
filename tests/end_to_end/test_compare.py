"""`regauge compare` on the command line: verdicts, costs, exit codes, and the report page."""

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
PASS, BAD_INPUT, FAIL, INCONCLUSIVE = 0, 2, 68, 69


@pytest.fixture
def first(runs: Runs) -> Path:
    return runs.train_once(1, "mlm", **EVALUATED)


def regauge(*words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON output and the last line of a command."""
    command = [sys.executable, "-m", "regauge", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = done.stderr.strip().splitlines()
    return done.returncode, json.loads(done.stdout or "{}"), errors[-1] if errors else ""


def compare(*words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON output and the last line of a comparison."""
    return regauge("compare", *words)


@pytest.mark.full
def test_a_run_with_another_summation_order_passes(runs: Runs, first: Path, tmp_path: Path) -> None:
    other = runs.train_once(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    code, answer, _ = compare(first, other, f"output.folder={tmp_path}")
    assert code == PASS
    result = answer[str(other)]
    assert result["verdict"] == "pass"
    assert "batch.microbatch_rows (2, 4)" in result["summary"][-1]
    assert any("was not measured" in sentence for sentence in result["summary"])
    rows = {row["name"]: row for row in answer["cost_to_target"]}
    assert set(rows) == {str(first), str(other)}
    assert all(
        row["usd"] == pytest.approx(row["machine_seconds"], abs=2e-3) for row in rows.values()
    )
    assert "at the lowest cost: " in answer["cost_summary"][-1]
    page = Path(answer["report"]).read_text()
    header = page[: page.index("<main>")]
    assert "Pass:" in header
    assert "at the lowest cost: " in header
    for title in (
        "heldout/loss",
        "difference from the baseline",
        "against dollars",
        "Tokens per second, padding included",
    ):
        assert re.search(f"<figcaption>[^<]*{title}", page), title


def test_another_strategy_on_two_processes_passes(runs: Runs, first: Path) -> None:
    other = runs.train_once(2, "mlm", **EVALUATED, strategy="fsdp")
    again = runs.train_once(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    code, answer, line = compare(first, other, f"comparison.noise_runs=['{again}']")
    assert code == PASS, line
    (text,) = (" ".join(result["summary"]) for result in answer.values() if "summary" in result)
    assert "strategy.kind (single, fsdp)" in text
    assert "was not measured" not in text


def test_another_learning_rate_is_not_comparable(runs: Runs, first: Path) -> None:
    other = runs.train_once(1, "mlm", **EVALUATED, optimizer={"learning_rate": 0.004})
    code, _, line = compare(first, other)
    assert code == INCONCLUSIVE
    assert "optimizer.learning_rate (0.003, 0.004)" in line


@pytest.mark.full
def test_a_tolerance_below_the_difference_fails(runs: Runs, first: Path) -> None:
    other = runs.train_once(1, "mlm", **merge(EVALUATED, {"execution": {"precision": "bf16"}}))
    code, answer, line = compare(first, other, "comparison.tolerance=1e-9")
    assert code == FAIL
    assert answer[str(other)]["verdict"] == "fail"
    assert "add --noise-floor" in line
    code, _, _ = compare(first, other, "comparison.tolerance=1e-9", "comparison.on_difference=warn")
    assert code == PASS


def test_a_target_that_is_not_reached_is_inconclusive(runs: Runs, first: Path) -> None:
    other = runs.train_once(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    target = ("comparison.target.metric=heldout/loss", "comparison.target.at_most=0.01")
    code, answer, line = compare(first, other, *target)
    assert code == INCONCLUSIVE
    assert "did not reach heldout/loss of at most 0.010: its best is" in line
    assert [row["usd"] for row in answer["cost_to_target"]] == [None, None]


def test_prices_can_be_replaced_and_unknown_ones_are_not_ranked(runs: Runs, first: Path) -> None:
    other = runs.train_once(1, "mlm", **EVALUATED, batch={"microbatch_rows": 4})
    prices = 'comparison.prices=[{instance="trn1.2xlarge"}, {}]'
    code, answer, _ = compare(first, other, prices)
    assert code == PASS
    baseline, candidate = answer["cost_to_target"]
    assert baseline["usd_per_hour"] == 1.34375
    assert (candidate["usd_per_hour"], candidate["usd"]) == (None, None)
    text = " ".join(answer["cost_summary"])
    assert "at 1.34375 USD per hour (catalog, on-demand in us-east-1, 2026-07-20)" in text
    assert "lowest cost" not in text
    assert f"The dollar cost of {other} is unknown; set execution.price.instance" in text


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
def test_bad_input_is_reported_in_one_line(
    first: Path, words: tuple[str, ...], problem: str
) -> None:
    code, _, line = compare(first, first, *words)
    assert code == BAD_INPUT
    assert problem in line


def test_a_comparison_needs_two_runs(first: Path) -> None:
    code, _, line = compare(first)
    assert code == BAD_INPUT
    assert "name two or more runs" in line


@pytest.mark.full
def test_replay_computes_the_logged_losses(first: Path, tmp_path: Path) -> None:
    """From the initial weights and from a checkpoint."""
    losses = {line["step"]: line["train/loss"] for line in lines(first) if "train/loss" in line}
    state = first / "checkpoints" / "step-00000004"
    for first_step, options in ((0, ()), (4, (f"replay.checkpoint={state}",))):
        folder = tmp_path / str(first_step)
        overrides = (
            f"output.folder={folder}",
            f"replay.until={first_step + 2}",
            f"replay.capture_steps=[{first_step}]",
        )
        code, answer, line = regauge("replay", first / "run.json", *overrides, *options)
        assert code == PASS, line
        assert answer["steps"] == first_step + 2
        replayed = [json.loads(text) for text in (folder / "replay.jsonl").read_text().splitlines()]
        assert [line["step"] for line in replayed] == [first_step + 1, first_step + 2]
        assert all(line["loss"] == losses[line["step"]] for line in replayed)
        captured = json.loads((folder / f"capture-{first_step:08d}.0.json").read_text())
        stages = {value["stage"] for value in captured["values"]}
        assert stages == {"input", "forward", "backward", "gradient", "update"}
    code, _, line = regauge("replay", first / "run.json", *overrides, *options, "replay.until=3")
    assert code == BAD_INPUT
    assert "is at step 4, after the steps to replay" in line


@pytest.mark.full
def test_the_first_divergence_is_in_the_output_and_in_the_report(
    runs: Runs, first: Path, tmp_path: Path
) -> None:
    other = runs.train_once(1, "mlm", **merge(EVALUATED, {"execution": {"precision": "bf16"}}))
    options = (f"output.folder={tmp_path}", "comparison.on_difference=warn", "--localize")
    code, answer, line = compare(first, other, *options)
    assert code == PASS, line
    sentence = answer[str(other)]["first_divergence"]
    assert sentence.startswith("Recomputed step 0 from one state: rounding explains every diff")
    assert escape(sentence) in Path(answer["report"]).read_text()
