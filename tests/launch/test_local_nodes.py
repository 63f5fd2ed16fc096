"""Jobs of simulated nodes survive the loss of a node, and equal undisturbed jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.test_resume import assert_same
from launch.training_jobs import (
    STEPS,
    Workplace,
    count_steps,
    create_workplace,
    find_recovery_seconds,
    wait_until,
)

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
    assert answer.document["progress"] == {
        "step": STEPS,
        "total_steps": STEPS,
        "eta_seconds": 0.0,
    }
    states = [event["state"] for event in workplace.read_events(handle) if "state" in event]
    assert "restarting" in states
    assert_same(undisturbed_folder, folder)
