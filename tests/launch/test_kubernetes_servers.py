"""A server on a small cluster: a rolling update under load, lost replicas, and clean-up."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

from end_to_end.predicting import export_run, train_model
from launch.cluster_workplace import ClusterWorkplace
from launch.kubernetes_api import CONTEXT, ApiServer
from launch.kubernetes_servers import HASH, ServiceClients
from launch.training_jobs import wait_until

REQUESTS, CLIENTS = 5000, 4
PATH, BODY = "/v1/embeddings", json.dumps({"input": "How do I read a file?"})


def write_server(workplace: ClusterWorkplace, artifact: Path, **serve: object) -> Path:
    folder = str(artifact.parent)
    volume = {"name": "models", "kind": "host", "mount": folder, "source": folder}
    workers = {"count": 1, "threads": 1}
    run = {
        "serve": {"artifacts": {"qa": str(artifact)}, "workers": workers, **serve},
        "launch": {"image": "registry.example/regauge:1", "jobs": 2, "volumes": [volume]},
    }
    path = workplace.root / "qa.json"
    path.write_text(json.dumps(run))
    return path


def list_digests(cluster: ApiServer) -> set[str]:
    return {pod["metadata"]["labels"][HASH] for pod in cluster.find_pods("qa")}


def test_a_rolling_update_under_load_fails_no_request(
    workplace: ClusterWorkplace, cluster: ApiServer, tmp_path: Path
) -> None:
    artifact = export_run(train_model(tmp_path / "encoder"), tmp_path / "artifact")
    handle = workplace.submit(write_server(workplace, artifact), verb="serve")
    assert handle == f"kubernetes://{CONTEXT}/default/deployment/qa"
    clients = ServiceClients(cluster, "qa", PATH, BODY)
    wait_until(lambda: len(clients.list_ports()) == 2, "two replicas")
    status = workplace.read_status(handle)
    assert (status["state"], len(status["nodes"])) == ("running", 2)
    (earlier,) = list_digests(cluster)

    load = Thread(target=clients.run, args=(REQUESTS, CLIENTS))
    load.start()
    changed = write_server(workplace, artifact, http={"access_log": True})
    assert workplace.submit(changed, verb="serve") == handle
    wait_until(lambda: earlier not in list_digests(cluster), "the end of the old replicas")
    victim = cluster.find_pods("qa")[0]["metadata"]["name"]
    load.join()
    assert clients.statuses == [200] * REQUESTS
    assert len(list_digests(cluster)) == 1

    cluster.lose_node(victim)
    wait_until(lambda: len(clients.list_ports()) == 2, "the replacement of the lost replica")
    assert "Serving" in workplace.run("job", "logs", handle).output
    refused = workplace.run("job", "cleanup", handle)
    assert "job cancel" in refused.error
    assert workplace.run("job", "cancel", handle).code == 0
    wait_until(lambda: not cluster.find_pods("qa"), "the end of all replicas")
    refused = workplace.try_submit(changed, verb="serve")
    assert "job cleanup" in refused.error
    assert workplace.run("job", "cleanup", handle).code == 0
    kinds = ("configmaps", "deployments", "poddisruptionbudgets", "services")
    assert not any(cluster.store.list(kind, **{"regauge/job": "qa"}) for kind in kinds)
