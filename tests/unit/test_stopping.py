"""Runs that stop early, at a limit, a target or a signal, and resume from there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from distributed import datasets, jobs
from regauge.errors import NoProgressError, SettingsError
from regauge.training.gradients import GradientComputer

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


def test_the_best_checkpoint_has_an_evaluation(data: str, tmp_path: Path) -> None:
    """A save between two evaluations has no metric, and does not take an older one."""
    checkpoint = {
        "every_steps": 2,
        "keep_last": 1,
        "best_metric": "heldout/loss",
        "best_mode": "min",
    }
    changes = {"output": {"checkpoint": checkpoint}, "evaluation": {"every_steps": 3}}
    lines = jobs.train(str(tmp_path), data, "mlm", {**changes, "stop": {"steps": 8}})
    best = json.loads((tmp_path / "checkpoints" / "BEST").read_text())
    values = {line["step"]: line["heldout/loss"] for line in lines if "heldout/loss" in line}
    step = int(best["checkpoint"].removeprefix("step-"))
    assert step in (6, 8)
    assert best["value"] == min(values[6], values[8]) == values[step]
