"""Launched servers: targets, replicas, and the decisions of their autoscaler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import regauge
from regauge import config
from regauge.system.errors import SettingsError
from unit.test_benchmark_summary import build_manifest
from unit.test_launch_kubernetes import P5, PROMETHEUS, SERVER, build_plan, find_document

CAPACITY = 200.0
"""Requests per second of one replica in the traces."""


def write_run_file(folder: Path, **serve: Any) -> Path:
    run = {
        "serve": {"artifacts": {"qa": "/data/qa"}, **serve},
        "launch": {"image": "registry.example/regauge:1", "instance": "c7i.4xlarge"},
    }
    path = folder / "qa.json"
    path.write_text(json.dumps(run))
    return path


def plan_server(run_file: Path, *overrides: str, on: str = "kubernetes") -> dict[str, Any]:
    return regauge.launch(run_file, "serve", *overrides, on=on, dry_run=True)


def test_a_replica_is_ready_before_an_old_one_ends_and_drains_before_it_is_killed(
    tmp_path: Path,
) -> None:
    http = {"drain_seconds": 50.0}
    run_file = write_run_file(tmp_path, port=9000, http=http, workers={"start_timeout_seconds": 60})
    documents = {
        item["content"]["kind"]: item["content"] for item in plan_server(run_file)["documents"]
    }
    assert "PodDisruptionBudget" not in documents
    spec = documents["Deployment"]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    hook = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > 50 + hook
    assert container["command"][-1] == "serve.host=0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": 9000}]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 60
    assert (
        documents["Service"]["spec"]["selector"].items()
        <= spec["template"]["metadata"]["labels"].items()
    )


def test_a_changed_run_file_changes_the_pods(tmp_path: Path) -> None:
    def find_template(**serve: Any) -> Any:
        documents = plan_server(write_run_file(tmp_path, **serve))["documents"]
        return documents[-1]["content"]["spec"]["template"]

    assert find_template() == find_template()
    assert find_template() != find_template(overflow="truncate")


MAXIMUM = "launch.target=[{kind='kubernetes', server={max_replicas=4}}]"


@pytest.mark.parametrize(
    ("overrides", "on", "message"),
    [
        ((), "slurm", "does not run servers"),
        ((), "aws_batch", "does not run servers"),
        (("serve.port=0",), "kubernetes", "another port at each start"),
        (("launch.hours=1",), "kubernetes", None),
        (
            (
                "launch.instance=g5.xlarge",
                MAXIMUM,
            ),
            "kubernetes",
            "CPU load does not show",
        ),
        (("launch.jobs=5", MAXIMUM), "kubernetes", "less than launch.jobs"),
    ],
)
def test_a_server_that_cannot_run_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], on: str, message: str | None
) -> None:
    run_file = write_run_file(tmp_path)
    if message is None:
        notes = plan_server(run_file, *overrides, on=on)["notes"]
        assert "launch.hours has no effect on this target." in notes
        return
    with pytest.raises(SettingsError, match=message):
        plan_server(run_file, *overrides, on=on)


def test_a_server_is_not_rehearsed(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a server has none"):
        regauge.launch(write_run_file(tmp_path), "serve", on="kubernetes", rehearse=True)


def write_artifact(folder: Path, gib: float = 0.0, **changes: Any) -> str:
    """Write the manifest of an artifact that computes with two threads; return its folder."""
    files = {"weights.safetensors": {"bytes": int(gib * 2**30), "sha256": ""}}
    document = config.dump(build_manifest()) | {"files": files}
    for key, value in changes.items():
        table, name = key.split("__")
        document[table][name] = value
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(document))
    return str(folder)


def plan_replica(folder: Path, artifacts: dict[str, str], **serve: Any) -> tuple[Any, list[str]]:
    """Return the resources and the command of a replica without a machine type."""
    run_file = write_run_file(folder, artifacts=artifacts, **serve)
    document = json.loads(run_file.read_text())
    del document["launch"]["instance"]
    run_file.write_text(json.dumps(document))
    deployment = plan_server(run_file)["documents"][-1]["content"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container.get("resources"), container["command"]


def test_a_replica_without_a_machine_type_is_as_large_as_its_artifacts(tmp_path: Path) -> None:
    small, large = write_artifact(tmp_path / "small"), write_artifact(tmp_path / "large", gib=2.0)
    resources, command = plan_replica(tmp_path, {"a": small})
    assert resources == {"requests": {"cpu": "3", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    assert command[-1] == "serve.workers.count=1", "or a worker for every two CPUs of the machine"
    resources, _ = plan_replica(tmp_path, {"a": small, "b": large})
    assert resources["requests"]["cpu"] == "5"
    both = int(resources["limits"]["memory"].removesuffix("Gi"))
    assert both >= 1 + 2 * 2 * 2, "two versions of the large one while it is replaced"
    resources, command = plan_replica(
        tmp_path, {"a": small, "b": large}, workers={"count": 2, "threads": 4}
    )
    assert resources["requests"]["cpu"] == "17"
    assert int(resources["limits"]["memory"].removesuffix("Gi")) > both
    assert command[-1] == "serve.workers.count=2"
    resources, _ = plan_replica(tmp_path, {"a": small, "b": large}, models={"max_loaded": 1})
    assert resources["requests"]["cpu"] == "3"


@pytest.mark.parametrize(
    "changes",
    [{"program__output_kind": "text"}, {"target__accelerator": "cuda"}, None],
    ids=["text", "accelerator", "elsewhere"],
)
def test_a_replica_of_unknown_size_requests_nothing(
    tmp_path: Path, changes: dict[str, Any] | None
) -> None:
    address = "/elsewhere" if changes is None else write_artifact(tmp_path / "a", **changes)
    resources, command = plan_replica(tmp_path, {"a": address})
    assert resources is None
    assert not [word for word in command if word.startswith("serve.workers")]


def test_a_planned_replica_can_be_scaled_by_its_cpu_load(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path, artifacts={"a": write_artifact(tmp_path / "a")})
    document = json.loads(run_file.read_text())
    del document["launch"]["instance"]
    run_file.write_text(json.dumps(document))
    documents = plan_server(run_file, MAXIMUM)["documents"]
    assert any(item["content"]["kind"] == "HorizontalPodAutoscaler" for item in documents)


def test_queue_time_and_requests_add_replicas_on_accelerators() -> None:
    spec = find_scaled_object()
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    assert "regauge_serve_queue_wait_seconds" in queries[0]
    assert "regauge_serve_requests_total" in queries[1]
    assert all(
        isinstance(value, str) for item in spec["triggers"] for value in item["metadata"].values()
    )


def find_scaled_object() -> dict[str, Any]:
    options = {"max_replicas": 8, "prometheus": PROMETHEUS, "requests_per_second": CAPACITY * 0.8}
    plan = build_plan(replace(SERVER, machine=P5), server=options)
    return dict(find_document(plan, "ScaledObject")["spec"])


def simulate(load: Callable[[float], float], seconds: int) -> Iterator[tuple[int, float]]:
    """Yield the replicas and the queue's wait at each decision of a HorizontalPodAutoscaler.

    It decides every 15 s with a tolerance of 10 %:
    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
    A new replica answers 30 s after its creation.
    """
    spec = find_scaled_object()
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (policy,) = behavior["scaleUp"]["policies"]
    window = behavior["scaleDown"]["stabilizationWindowSeconds"]
    wait_limit, rate_limit = (float(item["metadata"]["threshold"]) for item in spec["triggers"])
    replicas, backlog = spec["minReplicaCount"], 0.0
    history: list[tuple[int, int]] = []
    starts = [-60.0] * replicas
    for now in range(0, seconds, 15):
        answering = sum(now - start >= 30 for start in starts[:replicas])
        backlog = max(0.0, backlog + (load(now) - answering * CAPACITY) * 15)
        wait = min(backlog / (answering * CAPACITY), 2.0)  # later requests are refused
        backlog = wait * answering * CAPACITY
        ratios = [wait / wait_limit * replicas, load(now) / rate_limit]
        target = max(
            replicas if abs(item / replicas - 1) <= 0.1 else math.ceil(item) for item in ratios
        )
        history.append((now, target))
        target = max(value for time, value in history if now - time <= window)
        grown = math.ceil(replicas * (1 + policy["value"] / 100 * 15 / policy["periodSeconds"]))
        target = min(
            max(target, spec["minReplicaCount"]), spec["maxReplicaCount"], max(grown, replicas)
        )
        starts = (
            (starts + [float(now)] * target)[: max(target, 1)]
            if target > replicas
            else starts[:target]
        )
        replicas = target
        yield replicas, wait


def test_a_burst_adds_replicas_until_nobody_waits_and_keeps_them_for_a_while() -> None:
    def burst(now: float) -> float:
        return 1000.0 if 120 <= now < 600 else 100.0

    decisions = list(simulate(burst, 1500))
    during, after = decisions[120 // 15 : 600 // 15], decisions[600 // 15 :]
    assert decisions[0][0] == 2
    assert max(replicas for replicas, _ in decisions) <= 8
    assert all(wait == 0 for _, wait in during[len(during) // 2 :])
    assert during[-1][0] >= 1000 / CAPACITY
    assert after[200 // 15][0] >= 1000 / CAPACITY  # a pause of the load removes none
    assert decisions[-1][0] == 2


@pytest.mark.parametrize("rate", [50.0, 320.0, 640.0, 1100.0])
def test_a_constant_load_settles_without_oscillation(rate: float) -> None:
    counts = [replicas for replicas, _ in simulate(lambda _: rate, 3600)]
    assert len(set(counts[len(counts) // 2 :])) == 1
    assert counts[-1] * CAPACITY >= rate
