"""The batch size finder predicts memory, measures sizes in separate processes, and decides."""

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
from regauge.config import build, parse_choice
from regauge.data.mixture import read_data_manifest
from regauge.system.errors import SettingsError, TransientError
from regauge.system.processes import World
from regauge.training.batch_finder import finder
from regauge.training.batch_finder.finder import (
    MemoryForecast,
    SizeMeasurement,
    choose_size,
    forecast_memory,
    resolve_microbatch,
    select_sizes,
    usable_sizes,
)
from regauge.training.batch_finder.model_size import describe_model
from regauge.training.defaults import Rank0Decision, resolve_defaults
from regauge.training.dry_run import plan_run
from regauge.training.run_setup import NO_SUPERVISOR
from regauge.training.settings import Batch, TrainSettings
from saved_runs import build_saved_run

InstallTrial = Callable[[str], None]
"""Sets the source code of the trial worker."""
ALONE = World()
OPEN = {"batch": {"rows": 8, "microbatch_rows": "auto"}}
FULL_FROM_4_ROWS = """
import torch
from regauge.training.batch_finder import trial_worker
trial_worker.MIN_SPEEDUP = 0.0  # every size is measured, whatever the previous one gained
timed = trial_worker._time_microbatch
trial_worker._time_microbatch = lambda context, state, rows: timed(
    context, state, rows if rows < 4 else torch.empty(1 << 60)
)
trial_worker.main()
"""
DYING = """
import os, signal, sys
from regauge.system.worker import receive_job
job = receive_job()
def write(**line):
    job.write_line(line)
for rows in job.request["sizes"]:
    write(started_rows=rows)
    if rows >= {rows}:
        {death}
    write(measurement={{"rows": rows, "peak_bytes": 1000, "rows_per_second": rows}})
"""
"""A worker that writes the lines of a trial and dies, without the import of torch."""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
FULL = "sys.exit(write(error='it is full', is_out_of_memory=True) or 1)"
BROKEN = "sys.exit(write(error='it is wrong', is_out_of_memory=False) or 1)"


@pytest.fixture(autouse=True)
def _measure_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tiny batches of these tests large enough to be measured."""
    monkeypatch.setattr(finder, "SMALL_BATCH_TOKENS", 0)


def open_run(folder: Path, task: str = "mlm", **changes: Any) -> TrainSettings:
    layout = parse_choice("tasks", TASKS[task]["task"]).row_layout()
    data = folder / "data"
    if not data.exists():
        datasets.WRITERS[layout](data)
    return resolve_defaults(settings(folder / "run", data, task, **{**OPEN, **changes}), ALONE)


def find_rows(run: TrainSettings, world: World = ALONE) -> int:
    return resolve_microbatch(run, world, NO_SUPERVISOR).batch.microbatch


@pytest.fixture
def install_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> InstallTrial:
    folder = tmp_path_factory.mktemp("modules")

    def write_program(source: str) -> None:
        (folder / "dying_trial.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setattr(finder, "WORKER", "dying_trial")

    return write_program


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "regauge")
    return caplog


def test_every_process_gets_a_microbatch_and_even_shares_if_possible() -> None:
    assert usable_sizes(12, 1) == [1, 2, 3, 4, 6, 12]
    assert usable_sizes(12, 3) == [1, 2, 4]
    assert usable_sizes(12, 4) == [1, 3]
    assert usable_sizes(8, 3) == [1, 2]
    assert usable_sizes(3, 4) == []


def test_a_trial_measures_few_sizes_up_to_the_largest() -> None:
    assert select_sizes([1, 2, 3, 4, 6, 12]) == [1, 3, 6, 12]
    assert select_sizes([2**power for power in range(11)]) == [32, 64, 128, 256, 512, 1024]
    assert select_sizes([]) == []


def test_the_smallest_fitting_size_near_the_best_throughput_is_chosen() -> None:
    sizes = [
        SizeMeasurement(2, 10, 40.0),
        SizeMeasurement(4, 20, 97.0),
        SizeMeasurement(8, 40, 100.0),
        SizeMeasurement(16, 90, 200.0),
    ]
    assert choose_size(sizes, 100) == sizes[1]
    assert choose_size(sizes, 1000) == sizes[3]
    assert choose_size(sizes, 20) == sizes[0]
    assert choose_size(sizes, 5) is None


def test_a_forecast_leaves_a_fifth_of_the_memory_free() -> None:
    forecast = MemoryForecast(device_bytes=1000, fixed_bytes=200, bytes_per_row=100)
    assert [forecast.required_bytes(rows) for rows in (1, 6)] == [300, 800]
    assert [forecast.fits(rows) for rows in (6, 7)] == [True, False]
    assert MemoryForecast(1000, 200, 100, min_live_rows=6).required_bytes(1) == 800


@pytest.mark.parametrize("task", ["mlm", "clm", "classify", "rank"])
def test_predicted_bytes_of_a_row_equal_the_saved_activations(task: str, tmp_path: Path) -> None:
    from regauge.training.batch_finder.memory import _measure_saved_bytes
    from regauge.training.run_setup import set_up

    run = open_run(tmp_path, task)
    row = forecast_memory(run, ALONE).bytes_per_row
    batch = run.batch.model_copy(update={"microbatch_rows": 1})
    opened_run = set_up(run.model_copy(update={"batch": batch}), ALONE)
    task = opened_run.context.tasks[0]
    arrays = task.loader.build_empty_batch(run.task.slots_per_row(), task.bucket_lengths[-1])
    module: Any = opened_run.state.model.module.train()
    inputs = {name: torch.from_numpy(value) for name, value in arrays.items()}
    saved_bytes = _measure_saved_bytes(module, inputs)
    assert row == pytest.approx(saved_bytes, rel=0.1)


def test_the_forecast_agrees_with_the_dry_run_and_shrinks_with_checkpointing(
    tmp_path: Path,
) -> None:
    run = open_run(tmp_path)
    assert run.accelerator is not None
    write_program = run.accelerator.peak_memory_bytes() or 0
    forecast = forecast_memory(run, ALONE)
    total_gb = describe_model(run)["memory_gb_per_process"]["total"]
    assert forecast.fixed_bytes - write_program == pytest.approx(total_gb * 1e9, rel=0.2, abs=1e6)
    execution = run.execution.model_copy(update={"activation_checkpointing": "full"})
    checkpointed_forecast = forecast_memory(run.model_copy(update={"execution": execution}), ALONE)
    assert 0 < checkpointed_forecast.bytes_per_row < 0.8 * forecast.bytes_per_row


def test_a_global_batch_loss_holds_all_local_rows_unless_it_recomputes(
    tmp_path: Path,
) -> None:
    run = open_run(tmp_path, "contrastive")
    assert forecast_memory(run, ALONE).min_live_rows == 8
    assert forecast_memory(run, World(size=2, local_size=2)).min_live_rows == 4
    sharded = open_run(tmp_path, "contrastive", strategy="fsdp")
    assert forecast_memory(sharded, ALONE).min_live_rows is None


@pytest.mark.full
def test_measurements_before_an_out_of_memory_error_are_used(
    tmp_path: Path, install_trial: InstallTrial
) -> None:
    install_trial(FULL_FROM_4_ROWS)
    run = resolve_microbatch(open_run(tmp_path), ALONE, NO_SUPERVISOR)
    assert run.batch.microbatch in (1, 2)
    decided = json.loads((tmp_path / "run" / "probe" / "microbatch.json").read_text())
    assert decided["microbatch_rows"] == run.batch.microbatch
    assert "; more did not fit (at 4 rows: RuntimeError in " in decided["reason"]


@pytest.mark.full
def test_measurements_before_a_kill_are_used(tmp_path: Path, install_trial: InstallTrial) -> None:
    install_trial(DYING.format(rows=4, death=KILLED))
    assert find_rows(open_run(tmp_path)) == 2
    decided = json.loads((tmp_path / "run" / "probe" / "microbatch.json").read_text())
    assert "; more did not fit (at 4 rows: killed by SIGKILL)" in decided["reason"]


@pytest.mark.full
def test_smaller_sizes_are_tried_after_an_early_kill(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install_trial: InstallTrial,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(finder, "MAX_SIZES", 1)
    install_trial(DYING.format(rows=8, death=KILLED))
    assert find_rows(open_run(tmp_path)) == 4
    fault, decision = log.messages[-2:]
    assert fault == "a microbatch of 8 rows does not fit: at 8 rows: killed by SIGKILL"
    assert decision.startswith("batch.microbatch_rows = 4: ")
    assert " GB predicted, " in decision
    assert " GB measured of " in decision


def test_a_run_for_which_no_size_fits_is_refused(
    tmp_path: Path, install_trial: InstallTrial
) -> None:
    install_trial(DYING.format(rows=1, death=FULL))
    with pytest.raises(SettingsError, match=r"no microbatch fits .* GB: at 1 rows: it is full"):
        resolve_microbatch(open_run(tmp_path), ALONE, NO_SUPERVISOR)


@pytest.mark.full
def test_after_another_failure_the_predicted_size_is_used_with_a_warning(
    tmp_path: Path, install_trial: InstallTrial, log: pytest.LogCaptureFixture
) -> None:
    install_trial(DYING.format(rows=1, death=BROKEN))
    assert find_rows(open_run(tmp_path)) == 8
    assert "no microbatch size could be measured (at 1 rows: it is wrong)" in log.messages[-1]


def test_a_size_that_did_not_fit_is_not_used_after_a_later_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_trial: InstallTrial
) -> None:
    monkeypatch.setattr(finder, "MAX_SIZES", 1)
    death = f"{KILLED} if rows == 8 else {BROKEN}"
    install_trial(DYING.format(rows=4, death=death))
    assert find_rows(open_run(tmp_path)) == 4


def test_a_decision_depends_on_the_precision(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    execution = run.execution.model_copy(update={"precision": "bf16"})
    half = run.model_copy(update={"execution": execution})
    assert finder._hash_inputs(run, ALONE) != finder._hash_inputs(half, ALONE)


def test_other_processes_wait_as_long_as_a_trial_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, timeouts = open_run(tmp_path), []

    def wait_for(find: Callable[[], Any], seconds: float) -> Any:
        timeouts.append(seconds)
        return find()

    monkeypatch.setattr(NO_SUPERVISOR, "wait_for", wait_for)
    with pytest.raises(
        TransientError, match=r"process 1 waited .* s for microbatch\.json of process 0"
    ):
        resolve_microbatch(run, World(rank=1, size=2, local_rank=1, local_size=2), NO_SUPERVISOR)
    assert timeouts[0] > run.execution.timeout_seconds


def test_other_processes_use_the_decision_of_process_0(tmp_path: Path) -> None:
    run, first_world = open_run(tmp_path), World(rank=0, size=2, local_size=2)
    file = tmp_path / "run" / "probe" / "microbatch.json"
    agreement = Rank0Decision(file, finder._hash_inputs(run, first_world))
    agreement.write({"microbatch_rows": 2, "reason": "it was tried"})
    for rank in (0, 1):
        world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        assert find_rows(run, world) == 2
    assert not (tmp_path / "run" / "probe" / "lines.jsonl").exists()


def test_a_resumed_run_keeps_its_size_if_every_process_gets_a_microbatch(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(build_saved_run()))
    assert find_rows(run) == 4
    assert finder._read_previous_size(run, World(size=2, local_size=2)) == 4
    assert finder._read_previous_size(run, World(size=4, local_size=4)) is None


def test_a_device_with_unknown_memory_needs_a_number(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    silent = parse_choice("accelerators", "generic")
    with pytest.raises(SettingsError, match="the memory of 'generic' is unknown; set it to a"):
        resolve_microbatch(run.model_copy(update={"accelerator": silent}), ALONE, NO_SUPERVISOR)


def test_a_dry_run_shows_the_predicted_size(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    answer = plan_run(run)
    assert answer["microbatches"] == "auto (batch size finder)"
    assert answer["batch_shapes"] == ["(microbatch_rows x 1) x 32"]
    forecast = finder.describe_forecast(run)
    assert forecast.startswith("auto: 8 rows are predicted to fit (")
    assert not (tmp_path / "run").exists()


def test_more_processes_than_rows_are_refused_before_a_trial(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match="9 processes, but only 8 microbatches per step; use at most 8"
    ):
        resolve_defaults(open_run(tmp_path, strategy="ddp"), World(rank=1, size=9, local_size=9))


@pytest.mark.parametrize("value", ["most", 0, 2.5])
def test_only_a_number_or_auto_is_accepted(value: object, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"batch\.microbatch_rows"):
        settings(tmp_path, tmp_path, batch={"rows": 8, "microbatch_rows": value})


def test_a_small_batch_is_one_microbatch_without_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finder, "run_trial", lambda *_: pytest.fail("a trial was started"))
    run = open_run(tmp_path)
    num_tokens = 8 * run.task_configs[0].task.bucket_lengths(read_data_manifest(run.data))[-1]
    monkeypatch.setattr(finder, "SMALL_BATCH_TOKENS", num_tokens)
    with caplog.at_level(logging.INFO, "regauge"):
        assert find_rows(run) == 8
    line = f"batch.microbatch_rows = 8: a small batch, at most {num_tokens} tokens per process"
    assert line in caplog.text
    assert finder.describe_forecast(run).startswith("8: a small batch")
    assert build(Batch, {"rows": 8}) == run.batch


@pytest.mark.parametrize("limit", ["SMALL_BATCH_TOKENS", "UNMEASURED_MEMORY_SHARE"])
def test_a_batch_that_is_long_or_fills_the_memory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    class TrialStartedError(Exception):
        """A trial was started."""

    def start_trial(*_: object) -> None:
        raise TrialStartedError

    monkeypatch.setattr(finder, "run_trial", start_trial)
    monkeypatch.setattr(finder, "SMALL_BATCH_TOKENS", 1 << 20)
    run = open_run(tmp_path)
    monkeypatch.setattr(finder, limit, 1e-9)
    with pytest.raises(TrialStartedError):
        resolve_microbatch(run, ALONE, NO_SUPERVISOR)


def test_two_processes_share_a_small_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "SMALL_BATCH_TOKENS", 1 << 20)
    monkeypatch.setattr(finder, "UNMEASURED_MEMORY_SHARE", 1.0)  # other tests use memory, too
    run = open_run(tmp_path, strategy="ddp")
    world = World(size=2, local_size=2)
    assert find_rows(run, world) == 4
