"""The graph cache of a lazy device has the same keys at a second start.

XLA's CPU client writes executables and cannot read them. So only torch's compiler proves on the CPU
that a second start compiles nothing (tests/end_to_end/test_compile.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge import accelerators
from regauge.config import dump
from regauge.system import choices

LAZY_KINDS = [
    kind
    for kind, availability in accelerators.survey().items()
    if availability.fitness > 0 and choices.load("accelerators", kind)().is_lazy
]
NO_DEVICE = "this machine has no lazy device: not proved that a second start has the same graphs"


@pytest.mark.skipif(not LAZY_KINDS, reason=NO_DEVICE)
@pytest.mark.parametrize("kind", LAZY_KINDS)
def test_a_second_start_has_the_same_graphs(kind: str, tmp_path: Path) -> None:
    data, graphs = datasets.write_packed(tmp_path / "data"), tmp_path / "graphs"
    keys = []
    for name, steps in (("first", 4), ("second", 9)):
        run = settings(
            tmp_path / name,
            data,
            "mlm",
            accelerator=kind,
            execution={"compile_cache": str(graphs)},
            evaluation={"every_steps": 3},
            stop={"steps": steps},
        )
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(dump(run)))
        line = [sys.executable, "-m", "regauge", "train", str(file)]
        process = subprocess.run(line, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        (path,) = graphs.glob("*/entry.json")
        keys.append(sorted(json.loads(path.read_text())["files"]))
    assert keys[0]
    assert keys[0] == keys[1]
