"""The number of cores follows the CPU quota of a container, as Docker and Kubernetes set it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regauge.system import processes
from regauge.system.processes import read_cpu_quota


def build_groups(root: Path, files: dict[str, str]) -> Path:
    """Write the files of control groups below a folder; return the file of the memberships."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root / "membership"


V2, V1 = "0::{}\n", "4:memory:/\n2:cpu,cpuacct:{}\n0::/\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"membership": V2.format("/"), "cpu.max": "400000 100000\n"}, 4.0),
        ({"membership": V2.format("/"), "cpu.max": "max 100000\n"}, None),
        ({"membership": V2.format("/"), "cpu.max": "50000 100000\n"}, 0.5),
        ({"membership": V2.format("/a/b"), "a/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "membership": V2.format("/a/b"),
                "a/b/cpu.max": "300000 100000",
                "a/cpu.max": "200000 100000",
                "cpu.max": "max 100000",
            },
            2.0,
        ),
        (
            {
                "membership": V1.format("/docker/1f"),
                "cpu/cpu.cfs_quota_us": "600000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            6.0,
        ),
        (
            {
                "membership": V1.format("/docker/1f"),
                "cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "150000\n",
                "cpu,cpuacct/docker/1f/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            {
                "membership": V1.format("/"),
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"membership": "0::/gone\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_is_the_smallest_one_of_the_groups_of_a_process(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert read_cpu_quota(tmp_path, build_groups(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, 64), (4.0, 4), (2.5, 2), (0.5, 1), (100.0, 64)]
)
def test_a_container_uses_the_cores_of_its_quota(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(processes, "read_cpu_quota", lambda: quota)
    assert processes.available_cores() == cores
