"""An accelerator from another package: one file and an entry point, and nothing here changes."""

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
"""The processor under another name, which counts what the loop asks of it."""

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


def _count(what):
    COUNTS[what] = COUNTS.get(what, 0) + 1
    Path(os.environ["ABACUS"]).write_text(json.dumps(COUNTS))
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder of installed packages with the toy in it."""
    folder = tmp_path / "packages"
    facts = folder / "abacus-1.0.dist-info"
    facts.mkdir(parents=True)
    (folder / "abacus.py").write_text(TOY)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[regauge.accelerators]\nabacus = abacus:Abacus\n")
    return folder


def regauge(package: Path, counts: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package), "ABACUS": str(counts)}
    command = [sys.executable, "-m", "regauge", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_toy_from_outside_trains(package: Path, tmp_path: Path) -> None:
    data, counts = datasets.packed(tmp_path / "data"), tmp_path / "counts.json"
    ours = settings(tmp_path / "cpu", data, "mlm", stop={"steps": 4})
    found = {}
    for kind in ("cpu", "abacus"):
        file = tmp_path / f"{kind}.json"
        output = {**dump(ours)["output"], "folder": str(tmp_path / kind)}
        table = {"kind": kind, **({"beads": 3} if kind == "abacus" else {})}
        file.write_text(json.dumps({**dump(ours), "accelerator": table, "output": output}))
        regauge(package, counts, "train", str(file))
        found[kind] = losses(lines(tmp_path / kind))
    assert found["abacus"] == found["cpu"]
    saved = json.loads((tmp_path / "abacus" / "run.json").read_text())
    assert saved["accelerator"] == {"kind": "abacus", "beads": 3}
    counted = json.loads(counts.read_text())
    assert counted["updates"] == 4
    assert counted["microbatches"] >= 4 * 4
    assert counted["steps"] >= 4


def test_it_is_known_by_its_name(package: Path, tmp_path: Path) -> None:
    said = json.loads(regauge(package, tmp_path / "counts", "doctor", "--survey", "--json"))
    rows = {row["name"]: row for row in said["accelerators"]}
    assert rows["abacus"]["why"] == "it is a toy"
    assert rows["abacus"]["usable"] == "yes"
    assert said["chosen"] != "abacus"
