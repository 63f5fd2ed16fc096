"""An array of prediction jobs that loses a job writes the files of a single command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.predicting import read_output_files, train_model, write_records
from launch.training_jobs import Workplace, wait_until

RECORDS = 600


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path, tmp_path)
    yield workplace
    workplace.clean_up()


def write_run(workplace: Workplace, model: Path, name: str) -> Path:
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
    answer = workplace.run("predict", str(write_run(workplace, model, "single")))
    assert answer.code == 0, answer.error
    run_file = write_run(workplace, model, "array")
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
