"""A signal ends an export with the exit code of a shell, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regauge.system import timing

TIMEOUT_SECONDS = 120.0
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("number", EXIT_CODES)
@pytest.mark.parametrize("delay_seconds", [0.0, pytest.param(1.0, marks=pytest.mark.full)])
def test_a_signal_ends_an_export(
    model: Path, number: signal.Signals, delay_seconds: float, tmp_path: Path
) -> None:
    target, log, temporary = tmp_path / "artifact", tmp_path / "log.txt", tmp_path / "tmp"
    temporary.mkdir()
    options = ["candidates.backends=['eager']", "candidates.timing_seconds=2", "--to", str(target)]
    command = [sys.executable, "-m", "regauge", "export", str(model), *options]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
    staging = tmp_path / ".artifact.part"
    assert timing.wait_for(staging.exists, TIMEOUT_SECONDS, poll_seconds=0.01)
    time.sleep(delay_seconds)
    os.killpg(process.pid, number)
    text = log.read_text
    assert process.wait(TIMEOUT_SECONDS) == EXIT_CODES[number], text(encoding="utf-8")
    assert "Traceback" not in text(encoding="utf-8")
    assert not target.exists()
    assert not staging.exists()
    assert not list(temporary.iterdir())
