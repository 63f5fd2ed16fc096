"""A microbatch that is left open is predicted, tried in processes that may die, and decided."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.runs import TASKS, settings
from regauge.config import choose
from regauge.errors import SettingsError, TransientError
from regauge.processes import World
from regauge.training.batch_finder import finder, trial
from regauge.training.batch_finder.finder import (
    Forecast,
    choose_size,
    forecast_memory,
    resolve_microbatch,
    select_sizes,
    usable_sizes,
)
from regauge.training.batch_finder.memory import sized
from regauge.training.batch_finder.trial import Tried
from regauge.training.defaults import Rank0Decision, resolve_defaults
from regauge.training.dry_run import plan
from regauge.training.run_setup import NO_SUPERVISOR
from regauge.training.settings import Training

Dies = Callable[[str], None]
"""Sets the program of a trial."""
ALONE = World()
OPEN = {"batch": {"rows": 8, "microbatch_rows": "auto"}}
FULL_FROM_4_ROWS = """
import torch
from regauge.training.batch_finder import trial_worker
trial_worker.GAIN = 0.0  # each size is begun, whatever the one before has won
timed = trial_worker._timed
trial_worker._timed = lambda context, state, rows: timed(
    context, state, rows if rows < 4 else torch.empty(1 << 60)
)
trial_worker.main()
"""
DYING = """
import os, signal, sys
from regauge.worker import receive_job
job = receive_job()
def tell(**line):
    job.write_line(line)
for rows in job.request["sizes"]:
    tell(begins=rows)
    if rows >= {rows}:
        {death}
    tell(tried={{"rows": rows, "bytes": 1000, "rows_per_second": rows}})
"""
"""What the parent sees of a trial that dies, without the time that torch takes to be imported."""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
FULL = "sys.exit(tell(error='it is full', memory=True) or 1)"
BROKEN = "sys.exit(tell(error='it is wrong', memory=False) or 1)"


def left_open(folder: Path, task: str = "mlm", **changes: Any) -> Training:
    layout = choose("tasks", TASKS[task]["task"]).reads()
    data = folder / "data"
    if not data.exists():
        datasets.WRITERS[layout](data)
    return resolve_defaults(settings(folder / "run", data, task, **{**OPEN, **changes}), ALONE)


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Dies:
    folder = tmp_path_factory.mktemp("modules")

    def program(source: str) -> None:
        (folder / "dying_trial.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setattr(trial, "WORKER", "dying_trial")

    return program


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("regauge"), "propagate", True)
    caplog.set_level(logging.INFO, "regauge")
    return caplog


def test_every_process_gets_a_microbatch_and_shares_are_even_where_they_can_be() -> None:
    assert usable_sizes(12, 1) == [1, 2, 3, 4, 6, 12]
    assert usable_sizes(12, 3) == [1, 2, 4]
    assert usable_sizes(12, 4) == [1, 3]
    assert usable_sizes(8, 3) == [1, 2]
    assert usable_sizes(3, 4) == []


def test_a_trial_goes_through_few_sizes_up_to_the_largest() -> None:
    assert select_sizes([1, 2, 3, 4, 6, 12]) == [1, 3, 6, 12]
    assert select_sizes([2**power for power in range(11)]) == [32, 64, 128, 256, 512, 1024]
    assert select_sizes([]) == []


def test_the_smallest_size_near_the_best_is_chosen_and_never_one_without_room() -> None:
    tried = [Tried(2, 10, 40.0), Tried(4, 20, 97.0), Tried(8, 40, 100.0), Tried(16, 90, 200.0)]
    assert choose_size(tried, 100) == tried[1]
    assert choose_size(tried, 1000) == tried[3]
    assert choose_size(tried, 20) == tried[0]
    assert choose_size(tried, 5) is None


def test_a_forecast_says_what_fits_and_leaves_a_fifth_of_the_memory() -> None:
    seen = Forecast(memory=1000, held=200, row=100)
    assert [seen.of(rows) for rows in (1, 6)] == [300, 800]
    assert [seen.fits(rows) for rows in (6, 7)] == [True, False]
    assert Forecast(1000, 200, 100, live=6).of(1) == 800


@pytest.mark.parametrize("task", ["mlm", "clm", "classify", "rank"])
def test_what_is_predicted_of_a_row_is_what_autograd_keeps(task: str, tmp_path: Path) -> None:
    from regauge.training.batch_finder.memory import _saved
    from regauge.training.run_setup import set_up

    run = left_open(tmp_path, task)
    row = forecast_memory(run, ALONE).row
    batch = run.batch.model_copy(update={"microbatch_rows": 1})
    opened_run = set_up(run.model_copy(update={"batch": batch}), ALONE)
    slots = run.task.slots_per_row()
    arrays = opened_run.context.task_at(opened_run.state.step).feed.empty(
        slots, opened_run.context.task_at(opened_run.state.step).ladder[-1]
    )
    module: Any = opened_run.state.model.module.train()
    kept = _saved(module, {name: torch.from_numpy(value) for name, value in arrays.items()})
    assert row == pytest.approx(kept, rel=0.1)


def test_the_forecast_counts_what_a_dry_run_does_and_less_where_blocks_are_computed_again(
    tmp_path: Path,
) -> None:
    run = left_open(tmp_path)
    assert run.accelerator is not None
    program = run.accelerator.peak_memory_bytes() or 0
    seen = forecast_memory(run, ALONE)
    held = sized(run)["gigabytes_per_process"]["all"]
    assert seen.held - program == pytest.approx(held * 1e9, rel=0.2, abs=1e6)
    execution = run.execution.model_copy(update={"activation_checkpointing": "full"})
    again = forecast_memory(run.model_copy(update={"execution": execution}), ALONE)
    assert 0 < again.row < 0.8 * seen.row


def test_a_loss_over_the_batch_keeps_all_rows_of_a_process_unless_it_computes_them_again(
    tmp_path: Path,
) -> None:
    run = left_open(tmp_path, "contrastive")
    assert forecast_memory(run, ALONE).live == 8
    assert forecast_memory(run, World(size=2, local_size=2)).live == 4
    sharded = left_open(tmp_path, "contrastive", strategy="fsdp")
    assert forecast_memory(sharded, ALONE).live is None


def test_a_trial_that_dies_of_memory_leaves_what_smaller_sizes_have_shown(
    tmp_path: Path, dies: Dies
) -> None:
    dies(FULL_FROM_4_ROWS)
    run = resolve_microbatch(left_open(tmp_path), ALONE, NO_SUPERVISOR)
    assert run.batch.microbatch in (1, 2)
    decided = json.loads((tmp_path / "run" / "probe" / "decided.json").read_text())
    assert decided["rows"] == run.batch.microbatch
    assert "; more did not fit (at 4 rows: RuntimeError in " in decided["reason"]


def test_a_trial_that_is_killed_leaves_them_too(tmp_path: Path, dies: Dies) -> None:
    dies(DYING.format(rows=4, death=KILLED))
    assert resolve_microbatch(left_open(tmp_path), ALONE, NO_SUPERVISOR).batch.microbatch == 2
    decided = json.loads((tmp_path / "run" / "probe" / "decided.json").read_text())
    assert "; more did not fit (at 4 rows: killed by SIGKILL)" in decided["reason"]


def test_the_next_smaller_sizes_follow_one_that_dies_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: Dies, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finder, "MOST_SIZES", 1)
    dies(DYING.format(rows=8, death=KILLED))
    assert resolve_microbatch(left_open(tmp_path), ALONE, NO_SUPERVISOR).batch.microbatch == 4
    fault, decision = said.messages[-2:]
    assert fault == "a microbatch of 8 rows does not fit: at 8 rows: killed by SIGKILL"
    assert decision.startswith("batch.microbatch_rows = 4: ")
    assert " GB predicted, " in decision
    assert " GB measured of the " in decision


def test_where_no_size_fits_the_run_ends_in_a_line_that_says_so(tmp_path: Path, dies: Dies) -> None:
    dies(DYING.format(rows=1, death=FULL))
    with pytest.raises(SettingsError, match=r"no microbatch fits .* GB: at 1 rows: it is full"):
        resolve_microbatch(left_open(tmp_path), ALONE, NO_SUPERVISOR)


def test_a_trial_that_fails_otherwise_is_told_and_what_was_predicted_is_taken(
    tmp_path: Path, dies: Dies, said: pytest.LogCaptureFixture
) -> None:
    dies(DYING.format(rows=1, death=BROKEN))
    assert resolve_microbatch(left_open(tmp_path), ALONE, NO_SUPERVISOR).batch.microbatch == 8
    assert "no microbatch could be tried (at 1 rows: it is wrong)" in said.messages[-1]


def test_what_was_shown_not_to_fit_is_not_taken_when_a_later_trial_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: Dies
) -> None:
    monkeypatch.setattr(finder, "MOST_SIZES", 1)
    death = f"{KILLED} if rows == 8 else {BROKEN}"
    dies(DYING.format(rows=4, death=death))
    assert resolve_microbatch(left_open(tmp_path), ALONE, NO_SUPERVISOR).batch.microbatch == 4


def test_a_decision_is_for_one_precision(tmp_path: Path) -> None:
    run = left_open(tmp_path)
    half = run.model_copy(
        update={"execution": run.execution.model_copy(update={"precision": "bf16"})}
    )
    assert finder._key(run, ALONE) != finder._key(half, ALONE)


def test_the_others_wait_for_as_long_as_a_trial_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = left_open(tmp_path), []

    def wait_for(find: Callable[[], Any], seconds: float) -> Any:
        found.append(seconds)
        return find()

    monkeypatch.setattr(NO_SUPERVISOR, "wait_for", wait_for)
    with pytest.raises(TransientError, match=r"process 1 did not learn decided\.json"):
        resolve_microbatch(run, World(rank=1, size=2, local_rank=1, local_size=2), NO_SUPERVISOR)
    assert found[0] > run.execution.timeout_seconds


def test_the_other_processes_take_what_the_first_has_decided(tmp_path: Path) -> None:
    run, two = left_open(tmp_path), World(rank=0, size=2, local_size=2)
    agreement = Rank0Decision(tmp_path / "run" / "probe" / "decided.json", finder._key(run, two))
    agreement.write({"rows": 2, "reason": "it was tried"})
    for rank in (0, 1):
        world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        assert resolve_microbatch(run, world, NO_SUPERVISOR).batch.microbatch == 2
    assert not (tmp_path / "run" / "probe" / "lines.jsonl").exists()


def test_a_run_keeps_the_size_that_it_had_while_all_processes_can_use_it(tmp_path: Path) -> None:
    run = left_open(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"batch": {"rows": 8, "microbatch_rows": 4}}))
    assert resolve_microbatch(run, ALONE, NO_SUPERVISOR).batch.microbatch == 4
    assert finder._kept(run, World(size=2, local_size=2)) == 4
    assert finder._kept(run, World(size=4, local_size=4)) is None


def test_a_device_whose_memory_is_not_known_needs_a_number(tmp_path: Path) -> None:
    run = left_open(tmp_path)
    silent = choose("accelerators", "generic")
    with pytest.raises(SettingsError, match="the memory of 'generic' is not known; set it to a"):
        resolve_microbatch(run.model_copy(update={"accelerator": silent}), ALONE, NO_SUPERVISOR)


def test_a_dry_run_says_that_it_is_left_open_and_what_is_predicted(tmp_path: Path) -> None:
    run = left_open(tmp_path)
    answer = plan(run)
    assert answer["microbatches"] == "left to the finder"
    assert answer["shapes"] == ["(microbatch_rows x 1) x 32"]
    told = finder.describe_forecast(run)
    assert told.startswith("left to the finder: 8 are predicted to fit (")
    assert not (tmp_path / "run").exists()


def test_more_processes_than_rows_are_refused_before_anything_is_tried(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="9 processes for 8 microbatches a step; use at most 8"):
        resolve_defaults(left_open(tmp_path, strategy="ddp"), World(rank=1, size=9, local_size=9))


@pytest.mark.parametrize("value", ["most", 0, 2.5])
def test_anything_but_a_number_of_rows_or_auto_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"batch\.microbatch_rows"):
        settings(tmp_path, tmp_path, batch={"rows": 8, "microbatch_rows": value})
