"""Jobs of simulated nodes survive the loss of a node or of an array job, and equal others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from distributed.test_resume import assert_same
from end_to_end.predicting import export_run, read_output_files, train_model, write_records
from launch.training_jobs import (
    STEPS,
    Workplace,
    count_steps,
    create_workplace,
    find_recovery_seconds,
    wait_until,
)
from regauge.system.processes import find_free_port

RECORDS = 600
TWO_NODES = "execution.nodes.count=2"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Return a folder whose undisturbed run several tests read."""
    workplace = create_workplace(tmp_path_factory.mktemp("shared"))
    yield workplace
    workplace.clean_up()


@pytest.fixture(scope="module")
def undisturbed_folder(workplace: Workplace) -> Path:
    """Return the output folder of a job on two nodes that nothing disturbs."""
    handle = workplace.launch(workplace.write_run("undisturbed"), "train", TWO_NODES)
    answer = workplace.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, answer.error
    assert answer.document["state"] == "succeeded"
    assert answer.document["attempt"] == 1
    return workplace.root / "out-undisturbed"


@pytest.mark.parametrize("node", [1, 0])
def test_a_job_that_loses_a_node_equals_the_undisturbed_job(
    workplace: Workplace, undisturbed_folder: Path, figure: Callable[[str, float], None], node: int
) -> None:
    name = f"lost-{node}"
    folder = workplace.root / f"out-{name}"
    handle = workplace.launch(workplace.write_run(name), "train", TWO_NODES)
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    lost_at, step = time.time(), count_steps(folder)
    workplace.kill_node(handle, node)
    seconds = find_recovery_seconds(folder, lost_at, step)
    figure(f"seconds from the loss of node {node} of a local job to the next step", seconds)
    answer = workplace.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, answer.error
    assert answer.document["attempt"] == 2
    progress = {"step": STEPS, "total_steps": STEPS, "eta_seconds": 0.0}
    assert answer.document["progress"] == progress
    states = [event["state"] for event in workplace.read_events(handle) if "state" in event]
    assert "restarting" in states
    assert_same(undisturbed_folder, folder)


def write_prediction(workplace: Workplace, model: Path, name: str) -> Path:
    """Write a run file that embeds two files of records in shards of 50."""
    for number in range(2):
        write_records(workplace.root / f"records-{number}.jsonl", RECORDS // 2, seed=number)
    path = workplace.root / f"{name}.json"
    document = {
        "artifact": str(model),
        "source": {"kind": "jsonl", "files": [str(workplace.root / "records-*.jsonl")]},
        "output": {"folder": str(workplace.root / name)},
        "predict": {"shard_records": 50},
        "execution": {"executor": "inline"},
    }
    path.write_text(json.dumps(document))
    return path


def test_an_array_that_loses_a_job_equals_one_command(workplace: Workplace) -> None:
    model = train_model(workplace.root / "model")
    answer = workplace.run("predict", str(write_prediction(workplace, model, "single")))
    assert answer.code == 0, answer.error
    run_file = write_prediction(workplace, model, "array")
    handle = workplace.launch(run_file, "predict", "launch.jobs=2")
    wait_until(lambda: len(workplace.read_status(handle).get("nodes", ())) == 2, "both jobs")
    workplace.kill_node(handle, 1)
    answer = workplace.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, answer.error
    assert answer.document["state"] == "succeeded"
    assert answer.document["attempt"] == 2
    starts = [
        event for event in workplace.read_events(handle) if event.get("node_state") == "running"
    ]
    assert sorted((event["node"], event["attempt"]) for event in starts) == [(0, 1), (1, 1), (1, 2)]
    files = read_output_files(workplace.root / "array")
    assert files == read_output_files(workplace.root / "single")
    assert len(files) >= RECORDS // 50


def test_a_server_answers_until_it_is_cancelled(workplace: Workplace) -> None:
    export_run(train_model(workplace.root / "encoder"), workplace.root / "artifact")
    port, run_file = find_free_port(), workplace.root / "qa.json"
    run_file.write_text(json.dumps({"serve": {"artifacts": {"qa": "artifact"}, "port": port}}))
    handle = workplace.launch(run_file, "serve")
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)

    def is_ready() -> bool:
        with suppress(httpx.TransportError):
            return client.get("/v2/health/ready").is_success
        return False

    with client:
        wait_until(is_ready, "the server")
        answer = client.post("/v1/embeddings", json={"input": "How do I read a file?"})
        assert answer.json()["data"][0]["embedding"]
    assert workplace.run("job", "cancel", handle).code == 0
    log = workplace.run("job", "logs", handle).output
    assert "Serving qa at" in log
    assert "Draining" in log
    status = workplace.read_status(handle)
    assert (status["state"], status["nodes"][0]["exit_code"]) == ("cancelled", 0)
