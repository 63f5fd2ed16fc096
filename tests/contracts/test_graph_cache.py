"""A lazy device asks its kept graphs for the same keys at a second start, and for no others.

XLA's client for the CPU writes executables and cannot read them back, so that a second start that
compiles nothing is proved for the CPU by torch's compiler alone (tests/end_to_end/test_compile.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge import accelerators, choices
from regauge.config import dump

HERE = [
    kind
    for kind, found in accelerators.survey().items()
    if found.fitness > 0 and choices.load("accelerators", kind)().lazy
]
NOBODY = "no lazy device is here: that a second start asks for the same graphs is not proved"


@pytest.mark.skipif(not HERE, reason=NOBODY)
@pytest.mark.parametrize("kind", HERE)
def test_a_second_start_asks_for_the_same_graphs(kind: str, tmp_path: Path) -> None:
    data, graphs = datasets.packed(tmp_path / "data"), tmp_path / "graphs"
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
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (path,) = graphs.glob("*/entry.json")
        keys.append(sorted(json.loads(path.read_text())["files"]))
    assert keys[0]
    assert keys[0] == keys[1]
