"""Measured runs that correct plans."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path

import pytest

from regauge.machines.catalog import load_chips
from regauge.machines.machine_rates import find_machine
from regauge.planner import anchors, run_history
from regauge.planner.anchors import Anchor
from regauge.planner.calibration import load_calibration
from regauge.planner.model_shape import shape_from_config
from regauge.planner.training_job import TrainingJob
from regauge.planner.training_plan import TrainingPlan, plan_training
from regauge.training.strategies.ddp import Ddp

MACHINE = find_machine("g5.12xlarge")
CONFIG = {
    "model_type": "bert",
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
JOB = TrainingJob(
    shape_from_config(CONFIG), 128, 16, strategy=Ddp(), head="masked-lm", stack="regauge"
)


def _measure(plan: TrainingPlan, factor: float) -> Anchor:
    """Return a run that took `factor` times the plan, and used `factor` times its memory."""
    return Anchor(
        "probe",
        anchors.describe(plan.job, plan.machine, plan.count),
        "local",
        measured_seconds=plan.step_parts.total * factor,
        predicted_seconds=plan.step_parts.total,
        measured_bytes=plan.memory.parts.total * factor,
        predicted_bytes=plan.memory.parts.total,
    )


@pytest.mark.parametrize("factor", [0.3, 2.5])
def test_a_probe_corrects_the_next_plan(factor: float, tmp_path: Path) -> None:
    """After a run is recorded, the plan of its job is within 10 % of it, on 1 and 2 machines."""
    history = tmp_path / "state" / "planner_runs.jsonl"
    for count in (1, 2):
        run = _measure(plan_training(JOB, MACHINE, count), factor)
        run_history.record_run(dataclasses.replace(run, run_id=f"probe {count}"), history)
    runs = run_history.load_history(history)
    for count in (1, 2):
        plan = plan_training(JOB, MACHINE, count, runs)
        measured = plan.step_parts.total * factor
        assert plan.step_seconds.p50 == pytest.approx(measured, rel=0.10)
        assert plan.memory.total.p50 == pytest.approx(plan.memory.parts.total * factor, rel=0.10)
        assert plan.nearest[0].distance == 0
        assert plan.nearest[0].anchor.source == "local"


def test_a_run_of_the_user_corrects_the_memory_by_its_error() -> None:
    """Its weight is 10, and that of no correction is 0.1."""
    recorded = dataclasses.replace(_measure(plan_training(JOB, MACHINE), 2.0), run_id="probe")
    near = anchors.find_nearest_memory(recorded.features, [recorded])
    assert near[0].distance == 0
    assert anchors.correct_memory(near) == pytest.approx(2 ** (10 / 10.1))


def test_memory_is_compared_across_chips() -> None:
    """The memory of a job on another chip is near; its step time is far."""
    here = anchors.describe(JOB, MACHINE, 1)
    there = dataclasses.replace(here, chip="A100-SXM-80GB")
    assert here.distance(there) == anchors.OTHER["chip"]
    assert here.distance(there, anchors.OTHER_IN_MEMORY) < anchors.REACH


def test_a_far_run_changes_nothing() -> None:
    """A run of a model with 64 times the width says nothing about a small one."""
    large = dataclasses.replace(JOB, shape=shape_from_config(CONFIG | {"hidden_size": 16384}))
    runs = [_measure(plan_training(large, MACHINE), 3.0)]
    plan, alone = plan_training(JOB, MACHINE, 1, runs), plan_training(JOB, MACHINE)
    assert plan.step_seconds.p50 == pytest.approx(alone.step_seconds.p50)
    assert plan.memory.total.p50 == pytest.approx(alone.memory.total.p50)


def test_the_history_keeps_every_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged line is skipped with a warning."""
    path = tmp_path / "runs.jsonl"
    run = dataclasses.replace(_measure(plan_training(JOB, MACHINE), 1.5), date="2026-11-27")
    assert run_history.load_history(path) == ()
    run_history.record_run(run, path)
    with path.open("a") as file:
        file.write("{damaged\n")
    with caplog.at_level(logging.WARNING):
        assert run_history.load_history(path) == (run,)
    assert run.log_error == pytest.approx(math.log(1.5))
    assert run.log_memory_error == pytest.approx(math.log(1.5))


def test_another_prediction_needs_another_version() -> None:
    """If these numbers change, raise FORMULA_VERSION, so that older runs correct no plan."""
    plan = plan_training(JOB, MACHINE)
    predicted = (plan.step_parts.total, plan.memory.parts.total)
    assert run_history.FORMULA_VERSION == 2
    assert predicted == pytest.approx((0.005794409049511649, 1458007449.1421492), rel=1e-6)


def test_the_history_is_in_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """XDG_STATE_HOME decides."""
    monkeypatch.delenv(run_history.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_history.find_history() == tmp_path / "regauge" / "planner_runs.jsonl"


def test_published_rows_have_sources() -> None:
    """Each row of the package names its source, and its chip is in the catalog."""
    rows = anchors.load_published()
    assert len(rows) > 400
    assert all(row.source for row in rows)
    timed = [row for row in rows if row.measured_seconds]
    assert {row.features.chip for row in timed} <= set(load_chips())


def test_constants_name_their_rows() -> None:
    """Each constant of a stack counts the rows behind it, and is in its physical range."""
    for entry in load_calibration().stacks.values():
        assert entry.rows > 0 or entry.source in load_chips(), "or the chip that stands in"
        assert entry.source
        assert 0 < entry.attention_efficiency < entry.efficiency * 2
        assert 0 < entry.spread < 1
