"""Gradients that are not finite, replicas that differ, memory that ends: rows 30, 32 and 42."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributed.jobs import weights
from faults.conftest import Job, Jobs, full
from regauge.training.guard import Guard

pytestmark = pytest.mark.timeout(200)
Changes = dict[str, Any]


def finished(job: Job) -> Job:
    job.start().wait()
    assert job.code == 0, job.said
    return job


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=full)])
def test_a_step_whose_gradient_is_not_finite_is_skipped_by_all(jobs: Jobs, strategy: str) -> None:
    fault = {"kind": "nan", "at": "gradients", "rank": 1, "step": 10}
    job = finished(jobs.job(fault, strategy=strategy))
    assert job.struck
    assert "1 steps were skipped up to step 11: their gradients were not finite" in job.said
    assert not (job.folder / "failures").exists()
    for step in (12, 18, 24):
        path = job.folder / "checkpoints" / f"step-{step:08d}" / "state.json"
        assert json.loads(path.read_text())["optimizer_step"] == step - 1
    assert all(bool(value.isfinite().all()) for value in weights(job.folder).values())


@full
def test_too_many_in_a_row_end_the_run(jobs: Jobs) -> None:
    job = jobs.job({"kind": "nan", "at": "gradients", "rank": 1, "step": 10, "count": 9})
    job.start().wait()
    assert job.code == 66
    assert "the gradients of 3 steps in a row were not finite" in job.said.splitlines()[-1]
    for path in (job.folder / "checkpoints").glob("*/*.safetensors"):
        assert all(bool(value.isfinite().all()) for value in load_file(path).values())
    job.faults = []
    finished(job)


@full
@pytest.mark.parametrize(("size", "named"), [(3, "process 1 differs"), (2, "cannot be told")])
def test_a_replica_with_another_bit_never_gets_into_a_checkpoint(
    jobs: Jobs, size: int, named: str
) -> None:
    fault = {"kind": "flip", "at": "weights", "rank": 1, "step": 10}
    job = jobs.survives(jobs.job(fault, size=size, strategy="ddp"))
    (failure,) = job.failures
    assert failure["kind"] == "device"
    assert failure["step"] == 12
    assert named in failure["problem"]


@full
def test_memory_that_ends_is_not_tried_again_unchanged(jobs: Jobs) -> None:
    job = jobs.job({"kind": "memory", "rank": 1, "step": 10, "attempt": 0})
    job.start().wait()
    assert job.code == 64
    (failure,) = job.failures
    assert failure["kind"] == "memory"
    assert failure["rank"] == 1
    assert not failure["retryable"]
    assert "batch.microbatch_rows" in job.said.splitlines()[-1]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_no_bit(fused: bool) -> None:  # noqa: FBT001
    value = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW([value], fused=fused)
    guard = Guard(optimizer, 3, lazy=False)

    def step(factor: float) -> None:
        value.grad = torch.ones(8) * factor
        admitted, _ = guard.admits(value.grad.norm(), torch.ones(2))
        if admitted:
            optimizer.step()

    step(1.0)
    before = [value.detach().clone(), *(each.clone() for each in optimizer.state[value].values())]
    step(float("inf"))
    after = [value.detach(), *optimizer.state[value].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert guard.look(2) == 1
    step(1.0)
    assert not torch.equal(value.detach(), before[0])
