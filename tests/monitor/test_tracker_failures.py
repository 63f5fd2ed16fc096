"""A tracker on a full disk, and one whose service is down, delay neither a step nor the exit."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from regauge.system.processes import find_free_port

SCRIPT = """
import json, sys, time
from pathlib import Path
from regauge import config
from regauge.system import log
from regauge.monitoring.trackers import RunInfo, start_trackers

log.configure()
folder, table = Path(sys.argv[1]), json.loads(sys.argv[2])
tracker = config.parse_choice("trackers", table)
slowest = 0.0
with start_trackers([tracker], RunInfo("pairs", "a1b2", folder)) as group:
    for step in range(1, 2001):
        values = {f"train/metric-{number}": float(step) for number in range(20)}
        start = time.monotonic()
        group.log(step, values)
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.001)
    start = time.monotonic()
    group.finish({"steps": 2000})
print(json.dumps({"slowest": slowest, "close": time.monotonic() - start, "end": time.monotonic()}))
"""
MAX_STEP_SECONDS = 0.5
"""Far above the time of a call on a loaded machine, far below any timeout of a service."""
WAIT_SECONDS = 2.0
MAX_EXIT_SECONDS = 12.0
TABLES: dict[str, dict[str, Any]] = {
    "tensorboard": {"kind": "tensorboard", "wait_seconds": WAIT_SECONDS},
    "mlflow": {"kind": "mlflow", "wait_seconds": WAIT_SECONDS},
    "wandb": {"kind": "wandb", "mode": "offline", "wait_seconds": WAIT_SECONDS},
}
DOWN: dict[str, dict[str, Any]] = {
    "mlflow": {"uri": "http://127.0.0.1:{port}"},
    "wandb": {"mode": "online"},
}


def require(kind: str) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed: its failures are not proved")


def run_tracker(
    folder: Path, table: dict[str, Any], variables: dict[str, str], *prefix: str
) -> tuple[dict[str, float], str]:
    """Record a run in another process; return its times in seconds, and its log."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WANDB")}
    home = {"HOME": str(folder.parent)}
    result = subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT, str(folder), json.dumps(table)],
        env=environment | home | variables,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    times = json.loads(result.stdout.splitlines()[-1])
    return times, result.stderr


def assert_no_delay(times: dict[str, float], ended_at: float) -> None:
    assert times["slowest"] < MAX_STEP_SECONDS
    assert times["close"] < WAIT_SECONDS + 1
    assert ended_at - times["end"] < MAX_EXIT_SECONDS


def full_disk(folder: Path) -> list[str]:
    """Return a command prefix that mounts a disk of 16 KiB at a folder, for one process."""
    mount = 'mount -t tmpfs -o size=16k none "$0" && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("no mount of a small disk is possible here: a full disk is not proved")
    return prefix


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", TABLES)
def test_a_full_disk_delays_neither_a_step_nor_the_exit(kind: str, tmp_path: Path) -> None:
    require(kind)
    folder = tmp_path / "run"
    folder.mkdir()
    times, log = run_tracker(folder, TABLES[kind], {}, *full_disk(folder))
    assert_no_delay(times, time.monotonic())
    assert "Traceback" not in log
    if kind != "wandb":  # its client reports no error of the disk
        assert "not delivered to" in log


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", DOWN)
def test_a_service_that_is_down_delays_neither_a_step_nor_the_exit(
    kind: str, tmp_path: Path
) -> None:
    require(kind)
    port = find_free_port()
    down = {key: value.format(port=port) for key, value in DOWN[kind].items()}
    variables = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "a" * 40}
    times, log = run_tracker(tmp_path / "run", TABLES[kind] | down, variables)
    assert_no_delay(times, time.monotonic())
    assert "Traceback" not in log
