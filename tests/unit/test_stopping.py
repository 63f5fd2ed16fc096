"""Runs that stop early, at a limit, a target or a signal, and resume from there."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from distributed import datasets, jobs
from distributed.runs import settings
from regauge.run_folders.checkpoint_files import list_steps
from regauge.system.errors import NoProgressError, SettingsError
from regauge.training import trainer
from regauge.training.context import RunContext
from regauge.training.dry_run import plan_run
from regauge.training.gradients import GradientComputer
from regauge.training.state import TrainState

WHOLE: dict[str, Any] = {"stop": {"steps": 12}, "output": {"checkpoint": {"every_steps": 100}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(datasets.write_packed(tmp_path_factory.mktemp("data") / "packed"))


@pytest.fixture(scope="module")
def uninterrupted_run(data: str, tmp_path_factory: pytest.TempPathFactory) -> jobs.Lines:
    return jobs.train(str(tmp_path_factory.mktemp("whole")), data, "mlm", WHOLE)


def train_to_limit(folder: Path, data: str, **stop: Any) -> tuple[int, str]:
    """Train to a limit, at a dollar a second; return the exit code and the message."""
    price = {"price": {"usd_per_hour": 3600.0}}
    changes = {"stop": {**WHOLE["stop"], **stop}, "execution": price}
    return jobs.train_to_limit(str(folder), data, "mlm", {**WHOLE, **changes})


def read_last_line(folder: Path, name: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads((folder / name).read_text().splitlines()[-1])
    return line


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("stop.tokens", {"tokens": 1000}),
        ("stop.seconds", {"seconds": 0.001}),
        ("stop.usd", {"usd": 1e-6}),
    ],
)
def test_a_limit_saves_and_explains_how_to_resume(
    name: str, limits: dict[str, Any], uninterrupted_run: jobs.Lines, data: str, tmp_path: Path
) -> None:
    code, message = train_to_limit(tmp_path, data, **limits)
    assert code == 67
    step = read_last_line(tmp_path, "ledger.jsonl")["step"]
    assert 0 < step < 12
    assert message == (
        f"{name} is reached; the run is saved at step {step}; "
        f"raise {name}, then run the same command to resume"
    )
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == f"step-{step:08d}\n"
    assert not (tmp_path / "result.json").exists()
    raised = {**limits, name.removeprefix("stop."): 1_000_000}
    assert train_to_limit(tmp_path, data, **raised) == (0, "")
    lines = jobs.lines(tmp_path)
    assert jobs.losses(lines) == jobs.losses(uninterrupted_run)
    attempts = [line["attempt"] for line in lines if "train/loss" in line]
    assert attempts == [1] * step + [2] * (12 - step)


def test_tokens_and_dollars_are_counted_over_attempts(data: str, tmp_path: Path) -> None:
    train_to_limit(tmp_path, data, tokens=700)
    before = read_last_line(tmp_path, "ledger.jsonl")
    train_to_limit(tmp_path, data, tokens=1400)
    after = read_last_line(tmp_path, "ledger.jsonl")
    batch = 8 * datasets.LENGTH
    assert 700 <= before["tokens"] < 700 + 2 * batch, "a limit takes effect one step later"
    assert 1400 <= after["tokens"] < 1400 + 2 * batch
    assert after["usd"] == pytest.approx(after["machine_seconds"], abs=1e-3)
    assert after["usd"] >= sum(after["seconds"].values()), (
        "time outside of the accounts is paid as well"
    )
    assert after["usd"] > before["usd"] > 0


def test_a_target_ends_the_run(data: str, tmp_path: Path) -> None:
    changes = {
        **WHOLE,
        "evaluation": {"every_steps": 2},
        "stop": {"steps": 12, "target": {"metric": "heldout/loss", "at_most": 5.6}},
    }
    lines = jobs.train(str(tmp_path), data, "mlm", changes)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stop_reason"] == "reached heldout/loss"
    values = [line["heldout/loss"] for line in lines if "heldout/loss" in line]
    assert values[-1] <= 5.6 < values[-2]
    assert result["steps"] == lines[-1]["step"] < 12
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": {"steps": 12, "target": {"metric": "heldout/los", "at_most": 1.0}}},
        {"output": {"checkpoint": {"best_metric": "heldout/los"}}},
    ],
)
def test_an_unknown_metric_is_refused(changes: dict[str, Any], data: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'heldout/los' is not measured in this run; did you"):
        jobs.train(str(tmp_path), data, "mlm", {**WHOLE, **changes})


def test_a_metric_without_a_best_value_is_refused(data: str, tmp_path: Path) -> None:
    changes = {**WHOLE, "output": {"checkpoint": {"best_metric": "heldout/items"}}}
    with pytest.raises(
        SettingsError, match="'heldout/items': the task declares no best value; set"
    ):
        jobs.train(str(tmp_path), data, "mlm", changes)


@pytest.mark.parametrize(
    ("metric", "mode", "is_refused"),
    [
        ("heldout/items", "auto", True),
        ("heldout/items", "max", False),
        ("heldout/accuracy", "auto", False),
        ("heldout.news/accuracy", "auto", False),
        ("accuracy", "auto", True),
    ],
)
def test_a_dry_run_refuses_a_metric_without_a_best_value(
    data: str, tmp_path: Path, metric: str, mode: str, *, is_refused: bool
) -> None:
    """As the run does, and without held-out rows it refuses every metric."""
    checkpoint = {"best_metric": metric, "best_mode": mode}
    run = settings(tmp_path / "run", Path(data), "mlm", output={"checkpoint": checkpoint})
    message = f"'{metric}': the task declares no best value; set output.checkpoint.best_mode"
    with pytest.raises(SettingsError, match=message) if is_refused else nullcontext():
        plan_run(run)
    empty = datasets.write_packed(tmp_path / "empty", heldout=0)
    run = settings(tmp_path / "run", empty, "mlm", output={"checkpoint": checkpoint})
    with pytest.raises(SettingsError, match="best_metric needs held-out rows"):
        plan_run(run)


def test_a_signal_saves_and_the_same_command_resumes(
    uninterrupted_run: jobs.Lines, data: str, tmp_path: Path
) -> None:
    original = GradientComputer.accumulate_gradients
    steps: list[int] = []

    def interrupt(self: GradientComputer, *arguments: Any) -> Any:
        steps.append(len(steps))
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    before = signal.getsignal(signal.SIGTERM)
    with patch.object(GradientComputer, "accumulate_gradients", interrupt):
        code, message = train_to_limit(tmp_path, data)
    assert (code, message.partition(";")[0]) == (143, "stopped by a signal, saved at step 5")
    assert signal.getsignal(signal.SIGTERM) == before
    assert train_to_limit(tmp_path, data) == (0, "")
    assert jobs.losses(jobs.lines(tmp_path)) == jobs.losses(uninterrupted_run)


def test_a_loss_that_is_not_finite_ends_the_run(data: str, tmp_path: Path) -> None:
    changes = {**WHOLE, "optimizer": {"learning_rate": 1e30, "max_grad_norm": None}}
    with pytest.raises(NoProgressError, match=r"lower optimizer.learning_rate") as caught:
        jobs.train(str(tmp_path), data, "mlm", changes)
    assert caught.value.exit_code == 66


def test_a_second_start_of_a_finished_run_changes_nothing(
    uninterrupted_run: jobs.Lines, data: str, tmp_path: Path
) -> None:
    jobs.train(str(tmp_path), data, "mlm", WHOLE)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    second_lines = jobs.train(str(tmp_path), data, "mlm", WHOLE)
    assert jobs.losses(second_lines) == jobs.losses(uninterrupted_run)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 12


def test_a_line_counts_the_tokens_of_its_interval_also_across_a_save(
    data: str, tmp_path: Path
) -> None:
    output = {"log_every_steps": 6, "checkpoint": {"every_steps": 4}}
    metrics = jobs.train(str(tmp_path), data, "mlm", {"output": output})
    lines = [line for line in metrics if "train/loss" in line]
    assert [line["step"] for line in lines] == [6, 12]
    total = read_last_line(tmp_path, "ledger.jsonl")
    shares = [line["train/padding_fraction"] for line in lines]
    slots = 12 * 8 * datasets.LENGTH
    assert total["tokens"] == pytest.approx(sum((1 - share) * slots / 2 for share in shares))
    assert total["padding_fraction"] == pytest.approx(1 - total["tokens"] / slots)
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3


BEST_RUNS: dict[str, dict[str, Any]] = {
    "auto": {},
    "every evaluation": {"every_steps": 500},
    "the worst loss": {"best_mode": "max"},
    "accuracy": {"best_metric": "heldout/accuracy"},
}
"""Checkpoint settings, by a name."""


@pytest.mark.parametrize("name", BEST_RUNS)
def test_every_evaluation_can_become_the_best_checkpoint(
    name: str, data: str, tmp_path: Path
) -> None:
    checkpoint = {"every_steps": 4, "keep_last": 1, **BEST_RUNS[name]}
    changes = {
        "output": {"checkpoint": checkpoint},
        "evaluation": {"every_steps": 3},
        "optimizer": {"learning_rate": 0.3},
    }
    lines = jobs.train(str(tmp_path), data, "mlm", {**changes, "stop": {"steps": 16}})
    best = json.loads((tmp_path / "checkpoints" / "BEST").read_text())
    metric = BEST_RUNS[name].get("best_metric", "heldout/loss")
    values = {line["step"]: line[metric] for line in lines if line["step"] and metric in line}
    is_minimum = metric == "heldout/loss" and name != "the worst loss"
    expected = (min if is_minimum else max)(values, key=values.__getitem__)
    assert (best["metric"], best["value"]) == (metric, values[expected])
    assert best["checkpoint"] == f"step-{expected:08d}"
    assert set(list_steps(tmp_path / "checkpoints")) == {16, expected}


def test_a_value_that_is_not_finite_is_never_the_best(
    monkeypatch: pytest.MonkeyPatch, data: str, tmp_path: Path
) -> None:
    original = trainer.evaluate

    def evaluate(context: RunContext, state: TrainState) -> dict[str, float]:
        values = {3: math.nan, 6: -math.inf}
        metrics = original(context, state)
        return metrics | {"heldout/loss": values.get(state.step, metrics["heldout/loss"])}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    changes = {"evaluation": {"every_steps": 3}, "stop": {"steps": 9}}
    jobs.train(str(tmp_path), data, "mlm", changes)
    best = json.loads((tmp_path / "checkpoints" / "BEST").read_text())
    assert best["checkpoint"] == "step-00000009"
    assert math.isfinite(best["value"])


def test_no_best_checkpoint_is_kept_if_it_is_off(data: str, tmp_path: Path) -> None:
    changes = {
        "output": {"checkpoint": {"best_metric": "off", "keep_last": 1}},
        "evaluation": {"every_steps": 3},
    }
    jobs.train(str(tmp_path), data, "mlm", {**changes, "stop": {"steps": 8}})
    assert not (tmp_path / "checkpoints" / "BEST").exists()
    assert list_steps(tmp_path / "checkpoints") == [8]
