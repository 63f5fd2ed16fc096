"""Runs of several nodes: rows 10 to 14 and 43 of the fault matrix."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.test_resume import assert_same
from faults.clusters import Cluster, asked, etcd, lose, stranger
from faults.conftest import FULL, Job, Jobs, terminate
from regauge.processes import free_port

STEPS = 300
LONG: dict[str, Any] = {"stop": {"steps": STEPS}, "output": {"checkpoint": {"every_steps": 20}}}
CLOSE = 1e-4


@pytest.fixture
def cluster(jobs: Jobs) -> Cluster:
    """Return nodes that meet at one of them."""
    return Cluster(jobs, f"127.0.0.1:{free_port()}")


@pytest.fixture
def outside(jobs: Jobs, tmp_path: Path) -> Iterator[Cluster]:
    """Return nodes that meet at an etcd."""
    with etcd(tmp_path / "etcd") as (endpoint, process):
        yield Cluster(jobs, endpoint, "etcd", process)


def whole(jobs: Jobs, job: Job, size: int = 2) -> Path:
    """Return the folder of the same run on one machine."""
    changes = {name: each for name, each in job.changes.items() if name != "execution"}
    return jobs.whole(Job(job.folder, size, changes))


def assert_close(jobs: Jobs, job: Job) -> None:
    """Assert that the losses are those of a run that had two processes all the time."""
    assert job.losses == pytest.approx(Job(whole(jobs, job), 2, {}).losses, rel=CLOSE)


def ends(job: Job) -> list[tuple[str, int]]:
    """Return how each attempt ended, and its nodes."""
    return [(line["end"], line["nodes"]) for line in job.attempts]


@FULL
def test_two_nodes_train_as_one_machine_does(jobs: Jobs, cluster: Cluster) -> None:
    job = cluster.run("2")
    first, second = cluster.start(), cluster.start()
    assert cluster.end() == [0, 0], first.said + second.said
    assert_same(whole(jobs, job), job.folder)
    assert ends(job) == [("finished", 2)]
    for node in cluster.nodes:
        assert "attempt 1 on 2 nodes: " in node.told
    jobs.nothing_is_left(job)


@FULL
def test_a_node_comes_in_and_is_lost(
    jobs: Jobs, cluster: Cluster, figure: Callable[[str, float], None]
) -> None:
    job = cluster.run("1:2", **LONG)
    stays = cluster.start()
    stays.until(10)
    goes = cluster.start()
    _until_attempt(stays, 2)
    stays.until(_newest(stays) + 10)
    lose(goes)
    lost, step = time.time(), _newest(stays)
    _until_attempt(stays, 3)
    stays.until(step + 1)
    figure("seconds from the loss of a node to the next step", time.time() - lost)
    assert stays.wait().code == 0, stays.said
    assert ends(job) == [("resized", 1), ("node", 2), ("finished", 1)]
    (failure,) = [each for each in job.failures if each["kind"] == "node"]
    assert "node 1 (" in failure["problem"]
    assert "is lost" in failure["problem"]
    assert failure["retryable"]
    assert_close(jobs, job)


@FULL
def test_the_processes_of_a_node_end_with_its_command(
    jobs: Jobs, cluster: Cluster, figure: Callable[[str, float], None]
) -> None:
    job = cluster.run("1:2", **LONG)
    first, second = cluster.start(), cluster.start()
    first.until(40)
    began = time.monotonic()
    lose(second, whole=False)
    figure("seconds from a node's command to its processes' end", time.monotonic() - began)
    cluster.nodes.remove(second)
    assert cluster.end() == [0], cluster.nodes[0].said
    assert [end for end, _ in ends(job)] == ["node", "finished"]
    assert_close(jobs, job)


@FULL
def test_a_node_that_hangs_is_found_by_all(jobs: Jobs, cluster: Cluster) -> None:
    job = cluster.run("2", {"kind": "stop", "rank": 1, "step": 10})
    cluster.start(), cluster.start()
    assert cluster.end() == [0, 0]
    assert ends(job) == [("hang", 2), ("finished", 2)]
    (failure,) = job.failures
    assert failure["rank"] == 1
    assert "process 1 hangs (it is stopped)" in failure["problem"]
    assert_same(whole(jobs, job), job.folder)


@FULL
def test_a_process_that_dies_is_named_on_every_node(jobs: Jobs, cluster: Cluster) -> None:
    kills = [{"kind": "kill", "rank": n, "step": 10 + n, "attempt": 1 + n} for n in (0, 1)]
    job = cluster.run("2", *kills)
    cluster.start(), cluster.start()
    assert cluster.end() == [0, 0]
    assert ends(job) == [("process", 2), ("process", 2), ("finished", 2)]
    assert [failure["rank"] for failure in job.failures] == [0, 1]
    for node in cluster.nodes:
        for rank in (0, 1):
            assert f"process {rank} died by SIGKILL" in node.told
    assert_same(whole(jobs, job), job.folder)


@FULL
def test_a_node_that_is_told_to_stop_leaves_the_others_to_it(jobs: Jobs, cluster: Cluster) -> None:
    job = cluster.run("1:2", **LONG)
    first, second = cluster.start(), cluster.start()
    first.until(40)
    terminate(second)
    assert second.wait().code == 143, second.said
    assert first.wait().code == 0, first.said
    assert "was told to stop" in first.told
    assert ends(job)[-1] == ("finished", 1)
    assert_close(jobs, job)


@FULL
def test_all_nodes_told_to_stop_save_together(cluster: Cluster) -> None:
    cluster.run("2", **LONG)
    first, second = cluster.start(), cluster.start()
    first.until(40)
    for node in (first, second):
        terminate(node)
    assert cluster.end() == [143, 143], first.said + second.said
    step = _newest(first)
    assert (first.folder / "checkpoints" / f"step-{step:08d}").is_dir()


@FULL
def test_a_node_that_waits_for_others_can_be_stopped(cluster: Cluster) -> None:
    job = cluster.run("2")
    node = cluster.start()
    time.sleep(5.0)
    began = time.monotonic()
    terminate(node)
    assert node.wait().code == 143, node.said
    assert time.monotonic() - began < 10.0, "it did not hear the signal while it waited"
    assert "told to stop while it waited for other nodes" in node.said.splitlines()[-1]
    assert not job.folder.exists()


@FULL
def test_without_its_meeting_place_a_run_ends_in_time(outside: Cluster) -> None:
    """The place is gone, and then a node: what is left can meet nobody."""
    outside.run("1:2", execution={"nodes": {"join_seconds": 8.0}}, **LONG)
    first, second = outside.start(), outside.start()
    first.until(20)
    assert outside.place is not None
    outside.place.kill()
    first.until(40)
    lose(second)
    assert first.wait().code == 75, first.said
    line = first.said.splitlines()[-1]
    assert f"did not meet at {outside.endpoint} within 8 s" in line


@FULL
def test_the_node_where_all_meet_is_lost(cluster: Cluster) -> None:
    cluster.run("2", execution={"nodes": {"join_seconds": 8.0}}, **LONG)
    first, second = cluster.start(), cluster.start()
    first.until(40)
    lose(first)
    assert second.wait().code == 75, second.said
    assert "2 nodes did not meet at" in second.said.splitlines()[-1]


@FULL
def test_a_name_is_never_used_twice(outside: Cluster, jobs: Jobs) -> None:
    """The job is killed as a whole, started again, and started once more, on one etcd."""
    job = outside.run("2", **LONG)
    nodes = [outside.start(), outside.start()]
    nodes[0].until(40)
    lose(*nodes)
    outside.nodes.clear()
    first, second = outside.start(), outside.start()
    assert outside.end() == [0, 0], first.said + second.said
    assert_same(whole(jobs, job), job.folder)
    again = [outside.start(), outside.start()]
    assert [node.wait().code for node in again] == [0, 0]
    names = _names(outside.endpoint)
    attempts = [int(name.rpartition("-")[2]) for name in names]
    assert sorted(attempts) == [1, 2, 3]


@FULL
def test_somebody_else_at_the_meeting_place(jobs: Jobs) -> None:
    with stranger() as endpoint:
        cluster = Cluster(jobs, endpoint)
        job = cluster.run("2", execution={"nodes": {"join_seconds": 6.0}})
        node = cluster.start().wait()
    assert node.code == 75, node.said
    assert f"did not meet at {endpoint}" in node.said.splitlines()[-1]
    assert not job.folder.exists()


@FULL
def test_nodes_that_do_not_share_the_folder_are_told(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("2")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        cluster.start(options=("output.folder=run",), place=tmp_path / name)
    assert cluster.end() == [2, 2]
    for node in cluster.nodes:
        assert "is not the folder that node 0 writes" in node.said.splitlines()[-1]
    assert not list(tmp_path.glob("*/run/*")), "something was written"


@FULL
def test_other_settings_on_a_node_are_named(cluster: Cluster) -> None:
    job = cluster.run("2")
    first, second = cluster.start(), cluster.start(options=("optimizer.learning_rate=0.5",))
    assert cluster.end() == [2, 2], first.said + second.said
    for node in cluster.nodes:
        line = node.said.splitlines()[-1]
        assert "was started with other settings than node 0" in line
        assert "optimizer.learning_rate is " in line
    assert not job.folder.exists()


def _newest(job: Job) -> int:
    return len(job.losses)


def _until_attempt(job: Job, attempt: int) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        path = job.folder / "attempts.jsonl"
        if f'"attempt": {attempt},' in (path.read_text() if path.exists() else ""):
            return
        time.sleep(0.02)
    raise AssertionError(f"attempt {attempt} never began")


def _names(endpoint: str) -> list[str]:
    found = json.loads(asked(endpoint, "/v2/keys/torch/elastic/rendezvous"))
    nodes = found["node"]["nodes"]
    names = [node["key"].rpartition("/")[2] for node in nodes]
    return [name for name in names if re.fullmatch(r".+-[0-9a-f]{8}-\d+", name)]
