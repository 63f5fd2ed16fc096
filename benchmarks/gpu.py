"""Measures what needs a GPU: a list of steps, the most valuable first, for a machine lent briefly.

Each step is a child process with a time limit. Its result is written as soon as it ends, with the
chip, versions and date. The next start skips steps that were measured with the same sources on the
same chip. If a requirement is missing, the step is not measured and the result has the reason.
`--small` runs the same steps with tiny models on the CPU, to find bugs; its speeds mean nothing.

    python benchmarks/gpu.py [STEP …] [--again STEP …] [--small] [--limit SECONDS] [--json OUT]

The exit code is 1 if a step failed. `gpu_steps.py` has the steps.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_steps import HERE, ROOT, STEPS
from recording import RESULTS
from turns import kill_session

from regauge.accelerators.cpu import Cpu
from regauge.registry.lineage import describe_code
from regauge.system import children
from regauge.system.files import write_json

OUT = Path("out/gpu")
LIMIT_SECONDS = 480.0
NUM_LAST_LINES = 30
"""Lines of the log of a failed step in its result."""


def main() -> None:
    """Run the steps, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"default: {' '.join(STEPS)}")
    parser.add_argument("--again", nargs="+", default=[], choices=STEPS, help="measure again")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of a step")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu.json")
    options = parser.parse_args()
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"unknown steps: {', '.join(unknown)}")
    path = options.json or (OUT / "small.json" if options.small else RESULTS / "gpu.json")
    facts = describe_machine(is_small=options.small)
    folder = OUT.absolute() / f"{facts['sources'][:12]}{'-small' * options.small}"
    small = ["--small"] if options.small else []
    commands = {
        name: [sys.executable, str(HERE / "gpu_steps.py"), *small, name, str(folder)]
        for name in options.steps or STEPS
    }
    sys.exit(run_steps(commands, path, facts, options.limit, options.again))


def describe_machine(*, is_small: bool) -> dict[str, Any]:
    """Return the chip, its driver, the versions and the sources."""
    chip, driver = Cpu().model_name(), None
    if not is_small and (program := shutil.which("nvidia-smi")):
        query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        chip, driver = output.splitlines()[0].split(", ")
    versions = {name: version(name) for name in ("torch", "transformers")}
    code = {"commit": describe_code().get("commit"), "sources": hash_sources()}
    return {"chip": chip, "driver": driver, "versions": versions, "small": is_small, **code}


def hash_sources() -> str:
    """Return the SHA-256 of the package and of the benchmarks: changes may be uncommitted."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *HERE.glob("*.py")]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def run_steps(
    commands: Mapping[str, list[str]],
    path: Path,
    facts: dict[str, Any],
    limit: float,
    again: Collection[str] = (),
) -> int:
    """Run the commands that have no result of the same sources and chip; return the exit code."""
    results = json.loads(path.read_text())["steps"] if path.exists() else {}
    keys = ("sources", "chip", "small")
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        last = results.get(name, {})
        is_same = all(last.get(key) == facts[key] for key in keys)
        if last.get("status") == "measured" and is_same and name not in again:
            sys.stderr.write(f"{name}: measured before\n")
            continue
        sys.stderr.write(f"{name}: …\n")
        date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        results[name] = facts | {"date": date} | run_step(command, limit)
        write_json(path, {"benchmark": "one GPU", "steps": results})
        reason = results[name].get("reason", f"{results[name]['seconds']} s")
        sys.stderr.write(f"{name}: {results[name]['status']}, {reason}\n")
    return int(any(results[name]["status"] == "failed" for name in commands))


def run_step(command: list[str], limit: float) -> dict[str, Any]:
    """Run a command with the path of its result; kill its session after the limit."""
    with tempfile.TemporaryDirectory() as scratch:
        log, file, began = Path(scratch) / "log", Path(scratch) / "result.json", time.perf_counter()
        child = children.spawn([*command, str(file)], log, {}, new_session=True)
        try:
            code = child.wait(limit)
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, f"not finished after {limit:g} s"
        finally:
            kill_session(child)
        seconds = {"seconds": round(time.perf_counter() - began, 1)}
        if code:
            lines = log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
            return seconds | {"status": "failed", "reason": reason, "last_lines": lines}
        result = json.loads(file.read_text())
        return seconds | {"status": "measured" if "figures" in result else "not measured"} | result


if __name__ == "__main__":
    main()
