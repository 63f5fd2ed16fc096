"""The memory of predict does not grow with the number of records."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from end_to_end.predicting import export_run, train_model, write_records

SMALL, LARGE, ROWS = 20_000, 100_000, 4096
MAX_GROWTH_MB = 60
"""Allows for the allocator, but not for 80,000 records with vectors, ids and texts."""
PEAK = """
import resource, sys
from regauge.cli import main
code = main(sys.argv[1:])
print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
sys.exit(code)
"""


@pytest.mark.full
def test_peak_memory_does_not_grow_with_the_records(
    tmp_path: Path, report_peak: Callable[[str], None]
) -> None:
    artifact = export_run(train_model(tmp_path), tmp_path / "artifact")
    peaks = []
    for count in (SMALL, LARGE):
        source = write_records(tmp_path / f"{count}.jsonl", count)
        out = tmp_path / f"out-{count}"
        run = ["predict", str(artifact), "--source", str(source), "--to", str(out)]
        run += ["execution.executor=inline", f"predict.shard_records={ROWS}"]
        command = [sys.executable, "-c", PEAK, *run]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        match = re.search(r"^peak (\d+)$", result.stdout, flags=re.MULTILINE)
        assert match is not None
        peaks.append(int(match[1]))
    report_peak(f"peak memory of {SMALL:,} and {LARGE:,} records: {peaks[0]} and {peaks[1]} MB")
    assert peaks[1] - peaks[0] < MAX_GROWTH_MB


@pytest.fixture
def report_peak(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return a function that prints a line although pytest captures output."""

    def print_line(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return print_line
