"""An accelerator from another package needs one file and an entry point, and no change here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import datasets
from distributed.jobs import lines, losses
from distributed.runs import settings
from regauge.config import dump

TOY = '''
"""The CPU under another name, which counts the calls of the training loop."""

import json
import os
from pathlib import Path

from regauge.accelerators.cpu import Cpu
from regauge.accelerators import Availability


class Abacus(Cpu):
    """Counts marks on beads."""

    beads: int = 0
    """Where the count starts."""

    @classmethod
    def available(cls):
        return Availability(1, "it is a toy")

    def wrap_loader(self, steps, device):
        for batches in super().wrap_loader(steps, device):
            _count("steps")
            yield batches

    def end_microbatch(self):
        _count("microbatches")

    def end_step(self):
        _count("updates")


COUNTS = {}


def _count(name):
    COUNTS[name] = COUNTS.get(name, 0) + 1
    Path(os.environ["ABACUS"]).write_text(json.dumps(COUNTS))
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder of installed packages that contains the test accelerator."""
    folder = tmp_path / "packages"
    metadata = folder / "abacus-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "abacus.py").write_text(TOY)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[regauge.accelerators]\nabacus = abacus:Abacus\n")
    return folder


def regauge(package: Path, counts: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package), "ABACUS": str(counts)}
    command = [sys.executable, "-m", "regauge", *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.full
def test_an_accelerator_of_another_package_trains(package: Path, tmp_path: Path) -> None:
    data, counts = datasets.write_packed(tmp_path / "data"), tmp_path / "counts.json"
    run = settings(tmp_path / "cpu", data, "mlm", stop={"steps": 4})
    losses_by_kind = {}
    for kind in ("cpu", "abacus"):
        file = tmp_path / f"{kind}.json"
        output = {**dump(run)["output"], "folder": str(tmp_path / kind)}
        table = {"kind": kind, **({"beads": 3} if kind == "abacus" else {})}
        file.write_text(json.dumps({**dump(run), "accelerator": table, "output": output}))
        regauge(package, counts, "train", str(file))
        losses_by_kind[kind] = losses(lines(tmp_path / kind))
    assert losses_by_kind["abacus"] == losses_by_kind["cpu"]
    saved = json.loads((tmp_path / "abacus" / "run.json").read_text())
    assert saved["accelerator"] == {"kind": "abacus", "beads": 3}
    calls = json.loads(counts.read_text())
    assert calls["updates"] == 4
    assert calls["microbatches"] >= 4 * 4
    assert calls["steps"] >= 4


def test_doctor_lists_it_by_name(package: Path, tmp_path: Path) -> None:
    report = json.loads(regauge(package, tmp_path / "counts", "doctor", "--survey", "--json"))
    rows = {row["name"]: row for row in report["accelerators"]}
    assert rows["abacus"]["reason"] == "it is a toy"
    assert rows["abacus"]["available"] is True
    assert report["selected"] != "abacus"
