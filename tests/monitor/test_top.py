"""`regauge top` in a real terminal (tmux), on a real run of two processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from distributed.conftest import runs, worlds
from faults.conftest import Jobs, jobs
from monitor.terminal import Terminal, terminal
from regauge.run_folders.node_status import read_node_statuses

__all__ = ["jobs", "runs", "terminal", "worlds"]
PATIENT = {"timeout_seconds": 300}
"""The first step of a process may take a minute if other programs use the processor."""
ENDLESS: dict[str, Any] = {
    "stop": {"steps": 1_000_000, "usd": 2.0},
    "execution": {"price": {"usd_per_hour": 3.0}, **PATIENT},
}


def find_row(screen: str, rank: int) -> list[str]:
    """Return the cells of a rank in the table of a screen."""
    rows = [line.split() for line in screen.splitlines()]
    return next((cells for cells in rows if cells and cells[0] == str(rank)), [])


def test_a_live_run_with_a_stopped_and_a_killed_rank(jobs: Jobs, terminal: Terminal) -> None:
    job = jobs.create(**ENDLESS).start()
    job.wait_for_step(2)
    terminal.start("top", str(job.folder))
    screen = terminal.wait_for(lambda text: all("alive" in find_row(text, r) for r in (0, 1)))
    assert f"{job.folder.name}  train  running" in screen
    assert re.search(r"/1,000,000 steps [█░]+ +\d+\.\d%", screen)
    assert re.search(r"budget +\$2\.00", screen)
    first = int(find_row(screen, 0)[3].replace(",", ""))
    terminal.wait_for(lambda text: int(find_row(text, 0)[3].replace(",", "")) > first)

    terminal.resize(200, 50)
    screen = terminal.wait_for(lambda text: "q quit" in text.splitlines()[49])
    heading = next(line for line in screen.splitlines() if line.startswith("RANK"))
    assert heading.endswith("EVENTS  none yet") or "EVENTS" in heading
    terminal.resize(80, 24)
    terminal.wait_for(lambda text: "q quit" in text.splitlines()[23])

    pid = read_node_statuses(job.folder)[0].processes[1].pid
    os.kill(pid, signal.SIGSTOP)
    terminal.wait_for(lambda text: "stopped" in find_row(text, 1))
    os.kill(pid, signal.SIGKILL)
    terminal.wait_for("killed (SIGKILL)")
    terminal.wait_for("attempt 1 failed (process)")
    terminal.wait_for("attempt 2 started")

    before = {path: path.stat().st_mtime_ns for path in job.folder.glob("*.json*")}
    assert before  # the view is a reader: the run alone writes
    terminal.press("q")
    screen = terminal.wait_for("code=0")
    assert "RANK" not in screen  # the screen of the shell is back
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert job.code == 128 + signal.SIGTERM


def test_a_finished_run_and_a_vanished_folder(jobs: Jobs, terminal: Terminal) -> None:
    job = jobs.create(stop={"steps": 8}, execution=PATIENT).start().wait()
    assert job.code == 0, job.stderr
    terminal.start("top", str(job.folder), variables={"NO_COLOR": "1"})
    screen = terminal.wait_for("finished")
    assert "8/8 steps" in screen
    assert [find_row(screen, rank)[1] for rank in (0, 1)] == ["ended", "ended"]
    assert "attempt 1 finished" in screen
    codes = re.findall(r"\x1b\[([\d;]*)m", terminal.read(with_colors=True))
    colors = re.compile(r"(^|;)(3[0-8]|4[0-8]|9\d|10\d)(;|$)")  # 39 and 49 are the defaults
    assert not list(filter(colors.search, codes)), codes

    job.folder.rename(job.folder.with_name("moved"))
    terminal.wait_for("does not exist")
    job.folder.with_name("moved").rename(job.folder)
    terminal.wait_for(lambda text: "does not exist" not in text)
    terminal.press("C-c")
    terminal.wait_for("code=0")


def test_without_a_terminal_it_prints_one_snapshot(jobs: Jobs) -> None:
    job = jobs.create(stop={"steps": 4}, execution=PATIENT).start().wait()
    assert job.code == 0, job.stderr
    metrics = job.folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"attempt": 1, "step": 4, "tr')
    command = [sys.executable, "-m", "regauge", "top", str(job.folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 80
    assert "4/4 steps" in text.stdout
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(answer.stdout)
    assert document["state"] == "finished"
    assert document["progress"] == {"unit": "steps", "done": 4, "total": 4, "eta_seconds": 0.0}
    assert [row["state"] for row in document["ranks"]] == ["ended", "ended"]
    assert document["rates"]["loss"] > 0
    assert text.stderr == answer.stderr == ""


def test_it_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    program = (
        "import sys; from regauge.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(code)"
    )
    for arguments in (["top", str(tmp_path)], ["runs", "list", str(tmp_path)]):
        subprocess.run([sys.executable, "-c", program, *arguments], check=True)
