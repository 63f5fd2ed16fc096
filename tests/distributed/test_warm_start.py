"""Warm start: a run takes weights, optimizer moments and the schedule from an earlier run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.jobs import lines, losses, weights
from distributed.runs import Runs, settings
from regauge.models.settings import InitFrom
from regauge.run_folders.checkpoint_files import BEST, checkpoint_name
from regauge.system.errors import SettingsError
from regauge.training import dry_run, warm_start

FIRST: dict[str, Any] = {
    "stop": {"steps": 8},
    "optimizer": {"schedule": {"kind": "constant", "warmup_steps": 0}},
}


@pytest.fixture(scope="module")
def first(runs: Runs) -> Path:
    """Return a run of 8 steps with checkpoints at steps 4 and 8."""
    return runs.train_once(1, "mlm", **FIRST)


def start_from(first: Path, **start: Any) -> dict[str, Any]:
    """Return the `model` table of a run that starts from an earlier run."""
    return {"path": str(first), "init_from": {"path": str(first), **start}}


def train_from(runs: Runs, first: Path, size: int = 1, **start: Any) -> Path:
    """Return a run with another seed that starts from the first run."""
    changes = {**FIRST, "seed": 9, "stop": {"steps": 4}}
    model = {**start_from(first, **start), "dropout": 0.1}
    folder = runs.folder("next")
    runs.job("train", size, folder, "mlm", {**changes, "model": model})
    return folder


def initial_loss(folder: Path) -> float:
    """Return the held-out loss before the first step."""
    return next(line["heldout/loss"] for line in lines(folder) if "heldout/loss" in line)


def final_loss(folder: Path) -> float:
    return [line["heldout/loss"] for line in lines(folder) if "heldout/loss" in line][-1]


def test_a_run_starts_from_final_weights_or_a_checkpoint(runs: Runs, first: Path) -> None:
    final, latest, fourth = (train_from(runs, first, step=step) for step in ("final", "latest", 4))
    # Masks of held-out rows are keyed by the seed, so the losses are compared among the new runs.
    assert initial_loss(final) == initial_loss(latest) != initial_loss(fourth)
    assert final_loss(final) == final_loss(latest)
    assert (fourth / "start" / "config.json").is_file()
    assert not (final / "start").exists()


@pytest.mark.full
@pytest.mark.parametrize("size", [2])
def test_optimizer_moments_are_kept_on_request(runs: Runs, first: Path, size: int) -> None:
    fresh, with_moments, sharded = (
        train_from(runs, first, count, optimizer=optimizer)
        for optimizer, count in (("reset", 1), ("keep", 1), ("keep", size))
    )
    assert losses(lines(fresh))[0] == losses(lines(with_moments))[0]
    assert losses(lines(fresh))[1] != losses(lines(with_moments))[1]
    assert losses(lines(sharded)) == pytest.approx(losses(lines(with_moments)), rel=1e-5)


@pytest.mark.full
def test_a_continued_schedule_equals_one_long_run(runs: Runs) -> None:
    decaying = {"optimizer": {"schedule": {"kind": "linear", "warmup_steps": 3}}}
    whole = runs.train_once(1, "mlm", stop={"steps": 12}, **decaying, model={"dropout": 0.0})
    rates = [line["train/learning_rate"] for line in lines(whole) if "train/loss" in line]
    start = runs.train_once(1, "mlm", stop={"steps": 8}, **decaying, model={"dropout": 0.0})
    folder = runs.folder("rest")
    model = start_from(start, schedule="continue", optimizer="keep")
    changes = {"stop": {"steps": 4}, **decaying, "model": model}
    runs.job("train", 1, folder, "mlm", changes)
    continued_rates = [
        line["train/learning_rate"] for line in lines(folder) if "train/loss" in line
    ]
    assert continued_rates == rates[8:]


def test_a_warm_started_run_resumes_bitwise(runs: Runs, first: Path) -> None:
    whole = train_from(runs, first, optimizer="keep", schedule="continue", step=4)
    folder = runs.folder("stopped")
    model = start_from(first, optimizer="keep", schedule="continue", step=4)
    changes = {**FIRST, "seed": 9, "model": {**model, "dropout": 0.1}}
    short = {"stop": {"steps": 4, "tokens": 150}, "output": {"checkpoint": {"every_steps": 1}}}
    runs.job("train_to_limit", 1, folder, "mlm", {**changes, **short})
    assert (folder / "checkpoints" / checkpoint_name(1)).is_dir()
    runs.job("train", 1, folder, "mlm", {**changes, "stop": {"steps": 4}})
    assert losses(lines(folder)) == losses(lines(whole))
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(folder)[name]), name


def test_a_resume_does_not_need_the_earlier_run(runs: Runs, first: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(first, earlier)
    changes = {**FIRST, "seed": 9, "model": start_from(earlier, step=4)}
    folder = runs.folder("restarted")
    data = runs.data["packed"]
    runs.job("train", 1, folder, "mlm", {**changes, "stop": {"steps": 2}})
    dry_run.check_run(settings(folder, data, "mlm", **{**changes, "stop": {"steps": 2}}))
    shutil.rmtree(earlier)
    dry_run.check_run(settings(folder, data, "mlm", **{**changes, "stop": {"steps": 4}}))
    runs.job("train", 1, folder, "mlm", {**changes, "stop": {"steps": 4}})
    assert len(losses(lines(folder))) == 4
    with pytest.raises(SettingsError, match="no checkpoint"):
        dry_run.check_run(settings(tmp_path / "new", data, "mlm", **changes))


def test_a_third_run_continues_the_schedule_of_both_earlier_runs(runs: Runs, first: Path) -> None:
    second = train_from(runs, first, schedule="continue", optimizer="keep")
    assert warm_start.count_earlier_steps(InitFrom(path=str(first), schedule="continue")) == 8
    assert warm_start.count_earlier_steps(InitFrom(path=str(second), schedule="continue")) == 12


def test_the_machine_that_copies_last_uses_the_existing_copy(first: Path, tmp_path: Path) -> None:
    target = tmp_path / "next" / "start"
    start = InitFrom(path=str(first), step=4)
    warm_start._copy(start, target, rank=0)
    initial_loss = {path.name: path.read_bytes() for path in target.iterdir()}
    warm_start._copy(start, target, rank=2)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == initial_loss
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"step": 5}, "has no checkpoint '5'; set model.init_from.step to one of: 4, 8"),
        ({"step": "best"}, "set model.init_from.step to one of: 4, 8; output.checkpoint.best_me"),
    ],
)
def test_a_missing_checkpoint_is_refused(
    first: Path, start: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = shutil.copytree(first, tmp_path / "run")
    (run / "checkpoints" / BEST).unlink()
    with pytest.raises(SettingsError, match=message):
        warm_start.check_source(InitFrom(path=str(run), **start))


def test_an_unfinished_run_cannot_be_a_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / checkpoint_name(3)).mkdir(parents=True)
    with pytest.raises(SettingsError, match="has no final model, whose configuration is needed"):
        warm_start.check_source(InitFrom(path=str(tmp_path), step="latest"))
