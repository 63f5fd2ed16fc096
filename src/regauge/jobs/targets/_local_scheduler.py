"""The process that runs a job of simulated nodes.

    python -m regauge.jobs.targets._local_scheduler

It locks the folder of the job, detaches from the launching command and runs until the job has
ended. If it dies, its nodes die with it, and the lock is free.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from regauge.jobs.targets._job_runner import POLL_SECONDS, JobRunner, RestartRules, RunnerEvent
from regauge.jobs.targets._local_job import (
    CANCEL,
    EVENTS,
    LOGS,
    build_node_commands,
    parse_job,
    read_document,
)
from regauge.jobs.targets._nodes import clear_scheduler_variables
from regauge.jobs.targets._secret_files import read_secret_files
from regauge.jobs.targets._times import format_now
from regauge.system import jsonl
from regauge.system.errors import DataError, RegaugeError, first_line
from regauge.system.files import LOCK, hold_lock

LOCK_SECONDS = 10.0
"""Wait for the lock, which a command that reads the state of the job holds for a moment."""


def main(folder: Path) -> int:
    """Lock the folder of a job and run it in a detached process; return 0 as soon as it runs."""
    try:
        with hold_lock(folder / LOCK, LOCK_SECONDS):
            runner = build_runner(folder)
            if os.fork():
                return 0
            run(runner, folder)
    except RegaugeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except BlockingIOError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def build_runner(folder: Path) -> JobRunner:
    """Return the runner of the job in a folder; raises DataError if a secret cannot be read."""
    document = read_document(folder)
    if document is None:
        raise DataError(f"{folder} has no job", "launch it again")
    job = parse_job(document)
    is_gang = job.jobs == 1
    rules = RestartRules(is_gang, job.min_nodes, job.max_attempts, job.hours)
    runner = JobRunner(
        job.name,
        partial(build_node_commands, document),
        rules,
        folder / LOGS,
        environment={**clear_scheduler_variables(os.environ), **read_secret_files(job.secrets)},
        folder=Path(document["working_folder"]),
        on_event=partial(write_event, folder),
    )
    write_event(folder, RunnerEvent("submitted", "pending"))
    return runner


def run(runner: JobRunner, folder: Path) -> None:
    """Run a job to its end; SIGTERM and the file `cancel` stop it."""
    signal.signal(signal.SIGTERM, lambda *_: runner.cancel())
    try:
        runner.start()
        while not runner.is_final:
            if (folder / CANCEL).exists():
                runner.cancel()
            runner.poll()
            time.sleep(POLL_SECONDS)
    except Exception as error:
        message = f"the process that runs the job failed: {first_line(error)}"
        write_event(folder, RunnerEvent(message, "failed", exit_code=1))
        raise
    finally:
        runner.close()


def write_event(folder: Path, event: RunnerEvent) -> None:
    """Append an event to the folder of a job."""
    line = {name: value for name, value in asdict(event).items() if value is not None}
    jsonl.append_line(folder / EVENTS, {"time": format_now(), **line})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
