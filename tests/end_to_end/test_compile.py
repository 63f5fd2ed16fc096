"""Ahead-of-time compilation: the next run compiles no graph, and damaged graphs are replaced."""

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
from regauge.accelerators.cpu import Cpu
from regauge.config import dump
from regauge.system import processes
from regauge.system.errors import DataError
from regauge.training.compile import cache

pytestmark = pytest.mark.skipif(
    Cpu().compile_obstacle() is not None,
    reason="not proved here: torch.compile needs a C++ compiler",
)

PROBE = """
import json, sys
from regauge import accelerators, cli
from regauge.system import choices
sys.argv = ["regauge", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as error:
    assert not error.code, error.code
print("CACHED", json.dumps(choices.load("accelerators", "cpu")().graph_cache_counts()))
"""
Command = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run file whose graph cache is in that folder."""
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
def compiled_folder(run_folder: Path) -> Path:
    """Return the folder with compiled graphs in its cache; this takes one to two minutes."""
    output = run_command(run_folder, "compile", "--json")[0]
    summary = json.loads(output.rpartition("CACHED")[0])
    assert summary["cache_misses"] > 0
    assert summary["cache_hits"] == 0
    return run_folder


def run_command(folder: Path, verb: str, *arguments: str) -> tuple[str, str]:
    """Run a verb in a separate process; return its standard output and standard error.

    `train` starts as one rank of a launcher, so that its own process compiles and counts graphs.
    """
    line = [sys.executable, "-c", PROBE, verb, str(folder / "run.json"), *arguments]
    launched = dict.fromkeys(processes.LAUNCHER_VARIABLES, "0") | {"WORLD_SIZE": "1"}
    environment = {**os.environ, **(launched if verb == "train" else {})}
    completed = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout, completed.stderr


def read_cache_counts(output: str) -> tuple[int, int]:
    hits, misses = json.loads(output.rpartition("CACHED")[2])
    return hits, misses


def read_entry(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "graphs").glob("*/entry.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.full
def test_the_next_run_compiles_nothing(compiled_folder: Path) -> None:
    hits, misses = read_cache_counts(run_command(compiled_folder, "train")[0])
    assert hits > 0
    assert misses == 0
    assert len(list((compiled_folder / "graphs").glob("*/entry.json"))) == 1


@pytest.mark.full
def test_a_damaged_graph_is_logged_and_compiled_again(compiled_folder: Path) -> None:
    (folder,) = (compiled_folder / "graphs").iterdir()
    files = read_entry(compiled_folder)["files"]
    victim = max(files, key=lambda name: files[name]["bytes"])
    for name, content in ((victim, b"damaged"), ("stranger.py", b"print('surprise')")):
        (folder / "graphs" / name).write_bytes(content)
    output, log = run_command(compiled_folder, "compile", "--json")
    assert "removed 2 files with a wrong hash: " in log
    assert victim in log
    assert "stranger.py" in log
    assert not (folder / "graphs" / "stranger.py").exists()
    assert json.loads(output.rpartition("CACHED")[0])["num_graphs"] > 0
    assert read_cache_counts(run_command(compiled_folder, "compile", "--json")[0])[1] == 0


@pytest.mark.full
def test_cached_graphs_are_listed(compiled_folder: Path) -> None:
    output = run_command(compiled_folder, "compile", "--list", "--json")[0]
    assert len(json.loads(output.rpartition("CACHED")[0])["entries"]) == 1
    plan = json.loads(
        run_command(compiled_folder, "compile", "--dry-run", "--json")[0].rpartition("CACHED")[0]
    )
    assert plan["cache"] == str(compiled_folder / "graphs")


@pytest.mark.full
def test_graphs_are_pushed_and_pulled(compiled_folder: Path, tmp_path: Path) -> None:
    store, cache_folder = tmp_path / "store", tmp_path / "here"
    run_command(compiled_folder, "compile", "--push", f"file://{store}")
    pull = ("--pull", f"file://{store}", f"execution.compile_cache={cache_folder}", "--json")
    summary = json.loads(run_command(compiled_folder, "compile", *pull)[0].rpartition("CACHED")[0])
    assert summary["pulled"] == 1
    (row,) = summary["entries"]
    assert row["num_files"] == len(read_entry(compiled_folder)["files"])
    hits, misses = read_cache_counts(
        run_command(compiled_folder, "compile", f"execution.compile_cache={cache_folder}")[0]
    )
    assert misses == 0
    assert hits > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("execution.compile=off",), 'the run compiles nothing; set execution.compile = "blocks"'),
        (("--pull", "/nowhere"), "/nowhere contains no compiled graphs"),
    ],
)
def test_invalid_compile_commands_are_reported(
    run_folder: Path, changes: tuple[str, ...], message: str
) -> None:
    line = [sys.executable, "-m", "regauge", "compile", str(run_folder / "run.json"), *changes]
    completed = subprocess.run(line, capture_output=True, text=True, check=False)
    assert completed.returncode in (2, 64)
    assert message in completed.stderr


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"files": {"../../escaped": {}}, "compile_seconds": 1.0, "facts": {}},
            "names '../../escaped', outside of its",
        ),
        (
            {"files": {"/escaped": {}}, "compile_seconds": 1.0, "facts": {}},
            "names '/escaped', outside of its folder",
        ),
        ({"files": {}}, "is not a valid cache entry"),
    ],
)
def test_a_hostile_cache_entry_is_refused(
    document: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "there" / "key" / "graphs").mkdir(parents=True)
    (tmp_path / "there" / "key" / "entry.json").write_text(json.dumps(document))
    (tmp_path / "escaped").write_text("a stranger")
    with pytest.raises(DataError, match=message):
        cache.copy_entries(str(tmp_path / "there"), str(tmp_path / "deep" / "here"))
    assert not (tmp_path / "deep").exists()


def test_a_push_adds_files_to_an_existing_entry(tmp_path: Path) -> None:
    for name in ("one", "two"):
        graphs = tmp_path / name / "key" / "graphs"
        graphs.mkdir(parents=True)
        (graphs / name).write_text(name)
        cache.CacheEntry(tmp_path / name / "key", {}, is_writer=True).seal(len(name))
        cache.copy_entries(str(tmp_path / name), str(tmp_path / "all"))
    (row,) = cache.list_entries(tmp_path / "all")
    assert row["num_files"] == 2
