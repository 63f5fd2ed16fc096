"""Detection of resources that a test leaves behind: variables, threads, a process group."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field

IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "SKIP_MEGASCALE_PJRT_CLIENT",
}
"""Variables that pytest changes during a test, or torch and torch_xla set at their first use."""

MAX_EXIT_SECONDS = 1.0
"""Time limit for a thread that is about to end."""


def _read_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


@dataclass(frozen=True)
class Snapshot:
    """The environment variables and threads at one moment, before a test."""

    variables: dict[str, str] = field(default_factory=_read_environment)
    threads: frozenset[threading.Thread] = field(
        default_factory=lambda: frozenset(threading.enumerate())
    )

    def find_leaks(self) -> list[str]:
        """Return a description of each variable, thread and process group that is left."""
        now = _read_environment()
        names = sorted({*self.variables, *now})
        changed = [name for name in names if self.variables.get(name) != now.get(name)]
        problems = [f"environment variable {name} was left changed" for name in changed]
        new = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in new:
            if not thread.daemon:
                thread.join(timeout=MAX_EXIT_SECONDS)
                if thread.is_alive():
                    problems.append(f"thread {thread.name} was left running")
        return problems + (["a process group was left open"] if _has_process_group() else [])


def _has_process_group() -> bool:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
