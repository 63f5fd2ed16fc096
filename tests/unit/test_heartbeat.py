"""Heartbeats that are read while they are written."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from regauge.supervision.heartbeat import PHASES, Heartbeat, HeartbeatTable

WRITER = """
import sys
from pathlib import Path
from regauge.supervision.heartbeat import PHASES, Heartbeat
heartbeat = Heartbeat(Path(sys.argv[1]), 1)
while True:
    for phase in PHASES:
        heartbeat.beat(phase)
"""
SECONDS = 1.5


def test_a_heartbeat_is_never_read_half_written(tmp_path: Path) -> None:
    table = HeartbeatTable(tmp_path / "heartbeats", 2)
    began = time.monotonic()
    command = [sys.executable, "-c", WRITER, str(tmp_path / "heartbeats")]
    with subprocess.Popen(command) as writer:
        try:
            while table.read(1).count == 0:
                assert time.monotonic() < began + 60
            last, until = table.read(1), time.monotonic() + SECONDS
            while time.monotonic() < until:
                beat = table.read(1)
                assert beat.at >= last.at >= began
                assert beat.count >= last.count > 0
                assert PHASES.index(beat.phase) == (beat.count - 1) % len(PHASES)
                last = beat
        finally:
            writer.kill()
    assert last.count > 1000
    assert table.read(0).count == 0


def test_a_heartbeat_keeps_the_last_phase_and_step(tmp_path: Path) -> None:
    table = HeartbeatTable(tmp_path / "heartbeats", 1)
    heartbeat = Heartbeat(tmp_path / "heartbeats", 0)
    heartbeat.beat("step", step=7)
    heartbeat.beat()
    beat = table.read(0)
    assert (beat.count, beat.step, beat.phase) == (2, 7, "step")
