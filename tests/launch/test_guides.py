"""The guides typed line by line: first jobs on a real Slurm and on a small Kubernetes cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from architecture.tree import ROOT
from documentation.blocks import Block, read_blocks
from launch.cluster_workplace import ClusterWorkplace
from launch.kubernetes_api import CONTEXT, ApiServer
from launch.kubernetes_servers import ServiceClients
from launch.slurm_cluster import start_slurm
from launch.training_jobs import wait_until

GUIDES = ROOT / "docs" / "guides"
NEEDS_CLUSTER = ("Needs a Slurm cluster", "Needs a Kubernetes cluster")


def read_section(page: str, heading: str) -> list[Block]:
    """Return the code blocks below a heading of a guide, up to the next one of its level."""
    path = GUIDES / page
    text = path.read_text(encoding="utf-8")
    start = text.index(f"\n## {heading}\n") + 1
    end = text.find("\n## ", start)
    first, last = (text.count("\n", 0, offset) + 1 for offset in (start, end))
    return [block for block in read_blocks(path) if first < block.line < last]


class Reader:
    """Types blocks in a folder: writes files and runs commands, which must succeed."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], replacements: Mapping[str, str]
    ) -> None:
        self._folder, self._replacements = folder, replacements
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self._environment = {**environment, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}

    def write(self, block: Block, name: str = "") -> None:
        """Append a block to a file, by default to the one that its title names."""
        with (self._folder / (name or block.title)).open("a", encoding="utf-8") as file:
            file.write(self._replace(block.text))

    def run(self, text: str, program: tuple[str, ...] = ("bash", "-e", "-c")) -> str:
        done = subprocess.run(
            [*program, self._replace(text)],
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=480,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def _replace(self, text: str) -> str:
        for documented, real in self._replacements.items():
            text = text.replace(documented, real)
        return text


def test_the_first_job_on_slurm(tmp_path: Path) -> None:
    quick_start = read_section("launch.md", "Quick start")
    with start_slurm(tmp_path / "slurm", proof="the guide about Slurm") as cluster:
        replacements = {
            '"gpu"': '"low"',
            "module load": "echo module load",
            "slurm://cluster/": f"slurm://{cluster.name}/",
        }
        reader = Reader(tmp_path, cluster.environment, replacements)
        script, run_file = quick_start[:2]
        reader.run(script.text, (sys.executable, "-c"))
        reader.write(run_file)
        output = ""
        for block in read_section("slurm.md", "First job"):
            if block.language == "toml":
                reader.write(block, run_file.title)
            elif block.title in NEEDS_CLUSTER:
                output += reader.run(block.text)
    assert f"handle: slurm://{cluster.name}/1\n" in output
    assert "steps: 60 (finished)" in output
    assert (tmp_path / "out" / "classify" / "model").is_dir()
    assert not list((tmp_path / "out" / "classify.slurm").glob("*"))


@pytest.mark.full
def test_the_first_job_and_the_server_on_kubernetes(cluster: ApiServer, tmp_path: Path) -> None:
    workplace = ClusterWorkplace(tmp_path, tmp_path, cluster=cluster)
    replacements = {
        "kubernetes://my-cluster/": f"kubernetes://{CONTEXT}/",
        "/data": str(tmp_path / "data"),
        "deployment/qa --follow": "deployment/qa",  # the log of a server does not end
    }
    reader = Reader(tmp_path, workplace.environment, replacements)
    clients = ServiceClients(cluster, "qa", "/v1/embeddings", json.dumps({"input": "open a file"}))
    output = ""
    for block in read_section("kubernetes.md", "First job") + read_section(
        "kubernetes.md", "Serve"
    ):
        if block.is_file:
            reader.write(block)
        for line in block.text.splitlines() if block.title in NEEDS_CLUSTER else ():
            if "logs" in line and "deployment" in line:
                wait_until(lambda: bool(clients.list_ports()), "a replica")  # no autoscaler here
                clients.run(8, 2)
            output += reader.run(line)
    assert "steps: 100 (finished)" in output
    assert "Serving qa at" in output
    assert clients.statuses == [200] * 8
    assert (tmp_path / "data" / "search" / "model").is_dir()
