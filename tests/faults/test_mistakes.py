"""Mistakes of a training stack, injected on purpose: a comparison finds the step and the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Job, Jobs, full
from regauge.reporting.parity import Parity, compare
from regauge.reporting.runs import read
from regauge.reporting.spots import sentence
from regauge.verbs._localise import Localised, localise

pytestmark = pytest.mark.timeout(300)
STEP = 7
"""Steps that are done when the mistake begins: between the saves of steps 6 and 12."""
SEEN_AT = STEP + 1
"""The line of metrics of the first step with the mistake."""


def mistaken(jobs: Jobs, kind: str, size: int = 1, **fault: Any) -> Job:
    """Return a finished run that makes a mistake in every step from STEP on."""
    told = {"kind": kind, "rank": -1, "step": STEP, "count": 1000, "attempt": 0, **fault}
    job = jobs.job(told, size=size)
    job.start().wait()
    assert job.code == 0, job.said
    assert job.struck[0]["struck_at_step"] == STEP
    return job


def beside(jobs: Jobs, job: Job) -> tuple[Parity, Path]:
    """Return a run beside the same one without its mistake, and the folder of that one."""
    clean = jobs.whole(job)
    return compare(read(clean), read(job.folder)), clean


def found(jobs: Jobs, job: Job, folder: Path) -> Localised:
    """Return where a run parts from the same one without its mistake."""
    parity, clean = beside(jobs, job)
    assert parity.alike
    return localise((clean, job.folder), parity, folder, float64=False)


@pytest.mark.parametrize(
    ("kind", "seen_at"),
    [
        pytest.param("learning-rate", SEEN_AT + 1, id="learning rate, seen after its update"),
        pytest.param("bf16-gradients", SEEN_AT, marks=full),
        pytest.param("dropout-seed", SEEN_AT, marks=full),
        pytest.param("attention-mask", SEEN_AT, marks=full),
        pytest.param("gelu", SEEN_AT, marks=full),
    ],
)
def test_a_mistake_is_seen_at_its_step(jobs: Jobs, kind: str, seen_at: int) -> None:
    parity, _ = beside(jobs, mistaken(jobs, kind))
    assert parity.parted is not None
    assert parity.parted.gap.step == seen_at


@pytest.mark.parametrize(
    ("kind", "stage", "name", "remark"),
    [
        pytest.param("learning-rate", "update", "model.", "1.01 times as large", marks=full),
        pytest.param("bf16-gradients", "gradient", "model.", "", marks=full),
        pytest.param("dropout-seed", "rows", "keys", "", marks=full),
        pytest.param("attention-mask", "rows", "segments", "", marks=full),
        pytest.param("row-shift", "rows", "tokens", "moved by 1", marks=full),
        pytest.param("gelu", "forward", "layer.1.intermediate.intermediate_act_fn", ""),
    ],
)
def test_a_mistake_is_found(
    jobs: Jobs, tmp_path: Path, kind: str, stage: str, name: str, remark: str
) -> None:
    fault = {"layer": 1} if kind == "gelu" else {}
    fault |= {"at": "order"} if kind == "row-shift" else {}
    where = found(jobs, mistaken(jobs, kind, **fault), tmp_path)
    assert where.first is not None
    assert (where.step, where.first.stage) == (STEP, stage)
    assert name in where.first.name
    assert remark in where.first.remark
    told = sentence(where.step, where.spots, where.first)
    assert where.first.name in told
    assert f"At step {STEP} " in told
    before = where.spots[: where.spots.index(where.first)]
    assert all(spot.apart == 0.0 for spot in before)


@full
def test_it_is_found_between_processes(jobs: Jobs, tmp_path: Path) -> None:
    """Gradients that one of two processes rounds before they are summed."""
    where = found(jobs, mistaken(jobs, "bf16-gradients", size=2, rank=1), tmp_path)
    assert where.first is not None
    assert (where.step, where.first.stage) == (STEP, "gradient")
    assert all(spot.apart == 0.0 for spot in where.spots if spot.stage in {"forward", "backward"})


@full
def test_what_rounding_explains_is_no_place(jobs: Jobs, tmp_path: Path) -> None:
    """The same run in bf16 parts from its first step on, and no module is to blame."""
    clean = jobs.job(size=1)
    other = jobs.job(size=1, execution={"precision": "bf16"})
    ours, theirs = jobs.whole(clean), jobs.whole(other)
    parity = compare(read(ours), read(theirs))
    assert parity.parted is not None
    assert not parity.alike
    where = localise((ours, theirs), parity, tmp_path, float64=True)
    assert where.first is None, sentence(where.step, where.spots, where.first)
    assert max(spot.apart for spot in where.spots if spot.stage == "forward") > 1e-3
    assert "rounding explains" in sentence(where.step, where.spots, where.first)
