"""Bad gradients, replicas that differ, memory that ends: rows 30, 31, 32 and 42."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributed.jobs import weights
from faults.conftest import FULL, Job, Jobs
from regauge.training.guards import Guard
from regauge.training.settings import Guarding

Changes = dict[str, Any]


def finished(job: Job) -> Job:
    job.start().wait()
    assert job.code == 0, job.said
    return job


@FULL
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_whose_gradient_is_not_finite_is_skipped_by_all(jobs: Jobs, strategy: str) -> None:
    fault = {"kind": "nan", "at": "gradients", "rank": 1, "step": 10}
    job = finished(jobs.job(fault, strategy=strategy))
    assert job.struck
    assert "had gradients that are not finite, the first was step 11; they were skip" in job.told
    assert not (job.folder / "failures").exists()
    for step in (12, 18, 24):
        path = job.folder / "checkpoints" / f"step-{step:08d}" / "state.json"
        assert json.loads(path.read_text())["optimizer_step"] == step - 1
    assert all(bool(value.isfinite().all()) for value in weights(job.folder).values())


def every(attempt: int, **fault: Any) -> dict[str, Any]:
    return {"at": "gradients", "rank": 1, "attempt": attempt, **fault}


@FULL
def test_too_many_in_a_row_are_rolled_back(jobs: Jobs) -> None:
    job = jobs.survives(jobs.job(every(1, kind="nan", step=13, count=4)))
    (failure,) = job.failures
    assert failure["kind"] == "values"
    assert "steps in a row were skipped" in failure["problem"]


@FULL
def test_too_many_in_a_row_that_come_again_end_the_run(jobs: Jobs) -> None:
    job = jobs.job(every(0, kind="nan", step=10, count=9))
    job.start().wait()
    assert job.code == 66
    assert "steps in a row were skipped" in job.said.splitlines()[-1]
    assert [failure["kind"] for failure in job.failures] == ["values", "values"]
    for path in (job.folder / "checkpoints").glob("*/*.safetensors"):
        assert all(bool(value.isfinite().all()) for value in load_file(path).values())
    job.faults = []
    finished(job)


@FULL
def test_gradients_that_are_not_finite_stop_a_run_that_asks_for_it(jobs: Jobs) -> None:
    job = jobs.job(every(0, kind="nan", step=10), optimizer={"guard": {"not_finite": "stop"}})
    job.start().wait()
    assert job.code == 66
    assert "had gradients that are not finite, the first was step 11" in job.said.splitlines()[-1]
    assert len(job.attempts) == 1


@FULL
def test_a_spike_is_said_and_changes_nothing(jobs: Jobs) -> None:
    job = finished(jobs.job(every(1, kind="spike", step=21), optimizer={"clip_norm": None}))
    said = "1 of 1 steps had a loss or gradients far above the usual, the first was step 22"
    assert said in job.told
    assert f"{said}; they were skipped" not in job.told
    state = job.folder / "checkpoints" / "step-00000024" / "state.json"
    assert json.loads(state.read_text())["optimizer_step"] == 24


@FULL
def test_a_spike_is_skipped_by_a_run_that_asks_for_it(jobs: Jobs) -> None:
    job = finished(
        jobs.job(every(1, kind="spike", step=21), optimizer={"guard": {"spike": "skip"}})
    )
    assert "far above the usual, the first was step 22; they were skipped" in job.told
    state = job.folder / "checkpoints" / "step-00000024" / "state.json"
    assert json.loads(state.read_text())["optimizer_step"] == 23


@FULL
def test_a_spike_is_rolled_back_by_a_run_that_asks_for_it(jobs: Jobs) -> None:
    job = jobs.survives(
        jobs.job(every(1, kind="spike", step=21), optimizer={"guard": {"spike": "roll-back"}})
    )
    assert [failure["kind"] for failure in job.failures] == ["values"]


@FULL
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


@FULL
def test_memory_that_ends_is_not_tried_again_unchanged(jobs: Jobs) -> None:
    job = jobs.job({"kind": "memory", "rank": 1, "step": 10, "attempt": 0})
    job.start().wait()
    assert job.code == 64
    (failure,) = job.failures
    assert failure["kind"] == "memory"
    sizes = [each["bytes"] for each in failure["evidence"]["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert failure["rank"] == 1
    assert not failure["retryable"]
    assert "batch.microbatch_rows" in job.said.splitlines()[-1]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_no_bit(fused: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001
    value = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW([value], fused=fused)
    guard = Guard(Guarding(), optimizer, torch.device("cpu"), lazy=False)

    def step(factor: float) -> None:
        value.grad = torch.ones(8) * factor
        if guard.should_update(value.grad.norm(), torch.ones(2)):
            optimizer.step()

    step(1.0)
    before = [value.detach().clone(), *(each.clone() for each in optimizer.state[value].values())]
    step(float("inf"))
    after = [value.detach(), *optimizer.state[value].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with caplog.at_level("WARNING"):
        guard.raise_if_needed(2)
    assert "1 of 2 steps had gradients that are not finite, the first was step 2" in caplog.text
    step(1.0)
    assert not torch.equal(value.detach(), before[0])
