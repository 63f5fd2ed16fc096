"""Mistakes of a training stack, injected on purpose: a comparison finds the step and the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults.conftest import FULL, Job, Jobs
from regauge.comparison.first_divergence import sentence
from regauge.comparison.verdict import Parity, compare
from regauge.results.run_folder import read
from regauge.training.divergence.localize import Localised
from regauge.verbs._localise import localise

STEP = 7
"""Steps that are done when the mistake begins: between the saves of steps 6 and 12."""
SEEN_AT = STEP + 1
"""The line of metrics of the first step with the mistake."""
LATER = {"learning-rate": 1, "gelu": 4}
"""Steps more: an update shows in the loss after it, one GELU of a small model once bits differ."""
REMARKS = {"learning-rate": "1.01 times as large", "row-shift": "moved by 1"}


def mistaken(jobs: Jobs, kind: str, size: int = 1, **fault: Any) -> Job:
    """Return a finished run that makes a mistake in every step from STEP on."""
    told = {"kind": kind, "rank": -1, "step": STEP, "count": 1000, "attempt": 0, **fault}
    job = jobs.job(told, size=size)
    job.start().wait()
    assert job.code == 0, job.said
    assert job.struck[0]["triggered_at_step"] == STEP
    return job


def found(jobs: Jobs, job: Job, folder: Path) -> tuple[Parity, Localised]:
    """Return a run beside the same one without its mistake, and where they part."""
    clean = jobs.whole(job)
    parity = compare(read(clean), read(job.folder))
    assert parity.alike
    return parity, localise((clean, job.folder), parity, folder, float64=False)


@FULL
@pytest.mark.parametrize(
    ("kind", "fault", "place"),
    [
        ("gelu", {"layer": 1}, ("forward", "layer.1.intermediate.intermediate_act")),
        ("learning-rate", {}, ("update", "model.")),
        ("bf16-gradients", {}, ("gradient", "model.")),
        ("dropout-seed", {}, ("rows", "keys")),
        ("attention-mask", {}, ("rows", "segments")),
        ("row-shift", {"at": "order"}, ("rows", "tokens")),
    ],
)
def test_a_mistake_is_seen_at_its_step_and_found_at_its_place(
    jobs: Jobs, tmp_path: Path, kind: str, fault: dict[str, Any], place: tuple[str, str]
) -> None:
    parity, where = found(jobs, mistaken(jobs, kind, **fault), tmp_path)
    assert parity.parted is not None
    assert SEEN_AT <= parity.parted.gap.step <= SEEN_AT + LATER.get(kind, 0)
    assert where.first is not None
    assert where.first.stage == place[0]
    assert STEP <= where.step < parity.parted.gap.step
    assert place[1] in where.first.name
    told = sentence(where)
    assert "chosen differently" not in told
    assert told.startswith(f"At step {where.step} ")
    assert where.first.name in told
    assert REMARKS.get(kind, "") in told
    before = where.spots[: where.spots.index(where.first)]
    assert all(spot.apart == 0.0 for spot in before)


@FULL
def test_it_is_found_between_processes(jobs: Jobs, tmp_path: Path) -> None:
    """Gradients that one of two processes rounds before they are summed."""
    _, where = found(jobs, mistaken(jobs, "bf16-gradients", size=2, rank=1), tmp_path)
    assert where.first is not None
    assert (where.step, where.first.stage) == (STEP, "gradient")
    assert all(spot.apart == 0.0 for spot in where.spots if spot.stage in {"forward", "backward"})


@FULL
def test_what_rounding_explains_is_no_place(jobs: Jobs, tmp_path: Path) -> None:
    """The same run in bf16 parts from its first step on, and no module is to blame."""
    clean = jobs.job(size=1)
    other = jobs.job(size=1, execution={"precision": "bf16"})
    ours, theirs = jobs.whole(clean), jobs.whole(other)
    parity = compare(read(ours), read(theirs))
    assert parity.parted is not None
    assert not parity.alike
    where = localise((ours, theirs), parity, tmp_path, float64=True)
    assert where.first is None, sentence(where)
    assert max(spot.apart for spot in where.spots if spot.stage == "forward") > 1e-3
    assert "rounding explains" in sentence(where)


@FULL
def test_what_no_run_file_says_is_not_blamed_on_a_module(jobs: Jobs, tmp_path: Path) -> None:
    job = mistaken(jobs, "gelu", layer=1)
    (job.folder / "faults.jsonl").unlink()  # as if its code had been another
    _, where = found(jobs, job, tmp_path)
    assert not where.again
    assert "not in their run files" in sentence(where)
