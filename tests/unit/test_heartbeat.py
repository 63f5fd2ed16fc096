"""Signs of life that are read while they are written."""

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


def test_a_sign_is_never_torn(tmp_path: Path) -> None:
    pulses = HeartbeatTable(tmp_path / "pulse", 2)
    began = time.monotonic()
    command = [sys.executable, "-c", WRITER, str(tmp_path / "pulse")]
    with subprocess.Popen(command) as writer:
        try:
            while pulses.read(1).count == 0:
                assert time.monotonic() < began + 60
            seen, until = pulses.read(1), time.monotonic() + SECONDS
            while time.monotonic() < until:
                sign = pulses.read(1)
                assert sign.at >= seen.at >= began
                assert sign.count >= seen.count > 0
                assert PHASES.index(sign.phase) == (sign.count - 1) % len(PHASES)
                seen = sign
        finally:
            writer.kill()
    assert seen.count > 1000
    assert pulses.read(0).count == 0


def test_a_sign_keeps_what_it_does_not_say(tmp_path: Path) -> None:
    pulses = HeartbeatTable(tmp_path / "pulse", 1)
    pulse = Heartbeat(tmp_path / "pulse", 0)
    pulse.beat("step", step=7)
    pulse.beat()
    found = pulses.read(0)
    assert (found.count, found.step, found.phase) == (2, 7, "step")
