"""What a test can leave behind: environment variables, threads, a process group."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field

OWN_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "SKIP_MEGASCALE_PJRT_CLIENT",
}
"""What pytest changes while a test runs, and what torch and torch_xla write at their first use."""

SECONDS = 1.0
"""A thread that is about to end has this long."""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}


@dataclass(frozen=True)
class Before:
    """How things are before a test."""

    variables: dict[str, str] = field(default_factory=_environment)
    threads: frozenset[threading.Thread] = field(
        default_factory=lambda: frozenset(threading.enumerate())
    )

    def leaks(self) -> list[str]:
        """Return what is different now."""
        now = _environment()
        names = sorted({*self.variables, *now})
        changed = [name for name in names if self.variables.get(name) != now.get(name)]
        problems = [f"environment variable {name} was left changed" for name in changed]
        new = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in new:
            if not thread.daemon:
                thread.join(timeout=SECONDS)
                if thread.is_alive():
                    problems.append(f"thread {thread.name} was left running")
        return problems + (["a process group was left open"] if _process_group() else [])


def _process_group() -> bool:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
