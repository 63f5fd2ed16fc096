"""`python -m regauge` runs the same command line as `regauge`."""

import gc
import sys
from collections.abc import Sequence

from regauge.system import stop_signals

NO_RUN_FLAGS = frozenset({"--dry-run", "--help", "-h"})
"""Flags with which `train` starts no run."""


def run_process() -> int:
    """Run the command line as the whole process; return its exit code.

    Stop signals are recorded before the other modules are imported, which takes a while. The fork
    server of a run imports torch and transformers while this process reads and checks the settings.

    Python collects garbage once more at exit. Freezing the remaining objects skips this, which
    saves 1.5 s of CPU time once torch and transformers are imported.
    """
    stop_signals.start_command()
    from regauge.supervision import forks
    from regauge.system import processes, scratch  # the imports follow the handlers

    processes.limit_spinning()
    with scratch.use_command_folder(), forks.open_fork_server() as fork_server:
        if starts_run(sys.argv[1:]):
            fork_server.start_server()
        from regauge import cli

        try:
            code = cli.main()
        finally:
            gc.freeze()
    return stop_signals.exit_command(code)


def starts_run(arguments: Sequence[str]) -> bool:
    """Return whether a command line starts the processes of a run in a fork server."""
    from regauge.system import processes

    is_train = arguments[:1] == ["train"] and NO_RUN_FLAGS.isdisjoint(arguments)
    return is_train and sys.platform == "linux" and not processes.is_launched()


if __name__ == "__main__":
    sys.exit(run_process())
