"""The restart policy after a failure, and the choice of the first failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regauge.supervision import supervisor
from regauge.supervision.channel import WorkerReports
from regauge.supervision.failures import POLICIES, Failure, collect_evidence, find_largest_tensors
from regauge.training.settings import TrainSettings

SETTINGS = TrainSettings.model_validate(
    {
        "output": {"folder": "runs/x"},
        "data": {"path": "data"},
        "task": {"kind": "mlm"},
        "model": {"architecture": "bert"},
        "batch": {"rows": 8, "microbatch_rows": 4},
        "stop": {"steps": 10},
    }
)
LIMIT = SETTINGS.execution.supervision.max_attempts_per_step


def failure(kind: str = "process", step: int = 10, **evidence: Any) -> Failure:
    return Failure(kind, 1, step, f"a failure of {kind}", evidence=evidence)


def wait_after(*failures: Failure) -> float | None:
    return supervisor._compute_wait(list(failures), LIMIT)


def final_error(*failures: Failure) -> tuple[int, str]:
    error = supervisor._build_final_error(list(failures), SETTINGS)
    return error.exit_code, str(error)


def test_every_kind_has_a_documented_exit_code() -> None:
    assert {policy.exit_code for policy in POLICIES.values()} == {2, 64, 65, 66, 67, 75, 76, 143}


@pytest.mark.parametrize(
    "kind", sorted(kind for kind, policy in POLICIES.items() if policy.is_retried)
)
def test_the_run_is_restarted_after_a_first_failure(kind: str) -> None:
    assert wait_after(failure(kind)) is not None


@pytest.mark.parametrize(
    "kind", ["data", "memory", "preempted", "limit", "preflight", "checkpoint"]
)
def test_the_run_is_not_restarted_after_a_permanent_failure(kind: str) -> None:
    assert wait_after(failure(kind)) is None
    code, _ = final_error(failure(kind))
    assert code == POLICIES[kind].exit_code


def test_attempts_that_fail_at_the_same_step_are_limited() -> None:
    assert wait_after(*[failure()] * (LIMIT - 1)) is not None
    assert wait_after(*[failure()] * LIMIT) is None
    code, line = final_error(*[failure()] * LIMIT)
    assert code == 66
    assert line.startswith(f"{LIMIT} attempts failed at step 10 in the same way")


def test_another_step_or_kind_resets_the_count() -> None:
    equal_failures = [failure()] * (LIMIT - 1)
    assert wait_after(*equal_failures, failure(step=11), failure()) is not None
    assert wait_after(*equal_failures, failure("hang"), failure()) is not None


def test_different_failures_are_not_reported_as_the_same() -> None:
    """A signal may end a run between attempts whose failures have nothing in common."""
    code, line = final_error(failure(step=1), failure("hang", 2), failure(step=3))
    assert code == 75
    assert "in the same way" not in line


@pytest.mark.parametrize("kind", ["network"])
def test_a_network_failure_is_never_counted(kind: str) -> None:
    assert wait_after(*[failure(kind)] * 50) is not None


def test_waits_double_up_to_a_maximum() -> None:
    waits = [wait_after(*[failure("network")] * count) for count in (1, 2, 3, 20)]
    assert waits == [1.0, 2.0, 4.0, supervisor.MAX_WAIT_SECONDS]


def test_an_exception_is_retried_once_per_location() -> None:
    first, second = failure("user", location_hash="a"), failure("user", location_hash="b")
    assert wait_after(first, second) == 0
    assert wait_after(second, first, first) is None
    assert final_error(first, first)[0] == 64


def test_bad_steps_are_rolled_back_once() -> None:
    assert wait_after(failure("values")) == 0
    assert wait_after(failure("values"), failure("values")) is None
    assert final_error(failure("values"), failure("values"))[0] == 66


def test_the_error_has_the_worker_s_traceback_as_a_note() -> None:
    trace = ["Traceback (most recent call last):", "ValueError: x"]
    error = supervisor._build_final_error([failure("user", traceback=trace)], SETTINGS)
    assert error.__notes__ == ["In process 1:\nTraceback (most recent call last):\nValueError: x"]


def test_the_first_failure_is_the_earliest_and_not_the_lowest_rank(tmp_path: Path) -> None:
    for rank, at in ((0, 7.5), (2, 7.25)):
        document = {**Failure("user", rank, 3, "x").document(), "reported_at": at}
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(document))
    (tmp_path / "failure-1.json").write_text('{"kind": "us')
    assert [failure.rank for failure in WorkerReports(tmp_path, 3).read_failures()] == [2, 0]


def test_the_largest_tensors_are_grouped_by_type_and_shape() -> None:
    tensors = [torch.zeros(1000, 777) for _ in range(3)]
    tensors = [part for tensor in tensors for part in (tensor[0], tensor)]
    with FakeTensorMode():
        shapes = [torch.zeros(1000, 778), torch.zeros(1000, 777)]
    groups = {group["tensors"]: group for group in find_largest_tensors(50)}
    assert groups["float32 [1000, 777]"]["count"] == 3
    assert groups["float32 [1000, 777]"]["bytes"] == 3 * 1000 * 777 * 4
    assert "float32 [1000, 778]" not in groups, f"{shapes} have no bytes"
    assert "float32 [777]" not in groups, "a view shares the bytes of its base"
    assert collect_evidence(MemoryError())["largest_tensors"]
    assert "largest_tensors" not in collect_evidence(ValueError())
    largest = [{"tensors": "float32 [2]", "count": 3, "bytes": 24e6}]
    line = final_error(failure("memory", largest_tensors=largest))[1]
    assert "largest tensors 3 x float32 [2]: 24 MB" in line


def test_the_error_of_a_full_memory_suggests_half_of_the_microbatch(tmp_path: Path) -> None:
    assert "; set batch.microbatch_rows = 2, or set " in final_error(failure("memory"))[1]
    batch = SETTINGS.batch.model_copy(update={"microbatch_rows": "auto"})
    output = SETTINGS.output.model_copy(update={"folder": str(tmp_path)})
    settings = SETTINGS.model_copy(update={"batch": batch, "output": output})
    _, line = supervisor._summarize_failures([failure("memory")], settings)
    assert "; set batch.microbatch_rows to a number, or set " in line
    (tmp_path / "run.json").write_text('{"batch": {"rows": 8, "microbatch_rows": 8}}')
    _, line = supervisor._summarize_failures([failure("memory")], settings)
    assert "; set batch.microbatch_rows = 4, or set " in line
