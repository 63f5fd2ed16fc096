"""The process that runs a job on simulated nodes.

    python -m regauge.jobs.targets._local_scheduler

It locks the job folder, detaches from the launching command and runs until the job has ended. If it
dies, its nodes die with it, and the lock is free.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from regauge.jobs.targets._job_runner import JobRunner
from regauge.jobs.targets._local_job import JobFolder, build_node_commands
from regauge.jobs.targets._nodes import clear_scheduler_variables
from regauge.jobs.targets._secret_files import read_secret_files
from regauge.system.errors import RegaugeError, first_line
from regauge.system.files import LOCK, hold_lock

LOCK_SECONDS = 10.0
"""Wait for the lock, which commands that read the job state hold for a moment."""


def main(path: Path) -> int:
    """Lock a job's folder and run the job in a detached process; return 0 once it runs."""
    try:
        with hold_lock(path / LOCK, LOCK_SECONDS):
            folder = JobFolder(path)
            secrets = read_secret_files(folder.job.secrets)
            folder.write_event("submitted", state="pending", attempt=1)
            if os.fork():
                return 0
            run(folder, {**clear_scheduler_variables(os.environ), **secrets})
    except (RegaugeError, BlockingIOError) as error:
        sys.stderr.write(f"{error}\n")
        return getattr(error, "exit_code", 1)
    return 0


def run(folder: JobFolder, environment: Mapping[str, str]) -> None:
    """Run a job to the end; SIGTERM and the file `cancel` stop it."""
    job = folder.job
    commands = partial(build_node_commands, job)
    runner = JobRunner(job, commands, folder.logs, environment, folder.write_event)

    def check_cancellation() -> None:
        if folder.cancel_file.exists():
            runner.cancel()

    signal.signal(signal.SIGTERM, lambda *_: runner.cancel())
    try:
        os.chdir(folder.document["working_folder"])
        runner.run(check_cancellation)
    except Exception as error:
        message = f"the process that runs the job failed: {first_line(error)}"
        folder.write_event(message, state="failed", attempt=runner.attempt, exit_code=1)
        raise


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
