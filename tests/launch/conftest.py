"""A small cluster, and a folder whose commands use it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from launch.cluster_workplace import ClusterWorkplace
from launch.kubernetes_api import ApiServer, serve_cluster
from launch.schemas import require_schemas
from launch.training_jobs import create_workplace

PROOF = "that documents are accepted, run, and survive the loss of a node"


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
