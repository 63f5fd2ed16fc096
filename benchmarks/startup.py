"""How long a command takes until its first step, beside Trainer and accelerate launch.

Every command is a new process; they take turns. A small BERT (4 layers of 256) does one step, not
compiled; the clock runs from the command to the end of that step, and to the end of the command.
Regauge's processes check the machine before and write a checkpoint after it; Trainer does not.

    python benchmarks/startup.py [--text FILE] [--turns N] [--json OUT]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from language import run
from peers import HERE, arguments
from recording import keep, spread
from train_mlm import LANGUAGE

from regauge.accelerators.cpu import Cpu

LENGTH = 128
SMALL = LANGUAGE._replace(width=256, layers=4)
PACKAGES = ("transformers", "accelerate")
PYTHON = sys.executable
FIRST = '"step": 1'
POLL_SECONDS = 0.01


class Command(NamedTuple):
    """What is timed."""

    name: str
    words: list[str]
    told: Path | None = None
    """The file that says when the first step was done, in a folder of its own."""


def main() -> None:
    """Time every command in turns, and write what was found."""
    parser = arguments(__doc__, "startup", turns=7, steps=1)
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        commands = made(Path(scratch), own)
        found: dict[str, list[dict[str, float]]] = {each.name: [] for each in commands}
        for number in range(own.turns + 1):
            for each in commands:
                taken = timed(each)
                sys.stderr.write(f"{number} {each.name}: {taken}\n")
                if number:  # the first one fills the page cache
                    found[each.name].append(taken)
    told = {name: figures(turns) for name, turns in found.items()}
    title = "commands until their first step"
    keep(
        own.json, title, Cpu().chip_peak("fp32"), {"turns": own.turns, "commands": told}, *PACKAGES
    )


def made(scratch: Path, own: Any) -> list[Command]:
    """Return the commands, on a dataset that all of them read."""
    tables = run(own, SMALL.sized(own), LENGTH, scratch / "data")
    tables["stop"] = {"steps": 1}
    tables["execution"] = {"compile": "off"}
    tables["evaluation"] = {"rows": 1}
    ours, theirs = scratch / "run.json", scratch / "trainer.json"
    folder = scratch / "run"
    output = {"folder": str(folder), "trackers": ("jsonl",), "log_every_steps": 1}
    ours.write_text(json.dumps(tables | {"output": output}))
    theirs.write_text(json.dumps(tables | {"output": {"folder": str(scratch / "trainer")}}))
    told = scratch / "trainer" / "told"
    script = [str(HERE / "peer_start.py"), str(theirs), str(told)]
    regauge = [PYTHON, "-m", "regauge"]
    launch = [PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    quiet = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    return [
        Command("import regauge", [PYTHON, "-c", "import regauge"]),
        Command("regauge --help", [*regauge, "--help"]),
        Command("regauge train --dry-run", [*regauge, "train", str(ours), "--dry-run"]),
        Command("regauge train", [*regauge, "train", str(ours)], folder / "metrics.jsonl"),
        Command("import torch and transformers", [PYTHON, "-c", "import torch, transformers"]),
        Command("Trainer", [PYTHON, *script], told),
        Command("accelerate launch, Trainer", [*launch, *quiet, *script], told),
    ]


def timed(command: Command) -> dict[str, float]:
    """Run a command anew; return its seconds, and those until its first step."""
    if command.told is not None:
        shutil.rmtree(command.told.parent, ignore_errors=True)
    began = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command.words, **quiet) as process:
        found = {}
        while process.poll() is None:
            if command.told and not found and FIRST in _text(command.told):
                found["first_step"] = time.perf_counter() - began
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(f"{command.name} ended with code {process.returncode}: {command.words}")
    return {**found, "seconds": time.perf_counter() - began}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def figures(turns: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median, the least and the most of each figure."""
    return {name: spread([each[name] for each in turns]) for name in turns[0]}


if __name__ == "__main__":
    main()
