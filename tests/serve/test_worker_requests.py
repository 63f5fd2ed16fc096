"""Where the workers of a model run: on devices, or on groups of cores."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regauge.serving.settings import WorkerSettings
from regauge.serving.workers import worker_requests
from regauge.serving.workers.worker_requests import build_load_requests, split_cores


def describe_artifact(
    *,
    on_host: bool,
    threads: int = 1,
    num_devices: int = 1,
    devices_per_model: int = 1,
    output_kind: str = "vectors",
) -> Any:
    """Return what the placement reads of an artifact."""
    backend = SimpleNamespace(num_devices=devices_per_model)
    target = SimpleNamespace(threads=threads)
    return SimpleNamespace(
        folder=Path("model"),
        source=None,
        accelerator=SimpleNamespace(on_host=on_host, num_devices=lambda: num_devices),
        manifest=SimpleNamespace(
            compiled=SimpleNamespace(backend=backend),
            program=SimpleNamespace(output_kind=output_kind),
            target=target,
        ),
    )


@pytest.fixture(autouse=True)
def five_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(worker_requests, "available_cores", lambda: 5)


def test_one_worker_of_a_cpu_has_all_cores() -> None:
    artifact = describe_artifact(on_host=True, threads=5)
    [request] = build_load_requests(artifact, WorkerSettings())
    assert (request.path, request.threads, request.cores) == ("model", None, [])


def test_a_cpu_has_as_many_workers_as_their_threads_have_cores() -> None:
    artifact = describe_artifact(on_host=True, threads=2)
    for threads, num_workers in ((None, 2), (1, 5), (5, 1), (8, 1)):
        requests = build_load_requests(artifact, WorkerSettings(threads=threads))
        assert len(requests) == num_workers


def test_one_worker_of_a_cpu_generates_text() -> None:
    artifact = describe_artifact(on_host=True, threads=1, output_kind="text")
    assert len(build_load_requests(artifact, WorkerSettings())) == 1


def test_several_workers_of_a_cpu_share_its_cores() -> None:
    artifact = describe_artifact(on_host=True)
    requests = build_load_requests(artifact, WorkerSettings(count=2))
    assert [request.cores for request in requests] == [[0, 1, 2], [3, 4]]
    assert [request.threads for request in requests] == [2, 2]
    unbound = build_load_requests(artifact, WorkerSettings(count=2, pin_cores=False))
    assert [request.cores for request in unbound] == [[], []]
    assert split_cores(7) == [[0], [1], [2], [3], [4], [0], [1]]


def test_a_worker_starts_on_each_device_or_group_of_devices() -> None:
    for per_model, devices in ((1, [0, 1, 2, 3]), (2, [0, 1])):
        artifact = describe_artifact(on_host=False, num_devices=4, devices_per_model=per_model)
        requests = build_load_requests(artifact, WorkerSettings())
        assert [request.device for request in requests] == devices
    requests = build_load_requests(artifact, WorkerSettings(count=3))
    assert [request.device for request in requests] == [0, 1, 0]
