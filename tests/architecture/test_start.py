"""Help and the checks of a run file start fast, since they import nothing large."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets, runs
from regauge.config import dump

LARGE = ("torch", "numpy", "transformers", "pyarrow", "matplotlib")
HELP = "from regauge.cli import main; main(['--help'])"
ALL_VERBS = "from regauge import commands; commands.table_names()"

LIBRARIES = "import cyclopts, rich.console"
LIBRARIES_SECONDS = 0.1
"""Processor time of importing the libraries of the help, on a machine where --help takes 200 ms."""


def list_imported(code: str, packages: tuple[str, ...]) -> list[str]:
    """Return which of the packages packages a fresh interpreter has after some code."""
    after = f"import json, sys; print(json.dumps([m for m in {packages!r} if m in sys.modules]))"
    command = [sys.executable, "-c", f"{code}\n{after}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_large() -> None:
    assert list_imported(HELP, (*LARGE, "pydantic")) == []


def test_the_package_imports_no_verb_and_no_introspection() -> None:
    assert list_imported("import regauge", (*LARGE, "inspect", "regauge.commands")) == []


def test_the_files_of_all_verbs_import_nothing_large() -> None:
    assert list_imported(ALL_VERBS, LARGE) == []


def test_the_dry_run_of_a_new_bert_imports_no_torch(tmp_path: Path) -> None:
    """The large packages it imports are those that read the dataset."""
    assert list_imported(_dry_run(tmp_path, {}), (*LARGE, "scipy", "pandas")) == [
        "numpy",
        "pyarrow",
    ]


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "hsdp"])
def test_the_memory_of_a_strategy_needs_no_torch(strategy: str, tmp_path: Path) -> None:
    changes = {"strategy": {"kind": strategy}, "execution": {"processes": 4}}
    assert list_imported(_dry_run(tmp_path, changes), ("torch",)) == []


def test_the_dry_run_of_other_models_builds_them(tmp_path: Path) -> None:
    changes = {"model": {"config": {"hidden_act": "relu"}}}
    assert list_imported(_dry_run(tmp_path, changes), ("torch",)) == ["torch"]


def _dry_run(folder: Path, changes: dict[str, Any]) -> str:
    """Return the code of a dry run of a run file with a small BERT and prepared data."""
    data = datasets.write_packed(folder / "data")
    run = runs.settings(folder / "run", data, "mlm", **changes)
    file = folder / "run.json"
    file.write_text(json.dumps(dump(run)))
    return f"from regauge.cli import main; main(['train', {str(file)!r}, '--dry-run'])"


def test_the_choice_of_a_device_by_a_supervisor_imports_no_torch() -> None:
    assert (
        list_imported(
            "from regauge import accelerators; accelerators.choose_without_torch()", LARGE
        )
        == []
    )


def test_the_rows_of_a_dataset_import_no_pandas(tmp_path: Path) -> None:
    folder = datasets.write_packed(tmp_path / "data")
    code = (
        "from pathlib import Path; from regauge.data.dataset import Dataset;"
        f"Dataset(Path({str(folder)!r})).rows('train')"
    )
    assert list_imported(code, ("pyarrow", "pandas")) == ["pyarrow"]


def test_tensors_that_are_not_sharded_import_no_distributed_tensors() -> None:
    code = "import torch; from regauge.models.tensors import is_sharded; is_sharded(torch.ones(1))"
    assert list_imported(code, ("torch", "torch.distributed.tensor")) == ["torch"]


def test_help_takes_less_than_300_ms(report: Callable[[str], None]) -> None:
    """On a slow or busy machine it may take as much longer as its libraries do there."""
    seconds, libraries = [], []
    for _ in range(3):
        libraries.append(_cpu_seconds([sys.executable, "-c", LIBRARIES]))
        seconds.append(_cpu_seconds([sys.executable, "-m", "regauge", "--help"]))
    report(f"regauge --help: {min(seconds) * 1000:.0f} ms of processor time")
    assert min(seconds) < 0.3 * max(1.0, min(libraries) / LIBRARIES_SECONDS)


@pytest.mark.parametrize("package", ["numpy", "pydantic"])
def test_a_large_import_is_detected(package: str) -> None:
    assert list_imported(f"import {package}", (package,)) == [package]


def _cpu_seconds(command: list[str]) -> float:
    """Return the processor time of a command; other work changes the wall clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
