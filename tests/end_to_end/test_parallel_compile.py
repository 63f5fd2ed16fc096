"""Compilation of shapes in several processes at once, with the vendor's compiler tool if any.

The tool is a stand-in for Neuron's: its first call collects the graphs of a trial, its second call
compiles them. These tests do not prove that Neuron's tool works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.accelerators import neuron
from regauge.accelerators.cpu import Cpu
from regauge.config import dump

TOY = """
import os
from regauge.accelerators import Availability, GraphCollector
from regauge.accelerators.cpu import Cpu


class Loom(Cpu):
    \"\"\"The processor, with a tool that compiles after a trial.\"\"\"

    @classmethod
    def available(cls):
        return Availability(1, "it is a toy")

    def graph_collector(self):
        tool = os.environ["LOOM"]
        return GraphCollector((tool, "collect"), (tool, "compile"), "LOOM_GRAPHS")


class Alone(Loom):
    \"\"\"The same accelerator, for one process at a time.\"\"\"

    is_shareable = False
"""
TOOL = f"""#!{sys.executable}
import os, subprocess, sys
from pathlib import Path

command, *trial = sys.argv[1:]
folder = os.environ.get("LOOM_GRAPHS")
with Path(sys.argv[0]).with_suffix(".log").open("a") as log:
    log.write(f"{{command}} {{trial[-1]}} {{bool(folder)}}\\n")
if command == "collect":
    sys.exit(subprocess.run(trial).returncode)
part = trial[-1].replace("/", "of")
(Path(folder) / f"{{part}}.neff").write_text(part)
"""
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def loom(tmp_path: Path) -> Command:
    """Return a function that runs `regauge compile` with two accelerators of another package."""
    packages, tool = tmp_path / "packages", tmp_path / "loom"
    metadata = packages / "loom-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / "loom.py").write_text(TOY)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loom\nVersion: 1.0\n")
    points = "[regauge.accelerators]\nloom = loom:Loom\nalone = loom:Alone\n"
    (metadata / "entry_points.txt").write_text(points)
    tool.write_text(TOOL)
    tool.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(packages), "LOOM": str(tool)}
    run = settings(
        tmp_path / "run",
        datasets.write_pairs(tmp_path / "data"),
        "contrastive",
        execution={"compile": "blocks", "compile_cache": str(tmp_path / "graphs")},
        task={"max_buckets": 2},
        model={"config": {"num_hidden_layers": 1}},
    )

    def run_compile(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps({**dump(run), "accelerator": {"kind": kind}}))
        command = [sys.executable, "-m", "regauge", "compile", str(file), "--json", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run_compile


@pytest.mark.full
@pytest.mark.skipif(
    Cpu().compile_obstacle() is not None,
    reason="not proved here: torch.compile needs a C++ compiler",
)
def test_graphs_of_several_processes_share_one_cache_entry(loom: Command, tmp_path: Path) -> None:
    completed = loom("loom", "--jobs", "2")
    assert completed.returncode == 0, completed.stderr
    summary = json.loads(completed.stdout)
    assert summary["cache_misses"] == 0
    assert summary["cache_hits"] > 0
    calls = (tmp_path / "loom.log").read_text().splitlines()
    assert sorted(calls[:2]) == ["collect 1/2 False", "collect 2/2 False"]
    assert calls[2:] == ["compile 1/2 True", "compile 2/2 True"]
    (path,) = (tmp_path / "graphs").glob("*/entry.json")
    names = {Path(name).name for name in json.loads(path.read_text())["files"]}
    assert {"1of2.neff", "2of2.neff"} <= names


@pytest.mark.parametrize(
    ("kind", "arguments", "code", "message"),
    [
        ("alone", ("--jobs", "2"), 2, "only one process at a time can use a device of 'loom'"),
        ("loom", ("--part", "3/2"), 2, "--part '3/2' is invalid"),
        ("loom", ("task.temperature=0.5", "data.path=/nowhere"), 64, "/nowhere has no prepared"),
    ],
)
def test_invalid_parallel_compilation_is_reported(
    kind: str, arguments: tuple[str, ...], code: int, message: str, loom: Command
) -> None:
    completed = loom(kind, *arguments)
    assert completed.returncode == code
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr


def test_neuron_uses_the_tool_of_its_sdk() -> None:
    tool = neuron.Neuron().graph_collector()
    assert tool.collect_prefix == ("neuron_parallel_compile", "--command", "collect")
    assert tool.compile_prefix == ("neuron_parallel_compile", "--command", "compile")
    assert tool.folder_variable == "NEURON_COMPILE_CACHE_URL"
