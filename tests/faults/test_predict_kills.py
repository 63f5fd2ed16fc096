"""Inference jobs that are killed and restarted: each record once, and equal bytes."""

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

from distributed import datasets
from end_to_end.predicting import (
    read_output_files,
    read_table,
    train_model,
    write_records,
)
from regauge.cli import main
from regauge.system import jsonl

RECORDS, ROWS = 6000, 150
BAD_SHARD = 8
"""The shard with a bad record; it is not among the shards that a job inspects first."""
FEW_KILLS, MANY_KILLS = 3, 30
"""Kills in a job: by default, and in the full suite."""
POLL_SECONDS = 0.01
TIMEOUT_SECONDS = 120.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("texts") / "texts.jsonl", RECORDS)


@pytest.fixture(scope="module")
def expected_folder(artifact: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    command = _build_command(artifact, source, folder, "execution.executor=inline")
    assert main(command) == 0
    return folder


def _build_command(artifact: Path, source: Path, folder: Path, *more: str) -> list[str]:
    run = ["predict", str(artifact), "--source", str(source), "--to", str(folder)]
    return [*run, f"predict.shard_records={ROWS}", *more]


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        run = [sys.executable, "-m", "regauge", *command]
        return subprocess.Popen(run, stdout=file, stderr=file, start_new_session=True)


def _read_ledger(folder: Path) -> list[dict[str, object]]:
    return jsonl.read_lines(folder / "jobs" / "0-of-1" / "ledger.jsonl")


def _wait_for_lines(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Wait until a job has committed this many shards, or has ended."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while len(_read_ledger(folder)) < count and process.poll() is None:
        assert time.monotonic() < until, "no shard was committed"
        time.sleep(POLL_SECONDS)


def _list_workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the worker processes of a job, from /proc."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = children.read_text().split() if children.exists() else []
    commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in pids}
    return [
        pid
        for pid, path in commands.items()
        if path.exists() and b"spawn_main" in path.read_bytes()
    ]


@pytest.mark.parametrize(
    "kills", [FEW_KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.full)], ids=["some", "many"]
)
def test_a_job_survives_kills_at_random_moments(
    artifact: Path, source: Path, expected_folder: Path, tmp_path: Path, kills: int
) -> None:
    draw, folder, log = np.random.default_rng(kills), tmp_path / "out", tmp_path / "log"
    command = _build_command(artifact, source, folder, "execution.workers=2")
    done = 0
    for number in range(kills):
        process = _start(command, log)
        # Every third kill hits the start; the others hit the computation of a shard.
        if number % 3:
            _wait_for_lines(process, folder, done + 1)
            time.sleep(draw.uniform(0, 0.1))
        else:
            time.sleep(draw.uniform(0, 4.0))
        # Half of the kills hit the first process alone: its workers must not outlive it.
        with suppress(ProcessLookupError):
            (os.killpg if draw.random() < 0.5 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        done = len(_read_ledger(folder))
    assert _start(command, log).wait(TIMEOUT_SECONDS) == 0, log.read_text()
    assert read_output_files(folder) == read_output_files(expected_folder)
    assert read_table(folder)["id"].to_pylist() == list(range(RECORDS))
    finished = [(line["piece"], line["part"]) for line in _read_ledger(folder)]
    assert len(finished) == len(set(finished)) == RECORDS // ROWS


@pytest.mark.full
def test_a_lost_worker_is_replaced_and_its_shard_computed_again(
    artifact: Path, source: Path, expected_folder: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    command = _build_command(artifact, source, folder, "execution.workers=2")
    process = _start(command, log)
    _wait_for_lines(process, folder, 3)
    os.kill(_list_workers(process)[0], signal.SIGKILL)
    assert process.wait(TIMEOUT_SECONDS) == 0, log.read_text()
    assert "starting another" in log.read_text()
    assert read_output_files(folder) == read_output_files(expected_folder)


@pytest.mark.full
def test_a_worker_that_hangs_is_replaced(
    artifact: Path, source: Path, expected_folder: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    more = ("execution.workers=2", "execution.hang_timeout_seconds=20")
    process = _start(_build_command(artifact, source, folder, *more), log)
    _wait_for_lines(process, folder, 1)
    os.kill(_list_workers(process)[1], signal.SIGSTOP)
    assert process.wait(TIMEOUT_SECONDS) == 0, log.read_text()
    assert "reported no progress for 20 s" in log.read_text()
    assert read_output_files(folder) == read_output_files(expected_folder)


@pytest.mark.full
@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_a_killed_job_resumes_with_text_files(
    artifact: Path, source: Path, tmp_path: Path, file_format: str
) -> None:
    more, records = (f"output.format={file_format}",), 4 * ROWS
    few = tmp_path / "few.jsonl"
    few.write_text("".join(source.read_text().splitlines(keepends=True)[:records]))
    expected, folder, log = tmp_path / "expected", tmp_path / "out", tmp_path / "log"
    inline = "execution.executor=inline"
    assert main(_build_command(artifact, few, expected, inline, *more)) == 0
    process = _start(_build_command(artifact, few, folder, *more), log)
    _wait_for_lines(process, folder, 1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first = folder / "shards" / f"000000-00000.{file_format}"
    first.write_bytes(first.read_bytes().replace(b"0.0", b"0.1", 1))  # damaged later
    assert main(_build_command(artifact, few, folder, inline, *more)) == 0
    assert read_output_files(folder) == read_output_files(expected)
    assert len(read_output_files(folder)) == records // ROWS
    text = b"".join(data for _, data in sorted(read_output_files(folder).items()))
    assert text.count(b"embedding") == (records if file_format == "jsonl" else records // ROWS)


@pytest.mark.full
def test_a_killed_job_resumes_with_the_same_drawn_texts(
    source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = train_model(tmp_path_factory.mktemp("writer"), "sft", datasets.write_chats)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(source.read_text().splitlines(keepends=True)[:60]))
    options = ("output.format=jsonl", "generation.temperature=1.0", "predict.shard_records=12")
    expected, folder, log = tmp_path / "expected", tmp_path / "out", tmp_path / "log"
    inline = "execution.executor=inline"
    assert main(_build_command(run, few, expected, *options, inline)) == 0
    process = _start(_build_command(run, few, folder, *options), log)
    _wait_for_lines(process, folder, 2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 2 <= len(_read_ledger(folder)) < 5, log.read_text()
    assert main(_build_command(run, few, folder, *options, inline)) == 0
    assert read_output_files(folder) == read_output_files(expected)
    texts = b"".join(data for _, data in sorted(read_output_files(folder).items()))
    lines = [json.loads(line) for line in texts.splitlines()]
    assert [line["id"] for line in lines] == list(range(60))
    assert len({line["generated_text"] for line in lines}) > 50


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_stopped_job_explains_how_to_resume(
    artifact: Path, source: Path, expected_folder: Path, tmp_path: Path, number: int
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = _start(_build_command(artifact, source, folder), log)
    _wait_for_lines(process, folder, 2)
    os.kill(process.pid, number)
    assert process.wait(TIMEOUT_SECONDS) == 128 + number, log.read_text()
    assert "stopped by a signal; run the command again to resume" in log.read_text()
    assert len(_read_ledger(folder)) < RECORDS // ROWS
    assert main(_build_command(artifact, source, folder, "execution.executor=inline")) == 0
    assert read_output_files(folder) == read_output_files(expected_folder)


@pytest.mark.full
def test_two_commands_cannot_write_one_share(
    artifact: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = _start(_build_command(artifact, source, folder), log)
    _wait_for_lines(process, folder, 1)
    assert main(_build_command(artifact, source, folder)) == 2
    assert "is being written by process" in capsys.readouterr().err
    process.kill()
    process.wait()


@pytest.mark.full
def test_a_shard_that_kills_every_worker_ends_the_job(
    artifact: Path, source: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    run = _write_bad_source(tmp_path, artifact, source, "os._exit(3)")
    assert _start(run, log).wait(TIMEOUT_SECONDS) == 66, log.read_text()
    assert f"shard 000000-{BAD_SHARD:05} lost 3 workers" in log.read_text()
    assert [line["part"] for line in _read_ledger(folder)] == list(range(BAD_SHARD))


@pytest.mark.full
@pytest.mark.parametrize(("num_failures", "code"), [(2, 0), (99, 75)])
def test_a_transient_error_is_retried(
    artifact: Path,
    source: Path,
    expected_folder: Path,
    tmp_path: Path,
    num_failures: int,
    code: int,
) -> None:
    folder, log, tries = tmp_path / "out", tmp_path / "log", tmp_path / "tries"
    line = "raise TransientError('the shelf does not answer', 'wait for it')"
    run = _write_bad_source(
        tmp_path, artifact, source, f"tried('{tries}') <= {num_failures} and fail()", line
    )
    assert _start(run, log).wait(TIMEOUT_SECONDS) == code, log.read_text()
    lost = log.read_text().count("failed: the shelf does not answer")
    assert len(tries.read_text()) == lost + 1
    if code:
        assert lost >= 2, "a loss may be attributed to a shard that is computed meanwhile"
        assert log.read_text().endswith("the shelf does not answer; wait for it\n")
    else:
        assert lost == num_failures
        assert read_output_files(folder) == read_output_files(expected_folder)


def _write_bad_source(
    folder: Path, artifact: Path, source: Path, statement: str, fail: str = "pass"
) -> list[str]:
    """Return a command for a source in which one record runs a statement when it is read."""
    (folder / "custom_source.py").write_text(
        f"BAD_RECORD = {BAD_SHARD * ROWS + 1}\n"
        "import os\n"
        "from pathlib import Path\n"
        "from regauge.data.sources.jsonl import JsonLines\n"
        "from regauge.system.errors import TransientError\n"
        "def fail():\n"
        f"    {fail}\n"
        "def tried(path):\n"
        "    'Return how often the record was read, including this time.'\n"
        "    with Path(path).open('a') as file:\n"
        "        file.write('x')\n"
        "    return Path(path).stat().st_size\n"
        "class BadSource(JsonLines):\n"
        "    'Records with a bad one.'\n"
        "    def read(self, piece):\n"
        "        for index, record in enumerate(super().read(piece)):\n"
        "            if index == BAD_RECORD:\n"
        f"                {statement}\n"
        "            yield record\n"
    )
    run = {
        "artifact": str(artifact),
        "source": {"kind": "custom_source:BadSource", "files": [str(source)]},
        "output": {"folder": str(folder / "out")},
        "predict": {"shard_records": ROWS},
    }
    (folder / "run.toml").write_text(_toml(run))
    return ["predict", str(folder / "run.toml")]


def _toml(tables: dict[str, object]) -> str:
    """Return tables of one level as TOML."""
    lines = [
        f"{key} = {json.dumps(value)}" for key, value in tables.items() if isinstance(value, str)
    ]
    for key, table in tables.items():
        if isinstance(table, dict):
            lines += [
                f"[{key}]",
                *(f"{name} = {json.dumps(value)}" for name, value in table.items()),
            ]
    return "\n".join(lines)
