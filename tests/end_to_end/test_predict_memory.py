"""Any number of records is answered in the memory of a few shards."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from end_to_end.predicting import exported, trained, written

SMALL, LARGE, ROWS = 20_000, 100_000, 4096
MOST_MB = 60
"""Between the two: what an allocator keeps, and not 80,000 records of 32 vectors, ids and texts."""
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
    artifact = exported(trained(tmp_path), tmp_path / "artifact")
    peaks = []
    for count in (SMALL, LARGE):
        source = written(tmp_path / f"{count}.jsonl", count)
        out = tmp_path / f"out-{count}"
        run = ["predict", str(artifact), "--source", str(source), "--to", str(out)]
        run += ["execution.executor=inline", f"predict.rows={ROWS}"]
        command = [sys.executable, "-c", PEAK, *run]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"^peak (\d+)$", done.stdout, flags=re.MULTILINE)
        assert found is not None
        peaks.append(int(found[1]))
    report_peak(f"peak memory of {SMALL:,} and {LARGE:,} records: {peaks[0]} and {peaks[1]} MB")
    assert peaks[1] - peaks[0] < MOST_MB


@pytest.fixture
def report_peak(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return a function that prints a line past pytest's capture."""

    def say(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return say
