"""Trainings on a small cluster that lose a node and equal the undisturbed training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.jobs import lines, losses
from distributed.test_resume import assert_same
from launch.cluster_workplace import ClusterWorkplace, use_pytorch_job
from launch.kubernetes_api import CONTEXT, ApiServer
from launch.training_jobs import STEPS, count_steps, find_recovery_seconds, wait_until

TWO_NODES, ELASTIC = "execution.nodes.count=2", "execution.nodes.count=1:2"
CLOSE = 1e-4
"""Relative difference of losses if the number of nodes changes: sums have another order."""


@pytest.fixture(scope="module")
def undisturbed_folder(workplace: ClusterWorkplace) -> Path:
    """Return the output folder of a PyTorchJob on two nodes that nothing disturbs."""
    handle = workplace.submit(workplace.write_job("undisturbed"), TWO_NODES, *use_pytorch_job())
    workplace.assert_succeeds(handle)
    return workplace.root / "out-undisturbed"


@pytest.mark.parametrize("pod", ["master-0", "worker-0"])
def test_a_pytorch_job_that_loses_a_node_equals_the_undisturbed_job(
    workplace: ClusterWorkplace,
    cluster: ApiServer,
    undisturbed_folder: Path,
    figure: Callable[[str, float], None],
    pod: str,
) -> None:
    name = f"lost-{pod}"
    folder = workplace.root / f"out-{name}"
    handle = workplace.submit(workplace.write_job(name), TWO_NODES, *use_pytorch_job())
    assert handle == f"kubernetes://{CONTEXT}/default/pytorchjob/{name}"
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    lost_at, step = time.time(), count_steps(folder)
    cluster.lose_node(f"{name}-{pod}")
    seconds = find_recovery_seconds(folder, lost_at, step)
    figure(f"seconds from the loss of {pod} of a PyTorchJob to the next step", seconds)
    document = workplace.assert_succeeds(handle)
    assert document["progress"]["step"] == STEPS
    assert_same(undisturbed_folder, folder)


def test_a_train_job_that_loses_a_node_equals_the_undisturbed_job(
    workplace: ClusterWorkplace,
    cluster: ApiServer,
    undisturbed_folder: Path,
    figure: Callable[[str, float], None],
) -> None:
    """The loss of a node does not count as an attempt, and the launching process is killed."""
    folder = workplace.root / "out-fixed"
    handle = workplace.submit(workplace.write_job("fixed"), TWO_NODES)
    assert handle.endswith("/default/trainjob/fixed")
    waiting = subprocess.Popen(
        [sys.executable, "-m", "regauge", "job", "wait", handle],
        env=workplace.environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    os.killpg(waiting.pid, signal.SIGKILL)
    waiting.wait()
    lost_at, step = time.time(), count_steps(folder)
    (pod,) = (pod for pod in cluster.find_pods("fixed") if "-0-1-" in pod["metadata"]["name"])
    cluster.lose_node(pod["metadata"]["name"])
    seconds = find_recovery_seconds(folder, lost_at, step)
    figure("seconds from the loss of a node of a TrainJob to the next step", seconds)
    document = workplace.assert_succeeds(handle)
    assert document["attempt"] == 2
    assert_same(undisturbed_folder, folder)


def test_an_elastic_job_continues_on_fewer_nodes_and_ends(
    workplace: ClusterWorkplace,
    cluster: ApiServer,
    undisturbed_folder: Path,
    figure: Callable[[str, float], None],
) -> None:
    """The cluster has no room for a second node after the loss; the job ends without it."""
    folder = workplace.root / "out-elastic"
    handle = workplace.submit(workplace.write_job("elastic"), ELASTIC)
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    cluster.kubelet.capacity = 1
    try:
        lost_at, step = time.time(), count_steps(folder)
        cluster.lose_node("elastic-worker-0")
        seconds = find_recovery_seconds(folder, lost_at, step)
        figure("seconds from the loss of a node of an elastic job to the next step", seconds)
        document = workplace.read_status(handle)
        assert (document["state"], document["nodes"][0]["state"]) == ("running", "running")
        assert "no node has room" in document["nodes"][1]["reason"]
        workplace.assert_succeeds(handle)
    finally:
        cluster.kubelet.capacity = 8
    assert losses(lines(folder)) == pytest.approx(losses(lines(undisturbed_folder)), rel=CLOSE)
    assert len(cluster.find_pods("elastic")) == 1, "the waiting worker is not deleted"
