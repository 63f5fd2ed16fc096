"""Non-finite gradients, loss spikes, diverged replicas, out of memory: rows 30 to 32 and 42."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributed.jobs import weights
from faults.conftest import FULL, Job, Jobs
from regauge.training.guards import Guard
from regauge.training.settings import GuardSettings

Changes = dict[str, Any]


def finish(job: Job) -> Job:
    job.finish()
    return job


@FULL
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_processes_skip_a_step_with_gradients_that_are_not_finite(
    jobs: Jobs, strategy: str
) -> None:
    fault = {"kind": "nan", "at": "gradients", "rank": 1, "step": 10}
    job = finish(jobs.create(fault, strategy=strategy))
    assert job.triggered_faults
    assert (
        "had gradients that are not finite, the first was step 11; they were skip"
        in job.stderr_line
    )
    assert not (job.folder / "failures").exists()
    for step in (12, 18, 24):
        path = job.folder / "checkpoints" / f"step-{step:08d}" / "state.json"
        assert json.loads(path.read_text())["optimizer_steps"] == step - 1
    assert all(bool(value.isfinite().all()) for value in weights(job.folder).values())


def fault_at_gradients(attempt: int, **fault: Any) -> dict[str, Any]:
    return {"at": "gradients", "rank": 1, "attempt": attempt, **fault}


@FULL
def test_too_many_skipped_steps_are_rolled_back(jobs: Jobs) -> None:
    job = jobs.assert_survives(jobs.create(fault_at_gradients(1, kind="nan", step=13, count=4)))
    (failure,) = job.failures
    assert failure["kind"] == "values"
    assert "consecutive steps were skipped" in failure["problem"]


@FULL
def test_a_second_rollback_to_the_same_step_ends_the_run(jobs: Jobs) -> None:
    job = jobs.create(fault_at_gradients(0, kind="nan", step=10, count=9)).finish(66)
    assert "consecutive steps were skipped" in job.stderr.splitlines()[-1]
    assert [failure["kind"] for failure in job.failures] == ["values", "values"]
    for path in (job.folder / "checkpoints").glob("*/*.safetensors"):
        assert all(bool(value.isfinite().all()) for value in load_file(path).values())
    job.faults = []
    finish(job)


@FULL
def test_gradients_that_are_not_finite_stop_a_run_with_that_setting(jobs: Jobs) -> None:
    job = jobs.create(
        fault_at_gradients(0, kind="nan", step=10), optimizer={"guard": {"not_finite": "stop"}}
    )
    job.finish(66)
    assert "had gradients that are not finite, the first was step 11" in job.stderr.splitlines()[-1]
    assert len(job.attempts) == 1


@FULL
def test_a_spike_is_logged_and_changes_nothing(jobs: Jobs) -> None:
    job = finish(
        jobs.create(fault_at_gradients(1, kind="spike", step=21), optimizer={"max_grad_norm": None})
    )
    warning = "1 of 1 steps had a spike of the loss or the gradient norm, the first was step 22"
    assert warning in job.stderr_line
    assert f"{warning}; they were skipped" not in job.stderr_line
    state = job.folder / "checkpoints" / "step-00000024" / "state.json"
    assert json.loads(state.read_text())["optimizer_steps"] == 24


@FULL
def test_a_spike_is_skipped_by_a_run_with_that_setting(jobs: Jobs) -> None:
    job = finish(
        jobs.create(
            fault_at_gradients(1, kind="spike", step=21), optimizer={"guard": {"spike": "skip"}}
        )
    )
    assert (
        "spike of the loss or the gradient norm, the first was step 22; they were skipped"
        in job.stderr_line
    )
    state = job.folder / "checkpoints" / "step-00000024" / "state.json"
    assert json.loads(state.read_text())["optimizer_steps"] == 23


@FULL
def test_a_spike_is_rolled_back_by_a_run_with_that_setting(jobs: Jobs) -> None:
    job = jobs.assert_survives(
        jobs.create(
            fault_at_gradients(1, kind="spike", step=21), optimizer={"guard": {"spike": "rollback"}}
        )
    )
    assert [failure["kind"] for failure in job.failures] == ["values"]


@FULL
@pytest.mark.parametrize(("size", "problem"), [(3, "process 1 differs"), (2, "no majority")])
def test_a_replica_with_a_flipped_bit_is_never_saved(jobs: Jobs, size: int, problem: str) -> None:
    fault = {"kind": "flip", "at": "weights", "rank": 1, "step": 10}
    job = jobs.assert_survives(jobs.create(fault, size=size, strategy="ddp"))
    (failure,) = job.failures
    assert failure["kind"] == "device"
    assert failure["step"] == 12
    assert problem in failure["problem"]


@FULL
def test_a_run_out_of_memory_is_not_restarted(jobs: Jobs) -> None:
    job = jobs.create({"kind": "memory", "rank": 1, "step": 10, "attempt": 0}).finish(64)
    (failure,) = job.failures
    assert failure["kind"] == "memory"
    sizes = [group["bytes"] for group in failure["evidence"]["largest_tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert failure["rank"] == 1
    assert not failure["retryable"]
    assert "batch.microbatch_rows" in job.stderr.splitlines()[-1]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_no_bit(fused: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001
    value = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW([value], fused=fused)
    guard = Guard(GuardSettings(), optimizer, torch.device("cpu"), lazy=False)

    def step(factor: float) -> None:
        value.grad = torch.ones(8) * factor
        if guard.should_update(value.grad.norm(), torch.ones(2)):
            optimizer.step()

    step(1.0)
    before = [value.detach().clone(), *(state.clone() for state in optimizer.state[value].values())]
    step(float("inf"))
    after = [value.detach(), *optimizer.state[value].values()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    with caplog.at_level("WARNING"):
        guard.raise_if_needed(2)
    assert "1 of 2 steps had gradients that are not finite, the first was step 2" in caplog.text
    step(1.0)
    assert not torch.equal(value.detach(), before[0])
