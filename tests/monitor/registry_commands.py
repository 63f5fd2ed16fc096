"""A sequence of registry commands that is killed with SIGKILL at one of its writes.

It runs in a child of the test, which is forked, because a new process would import for seconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3fs import S3FileSystem

from regauge.registry.registry import Registry


def run_and_kill(address: str, artifacts: Path, kill_at: int) -> bool:
    """Run the commands in a child that is killed; return False if it was finished before.

    The child is killed before the write KILL_AT // 2, or after it if KILL_AT is odd.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            S3FileSystem.clear_instance_cache()
            kill_during_writes(kill_at)
            run_commands(address, artifacts)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def run_commands(address: str, artifacts: Path) -> None:
    """Register two versions and promote each."""
    registry = Registry(address, create=True)
    for name in ("one", "two"):
        version = registry.register("qa", artifacts / name)
        registry.promote("qa", version.number, why=name)


def kill_during_writes(kill_at: int) -> None:
    """Replace the functions that change files by ones that may kill this process."""
    counter = itertools.count()
    for owner, name in (
        (os, "link"),
        (os, "rename"),
        (shutil, "copyfile"),
        (Path, "replace"),
        (Path, "write_bytes"),
        (S3FileSystem, "_pipe_file"),
        (S3FileSystem, "_put_file"),
    ):
        build = _wrap_coroutine if owner is S3FileSystem else _wrap
        setattr(owner, name, build(getattr(owner, name), counter, kill_at))


def _wrap(write: Callable[..., Any], counter: Any, kill_at: int) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        index = next(counter)
        _kill_if(2 * index == kill_at)
        try:
            return write(*arguments, **options)
        finally:
            _kill_if(2 * index + 1 == kill_at)

    return run


def _wrap_coroutine(write: Callable[..., Any], counter: Any, kill_at: int) -> Callable[..., Any]:
    async def run(*arguments: Any, **options: Any) -> Any:
        index = next(counter)
        _kill_if(2 * index == kill_at)
        try:
            return await write(*arguments, **options)
        finally:
            _kill_if(2 * index + 1 == kill_at)

    return run


def _kill_if(condition: bool) -> None:  # noqa: FBT001
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)
