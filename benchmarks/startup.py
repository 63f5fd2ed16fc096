"""Seconds until the first step of a run and until the first vector of a model, with their peers.

Every command is a new process; the commands alternate. A small BERT (4 layers of width 256) does
one step, not compiled. Regauge checks the machine before the step and writes a checkpoint after it;
Trainer does neither. all-MiniLM-L6-v2 is loaded and encodes one sentence. The seconds until the end
of the step and of the command are measured, and the processor seconds of all its processes. The
first repeat, which does not count, compiles all modules, as pip does when it installs a package.

    python benchmarks/startup.py [--text FILE] [--repeats N] [--json OUT]
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from language import prepare_run
from peers import HERE, build_parser
from predict import find_packaged_model
from recording import summarize, write_result
from train_mlm import LANGUAGE

from regauge.accelerators.cpu import Cpu

LENGTH = 128
SMALL = LANGUAGE._replace(width=256, layers=4)
PACKAGES = ("transformers", "accelerate", "sentence-transformers")
LOAD = "import regauge; regauge.load({!r}).encode('Open a file.')"
PEER_LOAD = (
    "from sentence_transformers import SentenceTransformer;"
    " SentenceTransformer({!r}).encode('Open a file.')"
)
"""Programs that load a model and encode a sentence."""
PYTHON = sys.executable
FIRST_STEP = '"step": 1'
POLL_SECONDS = 0.01
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


class Command(NamedTuple):
    """A command that is timed."""

    name: str
    words: list[str]
    step_file: Path | None = None
    """The file that gets a line after the first step; its folder has no other use."""


def main() -> None:
    """Time the commands alternately, and write the results."""
    parser = build_parser(__doc__, "startup", repeats=7, steps=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        commands = build_commands(Path(scratch), options)
        timings: dict[str, list[dict[str, float]]] = {command.name: [] for command in commands}
        environment = build_environment(Path(scratch) / "bytecode")
        for index in range(options.repeats + 1):
            for command in commands:
                timing = time_command(command, environment)
                sys.stderr.write(f"{index} {command.name}: {timing}\n")
                if index:  # the first repeat fills the page cache and compiles the modules
                    timings[command.name].append(timing)
    summaries = {name: summarize_timings(repeats) for name, repeats in timings.items()}
    title = "commands until their first step or vector"
    figures = {"repeats": options.repeats, "bytecode": "cached", "commands": summaries}
    write_result(options.json, title, Cpu().chip_peak("fp32"), figures, *PACKAGES)


def build_commands(scratch: Path, options: Any) -> list[Command]:
    """Return the commands, which all read one dataset."""
    tables = prepare_run(options, SMALL.resize(options), LENGTH, scratch / "data")
    tables["stop"] = {"steps": 1}
    tables["evaluation"] = {"rows": 1}
    run_file, peer_run_file = scratch / "run.json", scratch / "trainer.json"
    folder = scratch / "run"
    output = {"folder": str(folder), "trackers": ("jsonl",), "log_every_steps": 1}
    run_file.write_text(json.dumps(tables | {"output": output}))
    peer_output = {"folder": str(scratch / "trainer")}
    peer_run_file.write_text(json.dumps(tables | {"output": peer_output}))
    step_file = scratch / "trainer" / "step.json"
    script = [str(HERE / "peer_start.py"), str(peer_run_file), str(step_file)]
    regauge = [PYTHON, "-m", "regauge"]
    launch = [PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    quiet = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    return [
        Command("import regauge", [PYTHON, "-c", "import regauge"]),
        Command("regauge --help", [*regauge, "--help"]),
        Command("regauge train --dry-run", [*regauge, "train", str(run_file), "--dry-run"]),
        Command("regauge train", [*regauge, "train", str(run_file)], folder / "metrics.jsonl"),
        Command("import torch and transformers", [PYTHON, "-c", "import torch, transformers"]),
        Command("Trainer", [PYTHON, *script], step_file),
        Command("accelerate launch, Trainer", [*launch, *quiet, *script], step_file),
        *build_load_commands(scratch / "artifact"),
    ]


def build_load_commands(artifact: Path) -> list[Command]:
    """Export all-MiniLM-L6-v2; return the commands that load it and encode a sentence."""
    model = str(find_packaged_model())
    export = ["export", "--model", model, "--to", str(artifact), "--fast"]
    subprocess.run([PYTHON, "-m", "regauge", *export], check=True, stdout=subprocess.DEVNULL)
    return [
        Command("regauge.load of a folder", [PYTHON, "-c", LOAD.format(model)]),
        Command("regauge.load of an artifact", [PYTHON, "-c", LOAD.format(str(artifact))]),
        Command("sentence-transformers", [PYTHON, "-c", PEER_LOAD.format(model)]),
    ]


def build_environment(bytecode: Path) -> dict[str, str]:
    """Return the environment of the commands, which keep the bytecode of modules in a folder."""
    variables = {key: value for key, value in os.environ.items() if key != NO_BYTECODE}
    return {**variables, "PYTHONPYCACHEPREFIX": str(bytecode)}


def time_command(command: Command, environment: dict[str, str]) -> dict[str, float]:
    """Run a command; return its seconds, also until the first step, and its processor seconds."""
    if command.step_file is not None:
        shutil.rmtree(command.step_file.parent, ignore_errors=True)
    began, cpu_before = time.perf_counter(), read_cpu_seconds()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command.words, env=environment, **quiet) as process:
        timing = {}
        while process.poll() is None:
            if command.step_file and not timing and FIRST_STEP in _read_text(command.step_file):
                timing["first_step"] = time.perf_counter() - began
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(f"{command.name} exited with code {process.returncode}: {command.words}")
    seconds = time.perf_counter() - began
    return {**timing, "seconds": seconds, "cpu_seconds": read_cpu_seconds() - cpu_before}


def read_cpu_seconds() -> float:
    """Return the user and system time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def summarize_timings(repeats: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median, the minimum and the maximum of each figure."""
    return {name: summarize([repeat[name] for repeat in repeats]) for name in repeats[0]}


if __name__ == "__main__":
    main()
