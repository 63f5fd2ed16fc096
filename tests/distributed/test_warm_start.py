"""A run goes on from a moment of another: its weights, its moments, its schedule, or a part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.jobs import lines, losses, weights
from distributed.runs import Runs, settings
from regauge.checkpoint.layout import name_of
from regauge.errors import SettingsError
from regauge.models.settings import Origin
from regauge.training import dry_run, warm_start

FIRST: dict[str, Any] = {
    "stop": {"steps": 8},
    "optimizer": {"schedule": {"kind": "constant", "warmup_steps": 0}},
}


@pytest.fixture(scope="module")
def first(runs: Runs) -> Path:
    """Return a run of 8 steps that was saved after the 4th as well."""
    return runs.trained(1, "mlm", **FIRST)


def begun(first: Path, **start: Any) -> dict[str, Any]:
    """Return the table of a model that begins from a moment of a run."""
    return {"path": str(first), "init_from": {"path": str(first), **start}}


def going_on(runs: Runs, first: Path, size: int = 1, **start: Any) -> Path:
    """Return a run of other data order that begins from a moment of the first."""
    changes = {**FIRST, "seed": 9, "stop": {"steps": 4}}
    model = {**begun(first, **start), "dropout": 0.1}
    folder = runs.folder("next")
    runs.job("train", size, folder, "mlm", {**changes, "model": model})
    return folder


def before(folder: Path) -> float:
    """Return the held-out loss before the first step."""
    return next(line["heldout/loss"] for line in lines(folder) if "heldout/loss" in line)


def after(folder: Path) -> float:
    return [line["heldout/loss"] for line in lines(folder) if "heldout/loss" in line][-1]


def test_a_run_begins_with_the_final_weights_or_those_of_a_checkpoint(
    runs: Runs, first: Path
) -> None:
    final, latest, fourth = (going_on(runs, first, step=step) for step in ("final", "latest", 4))
    # Masks of held-out rows are keyed by the seed, so the losses are compared among the new runs.
    assert before(final) == before(latest) != before(fourth)
    assert after(final) == after(latest)
    assert (fourth / "start" / "config.json").is_file()
    assert not (final / "start").exists()


@pytest.mark.parametrize("size", [2])
def test_moments_go_on_where_that_is_wanted(runs: Runs, first: Path, size: int) -> None:
    fresh, kept, spread = (
        going_on(runs, first, count, optimizer=optimizer)
        for optimizer, count in (("fresh", 1), ("kept", 1), ("kept", size))
    )
    assert losses(lines(fresh))[0] == losses(lines(kept))[0]
    assert losses(lines(fresh))[1] != losses(lines(kept))[1]
    assert losses(lines(spread)) == pytest.approx(losses(lines(kept)), rel=1e-5)


def test_a_schedule_goes_on_as_that_of_one_run_of_both_lengths(runs: Runs) -> None:
    decaying = {"optimizer": {"schedule": {"kind": "linear", "warmup_steps": 3}}}
    whole = runs.trained(1, "mlm", stop={"steps": 12}, **decaying, model={"dropout": 0.0})
    rates = [line["train/learning_rate"] for line in lines(whole) if "train/loss" in line]
    start = runs.trained(1, "mlm", stop={"steps": 8}, **decaying, model={"dropout": 0.0})
    folder = runs.folder("rest")
    asked = begun(start, schedule="continue", optimizer="kept")
    changes = {"stop": {"steps": 4}, **decaying, "model": asked}
    runs.job("train", 1, folder, "mlm", changes)
    found = [line["train/learning_rate"] for line in lines(folder) if "train/loss" in line]
    assert found == rates[8:]


def test_a_run_that_went_on_resumes_bit_for_bit(runs: Runs, first: Path) -> None:
    whole = going_on(runs, first, optimizer="kept", schedule="continue", step=4)
    folder = runs.folder("stopped")
    model = begun(first, optimizer="kept", schedule="continue", step=4)
    changes = {**FIRST, "seed": 9, "model": {**model, "dropout": 0.1}}
    short = {"stop": {"steps": 4, "tokens": 150}, "output": {"checkpoint": {"every_steps": 1}}}
    runs.job("stopped", 1, folder, "mlm", {**changes, **short})
    assert (folder / "checkpoints" / name_of(1)).is_dir()
    runs.job("train", 1, folder, "mlm", {**changes, "stop": {"steps": 4}})
    assert losses(lines(folder)) == losses(lines(whole))
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(folder)[name]), name


def test_the_same_command_goes_on_when_the_earlier_run_is_gone(
    runs: Runs, first: Path, tmp_path: Path
) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(first, earlier)
    changes = {**FIRST, "seed": 9, "model": begun(earlier, step=4)}
    folder = runs.folder("restarted")
    data = runs.data["packed"]
    runs.job("train", 1, folder, "mlm", {**changes, "stop": {"steps": 2}})
    dry_run.check(settings(folder, data, "mlm", **{**changes, "stop": {"steps": 2}}))
    shutil.rmtree(earlier)
    dry_run.check(settings(folder, data, "mlm", **{**changes, "stop": {"steps": 4}}))
    runs.job("train", 1, folder, "mlm", {**changes, "stop": {"steps": 4}})
    assert len(losses(lines(folder))) == 4
    with pytest.raises(SettingsError, match="no checkpoint"):
        dry_run.check(settings(tmp_path / "new", data, "mlm", **changes))


def test_a_third_run_goes_on_with_the_schedule_of_both_before(runs: Runs, first: Path) -> None:
    second = going_on(runs, first, schedule="continue", optimizer="kept")
    assert warm_start.steps_before(Origin(path=str(first), schedule="continue")) == 8
    assert warm_start.steps_before(Origin(path=str(second), schedule="continue")) == 12


def test_the_machine_that_copies_last_takes_what_is_there(first: Path, tmp_path: Path) -> None:
    target = tmp_path / "next" / "start"
    start = Origin(path=str(first), step=4)
    warm_start._copy(start, target, rank=0)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    warm_start._copy(start, target, rank=2)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"step": 5}, "has no checkpoint '5'; kept: 4, 8"),
        ({"step": "best"}, "has no checkpoint 'best'; kept: 4, 8"),
    ],
)
def test_a_moment_that_was_not_kept_is_refused(
    first: Path, start: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        warm_start.check(Origin(path=str(first), **start))


def test_a_run_that_is_not_finished_has_no_model_to_begin_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / name_of(3)).mkdir(parents=True)
    with pytest.raises(SettingsError, match="has no final model, whose configuration is needed"):
        warm_start.check(Origin(path=str(tmp_path), step="latest"))
