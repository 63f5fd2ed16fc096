"""Stop signals at random moments, to any of the processes: a command ends, and then continues."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from distributed.test_resume import assert_same
from end_to_end.predicting import EAGER, read_output_files, write_records
from faults.conftest import FULL, Jobs
from faults.families import list_descendants
from regauge.supervision.channel import read_text
from regauge.system import timing
from regauge.system.stop_signals import STOP_SIGNALS

STOP_SECONDS = 15.0
"""Maximum time from the last signal to the end of a command: ten seconds and a save."""
MAX_DELAY_SECONDS = 8.0
"""Maximum time from the start of a command to the first signal."""
TIMEOUT_SECONDS = 300.0
TARGETS = ("group", "supervisor", "workers", "all")
INDUCTOR_CACHE = "torchinductor_"
"""Prefix of the only temporary folder that outlives commands."""
PIPELINE = """
output.folder = "{folder}"
[[stage]]
verb = "prepare"
source = {{ kind = "jsonl", files = ["{records}"] }}
tokenizer.vocab_size = 300
prepare.processes = 2
[stage.rows.text]
layout = "packed"
length = 32
[[stage]]
verb = "train"
data.path = "@prepare/text"
task.kind = "mlm"
batch = {{ rows = 8, microbatch_rows = 4 }}
stop.steps = 20
evaluation.rows = 8
execution.processes = 2
[stage.model]
architecture = "bert"
[stage.model.config]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 32
max_position_embeddings = 32
"""


@dataclass(frozen=True)
class SignalCase:
    """Signals of one kind: when they are sent, how often and to which processes."""

    delay_seconds: float
    target: str
    number: signal.Signals
    count: int
    gap_seconds: float

    def send(self, pid: int) -> None:
        """Send the signals to a command that leads its process group."""
        for _ in range(self.count):
            if self.target == "group":
                with suppress(ProcessLookupError):
                    os.killpg(pid, self.number)
            else:
                for target in self._list_targets(pid):
                    with suppress(ProcessLookupError):
                        os.kill(target, self.number)
            time.sleep(self.gap_seconds)

    def _list_targets(self, pid: int) -> list[int]:
        workers = list_descendants(pid)
        if self.target == "workers" and workers:
            return workers
        return [pid, *workers] if self.target == "all" else [pid]


def draw_cases(seed: int, count: int) -> Iterator[SignalCase]:
    """Yield random cases."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        yield SignalCase(
            draw.uniform(0, MAX_DELAY_SECONDS),
            str(draw.choice(TARGETS)),
            STOP_SIGNALS[draw.integers(len(STOP_SIGNALS))],
            int(draw.integers(1, 4)),
            float(draw.choice([0.02, 0.1, 0.3])),
        )


@dataclass(frozen=True)
class StoppableCommand:
    """A command whose temporary files are in a folder of its own."""

    arguments: list[str]
    folder: Path
    """Has the log, and the temporary files."""
    result: Path
    """Exists if the command has finished."""

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command in a process group of its own."""
        self.temporary.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "regauge", *self.arguments],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )

    def stop(self, case: SignalCase) -> None:
        """Start the command, send signals to it, and assert that it ends as it should."""
        process = self.start()
        try:
            # Before the handlers are set, the system ends the process.
            assert timing.wait_for(lambda: has_handlers(process.pid), 60, poll_seconds=0.001)
            time.sleep(case.delay_seconds)
            pids = list_descendants(process.pid)
            case.send(process.pid)
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{case} did not end the command: {read_text(self.log)}")
        finally:
            for pid in [process.pid, *list_descendants(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        text = read_text(self.log)
        is_finished = code == 0 and self.result.exists()
        assert is_finished or code == 128 + case.number, f"{case}, code {code}: {text}"
        assert "Traceback" not in text, f"{case}: {text}"
        assert "Exception ignored" not in text, f"{case}: {text}"
        assert timing.wait_for(lambda: not any(map(is_alive, pids)), 10, poll_seconds=0.01), case
        names = [path.name for path in self.temporary.iterdir()]
        assert not [name for name in names if not name.startswith(INDUCTOR_CACHE)], case

    def finish(self) -> None:
        """Run the command to its end."""
        assert self.start().wait(TIMEOUT_SECONDS) == 0, read_text(self.log)
        assert self.result.exists()


def has_handlers(pid: int) -> bool:
    """Return whether a process handles SIGTERM, or has ended."""
    masks = [
        line for line in read_text(Path(f"/proc/{pid}/status")).splitlines() if "SigCgt" in line
    ]
    return not masks or bool(int(masks[0].split()[1], 16) & 1 << (signal.SIGTERM - 1))


def is_alive(pid: int) -> bool:
    state = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def stop_often(command: StoppableCommand, seed: int, count: int) -> None:
    """Stop a command several times, and then run it to its end."""
    for case in draw_cases(seed, count):
        if command.result.exists():
            break
        command.stop(case)
    command.finish()


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 3), *(pytest.param(seed, 10, marks=FULL) for seed in range(15))],
)
def test_training_ends_at_signals_and_resumes(
    jobs: Jobs, tmp_path: Path, seed: int, count: int
) -> None:
    """The steps are slow at first, so that signals hit them as well."""
    slow = {"kind": "sleep", "rank": 0, "step": 0, "count": 24, "seconds": 0.3, "attempt": 0}
    job = jobs.create(slow)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"fault": job.faults}))
    arguments = ["train", str(job.folder.with_suffix(".json"))]
    result = job.folder / "result.json"
    command = StoppableCommand([*arguments, "--chaos", str(plan)], tmp_path, result)
    for case in draw_cases(seed, count):
        if not result.exists():
            command.stop(case)
    StoppableCommand(arguments, tmp_path, result).finish()
    assert_same(jobs.undisturbed_folder(job), job.folder)
    jobs.assert_nothing_is_left(job)


def test_a_run_saves_when_its_terminal_is_closed(jobs: Jobs, tmp_path: Path) -> None:
    """The system sends SIGHUP, and the terminal refuses further lines."""
    job = jobs.create({"kind": "sleep", "rank": 0, "step": 2, "count": 22, "seconds": 0.3})
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"fault": job.faults}))
    run_file = str(job.folder.with_suffix(".json"))
    command = [sys.executable, "-m", "regauge", "train", run_file, "--chaos", str(plan)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)  # noqa: S606 - the terminal's session needs no shell
    metrics = job.folder / "metrics.jsonl"
    with open(terminal, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
        while '"step": 3' not in read_text(metrics):
            file.read(4096)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 128 + signal.SIGHUP
    (end,) = job.attempts
    assert end["outcome"] == "preempted"
    assert (job.folder / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    jobs.assert_nothing_is_left(job)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("texts") / "texts.jsonl", 6000)


SEEDS = pytest.mark.parametrize("seed", range(5))
STOPS = 5
"""Number of signals to one command."""


@FULL
@SEEDS
def test_a_pipeline_ends_at_signals_and_continues(records: Path, tmp_path: Path, seed: int) -> None:
    run_file, folder = tmp_path / "pipeline.toml", tmp_path / "out"
    run_file.write_text(PIPELINE.format(folder=folder, records=records))
    result = folder / "2-train" / "result.json"
    stop_often(StoppableCommand(["pipeline", str(run_file)], tmp_path, result), seed, STOPS)


@FULL
@SEEDS
def test_an_export_ends_at_signals(model: Path, tmp_path: Path, seed: int) -> None:
    target = tmp_path / "artifact"
    arguments = ["export", str(model), "--to", str(target), *EAGER, "candidates.timing_seconds=4"]
    stop_often(StoppableCommand(arguments, tmp_path, target / "manifest.json"), seed, STOPS)


@FULL
@SEEDS
def test_batch_inference_ends_at_signals_and_resumes(
    artifact: Path, records: Path, tmp_path: Path, seed: int
) -> None:
    options = ["predict.shard_records=300", "execution.workers=2"]
    commands = []
    for name in ("stopped", "undisturbed"):
        folder = tmp_path / name
        folder.mkdir()
        paths = [str(artifact), "--source", str(records), "--to", str(folder / "out")]
        result = folder / "out" / "result.json"
        commands.append(StoppableCommand(["predict", *paths, *options], folder, result))
    stopped, undisturbed = commands
    stop_often(stopped, seed, STOPS)
    undisturbed.finish()
    assert read_output_files(tmp_path / "stopped" / "out") == read_output_files(
        tmp_path / "undisturbed" / "out"
    )
