"""Shapes that are compiled in several processes at once, by a device's own tool where it has one.

The tool is a double with the manner of Neuron's: asked once to collect what a trial records, and
once to compile it. It is no proof of that tool.
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
    \"\"\"The same, for one process at a time.\"\"\"

    is_shareable = False
"""
TOOL = f"""#!{sys.executable}
import os, subprocess, sys
from pathlib import Path

what, *trial = sys.argv[1:]
folder = os.environ.get("LOOM_GRAPHS")
with Path(sys.argv[0]).with_suffix(".log").open("a") as log:
    log.write(f"{{what}} {{trial[-1]}} {{bool(folder)}}\\n")
if what == "collect":
    sys.exit(subprocess.run(trial).returncode)
part = trial[-1].replace("/", "of")
(Path(folder) / f"{{part}}.neff").write_text(part)
"""
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def loom(tmp_path: Path) -> Command:
    """Return what runs `regauge compile` where two toys of another package are installed."""
    packages, tool = tmp_path / "packages", tmp_path / "loom"
    facts = packages / "loom-1.0.dist-info"
    facts.mkdir(parents=True)
    (packages / "loom.py").write_text(TOY)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: loom\nVersion: 1.0\n")
    points = "[regauge.accelerators]\nloom = loom:Loom\nalone = loom:Alone\n"
    (facts / "entry_points.txt").write_text(points)
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

    def compiled(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps({**dump(run), "accelerator": {"kind": kind}}))
        command = [sys.executable, "-m", "regauge", "compile", str(file), "--json", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return compiled


@pytest.mark.full
@pytest.mark.skipif(
    Cpu().compile_obstacle() is not None,
    reason="no C++ compiler: that graphs compiled apart are found together is not proved here",
)
def test_graphs_that_were_compiled_apart_are_found_together(loom: Command, tmp_path: Path) -> None:
    done = loom("loom", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["made"] == 0
    assert answer["found"] > 0
    said = (tmp_path / "loom.log").read_text().splitlines()
    assert sorted(said[:2]) == ["collect 1/2 False", "collect 2/2 False"]
    assert said[2:] == ["compile 1/2 True", "compile 2/2 True"]
    (path,) = (tmp_path / "graphs").glob("*/entry.json")
    names = {Path(name).name for name in json.loads(path.read_text())["files"]}
    assert {"1of2.neff", "2of2.neff"} <= names


@pytest.mark.parametrize(
    ("kind", "arguments", "code", "said"),
    [
        ("alone", ("--jobs", "2"), 2, "only one process at a time can use a device of 'loom'"),
        ("loom", ("--part", "3/2"), 2, "--part '3/2' is invalid"),
        ("loom", ("task.temperature=0.5", "data.path=/nowhere"), 64, "/nowhere has no prepared"),
    ],
)
def test_what_cannot_be_compiled_apart_is_said(
    kind: str, arguments: tuple[str, ...], code: int, said: str, loom: Command
) -> None:
    done = loom(kind, *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_neuron_has_its_sdk_s_tool() -> None:
    tool = neuron.Neuron().graph_collector()
    assert tool.collect_prefix == ("neuron_parallel_compile", "--command", "collect")
    assert tool.compile_prefix == ("neuron_parallel_compile", "--command", "compile")
    assert tool.folder_variable == "NEURON_COMPILE_CACHE_URL"
