"""Starts and ends the processes that compute for the server."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from regauge.serving.wire import encode_message
from regauge.system import choices
from regauge.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET_BYTES = 4 << 20
"""Buffers of the socket to a worker, so that a batch is sent before the last one is computed."""

POLL_SECONDS = 0.02
"""Interval at which the end of a process is noticed."""

Process = subprocess.Popen[bytes]


def spawn_worker(module: str, request: Mapping[str, Any]) -> tuple[Process, socket.socket]:
    """Start a module as a process and send its request; return it with the socket to it.

    The argument of the process is the file descriptor of its end. It dies with this process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(descriptor)],
            env={**os.environ, **choices.module_folders_environment()},
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            # Only the child can request this. It takes no lock that a parent thread may hold.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
    ours.sendall(encode_message(dict(request)))
    ours.settimeout(0)
    return process, ours


async def wait_for_exit(process: Process, seconds: float) -> None:
    """Wait until a process has ended; kill it after some seconds."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
        await asyncio.sleep(POLL_SECONDS)
    process.kill()
    process.wait()
