"""The launcher of simulated nodes without a job: plans, documents, handles."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from regauge.jobs.targets import Handle, JobSpec, LeaderAddress, LogRequest
from regauge.jobs.targets.local import LocalNodes
from regauge.system.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("local://elsewhere/a/b", "runs on host 'elsewhere'"),
        ("local://{host}/a/b", "no job local://"),
    ],
)
def test_a_handle_of_another_host_or_job_is_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    handle = Handle.parse(text.format(host=socket.gethostname()))
    launcher = LocalNodes(folder=str(tmp_path))
    actions: tuple[Callable[[Handle], object], ...] = (
        launcher.find_status,
        launcher.list_events,
        launcher.cancel,
        launcher.clean_up,
        lambda handle: list(launcher.read_log(handle, LogRequest())),
    )
    for action in actions:
        with pytest.raises(SettingsError, match=problem):
            action(handle)


def test_the_processes_of_a_plan_are_read_from_its_document(tmp_path: Path) -> None:
    launcher = LocalNodes(folder=str(tmp_path))
    job = JobSpec("job", "train", ("run",), 1, 2, 1, environment={"A": "1"}, image="x:1")
    plan = launcher.plan(job)
    nodes = launcher.list_node_commands(plan, LeaderAddress("127.0.0.1", 29400, "job-7"))
    expected: Mapping[str, str] = {
        "A": "1",
        "PET_NNODES": "1:2",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "127.0.0.1:29400",
        "PET_RDZV_ID": "job-7",
    }
    assert [(node.index, node.command, node.environment) for node in nodes] == [
        (0, ("run",), expected),
        (1, ("run",), expected),
    ]
    assert not list(tmp_path.iterdir()), "a plan is pure"


def test_etcd_needs_an_endpoint(tmp_path: Path) -> None:
    job = JobSpec("job", "train", ("run",), 2, 2, 1, rendezvous="etcd")
    with pytest.raises(SettingsError, match=r"execution\.nodes\.endpoint"):
        LocalNodes(folder=str(tmp_path)).plan(job)
