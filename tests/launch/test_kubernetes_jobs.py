"""Jobs on a small cluster: arrays, failures, pending reasons, logs, cancellation and clean-up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from end_to_end.predicting import export_run, read_table, train_model, write_records
from launch.cluster_workplace import ClusterWorkplace, use_pytorch_job
from launch.kubernetes_api import CONTEXT, ApiServer
from launch.training_jobs import count_steps, wait_until

RECORDS, JOBS = 1200, 3
TWO_NODES = "execution.nodes.count=2"
SECRET_VALUE = "hf_cluster_secret_value"  # noqa: S105 - of this test
BRIEF: dict[str, Any] = {"stop": {"steps": 6}, "output": {"checkpoint": {"every_steps": 3}}}
ENDLESS: dict[str, Any] = {"stop": {"steps": 100_000}, "execution": {"compile": "off"}}


@contextmanager
def change(target: object, **values: Any) -> Iterator[None]:
    earlier = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in earlier.items():
            setattr(target, name, value)


def cancel_and_clean_up(workplace: ClusterWorkplace, handle: str) -> None:
    assert workplace.run("job", "cancel", handle).code == 0
    assert workplace.run("job", "cleanup", handle).code == 0


def test_an_array_that_loses_a_pod_writes_every_record_once(
    workplace: ClusterWorkplace, cluster: ApiServer, tmp_path: Path
) -> None:
    artifact = export_run(train_model(tmp_path / "encoder"), tmp_path / "artifact")
    source = write_records(workplace.root / "texts.jsonl", RECORDS)
    folder = workplace.root / "out-array"
    path = workplace.root / "array.json"
    volume = {"name": "all", "kind": "host", "mount": str(tmp_path), "source": str(tmp_path)}
    root = {**volume, "name": "root", "mount": str(workplace.root), "source": str(workplace.root)}
    run = {
        "artifact": str(artifact),
        "source": {"kind": "jsonl", "files": [str(source)]},
        "output": {"folder": str(folder)},
        "predict": {"shard_records": 50},
        "execution": {"executor": "inline"},
        "launch": {"image": "registry.example/regauge:1", "jobs": JOBS, "volumes": [volume, root]},
    }
    path.write_text(json.dumps(run))
    handle = workplace.submit(path, verb="predict")
    assert handle == f"kubernetes://{CONTEXT}/default/job/array"
    wait_until(lambda: len(cluster.find_pods("array")) == JOBS, "the pods")
    lost = cluster.find_pods("array")[1]["metadata"]["name"]
    wait_until(lambda: lost_runs(cluster, lost), "the second pod")
    cluster.lose_node(lost)
    document = workplace.assert_succeeds(handle)
    assert [node["state"] for node in document["nodes"]] == ["succeeded"] * JOBS
    assert document["attempt"] == 2
    assert read_table(folder)["id"].to_pylist() == list(range(RECORDS))


def lost_runs(cluster: ApiServer, name: str) -> bool:
    pods = [pod for pod in cluster.find_pods("array") if pod["metadata"]["name"] == name]
    return bool(pods) and pods[0]["status"]["phase"] == "Running"


@pytest.mark.parametrize("overrides", [(), use_pytorch_job()], ids=["trainjob", "pytorchjob"])
def test_a_run_that_no_restart_can_fix_fails_at_once(
    workplace: ClusterWorkplace, overrides: tuple[str, ...]
) -> None:
    name = f"failing-{len(overrides)}"
    missing = str(workplace.root / "missing")
    handle = workplace.submit(
        workplace.write_job(name), TWO_NODES, f"data.path={missing}", *overrides
    )
    answer = workplace.run("job", "wait", handle)
    status = workplace.read_status(handle)
    assert (status["state"], answer.code) == ("failed", status["exit_code"])
    assert status["exit_code"] in {2, 64}
    assert missing in status["failure"]["message"]
    assert missing in answer.error.splitlines()[-1]
    assert status["failure"]["node"] in {0, 1}
    assert status.get("attempt", 1) == 1
    assert workplace.run("job", "cleanup", handle).code == 0


def test_pending_jobs_have_a_reason_in_plain_words(
    workplace: ClusterWorkplace, cluster: ApiServer
) -> None:
    run_file = workplace.write_job("pending", {"secrets": {"TOKEN": "absent/token"}}, **BRIEF)
    with change(cluster.kubelet, capacity=0):
        handle = workplace.submit(run_file, TWO_NODES)
        status = wait_for_reason(workplace, handle, "no node has room: 0/0 nodes are available")
        assert status["nodes"][0]["state"] == "pending"
    wait_for_reason(workplace, handle, 'the container cannot be created: secret "absent" not found')
    cancel_and_clean_up(workplace, handle)
    image = "registry.example/regauge:1"
    cases: tuple[tuple[object, dict[str, Any], str], ...] = (
        (cluster.kubelet, {"missing_images": {image}}, f"the image {image} cannot be pulled"),
        (cluster.controllers, {"quota": 0}, "quota compute: pods=1 is requested, "),
        (cluster.controllers, {"is_operator_running": False}, "check that the operator of a Train"),
    )
    run_file = workplace.write_job("refused-pods", **BRIEF)
    for target, values, reason in cases:
        with change(target, **values):
            handle = workplace.submit(run_file, TWO_NODES)
            wait_for_reason(workplace, handle, reason)
            cancel_and_clean_up(workplace, handle)


def wait_for_reason(workplace: ClusterWorkplace, handle: str, reason: str) -> dict[str, Any]:
    """Wait until a job is pending for a reason; return its status."""

    def has_reason() -> bool:
        return reason in workplace.read_status(handle).get("reason", "")

    wait_until(has_reason, reason)
    status = workplace.read_status(handle)
    assert status["state"] == "pending"
    return status


def test_a_job_is_cancelled_once_and_cleaned_up_in_order(
    workplace: ClusterWorkplace, cluster: ApiServer
) -> None:
    cluster.store.create(
        "secrets",
        {
            "kind": "Secret",
            "metadata": {"name": "hub", "namespace": "default"},
            "stringData": {"token": SECRET_VALUE},
        },
    )
    claim = {"name": "extra", "kind": "claim", "mount": "/extra", "source": "models"}
    launch = {"secrets": {"HF_TOKEN": "hub/token"}}
    run_file = workplace.write_job("endless", launch, **ENDLESS)
    document = json.loads(run_file.read_text())
    document["launch"]["volumes"].append(claim)
    run_file.write_text(json.dumps(document))
    answer = workplace.try_submit(run_file, TWO_NODES)
    handle = answer.document["handle"]
    folder = workplace.root / "out-endless"
    wait_until(lambda: count_steps(folder) >= 3, "step 3")

    refused = workplace.run("job", "cleanup", handle)
    assert (refused.code, "is running; stop it first" in refused.error) == (2, True)
    second = workplace.try_submit(run_file, TWO_NODES)
    assert second.code == 2
    assert "already exists; set launch.name" in second.error
    assert workplace.read_status(handle)["state"] == "running"
    for rank in (0, 1):
        log = workplace.run("job", "logs", handle, "--rank", str(rank))
        assert "attempt 1 on 2 nodes" in log.output
    assert workplace.run("job", "logs", handle, "--rank", "2").code == 2
    assert workplace.run("job", "logs", handle, "--attempt", "2").code == 2
    assert workplace.run("job", "events", handle).output.count("Started:") == 2

    command = [sys.executable, "-m", "regauge", "job", "logs", handle, "--follow"]
    following = subprocess.Popen(
        command, env=workplace.environment, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert following.stdout is not None
    assert "attempt 1 on 2 nodes" in following.stdout.readline()
    assert workplace.run("job", "cancel", handle).code == 0
    with following:
        assert following.stdout.read(), "the last lines of the log are missing"
    wait_until(lambda: not cluster.find_pods("endless"), "the end of the pods")
    assert workplace.read_status(handle)["state"] == "cancelled"
    again = workplace.run("job", "cancel", handle)
    assert (again.code, "has ended already (cancelled)" in again.error) == (2, True)
    assert workplace.run("job", "wait", handle).code == 130
    cluster.store.deleted.clear()
    left = workplace.run("job", "cleanup", handle, "-o", "json").document["leftovers"]
    assert [item["name"] for item in left] == ["persistentvolumeclaims/models"]
    assert left[0]["remedy"].endswith("delete persistentvolumeclaims models")
    deleted = [key[0] for key in cluster.store.deleted if key[0] != "pods"]
    assert deleted == ["trainjobs", "trainingruntimes", "configmaps"]
    assert workplace.run("job", "status", handle).code == 2
    assert workplace.run("job", "cleanup", handle).code == 0
    assert_no_secret(workplace, cluster, answer.output + log.output)


def assert_no_secret(workplace: ClusterWorkplace, cluster: ApiServer, *texts: str) -> None:
    """Assert that a secret is in no output, in no file of a run, and in no log of a pod."""
    files = [*workplace.root.rglob("*"), *cluster.root.rglob("*")]
    contents = [path.read_bytes() for path in files if path.is_file()]
    assert len(contents) > 10
    assert not any(SECRET_VALUE in text for text in texts)
    assert not any(SECRET_VALUE.encode() in content for content in contents)


def test_a_refused_document_leaves_nothing_behind(
    workplace: ClusterWorkplace, cluster: ApiServer
) -> None:
    with change(cluster.store, refused={"PyTorchJob"}):
        answer = workplace.try_submit(workplace.write_job("refused", **BRIEF), TWO_NODES)
        assert answer.code == 0, "a TrainJob is another kind"
        cancel_and_clean_up(workplace, answer.document["handle"])
        answer = workplace.try_submit(
            workplace.write_job("refused", **BRIEF), TWO_NODES, *use_pytorch_job()
        )
    assert answer.code == 2
    assert "forbidden" in answer.error
    assert cluster.store.list("configmaps", **{"regauge/job": "refused"}) == []


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("down", 75, "check that its server runs"),
        ("credentials", 76, "log in to the cluster"),
        ("context", 2, "set launch.target.context"),
        ("no-context", 76, "kubectl has no current context"),
        ("kubectl", 76, "'kubectl' is not installed here; install kubectl"),
        ("schema", 2, "invalid"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_line_and_a_code(
    workplace: ClusterWorkplace,
    cluster: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    code: int,
    message: str,
) -> None:
    run_file = workplace.write_job(f"unusable-{case}", **BRIEF)
    arguments: tuple[str, ...] = (TWO_NODES,)
    config = cluster.kubeconfig.read_text()
    try:
        if case == "down":
            cluster.kubeconfig.write_text(config.replace(cluster.url, "http://127.0.0.1:9"))
        elif case == "no-context":
            cluster.kubeconfig.write_text("")
        elif case == "kubectl":
            monkeypatch.setenv("PATH", str(workplace.root))
        elif case == "context":
            arguments += ('launch.target=[{kind="kubernetes", context="other"}]',)
        elif case == "schema":  # an operator of another version than the setting
            arguments += ("launch.hours=1",)
        is_accepted = case != "credentials"
        versions = {"TrainJob": "2.0.1"} if case == "schema" else {}
        with change(cluster, accepts_credentials=is_accepted, versions=versions):
            answer = workplace.try_submit(run_file, *arguments)
    finally:
        cluster.kubeconfig.write_text(config)
    assert answer.code == code, answer.error
    assert message in answer.error
    assert len(answer.error.splitlines()) == 1
    assert cluster.store.list("configmaps", **{"regauge/job": f"unusable-{case}"}) == []
