"""Jobs on a small cluster: kubectl submits the documents, and pods run them as local processes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distributed.test_resume import assert_same
from launch.kubernetes_api import CONTEXT, ApiServer, serve_cluster
from launch.schemas import require_schemas
from launch.training_jobs import (
    STEPS,
    Answer,
    Workplace,
    count_steps,
    create_workplace,
    find_recovery_seconds,
    wait_until,
)

TWO_NODES, ELASTIC = "execution.nodes.count=2", "execution.nodes.count=1:2"
PROOF = "that documents are accepted, run, and survive the loss of a node"
LIGHT: dict[str, Any] = {"stop": {"steps": 4}, "execution": {"nodes": {"last_call_seconds": 0.0}}}


@dataclass
class ClusterWorkplace(Workplace):
    """A workplace whose commands use a cluster."""

    cluster: ApiServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the commands, with the configuration of kubectl."""
        assert self.cluster is not None
        return {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}

    def write_job(self, name: str, launch: dict[str, Any] | None = None, **changes: Any) -> Path:
        """Write a run file with the table [launch], whose pods mount this folder."""
        path = self.write_run(name, **changes)
        root = str(self.root)
        volume = {"name": "files", "kind": "host", "mount": root, "source": root}
        table = {"image": "registry.example/regauge:1", "volumes": [volume], **(launch or {})}
        path.write_text(json.dumps({**json.loads(path.read_text()), "launch": table}))
        return path

    def submit(self, run_file: Path, *arguments: str, verb: str = "train") -> str:
        """Submit a job; return its handle."""
        return self.launch(run_file, verb, *arguments, "--on", "kubernetes")

    def try_submit(self, run_file: Path, *arguments: str, verb: str = "train") -> Answer:
        """Submit a job that may be refused."""
        command = ("launch", str(run_file), verb, *arguments, "--on", "kubernetes", "-o", "json")
        return self.run(*command)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Return a cluster; tests that need a failure change its attributes and restore them."""
    if shutil.which("kubectl") is None:
        pytest.skip(f"no kubectl here: {PROOF} on Kubernetes is not proved")
    require_schemas(PROOF)
    with serve_cluster(tmp_path_factory.mktemp("cluster")) as api_server:
        yield api_server


@pytest.fixture(scope="module")
def workplace(cluster: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> ClusterWorkplace:
    """Return a folder whose commands use the cluster."""
    simple = create_workplace(tmp_path_factory.mktemp("workplace"))
    return ClusterWorkplace(simple.root, simple.data, cluster=cluster)


@pytest.fixture(scope="module")
def undisturbed_folder(workplace: ClusterWorkplace) -> Path:
    """Return the output folder of a PyTorchJob on two nodes that nothing disturbs."""
    handle = workplace.submit(workplace.write_job("undisturbed"), TWO_NODES, *use_pytorch_job())
    assert_succeeds(workplace, handle)
    return workplace.root / "out-undisturbed"


def use_pytorch_job() -> tuple[str, ...]:
    """Return the override that selects a PyTorchJob for a fixed number of nodes."""
    return ('launch.target=[{kind="kubernetes", api="pytorchjob"}]',)


def assert_succeeds(workplace: ClusterWorkplace, handle: str) -> dict[str, Any]:
    """Wait for a job and return its last status."""
    answer = workplace.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, answer.error + "\n".join(workplace.run("job", "logs", handle).output)
    assert answer.document["state"] == "succeeded"
    return answer.document


@pytest.mark.parametrize("node", [1, 0])
def test_a_pytorch_job_that_loses_a_node_equals_the_undisturbed_job(
    workplace: ClusterWorkplace,
    cluster: ApiServer,
    undisturbed_folder: Path,
    figure: Callable[[str, float], None],
    node: int,
) -> None:
    name = f"lost-{node}"
    folder = workplace.root / f"out-{name}"
    handle = workplace.submit(workplace.write_job(name), TWO_NODES, *use_pytorch_job())
    assert handle == f"kubernetes://{CONTEXT}/default/pytorchjob/{name}"
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    lost_at, step = time.time(), count_steps(folder)
    cluster.lose_node(f"{name}-worker-{node}")
    seconds = find_recovery_seconds(folder, lost_at, step)
    figure(f"seconds from the loss of pod {node} of a PyTorchJob to the next step", seconds)
    document = assert_succeeds(workplace, handle)
    assert document["progress"]["step"] == STEPS
    assert_same(undisturbed_folder, folder)
