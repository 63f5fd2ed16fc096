"""`regauge runs`: lists, filters, compares and removes output folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regauge
from regauge.config.output_files import ATTEMPTS
from regauge.run_folders.run_list import list_runs
from regauge.run_folders.run_removal import REMOVED, remove_run
from regauge.system.errors import SettingsError
from regauge.system.files import LOCK, hold_lock
from saved_runs import build_saved_run


def write_run(
    folder: Path, *, step: int = 10, usd: float = 1.0, loss: float = 2.0, **tables: Any
) -> Path:
    """Write a finished run."""
    folder.mkdir(parents=True)
    document = build_saved_run(stop={"steps": step}, **tables)
    document["run"]["verb"] = "train"
    (folder / "run.json").write_text(json.dumps(document))
    line = {"attempt": 1, "step": step, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps({**line, "heldout/loss": loss}) + "\n")
    end = {"attempt": 1, "started_at": 5.0, "ended_at": 105.0, "outcome": "finished", "usd": usd}
    (folder / ATTEMPTS).write_text(json.dumps(end) + "\n")
    ledger = {"attempt": 1, "step": step, "seconds": {"step": 75.0}}
    (folder / "ledger.jsonl").write_text(json.dumps(ledger) + "\n")
    (folder / "result.json").write_text("{}")
    return folder


def call(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "regauge", "runs", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert result.returncode == code, result.stderr
    return result


def test_a_list_has_every_run_below_the_root(tmp_path: Path) -> None:
    write_run(tmp_path / "b", usd=2.0)
    write_run(tmp_path / "group" / "a", loss=1.0)
    write_run(tmp_path / ".hidden" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in ("run.json", "metrics.jsonl", "ledger.jsonl", ATTEMPTS):
        (damaged / name).write_text('{"damaged')
    document = json.loads(call("list", str(tmp_path), "--json").stdout)
    assert [run["name"] for run in document["runs"]] == ["b", "damaged", "group/a"]
    assert document["runs"][0] == {
        "name": "b", "verb": "train", "state": "finished", "step": 10, "steps": 10,
        "metric": "heldout/loss", "value": 2.0, "value_step": 10, "usd": 2.0, "goodput": 0.75,
        "attempts": 1, "host": None, "started": "1970-01-01T00:00:05+00:00",
    }  # fmt: skip
    assert document["runs"][1]["state"] == "unknown"
    assert json.loads(call("list", str(tmp_path), "-o", "json").stdout) == document
    assert regauge.runs("list", str(tmp_path)).document == document
    lines = call("list", str(tmp_path)).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "b", "damaged", "group/a"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--filter", "usd=1.0"], ["a", "c"]),
        (["--filter", "seed=1"], ["b"]),
        (["--filter", "name=[ab]", "--filter", "state=fin*"], ["a", "b"]),
        (["--sort", "usd", "--reverse"], ["b", "a", "c"]),
        (["--sort", "value"], ["c", "b", "a"]),
        (["--sort", "seed"], ["a", "c", "b"]),
    ],
)
def test_filter_and_sort(
    tmp_path: Path, options: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from regauge.cli import main

    write_run(tmp_path / "a", loss=3.0)
    write_run(tmp_path / "b", loss=2.0, usd=5.0, seed=1)
    write_run(tmp_path / "c", loss=1.0)
    assert main(["runs", "list", str(tmp_path), "--json", *options]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == names


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["list", "ROOT", "--filter", "stat=x"], "no run has 'stat'; did you mean 'state'?"),
        (["list", "ROOT", "--filter", "state"], "the filter 'state' has no value"),
        (["list", "ROOT", "--sort", "cost"], "no run has 'cost'"),
        (["list", "ROOT/none"], "no folder"),
        (["diff", "ROOT/a"], "'runs diff' needs two folders, got 1"),
        (["show", "ROOT"], "does not contain a run"),
        (["rm", "ROOT"], "does not contain a run"),
        (["rm", "ROOT/a"], "is not removed without confirmation; add --yes"),
        (["rm", "ROOT/link", "--yes"], "is not a folder"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from regauge.cli import main

    write_run(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    code = main(["runs", *(text.replace("ROOT", str(tmp_path)) for text in arguments)])
    assert code == SettingsError.exit_code
    assert problem in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "a" / "run.json").exists()


def test_the_differences_of_two_runs_by_topic(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", step=20, seed=3)
    for folder, version, host in ((first, "0.1.0", "x"), (second, "0.2.0", "y")):
        packages = {"regauge": version, "torch": "2.9"}
        environment = {"format": 2, "host": host, "packages": packages, "variables": {}}
        (folder / "environment.json").write_text(json.dumps(environment))
    saved = json.loads((second / "run.json").read_text())
    saved["run"] |= {"data_fingerprint": "c", "weights_checksum": "d"}
    (second / "run.json").write_text(json.dumps(saved))
    assert regauge.runs("diff", str(first), str(second)).document == {
        "settings": [
            {"name": "seed", "first": 0, "second": 3},
            {"name": "stop.steps", "first": 10, "second": 20},
        ],
        "data": [{"name": "data_fingerprint", "first": "b", "second": "c"}],
        "weights": [{"name": "weights_checksum", "first": None, "second": "d"}],
        "code": [{"name": "regauge", "first": "0.1.0", "second": "0.2.0"}],
        "environment": [{"name": "host", "first": "x", "second": "y"}],
    }
    equal = call("diff", str(first), str(first)).stdout.split()
    assert equal.count("equal") == 5


def test_one_run_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    document = json.loads(call("show", str(folder), "--json").stdout)
    assert (document["state"], document["run_id"], document["settings"]["seed"]) == (
        "finished", "a", 0
    )  # fmt: skip
    assert "state: finished" in call("show", str(folder)).stdout


def test_a_removed_run_is_gone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    leftover = tmp_path / f".b.0123abcd{REMOVED}"
    leftover.mkdir()
    call("rm", str(folder), "--yes", "--root", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def lock_run(folder: Path) -> Any:
    return hold_lock(folder / LOCK)


def lock_predict_job(folder: Path) -> Any:
    job = folder / "jobs" / "0-of-1"
    job.mkdir(parents=True)
    (folder / "job.json").write_text("{}")
    return hold_lock(job / LOCK)


@pytest.mark.parametrize("lock", [lock_run, lock_predict_job])
def test_a_running_run_is_not_removed(tmp_path: Path, lock: Callable[[Path], Any]) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "result.json").unlink()
    with lock(folder), pytest.raises(SettingsError, match="is running; stop it first"):
        remove_run(folder, tmp_path)
    assert (folder / "run.json").exists()


def test_a_run_on_another_machine_is_not_removed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "result.json").unlink()
    (folder / ATTEMPTS).write_text(json.dumps({"attempt": 1, "started_at": time.time()}) + "\n")
    (folder / ".seen").write_text(f"{time.time():.3f}")
    with pytest.raises(SettingsError, match="is running"):
        remove_run(folder, tmp_path)


def use_as_start(root: Path, folder: Path) -> Path:
    return write_run(root / "user", model={"path": str(folder / "model")})


def use_by_relative_path(root: Path, folder: Path) -> Path:
    path = os.path.relpath(folder / "checkpoints" / "step-00000010")
    return write_run(root / "user", start={"from": path})


def register(root: Path, folder: Path) -> Path:
    registry = root / "registry"
    version = registry / "models" / "m" / "versions" / "1"
    version.mkdir(parents=True)
    (registry / "registry.json").write_text("{}")
    run_id = json.loads((folder / "run.json").read_text())["run"]["run_id"]
    (version / "version.json").write_text(json.dumps({"lineage": [{"run_id": run_id}]}))
    return version


@pytest.mark.parametrize("use", [use_as_start, use_by_relative_path, register])
def test_a_run_that_other_work_uses_is_not_removed(
    tmp_path: Path, use: Callable[[Path, Path], Path]
) -> None:
    folder = write_run(tmp_path / "a")
    user = use(tmp_path, folder)
    with pytest.raises(SettingsError, match=f"{user} depends on"):
        remove_run(folder, tmp_path)
    assert (folder / "run.json").exists()


def test_a_stage_that_later_stages_use_is_not_removed(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "1-train"), write_run(tmp_path / "2-export")
    (tmp_path / "pipeline.json").write_text("{}")
    done = {"verb": "export", "seconds": 1.0, "inputs": {"train": "hash"}}
    (second / "done.json").write_text(json.dumps(done))
    with pytest.raises(SettingsError, match="2-export depends on"):
        remove_run(first, tmp_path)
    with pytest.raises(SettingsError, match="is a pipeline folder"):
        remove_run(tmp_path, tmp_path)
    remove_run(second, tmp_path)
    remove_run(first, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.json"]


def test_a_stage_of_a_round_that_later_stages_use_is_not_removed(tmp_path: Path) -> None:
    """A round's folders are named by hashes; other rounds do not depend on them."""
    (tmp_path / "pipeline.json").write_text("{}")
    folders = {}
    for sha256 in ("abcdef012345", "0123456789ab"):
        train = folders[sha256] = write_run(tmp_path / "1-train" / sha256)
        (train / "done.json").write_text(json.dumps({"sha256": sha256, "inputs": {}}))
    export = write_run(tmp_path / "2-export" / "9876543210ff")
    done = {"verb": "export", "seconds": 1.0, "inputs": {"train": "abcdef012345"}}
    (export / "done.json").write_text(json.dumps(done))
    remove_run(folders["0123456789ab"], tmp_path)
    with pytest.raises(SettingsError, match="9876543210ff depends on"):
        remove_run(folders["abcdef012345"], tmp_path)
    remove_run(export, tmp_path)
    remove_run(folders["abcdef012345"], tmp_path)


def test_a_thousand_runs_are_listed(tmp_path: Path, figure: Callable[[str, float], None]) -> None:
    for number in range(1000):
        write_run(tmp_path / f"{number:04}")
    began = time.process_time()
    assert len(list_runs(tmp_path)) == 1000
    seconds = time.process_time() - began
    figure("seconds to list 1,000 runs", seconds)
    assert seconds < 10
