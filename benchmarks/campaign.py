"""How many jobs finish by themselves while faults strike them.

Short jobs, each hit by one fault or more, drawn from a seed. Size and mix are fixed before the
start and written first; every job is written as it ends, and none is repeated. A job succeeds when
a fault has hit it, it reaches its last step with nobody asked, its newest checkpoint is whole, and
its final weights are those of the job that was not hit, to the last bit, where the fault must leave
no trace.

A scheduler's part is played here: a command that ends with code 75 or 143, or is killed (137), is
started again. Codes are those that a shell shows: 128 and the signal, where one ended the command.

With no failure in n jobs, the success rate is at least 0.05 ** (1 / n) at 95 % confidence (Clopper
and Pearson, 1934, one-sided); with k failures it is the rate at which k or fewer have a probability
of 5 %.

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
from recording import RESULTS, train_command
from safetensors.numpy import load_file
from text import corpus

from regauge import jsonl
from regauge.checkpoint import layout as checkpoints
from regauge.supervision.goodput import read_goodput

STEPS, SAVE_EVERY = 100, 20
SIZES = (1, 2)
MOST_FAULTS = 3
AGAIN = {75, 128 + signal.SIGTERM, 128 + signal.SIGKILL}
"""Codes after which a scheduler starts a job again."""
MOST_STARTS = 10
LIMIT_SECONDS = 600
CONFIDENCE = 0.95
KINDS: dict[str, float] = {
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
    "kill in a save": 4,
    "a save that fails": 2,
    "kill the supervisor": 3,
    "tell the supervisor": 2,
    "kill the supervisor early": 1,
    "tell the supervisor early": 1,
}
"""How often each is drawn, relative to the others."""
MOMENTS = ("begin", "staged", "written")
TRACE = {"nan"}
"""Kinds that must leave a trace: a step is skipped."""
OUTSIDE = "the supervisor"
"""In the name of what hits the command itself, from outside: at a step, or as it starts."""
EARLY_SECONDS = 3.0
"""Within so many seconds from its start it may be hit early: at imports, checks, the first step."""
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
    """What became of one job."""

    number: int
    processes: int
    kinds: list[str]
    faults: list[dict[str, Any]]
    struck: int = 0
    """Faults that did strike, inside of the job and from outside."""
    starts: int = 0
    codes: list[int] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    goodput: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by account, idle ones included."""
    step: int = 0
    checkpoint_is_whole: bool = False
    same_weights: bool | None = None
    """None where the fault must leave a trace."""
    success: bool = False
    said: str = ""
    """The last line of the last command, where the job failed."""


def main() -> None:
    """Run a campaign and write every job as it ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--out", type=Path, help="benchmarks/results/campaign-SEED-JOBS.jsonl")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"campaign-{arguments.seed}-{arguments.jobs}.jsonl"
    if out.exists():
        raise SystemExit(f"{out} is there: a campaign is never extended or run again over another")
    jsonl.append_line(out, header(arguments.seed, arguments.jobs))
    with tempfile.TemporaryDirectory() as scratch:
        campaign = Campaign(Path(scratch), arguments.seed)
        jobs = []
        for number in range(arguments.jobs):
            job = campaign.run(number)
            jobs.append(job)
            jsonl.append_line(out, asdict(job))
            sys.stdout.write(f"{number + 1}/{arguments.jobs} {_told(job)}\n")
            sys.stdout.flush()
    result = summary(jobs)
    jsonl.append_line(out, result)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def header(seed: int, jobs: int) -> dict[str, Any]:
    """Return what is fixed before the first job."""
    return {
        "benchmark": "jobs that finish by themselves while faults strike",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
        "jobs": jobs,
        "mix": KINDS,
        "sizes": SIZES,
        "steps": STEPS,
        "save_every_steps": SAVE_EVERY,
        "most_faults_of_a_job": MOST_FAULTS,
        "confidence": CONFIDENCE,
    }


class Campaign:
    """Jobs over one small dataset."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self._scratch = scratch
        self._seed = seed
        self._data = corpus(scratch / "data")
        self._whole: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
        for size in SIZES:
            folder = scratch / f"whole-{size}"
            code, said = _wait(self._start(folder, size, []))
            if code:
                raise SystemExit(f"the job without faults failed: {said}")
            self._whole[size] = load_file(folder / "model" / "model.safetensors")

    def run(self, number: int) -> Job:
        """Run one job until it ends or nobody would start it again."""
        draw = np.random.default_rng((self._seed, number))
        size = int(draw.choice(SIZES))
        kinds, faults = drawn(draw, size)
        job = Job(number, size, kinds, faults)
        folder = self._scratch / f"job-{number:04d}"
        began = time.monotonic()
        outside = [kind for kind in kinds if OUTSIDE in kind]
        while job.starts < MOST_STARTS:
            process = self._start(folder, size, faults)
            if job.starts < len(outside):
                how = signal.SIGKILL if outside[job.starts].startswith("kill") else signal.SIGTERM
                if outside[job.starts].endswith("early"):
                    time.sleep(float(draw.uniform(0, EARLY_SECONDS)))
                    at = 0
                else:
                    at = int(draw.integers(1, STEPS // 2))
                job.struck += _strike(process, folder / "metrics.jsonl", at, how)
            job.starts += 1
            code, job.said = _wait(process)
            job.codes.append(code)
            if code not in AGAIN:
                break
        job.seconds = time.monotonic() - began
        self._judge(job, folder)
        return job

    def _start(
        self, folder: Path, size: int, faults: list[dict[str, Any]]
    ) -> subprocess.Popen[str]:
        command = train_command(
            folder,
            self._data,
            SAVE_EVERY,
            model=MODEL,
            batch={"rows": 8, "microbatch_rows": 4},
            execution={"processes": size, "supervision": {"hang_timeout_seconds": 5.0}},
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
        struck = jsonl.read_lines(folder / "faults.jsonl")
        job.struck += len({(line["kind"], line["at"], line["attempt"]) for line in struck})
        result, found = folder / "result.json", read_goodput(folder)
        job.goodput = found.share if found else 0.0
        job.spent = dict(found.seconds) if found else {}
        job.attempts = len(found.ends) if found else 0
        job.step = json.loads(result.read_text())["steps"] if result.exists() else 0
        newest = checkpoints.list_steps(folder / "checkpoints")[:1]
        where = [folder / "checkpoints" / checkpoints.checkpoint_name(step) for step in newest]
        job.checkpoint_is_whole = newest == [STEPS] and checkpoints.find_damage(where[0]) is None
        if not TRACE & set(job.kinds) and (folder / "model").exists():
            weights = load_file(folder / "model" / "model.safetensors")
            job.same_weights = all(
                np.array_equal(weights[name], value)
                for name, value in self._whole[job.processes].items()
            )
        ended = job.codes[-1:] == [0]
        job.success = (
            ended
            and job.struck > 0
            and job.step == STEPS
            and job.checkpoint_is_whole
            and (job.same_weights is True or bool(TRACE & set(job.kinds)))
        )
        if job.success:
            job.said = ""


def drawn(draw: np.random.Generator, size: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the kinds that hit a job, and the plan of those that strike from inside."""
    weights = np.array(list(KINDS.values()))
    count = int(draw.integers(1, MOST_FAULTS + 1))
    kinds = draw.choice(list(KINDS), count, p=weights / weights.sum()).tolist()
    faults = []
    for number, kind in enumerate(kinds, start=1):
        rank, step = int(draw.integers(size)), int(draw.integers(1, STEPS - 1))
        save = int(draw.integers(1, STEPS // SAVE_EVERY)) * SAVE_EVERY
        fault: dict[str, Any] = {"kind": kind, "rank": rank, "step": step, "attempt": number}
        if kind == "nan":
            fault |= {"at": "gradients", "attempt": 1}
        elif kind == "sleep":
            fault |= {"seconds": 0.1, "count": 10}
        elif kind == "kill in a save":
            fault |= {"kind": "kill", "step": save, "at": f"save:{draw.choice(MOMENTS)}"}
        elif kind == "a save that fails":
            fault |= {"kind": "fail", "step": save, "at": "save:written"}
        if OUTSIDE not in kind:
            faults.append(fault)
    return kinds, faults


def _strike(process: subprocess.Popen[str], metrics: Path, step: int, how: int) -> bool:
    """Send a signal to a command once it tells of a step; return whether it still ran.

    What an earlier start has told does not count; step 0 is at once.
    """
    before = jsonl.read_last_line(metrics)
    while process.poll() is None:
        last = jsonl.read_last_line(metrics)
        if step == 0 or (last and last != before and last["step"] >= step):
            process.send_signal(how)
            return True
        time.sleep(0.005)
    return False


def _wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the code of a command and its last line; one that never ends is killed."""
    try:
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 124, f"no end in {LIMIT_SECONDS} s"
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, said.strip().splitlines()[-1] if said.strip() else ""


def _told(job: Job) -> str:
    verdict = "finished" if job.success else f"FAILED {job.codes} {job.said}"
    return f"{', '.join(job.kinds)} on {job.processes}: {verdict}, {job.seconds:.1f} s"


def least_rate(failures: int, jobs: int, confidence: float = CONFIDENCE) -> float:
    """Return the success rate that is shown with a confidence (Clopper and Pearson, one-sided)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        chance = sum(
            math.comb(jobs, k) * (1 - rate) ** k * rate ** (jobs - k) for k in range(failures + 1)
        )
        low, high = (rate, high) if chance < 1 - confidence else (low, rate)
    return low


def summary(jobs: list[Job]) -> dict[str, Any]:
    """Return the rate, what it shows, and the goodput beside what Young and Daly's rule allows.

    Of a run that saves at the best interval, the share sqrt(2 C / M) is lost to saves and to work
    that is done again, and R / M to starting: C seconds a save, one fault in M seconds, R a start
    (Young, 1974; Daly, 2006).
    """
    failures = sum(not job.success for job in jobs)
    hours = sum(job.seconds for job in jobs) / 3600
    faults = sum(job.struck for job in jobs)
    between = hours * 3600 / max(faults, 1)
    saves = len(jobs) * (STEPS // SAVE_EVERY)
    save = sum(job.spent.get("checkpoint", 0.0) for job in jobs) / saves
    start = sum(job.spent.get("init", 0.0) for job in jobs) / max(1, sum(j.attempts for j in jobs))
    lost = math.sqrt(2 * save / between) + start / between
    return {
        "jobs": len(jobs),
        "failed": failures,
        "success_rate": 1 - failures / len(jobs),
        "shown_at_95_percent": least_rate(failures, len(jobs)),
        "faults": faults,
        "faults_per_hour": faults / hours,
        "seconds_between_faults": between,
        "seconds_of_a_save": save,
        "seconds_of_a_start": start,
        "goodput_by_young_and_daly": max(0.0, 1 - lost),
        "mean_goodput": statistics.mean(job.goodput for job in jobs),
        "median_seconds_of_a_job": statistics.median(job.seconds for job in jobs),
        "starts": sum(job.starts for job in jobs),
        "attempts": sum(job.attempts for job in jobs),
        "hours": hours,
    }


if __name__ == "__main__":
    main()
