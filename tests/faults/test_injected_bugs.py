"""Deliberate bugs of a training stack: a comparison finds their step and module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults.conftest import FULL, Job, Jobs
from regauge.commands._parts.localize import localize_divergence
from regauge.evaluation.compare.first_divergence import describe_divergence
from regauge.evaluation.compare.verdict import Parity, compare_pair
from regauge.run_folders.run_folder import read_run_folder
from regauge.training.divergence.localize import Divergence

STEP = 7
"""Number of steps before the bug begins: between the saves of steps 6 and 12."""
FIRST_STEP = STEP + 1
"""The first step with the bug."""
MAX_DELAYS = {"learning-rate": 1, "gelu": 4}
"""Maximum number of steps until the loss differs: an update shows in the next loss."""
CAUSES = {"learning-rate": "1.01 times as large", "row-shift": "shifted by 1"}


def run_with_bug(jobs: Jobs, kind: str, size: int = 1, **fault: Any) -> Job:
    """Return a finished run with a bug in every step from STEP on."""
    bug = {"kind": kind, "rank": -1, "step": STEP, "count": 1000, "attempt": 0, **fault}
    job = jobs.create(bug, size=size).finish()
    assert job.triggered_faults[0]["triggered_at_step"] == STEP
    return job


def localize(jobs: Jobs, job: Job, folder: Path) -> tuple[Parity, Divergence]:
    """Return the comparison of a run with the same one without its bug, and the divergence."""
    clean = jobs.undisturbed_folder(job)
    parity = compare_pair(read_run_folder(clean), read_run_folder(job.folder))
    assert parity.expects_equal_bits
    return parity, localize_divergence((clean, job.folder), parity, folder, float64=False)


@FULL
@pytest.mark.parametrize(
    ("kind", "fault", "location"),
    [
        ("gelu", {"layer": 1}, ("forward", "layer.1.intermediate.intermediate_act")),
        ("learning-rate", {}, ("update", "model.")),
        ("bf16-gradients", {}, ("gradient", "model.")),
        ("dropout-seed", {}, ("input", "keys")),
        ("attention-mask", {}, ("input", "segments")),
        ("row-shift", {"at": "order"}, ("input", "tokens")),
    ],
)
def test_a_bug_is_localized_to_its_step_and_module(
    jobs: Jobs, tmp_path: Path, kind: str, fault: dict[str, Any], location: tuple[str, str]
) -> None:
    parity, divergence = localize(jobs, run_with_bug(jobs, kind, **fault), tmp_path)
    assert parity.first_divergence is not None
    assert FIRST_STEP <= parity.first_divergence.gap.step <= FIRST_STEP + MAX_DELAYS.get(kind, 0)
    assert divergence.first is not None
    assert divergence.first.stage == location[0]
    assert STEP <= divergence.step < parity.first_divergence.gap.step
    assert location[1] in divergence.first.name
    text = describe_divergence(divergence)
    assert "Different execution settings" not in text
    assert text.startswith(f"At step {divergence.step} ")
    assert divergence.first.name in text
    assert CAUSES.get(kind, "") in text
    earlier = divergence.differences[: divergence.differences.index(divergence.first)]
    assert all(spot.difference == 0.0 for spot in earlier)


@FULL
def test_a_bug_of_one_process_is_detected(jobs: Jobs, tmp_path: Path) -> None:
    """One of two processes rounds its gradients before they are summed."""
    _, divergence = localize(jobs, run_with_bug(jobs, "bf16-gradients", size=2, rank=1), tmp_path)
    assert divergence.first is not None
    assert (divergence.step, divergence.first.stage) == (STEP, "gradient")
    assert all(
        spot.difference == 0.0
        for spot in divergence.differences
        if spot.stage in {"forward", "backward"}
    )


@FULL
def test_differences_by_rounding_blame_no_module(jobs: Jobs, tmp_path: Path) -> None:
    """The same run in bf16 differs from its first step on, and no module is the cause."""
    fp32 = jobs.create(size=1)
    bf16 = jobs.create(size=1, execution={"precision": "bf16"})
    ours, theirs = jobs.undisturbed_folder(fp32), jobs.undisturbed_folder(bf16)
    parity = compare_pair(read_run_folder(ours), read_run_folder(theirs))
    assert parity.first_divergence is not None
    assert not parity.expects_equal_bits
    divergence = localize_divergence((ours, theirs), parity, tmp_path, float64=True)
    assert divergence.first is None, describe_divergence(divergence)
    assert max(spot.difference for spot in divergence.differences if spot.stage == "forward") > 1e-3
    assert "rounding explains" in describe_divergence(divergence)


@FULL
def test_a_difference_outside_the_run_files_blames_no_module(jobs: Jobs, tmp_path: Path) -> None:
    job = run_with_bug(jobs, "gelu", layer=1)
    (job.folder / "faults.jsonl").unlink()  # as if the code of the run had differed
    _, divergence = localize(jobs, job, tmp_path)
    assert not divergence.is_reproduced
    assert "not in their run files" in describe_divergence(divergence)
