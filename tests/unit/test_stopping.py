"""A run that stops before its end: at a limit, at a target, at a signal. It goes on from there."""

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
    return str(datasets.packed(tmp_path_factory.mktemp("data") / "packed"))


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> jobs.Lines:
    return jobs.train(str(tmp_path_factory.mktemp("whole")), data, "mlm", WHOLE)


def stopped(folder: Path, data: str, **stop: Any) -> tuple[int, str]:
    """Train to a limit, at a dollar a second."""
    price = {"price": {"usd_per_hour": 3600.0}}
    changes = {"stop": {**WHOLE["stop"], **stop}, "execution": price}
    return jobs.stopped(str(folder), data, "mlm", {**WHOLE, **changes})


def last(folder: Path, name: str) -> dict[str, Any]:
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
def test_a_limit_saves_and_says_how_to_go_on(
    name: str, limits: dict[str, Any], whole: jobs.Lines, data: str, tmp_path: Path
) -> None:
    code, message = stopped(tmp_path, data, **limits)
    assert code == 67
    step = last(tmp_path, "ledger.jsonl")["step"]
    assert 0 < step < 12
    assert message == (
        f"{name} is reached; the run is saved at step {step}; "
        f"raise {name}, then run the same command to resume"
    )
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == f"step-{step:08d}\n"
    assert not (tmp_path / "result.json").exists()
    raised = {**limits, name.removeprefix("stop."): 1_000_000}
    assert stopped(tmp_path, data, **raised) == (0, "")
    found = jobs.lines(tmp_path)
    assert jobs.losses(found) == jobs.losses(whole)
    assert [line["attempt"] for line in found if "train/loss" in line] == [1] * step + [2] * (
        12 - step
    )


def test_tokens_and_dollars_are_counted_over_attempts(data: str, tmp_path: Path) -> None:
    stopped(tmp_path, data, tokens=700)
    before = last(tmp_path, "ledger.jsonl")
    stopped(tmp_path, data, tokens=1400)
    after = last(tmp_path, "ledger.jsonl")
    batch = 8 * datasets.LENGTH
    assert 700 <= before["tokens"] < 700 + 2 * batch, "a limit is seen one step later"
    assert 1400 <= after["tokens"] < 1400 + 2 * batch
    assert after["usd"] == pytest.approx(after["machine_seconds"], abs=1e-3)
    assert after["usd"] >= sum(after["seconds"].values()), "what is in no account is paid as well"
    assert after["usd"] > before["usd"] > 0


def test_a_target_ends_the_run(data: str, tmp_path: Path) -> None:
    changes = {
        **WHOLE,
        "evaluation": {"every_steps": 2},
        "stop": {"steps": 12, "target": {"metric": "heldout/loss", "at_most": 5.6}},
    }
    found = jobs.train(str(tmp_path), data, "mlm", changes)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["reason"] == "reached heldout/loss"
    measured = [line["heldout/loss"] for line in found if "heldout/loss" in line]
    assert measured[-1] <= 5.6 < measured[-2]
    assert result["steps"] == found[-1]["step"] < 12
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": {"steps": 12, "target": {"metric": "heldout/los", "at_most": 1.0}}},
        {"output": {"checkpoint": {"best": "heldout/los"}}},
    ],
)
def test_a_metric_that_is_never_measured_is_refused(
    changes: dict[str, Any], data: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="'heldout/los' is not measured in this run; did you"):
        jobs.train(str(tmp_path), data, "mlm", {**WHOLE, **changes})


def test_a_signal_saves_and_the_same_command_goes_on(
    whole: jobs.Lines, data: str, tmp_path: Path
) -> None:
    computed = GradientComputer.accumulate_gradients
    steps: list[int] = []

    def of(self: GradientComputer, *given: Any) -> Any:
        steps.append(len(steps))
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return computed(self, *given)

    before = signal.getsignal(signal.SIGTERM)
    with patch.object(GradientComputer, "accumulate_gradients", of):
        code, message = stopped(tmp_path, data)
    assert (code, message.partition(";")[0]) == (143, "stopped by a signal, saved at step 5")
    assert signal.getsignal(signal.SIGTERM) == before
    assert stopped(tmp_path, data) == (0, "")
    assert jobs.losses(jobs.lines(tmp_path)) == jobs.losses(whole)


def test_a_loss_that_is_no_number_ends_the_run(data: str, tmp_path: Path) -> None:
    changes = {**WHOLE, "optimizer": {"learning_rate": 1e30, "clip_norm": None}}
    with pytest.raises(NoProgressError, match=r"lower optimizer.learning_rate") as caught:
        jobs.train(str(tmp_path), data, "mlm", changes)
    assert caught.value.exit_code == 66


def test_a_finished_run_that_is_started_again_changes_nothing(
    whole: jobs.Lines, data: str, tmp_path: Path
) -> None:
    jobs.train(str(tmp_path), data, "mlm", WHOLE)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    again = jobs.train(str(tmp_path), data, "mlm", WHOLE)
    assert jobs.losses(again) == jobs.losses(whole)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 12


def test_a_line_counts_the_tokens_of_its_interval_when_a_save_lies_inside_of_it(
    data: str, tmp_path: Path
) -> None:
    output = {"every_steps": 6, "checkpoint": {"every_steps": 4}}
    found = jobs.train(str(tmp_path), data, "mlm", {"output": output})
    told = [line for line in found if "train/loss" in line]
    assert [line["step"] for line in told] == [6, 12]
    total = last(tmp_path, "ledger.jsonl")
    shares = [line["train/padding_share"] for line in told]
    slots = 12 * 8 * datasets.LENGTH
    assert total["tokens"] == pytest.approx(sum((1 - share) * slots / 2 for share in shares))
    assert total["padding_share"] == pytest.approx(1 - total["tokens"] / slots)
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3


def test_the_best_checkpoint_is_one_that_was_measured(data: str, tmp_path: Path) -> None:
    """A save between two evaluations has no value of its own, and takes none of an older one."""
    checkpoint = {"every_steps": 2, "keep": 1, "best": "heldout/loss", "best_is": "lowest"}
    changes = {"output": {"checkpoint": checkpoint}, "evaluation": {"every_steps": 3}}
    found = jobs.train(str(tmp_path), data, "mlm", {**changes, "stop": {"steps": 8}})
    best = json.loads((tmp_path / "checkpoints" / "BEST").read_text())
    measured = {line["step"]: line["heldout/loss"] for line in found if "heldout/loss" in line}
    step = int(best["name"].removeprefix("step-"))
    assert step in (6, 8)
    assert best["value"] == min(measured[6], measured[8]) == measured[step]
