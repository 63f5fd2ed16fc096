"""Runs of several nodes: rows 10 to 14 and 43 of the fault matrix."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.test_resume import assert_same
from faults.clusters import Cluster, kill_nodes, request, serve_unrelated_port, start_etcd
from faults.conftest import FULL, Job, Jobs, send_sigterm
from notification_sinks import WebhookSink, notify, webhook
from regauge.system.processes import find_free_port
from regauge.system.timing import wait_for

__all__ = ["webhook"]
STEPS = 300
LONG: dict[str, Any] = {"stop": {"steps": STEPS}, "output": {"checkpoint": {"every_steps": 20}}}
CLOSE = 1e-4


@pytest.fixture
def cluster(jobs: Jobs) -> Cluster:
    """Return nodes whose rendezvous is on one of them."""
    return Cluster(jobs, f"127.0.0.1:{find_free_port()}")


@pytest.fixture
def etcd_cluster(jobs: Jobs, tmp_path: Path) -> Iterator[Cluster]:
    """Return nodes whose rendezvous is an etcd."""
    with start_etcd(tmp_path / "etcd") as (endpoint, process):
        yield Cluster(jobs, endpoint, "etcd", process)


def single_node_folder(jobs: Jobs, job: Job, size: int = 2) -> Path:
    """Return the folder of the same run on one node."""
    changes = {name: value for name, value in job.changes.items() if name != "execution"}
    return jobs.undisturbed_folder(Job(job.folder, size, changes))


def assert_close(jobs: Jobs, job: Job) -> None:
    """Assert that the losses are close to the losses of a run with two processes throughout."""
    assert job.losses == pytest.approx(Job(single_node_folder(jobs, job), 2, {}).losses, rel=CLOSE)


def list_ends(job: Job) -> list[tuple[str, int]]:
    """Return how each attempt ended, and its number of nodes."""
    return [(line["outcome"], line["nodes"]) for line in job.attempts]


@FULL
def test_two_nodes_train_like_one_node(jobs: Jobs, cluster: Cluster) -> None:
    job = cluster.create_job("2")
    first, second = cluster.start_node(), cluster.start_node()
    assert cluster.wait_for_nodes() == [0, 0], first.stderr + second.stderr
    assert_same(single_node_folder(jobs, job), job.folder)
    assert list_ends(job) == [("finished", 2)]
    for node in cluster.nodes:
        assert "attempt 1 on 2 nodes: " in node.stderr_line
    jobs.assert_nothing_is_left(job)


@FULL
def test_a_node_joins_and_is_lost(
    jobs: Jobs, cluster: Cluster, figure: Callable[[str, float], None]
) -> None:
    job = cluster.create_job("1:2", **LONG)
    first = cluster.start_node()
    first.wait_for_step(10)
    second = cluster.start_node()
    _wait_for_attempt(first, 2)
    first.wait_for_step(_last_step(first) + 10)
    kill_nodes(second)
    lost_at, step = time.time(), _last_step(first)
    _wait_for_attempt(first, 3)
    first.wait_for_step(step + 1)
    figure("seconds from the loss of a node to the next step", time.time() - lost_at)
    assert first.wait().code == 0, first.stderr
    assert list_ends(job) == [("resized", 1), ("node", 2), ("finished", 1)]
    (failure,) = [failure for failure in job.failures if failure["kind"] == "node"]
    assert "node 1 (" in failure["problem"]
    assert "is lost" in failure["problem"]
    assert failure["retryable"]
    assert_close(jobs, job)


@FULL
def test_the_processes_of_a_node_die_with_its_command(
    jobs: Jobs, cluster: Cluster, figure: Callable[[str, float], None]
) -> None:
    job = cluster.create_job("1:2", **LONG)
    first, second = cluster.start_node(), cluster.start_node()
    first.wait_for_step(40)
    began = time.monotonic()
    kill_nodes(second, with_processes=False)
    figure("seconds from a node's command to its processes' end", time.monotonic() - began)
    cluster.nodes.remove(second)
    assert cluster.wait_for_nodes() == [0], cluster.nodes[0].stderr
    assert [end for end, _ in list_ends(job)] == ["node", "finished"]
    assert_close(jobs, job)


@FULL
def test_a_hang_on_one_node_is_detected_by_all(jobs: Jobs, cluster: Cluster) -> None:
    job = cluster.create_job("2", {"kind": "stop", "rank": 1, "step": 10})
    cluster.start_node(), cluster.start_node()
    assert cluster.wait_for_nodes() == [0, 0]
    assert list_ends(job) == [("hang", 2), ("finished", 2)]
    (failure,) = job.failures
    assert failure["rank"] == 1
    assert "process 1 hangs (it is stopped)" in failure["problem"]
    assert_same(single_node_folder(jobs, job), job.folder)


@FULL
def test_a_process_that_dies_is_named_on_every_node(jobs: Jobs, cluster: Cluster) -> None:
    kills = [{"kind": "kill", "rank": n, "step": 10 + n, "attempt": 1 + n} for n in (0, 1)]
    job = cluster.create_job("2", *kills)
    cluster.start_node(), cluster.start_node()
    assert cluster.wait_for_nodes() == [0, 0]
    assert list_ends(job) == [("process", 2), ("process", 2), ("finished", 2)]
    assert [failure["rank"] for failure in job.failures] == [0, 1]
    for node in cluster.nodes:
        for rank in (0, 1):
            assert f"process {rank} was killed by SIGKILL" in node.stderr_line
    assert_same(single_node_folder(jobs, job), job.folder)


@FULL
def test_other_nodes_continue_without_a_stopped_node(jobs: Jobs, cluster: Cluster) -> None:
    job = cluster.create_job("1:2", **LONG)
    first, second = cluster.start_node(), cluster.start_node()
    first.wait_for_step(40)
    send_sigterm(second)
    assert second.wait().code == 143, second.stderr
    assert first.wait().code == 0, first.stderr
    assert "was stopped by a signal" in first.stderr_line
    assert list_ends(job)[-1] == ("finished", 1)
    assert_close(jobs, job)


@FULL
def test_all_nodes_save_together_if_all_are_stopped(cluster: Cluster) -> None:
    cluster.create_job("2", **LONG)
    first, second = cluster.start_node(), cluster.start_node()
    first.wait_for_step(40)
    for node in (first, second):
        send_sigterm(node)
    assert cluster.wait_for_nodes() == [143, 143], first.stderr + second.stderr
    step = _last_step(first)
    assert (first.folder / "checkpoints" / f"step-{step:08d}").is_dir()


@FULL
def test_a_node_that_waits_for_others_can_be_stopped(cluster: Cluster) -> None:
    job = cluster.create_job("2")
    node = cluster.start_node()
    host, port = cluster.endpoint.split(":")
    assert wait_for(lambda: is_open(host, int(port)), 60)
    began = time.monotonic()
    send_sigterm(node)
    assert node.wait().code == 143, node.stderr
    assert time.monotonic() - began < 10.0, "the signal was ignored during the wait"
    assert "stopped by a signal while waiting for other nodes" in node.stderr.splitlines()[-1]
    assert not job.folder.exists()


@FULL
def test_a_run_without_its_rendezvous_ends_in_time(etcd_cluster: Cluster) -> None:
    """The rendezvous is lost, then a node: the remaining node has no rendezvous."""
    etcd_cluster.create_job("1:2", execution={"nodes": {"join_seconds": 8.0}}, **LONG)
    first, second = etcd_cluster.start_node(), etcd_cluster.start_node()
    first.wait_for_step(20)
    assert etcd_cluster.etcd_process is not None
    etcd_cluster.etcd_process.kill()
    first.wait_for_step(40)
    kill_nodes(second)
    assert first.wait().code == 75, first.stderr
    line = first.stderr.splitlines()[-1]
    assert f"did not meet at {etcd_cluster.endpoint} within 8 s" in line


@FULL
def test_losing_the_rendezvous_node_ends_the_run(cluster: Cluster, webhook: WebhookSink) -> None:
    nodes = {"nodes": {"join_seconds": 8.0}}
    cluster.create_job("2", execution=nodes, monitoring=notify(webhook.url), **LONG)
    first, second = cluster.start_node(), cluster.start_node()
    first.wait_for_step(40)
    kill_nodes(first)
    assert second.wait().code == 75, second.stderr
    assert "2 nodes did not meet at" in second.stderr.splitlines()[-1]
    assert [document["is_final"] for document in webhook.documents][-1:] == [True]


@FULL
def test_a_rendezvous_name_is_never_used_twice(etcd_cluster: Cluster, jobs: Jobs) -> None:
    """The job is killed with all nodes, restarted, and started a third time, with one etcd."""
    job = etcd_cluster.create_job("2", **LONG)
    nodes = [etcd_cluster.start_node(), etcd_cluster.start_node()]
    nodes[0].wait_for_step(40)
    kill_nodes(*nodes)
    etcd_cluster.nodes.clear()
    first, second = etcd_cluster.start_node(), etcd_cluster.start_node()
    assert etcd_cluster.wait_for_nodes() == [0, 0], first.stderr + second.stderr
    assert_same(single_node_folder(jobs, job), job.folder)
    third = [etcd_cluster.start_node(), etcd_cluster.start_node()]
    assert [node.wait().code for node in third] == [0, 0]
    names = _list_names(etcd_cluster.endpoint)
    attempts = [int(name.rpartition("-")[2]) for name in names]
    assert sorted(attempts) == [1, 2, 3]


@FULL
def test_another_server_at_the_endpoint_is_no_rendezvous(jobs: Jobs) -> None:
    with serve_unrelated_port() as endpoint:
        cluster = Cluster(jobs, endpoint)
        job = cluster.create_job("2", execution={"nodes": {"join_seconds": 6.0}})
        node = cluster.start_node().wait()
    assert node.code == 75, node.stderr
    assert f"did not meet at {endpoint}" in node.stderr.splitlines()[-1]
    assert not job.folder.exists()


@FULL
def test_nodes_without_a_shared_folder_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_job("2")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        cluster.start_node(options=("output.folder=run",), place=tmp_path / name)
    assert cluster.wait_for_nodes() == [2, 2]
    for node in cluster.nodes:
        assert (
            "is not the output folder of node 0; use a shared file system"
            in node.stderr.splitlines()[-1]
        )
    assert not list(tmp_path.glob("*/run/*")), "something was written"


@FULL
def test_different_settings_on_a_node_are_reported(cluster: Cluster, webhook: WebhookSink) -> None:
    """Every node prints the error; only the leader sends it."""
    job = cluster.create_job("2", monitoring=notify(webhook.url))
    first, second = (
        cluster.start_node(),
        cluster.start_node(options=("optimizer.learning_rate=0.5",)),
    )
    assert cluster.wait_for_nodes() == [2, 2], first.stderr + second.stderr
    for node in cluster.nodes:
        line = node.stderr.splitlines()[-1]
        assert "has other settings than node 0" in line
        assert "optimizer.learning_rate is " in line
    assert webhook.events == ["failed"]
    assert not job.folder.exists()


def is_open(host: str, port: int) -> bool:
    """Return whether a server listens at an address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _last_step(job: Job) -> int:
    return len(job.losses)


def _wait_for_attempt(job: Job, attempt: int) -> None:
    path, text = job.folder / "attempts.jsonl", f'"attempt": {attempt},'
    assert wait_for(lambda: path.exists() and text in path.read_text(), 90), "it never began"


def _list_names(endpoint: str) -> list[str]:
    tree = json.loads(request(endpoint, "/v2/keys/torch/elastic/rendezvous"))
    nodes = tree["node"]["nodes"]
    names = [node["key"].rpartition("/")[2] for node in nodes]
    return [name for name in names if re.fullmatch(r".+-[0-9a-f]{8}-\d+", name)]
