"""What follows a failure, and which one came first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regauge.supervision import supervisor
from regauge.supervision.channel import WorkerReports
from regauge.supervision.failures import POLICIES, Failure, evidence_of, largest
from regauge.training.settings import Training

SETTINGS = Training.model_validate(
    {
        "output": {"folder": "runs/x"},
        "data": {"path": "data"},
        "task": {"kind": "mlm"},
        "model": {"architecture": "bert"},
        "batch": {"rows": 8, "microbatch_rows": 4},
        "stop": {"steps": 10},
    }
)
LIMIT = SETTINGS.execution.supervision.attempts_at_a_step


def failure(kind: str = "process", step: int = 10, **evidence: Any) -> Failure:
    return Failure(kind, 1, step, f"a failure of {kind}", evidence=evidence)


def waits(*failures: Failure) -> float | None:
    return supervisor._wait_before_next(list(failures), LIMIT)


def last_word(*failures: Failure) -> tuple[int, str]:
    error = supervisor._last_word(list(failures), SETTINGS)
    return error.exit_code, str(error)


def test_every_kind_has_a_code_that_is_documented() -> None:
    assert {policy.code for policy in POLICIES.values()} == {2, 64, 65, 66, 67, 75, 76, 143}


@pytest.mark.parametrize(
    "kind", sorted(kind for kind, policy in POLICIES.items() if policy.retried)
)
def test_a_first_failure_is_tried_again(kind: str) -> None:
    assert waits(failure(kind)) is not None


@pytest.mark.parametrize(
    "kind", ["data", "memory", "preempted", "limit", "preflight", "checkpoint"]
)
def test_what_would_come_again_is_not(kind: str) -> None:
    assert waits(failure(kind)) is None
    code, _ = last_word(failure(kind))
    assert code == POLICIES[kind].code


def test_the_same_failure_at_a_step_is_tried_so_often() -> None:
    assert waits(*[failure()] * (LIMIT - 1)) is not None
    assert waits(*[failure()] * LIMIT) is None
    code, line = last_word(*[failure()] * LIMIT)
    assert code == 66
    assert line.startswith(f"{LIMIT} attempts failed at step 10 in the same way")


def test_another_step_or_kind_begins_the_count_again() -> None:
    same = [failure()] * (LIMIT - 1)
    assert waits(*same, failure(step=11), failure()) is not None
    assert waits(*same, failure("hang"), failure()) is not None


def test_failures_that_differ_are_not_the_same_way() -> None:
    """A signal may end a run between attempts whose failures have nothing in common."""
    code, line = last_word(failure(step=1), failure("hang", 2), failure(step=3))
    assert code == 75
    assert "in the same way" not in line


@pytest.mark.parametrize("kind", ["network"])
def test_what_is_nobody_s_fault_is_never_counted(kind: str) -> None:
    assert waits(*[failure(kind)] * 50) is not None


def test_waits_grow_to_a_limit() -> None:
    found = [waits(*[failure("network")] * count) for count in (1, 2, 3, 20)]
    assert found == [1.0, 2.0, 4.0, supervisor.LONGEST_WAIT_SECONDS]


def test_an_exception_is_tried_once_more_in_its_place() -> None:
    here, there = failure("user", place="a"), failure("user", place="b")
    assert waits(here, there) == 0
    assert waits(there, here, here) is None
    assert last_word(here, here)[0] == 64


def test_steps_that_must_not_count_are_gone_back_over_once() -> None:
    assert waits(failure("values")) == 0
    assert waits(failure("values"), failure("values")) is None
    assert last_word(failure("values"), failure("values"))[0] == 66


def test_the_worker_s_traceback_is_kept_for_who_asks() -> None:
    one = failure("user", traceback=["Traceback (most recent call last):", "ValueError: x"])
    error = supervisor._last_word([one], SETTINGS)
    assert error.__notes__ == ["In process 1:\nTraceback (most recent call last):\nValueError: x"]


def test_the_first_failure_is_the_earliest_and_not_the_lowest_rank(tmp_path: Path) -> None:
    for rank, at in ((0, 7.5), (2, 7.25)):
        document = {**Failure("user", rank, 3, "x").document(), "at": at}
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(document))
    (tmp_path / "failure-1.json").write_text('{"kind": "us')
    assert [one.rank for one in WorkerReports(tmp_path, 3).failures()] == [2, 0]


def test_what_fills_the_memory_is_told_by_type_and_shape() -> None:
    kept = [torch.zeros(1000, 777) for _ in range(3)]
    kept = [part for tensor in kept for part in (tensor[0], tensor)]
    with FakeTensorMode():
        shapes = [torch.zeros(1000, 778), torch.zeros(1000, 777)]
    found = {each["tensors"]: each for each in largest(50)}
    assert found["float32 [1000, 777]"]["count"] == 3
    assert found["float32 [1000, 777]"]["bytes"] == 3 * 1000 * 777 * 4
    assert "float32 [1000, 778]" not in found, f"{shapes} have no bytes"
    assert "float32 [777]" not in found, "a view has no bytes of its own"
    assert evidence_of(MemoryError())["largest"]
    assert "largest" not in evidence_of(ValueError())
    told = failure("memory", largest=[{"tensors": "float32 [2]", "count": 3, "bytes": 24e6}])
    assert "most of it 3 x float32 [2]: 24 MB" in last_word(told)[1]


def test_a_run_out_of_memory_is_told_half_of_the_microbatch_also_of_one_it_found(
    tmp_path: Path,
) -> None:
    assert "try batch.microbatch_rows = 2, or " in last_word(failure("memory"))[1]
    batch = SETTINGS.batch.model_copy(update={"microbatch_rows": "auto"})
    output = SETTINGS.output.model_copy(update={"folder": str(tmp_path)})
    found = SETTINGS.model_copy(update={"batch": batch, "output": output})
    assert "; try a batch.microbatch_rows, or" in supervisor._summary([failure("memory")], found)[1]
    (tmp_path / "run.json").write_text('{"batch": {"rows": 8, "microbatch_rows": 8}}')
    assert "try batch.microbatch_rows = 4, or" in supervisor._summary([failure("memory")], found)[1]
