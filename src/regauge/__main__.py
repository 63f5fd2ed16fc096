"""`python -m regauge` runs the same command line as `regauge`."""

import gc
import sys

from regauge import stop_signals


def run_process() -> int:
    """Run the command line as the whole process; return its exit code.

    Stop signals are recorded before the other modules are imported, which takes a while. The fork
    server of a run imports torch and transformers while this process reads and checks the settings.

    Python collects garbage once more at exit. Freezing the remaining objects skips this, which
    saves 1.5 s of CPU time once torch and transformers are imported.
    """
    stop_signals.start_command()
    from regauge import scratch  # the imports follow the handlers
    from regauge.supervision import forks

    with scratch.use_command_folder(), forks.open_fork_server() as fork_server:
        if forks.is_training(sys.argv[1:]):
            fork_server.start_server()
        from regauge import cli

        try:
            return cli.main()
        finally:
            gc.freeze()


if __name__ == "__main__":
    sys.exit(run_process())
