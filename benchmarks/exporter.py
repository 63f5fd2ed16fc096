"""The cost of exporting metrics per step: the same run without and with a scraped exporter.

    python benchmarks/exporter.py RUN.toml [--rounds 3] [key.path=value …]

Runs alternate (A B A B). With the exporter, the metrics are scraped once a second, more often than
any Prometheus does by default. Prints the seconds per step of both, and their relative difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from regauge.monitoring.exporter import find_targets
from regauge.system import jsonl

SCRAPE_SECONDS = 1.0
MAX_COST = 0.005
"""Share of a step that exporting may cost."""


def measure_step_seconds(run_file: Path, overrides: list[str], folder: Path) -> float:
    """Run to the end, scraping the exporters meanwhile; return the seconds of steps per step."""
    command = [sys.executable, "-m", "regauge", "train", str(run_file), *overrides]
    with subprocess.Popen(
        [*command, f"output.folder={folder}"], stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            for target in find_targets(folder):
                with suppress(OSError):
                    urllib.request.urlopen(f"http://{target}/metrics", timeout=5).close()
            time.sleep(SCRAPE_SECONDS)
    if process.returncode:
        raise SystemExit(process.returncode)
    lines = jsonl.read_lines(folder / "ledger.jsonl")
    first, last = lines[0], lines[-1]  # the first interval includes the warm-up
    seconds: float = last["seconds"]["step"] - first["seconds"]["step"]
    num_steps: int = last["step"] - first["step"]
    return seconds / num_steps


def main() -> dict[str, Any]:
    """Print the result as JSON; the exit code is 1 if exporting costs too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_intermixed_args()
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as parent:
        for number in range(options.rounds):
            for name, port in (("off", []), ("on", ["monitoring.port=0"])):
                folder = Path(parent) / f"{name}-{number}"
                overrides = [*options.overrides, *port]
                seconds[name].append(measure_step_seconds(options.run_file, overrides, folder))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    cost = medians["on"] / medians["off"] - 1
    return {"step_seconds": seconds, "cost": round(cost, 5), "is_within_limit": cost < MAX_COST}


if __name__ == "__main__":
    result = main()
    print(json.dumps(result, indent=1))  # noqa: T201 (the result of a script)
    sys.exit(not result["is_within_limit"])
