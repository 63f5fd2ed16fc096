"""Graphs that are compiled ahead: the run that follows compiles none, and damage is made good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge import processes
from regauge.accelerators.cpu import Cpu
from regauge.config import dump
from regauge.errors import DataError
from regauge.training.compile import cache

pytestmark = pytest.mark.skipif(
    Cpu().compile_obstacle() is not None,
    reason="no C++ compiler: that a second start compiles nothing is not proved here",
)

PROBE = """
import json, sys
from regauge import accelerators, cli, choices
sys.argv = ["regauge", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as error:
    assert not error.code, error.code
print("CACHED", json.dumps(choices.load("accelerators", "cpu")().graph_cache_counts()))
"""
Command = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run file that keeps its graphs there."""
    root = tmp_path_factory.mktemp("compiled")
    changes: dict[str, Any] = {
        "execution": {"compile": "blocks", "compile_cache": str(root / "graphs")},
        "task": {"max_buckets": 1},
        "model": {"config": {"num_hidden_layers": 1}},
        "stop": {"steps": 3},
    }
    run = settings(root / "run", datasets.write_pairs(root / "data"), "contrastive", **changes)
    (root / "run.json").write_text(json.dumps(dump(run)))
    return root


@pytest.fixture(scope="module")
def place(written: Path) -> Path:
    """Return that folder with its graphs compiled and kept: a minute or two."""
    said = json.loads(command(written, "compile", "--json")[0].rpartition("CACHED")[0])
    assert said["made"] > 0
    assert said["found"] == 0
    return written


def command(place: Path, verb: str, *arguments: str) -> tuple[str, str]:
    """Return what a verb prints, in a process of its own, and what it says.

    A run is started as a launcher does it, so that it counts in the process that computes.
    """
    line = [sys.executable, "-c", PROBE, verb, str(place / "run.json"), *arguments]
    launched = dict.fromkeys(processes.LAUNCHER_VARIABLES, "0") | {"WORLD_SIZE": "1"}
    environment = {**os.environ, **(launched if verb == "train" else {})}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def cached(output: str) -> tuple[int, int]:
    hits, misses = json.loads(output.rpartition("CACHED")[2])
    return hits, misses


def entry(place: Path) -> dict[str, Any]:
    (path,) = (place / "graphs").glob("*/entry.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.full
def test_the_run_that_follows_compiles_nothing(place: Path) -> None:
    hits, misses = cached(command(place, "train")[0])
    assert hits > 0
    assert misses == 0
    assert len(list((place / "graphs").glob("*/entry.json"))) == 1


@pytest.mark.full
def test_a_damaged_graph_is_ignored_said_and_made_again(place: Path) -> None:
    (folder,) = (place / "graphs").iterdir()
    listed = entry(place)["files"]
    victim = max(listed, key=lambda name: listed[name]["bytes"])
    for name, content in ((victim, b"damaged"), ("stranger.py", b"print('surprise')")):
        (folder / "graphs" / name).write_bytes(content)
    output, said = command(place, "compile", "--json")
    assert "removed files with a wrong hash" in said
    assert victim in said
    assert "stranger.py" in said
    assert not (folder / "graphs" / "stranger.py").exists()
    assert json.loads(output.rpartition("CACHED")[0])["graphs"] > 0
    assert cached(command(place, "compile", "--json")[0])[1] == 0


@pytest.mark.full
def test_what_is_kept_is_listed(place: Path) -> None:
    said = command(place, "compile", "--list", "--json")[0]
    assert len(json.loads(said.rpartition("CACHED")[0])["entries"]) == 1
    plan = json.loads(command(place, "compile", "--dry-run", "--json")[0].rpartition("CACHED")[0])
    assert plan["cache"] == str(place / "graphs")


@pytest.mark.full
def test_graphs_travel(place: Path, tmp_path: Path) -> None:
    there, here = tmp_path / "store", tmp_path / "here"
    command(place, "compile", "--push", f"file://{there}")
    pulled = ("--pull", f"file://{there}", f"execution.compile_cache={here}", "--json")
    said = json.loads(command(place, "compile", *pulled)[0].rpartition("CACHED")[0])
    assert said["pulled"] == 1
    (row,) = said["entries"]
    assert row["files"] == len(entry(place)["files"])
    hits, misses = cached(command(place, "compile", f"execution.compile_cache={here}")[0])
    assert misses == 0
    assert hits > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("execution.compile=off",), 'the run compiles nothing; set execution.compile = "blocks"'),
        (("--pull", "/nowhere"), "/nowhere contains no compiled graphs"),
    ],
)
def test_what_cannot_be_compiled_is_said(
    written: Path, changes: tuple[str, ...], said: str
) -> None:
    line = [sys.executable, "-m", "regauge", "compile", str(written / "run.json"), *changes]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode in (2, 64)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"files": {"../../escaped": {}}, "seconds": 1.0}, "names '../../escaped', outside of its"),
        ({"files": {"/escaped": {}}, "seconds": 1.0}, "names '/escaped', outside of its folder"),
        ({"files": {}}, "is not a valid cache entry"),
    ],
)
def test_a_hostile_list_is_refused(document: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "there" / "key" / "graphs").mkdir(parents=True)
    (tmp_path / "there" / "key" / "entry.json").write_text(json.dumps(document))
    (tmp_path / "escaped").write_text("a stranger")
    with pytest.raises(DataError, match=said):
        cache.copy_entries(str(tmp_path / "there"), str(tmp_path / "deep" / "here"))
    assert not (tmp_path / "deep").exists()


def test_a_push_adds_to_what_is_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        graphs = tmp_path / name / "key" / "graphs"
        graphs.mkdir(parents=True)
        (graphs / name).write_text(name)
        cache.CacheEntry(tmp_path / name / "key", {}, is_writer=True).seal(len(name))
        cache.copy_entries(str(tmp_path / name), str(tmp_path / "all"))
    (row,) = cache.list_entries(tmp_path / "all")
    assert row["files"] == 2
