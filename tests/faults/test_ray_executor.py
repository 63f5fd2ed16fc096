"""Inference on a Ray cluster whose worker is killed has the same output."""

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

from end_to_end.predicting import (
    read_output_files,
    read_table,
    write_row_groups,
)
from regauge.cli import main
from regauge.system import jsonl

GROUPS, RECORDS, ROWS = 6, 400, 100
TIMEOUT_SECONDS = 180.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("ray") is None, reason="not proved here: ray is not installed"),
]


@pytest.fixture
def cluster() -> Iterator[str]:
    """Return the address of a cluster of two nodes."""
    command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=60)


def _list_actors() -> list[int]:
    """Return the worker processes, which Ray names after their class."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::") and b"PieceWorker" in command:
            pids.append(int(path.parent.name))
    return pids


def test_a_killed_worker_of_a_cluster_is_replaced(
    artifact: Path, cluster: str, tmp_path: Path
) -> None:
    source = write_row_groups(tmp_path / "texts.parquet", GROUPS, RECORDS)
    run = ["predict", str(artifact), "--source", str(source), f"predict.shard_records={ROWS}"]
    alone, folder, log = tmp_path / "alone", tmp_path / "out", tmp_path / "log"
    assert main([*run, "--to", str(alone), "execution.executor=inline"]) == 0
    kind = f'execution.executor={{kind = "ray", address = "{cluster}", workers = 2}}'
    command = [sys.executable, "-m", "regauge", *run, "--to", str(folder), kind]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (actors := _list_actors()) and process.poll() is None:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    os.kill(actors[0], signal.SIGKILL)
    assert process.wait(TIMEOUT_SECONDS) == 0, log.read_text()
    assert read_output_files(folder) == read_output_files(alone)
    assert len(read_table(folder)) == GROUPS * RECORDS
    done = {
        (line["piece"], line["part"])
        for line in jsonl.read_lines(folder / "jobs/0-of-1/ledger.jsonl")
    }
    assert len(done) == GROUPS * RECORDS // ROWS
