"""Jobs of simulated nodes: they survive their launcher and lost nodes, and equal undisturbed runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.jobs import lines
from distributed.test_resume import assert_same
from launch.training_jobs import (
    STEPS,
    Workplace,
    count_steps,
    create_workplace,
    find_folder,
    find_recovery_seconds,
    wait_until,
)

TWO_NODES = "execution.nodes.count=2"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Return a folder whose undisturbed run several tests read."""
    workplace = create_workplace(tmp_path_factory.mktemp("shared"))
    yield workplace
    workplace.clean_up()


@pytest.fixture(scope="module")
def undisturbed(shared: Workplace) -> Path:
    """Return the output folder of a job on two nodes that nothing disturbs."""
    handle = shared.launch(shared.write_run("undisturbed"), "train", TWO_NODES)
    answer = shared.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, answer.error
    assert answer.document["state"] == "succeeded"
    assert answer.document["attempt"] == 1
    return shared.root / "out-undisturbed"


@pytest.mark.parametrize("node", [1, 0])
def test_a_job_that_loses_a_node_equals_the_undisturbed_job(
    shared: Workplace, undisturbed: Path, figure: Callable[[str, float], None], node: int
) -> None:
    name = f"lost-{node}"
    folder = shared.root / f"out-{name}"
    handle = shared.launch(shared.write_run(name), "train", TWO_NODES)
    wait_until(lambda: count_steps(folder) >= 30, "step 30")
    lost_at, step = time.time(), count_steps(folder)
    shared.kill_node(handle, node)
    seconds = find_recovery_seconds(folder, lost_at, step)
    figure(f"seconds from the loss of node {node} of a local job to the next step", seconds)
    answer = shared.run("job", "wait", handle, "-o", "json")
    assert answer.code == 0, answer.error
    assert answer.document["attempt"] == 2
    assert answer.document["progress"] == {
        "step": STEPS,
        "total_steps": STEPS,
        "eta_seconds": 0.0,
    }
    states = [event["state"] for event in shared.read_events(handle) if "state" in event]
    assert "restarting" in states
    assert_same(undisturbed, folder)
