"""Share of jobs that finish without help under random faults.

Each short job is hit by one or more faults, drawn from a seed. The number of jobs and the weights
of the faults are written before the first job; every job is written when it ends, and none is
repeated. A job succeeds if a fault has hit it, it reaches its last step without help and its newest
checkpoint is complete. Its final weights must equal the weights of a job without faults, bit by
bit, except after a fault that skips a step.

The benchmark acts as a scheduler: it restarts a command that exits with status 75 or 143, or that
is killed (137). The status of a command that a signal ended is 128 plus the signal, as in a shell.

The success rate has a one-sided 95 % bound (Clopper and Pearson, 1934). Without a failure in n jobs
it is at least 0.05 ** (1 / n). With k failures it is at least the rate for which k or fewer
failures have a probability of 5 %.

    python benchmarks/campaign.py --seed 1 --jobs 199
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from recording import RESULTS, write_train_command
from safetensors.numpy import load_file
from text import prepare_library_docs

from regauge.run_folders.checkpoint_files import checkpoint_name, find_damage, list_steps
from regauge.run_folders.goodput import read_goodput
from regauge.system import jsonl

STEPS, SAVE_EVERY = 100, 20
PROCESS_COUNTS = (1, 2)
MAX_FAULTS = 3
RESTART_CODES = {75, 128 + signal.SIGTERM, 128 + signal.SIGKILL}
"""Exit statuses after which a scheduler restarts a job."""
MAX_STARTS = 10
TIMEOUT_SECONDS = 600
CONFIDENCE = 0.95
FAULT_WEIGHTS: dict[str, float] = {
    "kill": 6,
    "segfault": 1,
    "abort": 1,
    "leave": 1,
    "raise": 1,
    "stop": 3,
    "block": 1,
    "terminate": 3,
    "sleep": 2,
    "nan": 2,
    "kill during save": 4,
    "failed save": 2,
    "kill the supervisor": 3,
    "terminate the supervisor": 2,
    "kill the supervisor early": 1,
    "terminate the supervisor early": 1,
}
"""Relative frequencies of the kinds of faults."""
SAVE_POINTS = ("begin", "staged", "written")
CHANGES_WEIGHTS = {"nan"}
"""Kinds that change the final weights: a step is skipped."""
EXTERNAL = "the supervisor"
"""In the names of faults that hit the command from outside: at a step, or when it starts."""
MAX_EARLY_SECONDS = 3.0
"""An early fault hits within this time from the start: imports, checks or the first step."""
MODEL = {
    "architecture": "bert",
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    },
}


@dataclass
class Job:
    """The result of one job."""

    index: int
    processes: int
    kinds: list[str]
    faults: list[dict[str, Any]]
    num_faults: int = 0
    """Number of faults that hit the job, from inside and from outside."""
    starts: int = 0
    exit_codes: list[int] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    goodput: float = 0.0
    seconds_by_account: dict[str, float] = field(default_factory=dict)
    """Seconds by account of the ledger, with `idle`."""
    step: int = 0
    is_checkpoint_complete: bool = False
    has_equal_weights: bool | None = None
    """None after a fault that changes the final weights."""
    success: bool = False
    last_line: str = ""
    """The last line of the last command if the job failed."""


def main() -> None:
    """Run a campaign, and write every job when it ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--out", type=Path, help="benchmarks/results/campaign-SEED-JOBS.jsonl")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"campaign-{arguments.seed}-{arguments.jobs}.jsonl"
    if out.exists():
        raise SystemExit(f"{out} already exists; choose another seed, or --out")
    jsonl.append_line(out, build_header(arguments.seed, arguments.jobs))
    with tempfile.TemporaryDirectory() as scratch:
        campaign = Campaign(Path(scratch), arguments.seed)
        jobs = []
        for index in range(arguments.jobs):
            job = campaign.run(index)
            jobs.append(job)
            jsonl.append_line(out, asdict(job))
            sys.stdout.write(f"{index + 1}/{arguments.jobs} {_format_job(job)}\n")
            sys.stdout.flush()
    result = summarize_jobs(jobs)
    jsonl.append_line(out, result)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def build_header(seed: int, jobs: int) -> dict[str, Any]:
    """Return the settings that are fixed before the first job."""
    return {
        "benchmark": "jobs that finish without help under random faults",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
        "jobs": jobs,
        "fault_weights": FAULT_WEIGHTS,
        "process_counts": PROCESS_COUNTS,
        "steps": STEPS,
        "save_every_steps": SAVE_EVERY,
        "max_faults_per_job": MAX_FAULTS,
        "confidence": CONFIDENCE,
    }


class Campaign:
    """Jobs over one small dataset."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self._scratch = scratch
        self._seed = seed
        self._data = prepare_library_docs(scratch / "data")
        self._reference_weights: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
        for processes in PROCESS_COUNTS:
            folder = scratch / f"reference-{processes}"
            code, last_line = _wait(self._start(folder, processes, []))
            if code:
                raise SystemExit(f"the job without faults failed: {last_line}")
            self._reference_weights[processes] = load_file(folder / "model" / "model.safetensors")

    def run(self, index: int) -> Job:
        """Run one job until it ends or a scheduler would not restart it."""
        generator = np.random.default_rng((self._seed, index))
        processes = int(generator.choice(PROCESS_COUNTS))
        kinds, faults = draw_faults(generator, processes)
        job = Job(index, processes, kinds, faults)
        folder = self._scratch / f"job-{index:04d}"
        began = time.monotonic()
        external = [kind for kind in kinds if EXTERNAL in kind]
        while job.starts < MAX_STARTS:
            process = self._start(folder, processes, faults)
            if job.starts < len(external):
                kind = external[job.starts]
                signal_number = signal.SIGKILL if kind.startswith("kill") else signal.SIGTERM
                if kind.endswith("early"):
                    time.sleep(float(generator.uniform(0, MAX_EARLY_SECONDS)))
                    step = 0
                else:
                    step = int(generator.integers(1, STEPS // 2))
                job.num_faults += _send_signal(
                    process, folder / "metrics.jsonl", step, signal_number
                )
            job.starts += 1
            code, job.last_line = _wait(process)
            job.exit_codes.append(code)
            if code not in RESTART_CODES:
                break
        job.seconds = time.monotonic() - began
        self._judge(job, folder)
        return job

    def _start(
        self, folder: Path, processes: int, faults: list[dict[str, Any]]
    ) -> subprocess.Popen[str]:
        command = write_train_command(
            folder,
            self._data,
            SAVE_EVERY,
            model=MODEL,
            batch={"rows": 8, "microbatch_rows": 4},
            execution={"processes": processes, "supervision": {"hang_timeout_seconds": 5.0}},
            stop={"steps": STEPS},
            evaluation={"rows": 8},
        )
        if faults:
            plan = folder.with_suffix(".plan.json")
            plan.write_text(json.dumps({"fault": faults}))
            command += ["--chaos", str(plan)]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def _judge(self, job: Job, folder: Path) -> None:
        lines = jsonl.read_lines(folder / "faults.jsonl")
        job.num_faults += len({(line["kind"], line["at"], line["attempt"]) for line in lines})
        result, goodput = folder / "result.json", read_goodput(folder)
        job.goodput = goodput.fraction if goodput else 0.0
        job.seconds_by_account = dict(goodput.seconds) if goodput else {}
        job.attempts = len(goodput.outcomes) if goodput else 0
        job.step = json.loads(result.read_text())["steps"] if result.exists() else 0
        newest = list_steps(folder / "checkpoints")[:1]
        paths = [folder / "checkpoints" / checkpoint_name(step) for step in newest]
        job.is_checkpoint_complete = newest == [STEPS] and find_damage(paths[0]) is None
        if not CHANGES_WEIGHTS & set(job.kinds) and (folder / "model").exists():
            weights = load_file(folder / "model" / "model.safetensors")
            job.has_equal_weights = all(
                np.array_equal(weights[name], value)
                for name, value in self._reference_weights[job.processes].items()
            )
        is_finished = job.exit_codes[-1:] == [0]
        job.success = (
            is_finished
            and job.num_faults > 0
            and job.step == STEPS
            and job.is_checkpoint_complete
            and (job.has_equal_weights is True or bool(CHANGES_WEIGHTS & set(job.kinds)))
        )
        if job.success:
            job.last_line = ""


def draw_faults(
    generator: np.random.Generator, processes: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the kinds of faults of a job, and the plan of the faults from inside."""
    weights = np.array(list(FAULT_WEIGHTS.values()))
    count = int(generator.integers(1, MAX_FAULTS + 1))
    kinds = generator.choice(list(FAULT_WEIGHTS), count, p=weights / weights.sum()).tolist()
    faults = []
    for attempt, kind in enumerate(kinds, start=1):
        rank, step = int(generator.integers(processes)), int(generator.integers(1, STEPS - 1))
        save = int(generator.integers(1, STEPS // SAVE_EVERY)) * SAVE_EVERY
        fault: dict[str, Any] = {"kind": kind, "rank": rank, "step": step, "attempt": attempt}
        if kind == "nan":
            fault |= {"at": "gradients", "attempt": 1}
        elif kind == "sleep":
            fault |= {"seconds": 0.1, "count": 10}
        elif kind == "kill during save":
            fault |= {"kind": "kill", "step": save, "at": f"save:{generator.choice(SAVE_POINTS)}"}
        elif kind == "failed save":
            fault |= {"kind": "fail", "step": save, "at": "save:written"}
        if EXTERNAL not in kind:
            faults.append(fault)
    return kinds, faults


def _send_signal(
    process: subprocess.Popen[str], metrics: Path, step: int, signal_number: int
) -> bool:
    """Send a signal to a command after it has written a step; return whether it still ran.

    Steps of an earlier start do not count. Step 0 sends the signal immediately.
    """
    before = jsonl.read_last_line(metrics)
    while process.poll() is None:
        last = jsonl.read_last_line(metrics)
        if step == 0 or (last and last != before and last["step"] >= step):
            process.send_signal(signal_number)
            return True
        time.sleep(0.005)
    return False


def _wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status of a command and its last line; kill it after the timeout."""
    try:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 124, f"killed after {TIMEOUT_SECONDS} s"
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, errors.strip().splitlines()[-1] if errors.strip() else ""


def _format_job(job: Job) -> str:
    verdict = "finished" if job.success else f"FAILED {job.exit_codes} {job.last_line}"
    return f"{', '.join(job.kinds)} on {job.processes}: {verdict}, {job.seconds:.1f} s"


def success_rate_bound(failures: int, jobs: int, confidence: float = CONFIDENCE) -> float:
    """Return the lower bound of the success rate (Clopper and Pearson, one-sided)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        probability = sum(
            math.comb(jobs, k) * (1 - rate) ** k * rate ** (jobs - k) for k in range(failures + 1)
        )
        low, high = (rate, high) if probability < 1 - confidence else (low, rate)
    return low


def summarize_jobs(jobs: list[Job]) -> dict[str, Any]:
    """Return the success rate with its bound, and the goodput with its Young-Daly bound.

    C is the seconds of a save, R the seconds of a start, and M the seconds between faults. A run
    that saves at the optimal interval loses the share sqrt(2 C / M) to saves and repeated steps.
    It loses R / M to starts (Young, 1974; Daly, 2006).
    """
    failures = sum(not job.success for job in jobs)
    hours = sum(job.seconds for job in jobs) / 3600
    faults = sum(job.num_faults for job in jobs)
    seconds_between_faults = hours * 3600 / max(faults, 1)
    num_saves = len(jobs) * (STEPS // SAVE_EVERY)
    num_attempts = sum(job.attempts for job in jobs)
    save_seconds = _sum_account(jobs, "checkpoint") / num_saves
    start_seconds = _sum_account(jobs, "init") / max(1, num_attempts)
    lost = math.sqrt(2 * save_seconds / seconds_between_faults)
    lost += start_seconds / seconds_between_faults
    return {
        "jobs": len(jobs),
        "failed": failures,
        "success_rate": 1 - failures / len(jobs),
        "lower_bound_at_95_percent": success_rate_bound(failures, len(jobs)),
        "faults": faults,
        "faults_per_hour": faults / hours,
        "seconds_between_faults": seconds_between_faults,
        "seconds_per_save": save_seconds,
        "seconds_per_start": start_seconds,
        "young_daly_goodput": max(0.0, 1 - lost),
        "mean_goodput": statistics.mean(job.goodput for job in jobs),
        "median_seconds_per_job": statistics.median(job.seconds for job in jobs),
        "starts": sum(job.starts for job in jobs),
        "attempts": num_attempts,
        "hours": hours,
    }


def _sum_account(jobs: list[Job], account: str) -> float:
    return sum(job.seconds_by_account.get(account, 0.0) for job in jobs)


if __name__ == "__main__":
    main()
