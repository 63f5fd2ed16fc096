"""A job that is killed at any moment and started again: no record lost, none twice, equal bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from end_to_end.predicting import bits, exported, table, trained, written
from regauge import jsonl
from regauge.cli import main

RECORDS, ROWS = 6000, 150
SPOILT = 8
"""The shard with a record that is no good, which is none of those that a job looks at first."""
SHORT, LONG = 3, 30
"""Kills in a job: of a part of the suite, and of all of it."""
POLL_SECONDS = 0.01
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return exported(trained(folder), folder / "artifact")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("texts") / "texts.jsonl", RECORDS)


@pytest.fixture(scope="module")
def undisturbed(artifact: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    command = _command(artifact, source, folder, "execution.executor=inline")
    assert main(command) == 0
    return folder


def _command(artifact: Path, source: Path, folder: Path, *more: str) -> list[str]:
    run = ["predict", str(artifact), "--source", str(source), "--to", str(folder)]
    return [*run, f"predict.rows={ROWS}", *more]


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        run = [sys.executable, "-m", "regauge", *command]
        return subprocess.Popen(run, stdout=file, stderr=file, start_new_session=True)


def _ledger(folder: Path) -> list[dict[str, object]]:
    return jsonl.whole(folder / "jobs" / "0-of-1" / "ledger.jsonl")


def _wait_for_lines(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Wait until a job has committed so many shards, or has ended."""
    until = time.monotonic() + PATIENCE_SECONDS
    while len(_ledger(folder)) < count and process.poll() is None:
        assert time.monotonic() < until, "no shard was committed"
        time.sleep(POLL_SECONDS)


def _workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes that a job has started to compute, as Linux tells them."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = children.read_text().split() if children.exists() else []
    commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in found}
    return [
        pid
        for pid, path in commands.items()
        if path.exists() and b"spawn_main" in path.read_bytes()
    ]


@pytest.mark.parametrize(
    "kills", [SHORT, pytest.param(LONG, marks=pytest.mark.full)], ids=["some", "many"]
)
def test_killed_at_random_moments(
    artifact: Path, source: Path, undisturbed: Path, tmp_path: Path, kills: int
) -> None:
    draw, folder, log = np.random.default_rng(kills), tmp_path / "out", tmp_path / "log"
    command = _command(artifact, source, folder, "execution.workers=2")
    done = 0
    for number in range(kills):
        process = _started(command, log)
        # Every third one dies while it starts; the others in the midst of their shards.
        if number % 3:
            _wait_for_lines(process, folder, done + 1)
            time.sleep(draw.uniform(0, 0.1))
        else:
            time.sleep(draw.uniform(0, 4.0))
        # Half of the time the first process alone: what it started must not outlive it.
        with suppress(ProcessLookupError):
            (os.killpg if draw.random() < 0.5 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        done = len(_ledger(folder))
    assert _started(command, log).wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert bits(folder) == bits(undisturbed)
    assert table(folder)["id"].to_pylist() == list(range(RECORDS))
    finished = [(line["piece"], line["part"]) for line in _ledger(folder)]
    assert len(finished) == len(set(finished)) == RECORDS // ROWS


def test_a_lost_worker_is_replaced_and_its_shard_given_to_another(
    artifact: Path, source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    command = _command(artifact, source, folder, "execution.workers=2")
    process = _started(command, log)
    _wait_for_lines(process, folder, 3)
    os.kill(_workers(process)[0], signal.SIGKILL)
    assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert "another takes its place" in log.read_text()
    assert bits(folder) == bits(undisturbed)


@pytest.mark.full
def test_a_worker_that_says_nothing_is_replaced(
    artifact: Path, source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    more = ("execution.workers=2", "execution.hang_seconds=20")
    process = _started(_command(artifact, source, folder, *more), log)
    _wait_for_lines(process, folder, 1)
    os.kill(_workers(process)[1], signal.SIGSTOP)
    assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert "said nothing for 20 s" in log.read_text()
    assert bits(folder) == bits(undisturbed)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_told_to_stop_it_says_how_to_go_on(
    artifact: Path, source: Path, undisturbed: Path, tmp_path: Path, number: int
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = _started(_command(artifact, source, folder), log)
    _wait_for_lines(process, folder, 2)
    os.kill(process.pid, number)
    assert process.wait(PATIENCE_SECONDS) == 143, log.read_text()
    assert "told to stop; run it again: it goes on where it is" in log.read_text()
    assert len(_ledger(folder)) < RECORDS // ROWS
    assert main(_command(artifact, source, folder, "execution.executor=inline")) == 0
    assert bits(folder) == bits(undisturbed)


def test_two_commands_do_not_write_one_share(
    artifact: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = _started(_command(artifact, source, folder), log)
    _wait_for_lines(process, folder, 1)
    assert main(_command(artifact, source, folder)) == 2
    assert "is being written by process" in capsys.readouterr().err
    process.kill()
    process.wait()


@pytest.mark.full
def test_a_shard_that_ends_every_process_ends_the_job(
    artifact: Path, source: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    run = _spoilt(tmp_path, artifact, source, "os._exit(3)")
    assert _started(run, log).wait(PATIENCE_SECONDS) == 66, log.read_text()
    assert f"shard 000000-{SPOILT:05} ended 3 processes" in log.read_text()
    assert [line["part"] for line in _ledger(folder)] == list(range(SPOILT))


@pytest.mark.full
@pytest.mark.parametrize(("often", "code"), [(2, 0), (99, 75)])
def test_what_may_work_the_next_time_is_tried_again(
    artifact: Path, source: Path, undisturbed: Path, tmp_path: Path, often: int, code: int
) -> None:
    folder, log, tries = tmp_path / "out", tmp_path / "log", tmp_path / "tries"
    line = "raise TransientError('the shelf does not answer', 'wait for it')"
    run = _spoilt(tmp_path, artifact, source, f"tried('{tries}') <= {often} and fail()", line)
    assert _started(run, log).wait(PATIENCE_SECONDS) == code, log.read_text()
    lost = log.read_text().count("failed: the shelf does not answer")
    assert len(tries.read_text()) == lost + 1
    if code:
        assert lost >= 2, "a loss may be blamed on a shard that is answered meanwhile"
        assert log.read_text().endswith("the shelf does not answer; wait for it\n")
    else:
        assert lost == often
        assert bits(folder) == bits(undisturbed)


def _spoilt(
    folder: Path, artifact: Path, source: Path, spoil: str, fail: str = "pass"
) -> list[str]:
    """Return a command that answers records of which one runs a statement when it is read."""
    (folder / "own_source.py").write_text(
        f"SPOILT = {SPOILT * ROWS + 1}\n"
        "import os\n"
        "from pathlib import Path\n"
        "from regauge.data.sources.jsonl import JsonLines\n"
        "from regauge.errors import TransientError\n"
        "def fail():\n"
        f"    {fail}\n"
        "def tried(path):\n"
        "    'Return how often a record was read, this time included.'\n"
        "    with Path(path).open('a') as file:\n"
        "        file.write('x')\n"
        "    return Path(path).stat().st_size\n"
        "class Spoilt(JsonLines):\n"
        "    'Records of which one is no good.'\n"
        "    def read(self, piece):\n"
        "        for number, found in enumerate(super().read(piece)):\n"
        "            if number == SPOILT:\n"
        f"                {spoil}\n"
        "            yield found\n"
    )
    run = {
        "artifact": str(artifact),
        "source": {"kind": "own_source:Spoilt", "files": [str(source)]},
        "output": {"folder": str(folder / "out")},
        "predict": {"rows": ROWS},
    }
    (folder / "run.toml").write_text(_toml(run))
    return ["predict", str(folder / "run.toml")]


def _toml(tables: dict[str, object]) -> str:
    """Return tables one level deep as TOML."""
    said = [
        f"{key} = {json.dumps(value)}" for key, value in tables.items() if isinstance(value, str)
    ]
    for key, table_of in tables.items():
        if isinstance(table_of, dict):
            said += [
                f"[{key}]",
                *(f"{name} = {json.dumps(value)}" for name, value in table_of.items()),
            ]
    return "\n".join(said)
