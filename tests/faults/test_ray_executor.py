"""The same shards by the workers of a Ray cluster, of which one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from end_to_end.predicting import bits, exported, in_groups, table, trained
from regauge import jsonl
from regauge.cli import main

GROUPS, RECORDS, ROWS = 6, 400, 100
PATIENCE_SECONDS = 180.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("ray") is None, reason="not proved here: ray is not installed"),
]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return exported(trained(folder), folder / "artifact")


@pytest.fixture
def cluster() -> Iterator[str]:
    """Return the address of two nodes."""
    command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=60)


def _actors() -> list[int]:
    """Return the processes that answer shards: Ray calls them after the class."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = path.read_bytes()
        except OSError:
            continue
        if said.startswith(b"ray::") and b"PieceWorker" in said:
            found.append(int(path.parent.name))
    return found


def test_workers_of_a_cluster_answer_and_one_is_killed(
    artifact: Path, cluster: str, tmp_path: Path
) -> None:
    source = in_groups(tmp_path / "texts.parquet", GROUPS, RECORDS)
    run = ["predict", str(artifact), "--source", str(source), f"predict.rows={ROWS}"]
    alone, folder, log = tmp_path / "alone", tmp_path / "out", tmp_path / "log"
    assert main([*run, "--to", str(alone), "execution.executor=inline"]) == 0
    kind = f'execution.executor={{kind = "ray", address = "{cluster}", workers = 2}}'
    command = [sys.executable, "-m", "regauge", *run, "--to", str(folder), kind]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    until = time.monotonic() + PATIENCE_SECONDS
    while not (killed := _actors()) and process.poll() is None:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    os.kill(killed[0], signal.SIGKILL)
    assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert bits(folder) == bits(alone)
    assert len(table(folder)) == GROUPS * RECORDS
    done = {
        (line["piece"], line["part"]) for line in jsonl.whole(folder / "jobs/0-of-1/ledger.jsonl")
    }
    assert len(done) == GROUPS * RECORDS // ROWS
