"""The start of a worker process: its request, its socket, and its errors.

    python -m MODULE FD

FD is a socket to the server. The first message is the request. The worker answers with `error` and
ends if it cannot load the model.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from regauge.serving.wire import encode_message, receive_message
from regauge.system import choices, log
from regauge.system.errors import describe_error
from regauge.system.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable

W = TypeVar("W")


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What a worker loads, and where it runs."""

    path: str
    """Folder of an artifact, a run or a model."""
    source: str = ""
    """The folder that `path` is a copy of; messages name it."""
    threads: int | None = None
    device: int = 0
    cores: list[int] = field(default_factory=list)
    """The cores that the worker is bound to; empty if it may use all of them."""
    custom_paths: list[str] = field(default_factory=list)
    """Import paths of custom code that the command allows."""

    @property
    def origin(self) -> str:
        """The path that messages name."""
        return self.source or self.path

    def to_header(self) -> dict[str, Any]:
        """Return the request as the header of a message."""
        return asdict(self)

    def prepare_process(self) -> None:
        """Bind this process to its cores, and permit its custom code."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        choices.allow_imports(self.custom_paths)


def run_worker_process(
    descriptor: int,
    load: Callable[[dict[str, Any]], W],
    serve: Callable[[socket.socket, W], object],
) -> int:
    """Load the requested model and serve the socket with this descriptor; return the exit code.

    `load` gets the header of the request. `serve` returns when the server has closed the socket.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the server decides when its workers end
    log.configure(quiet=True)
    with socket.socket(fileno=descriptor) as connection:
        message = receive_message(connection)
        if message is None:
            return 0
        try:
            model = load(message.header)
        except Exception as error:  # noqa: BLE001 - the server reports it
            report = describe_error(error)
            document = _name_origin(report.to_document(), message.header)
            connection.sendall(encode_message({"type": "error", **document}))
            return report.code
        serve(connection, model)
    return 0


def _name_origin(document: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Replace the path of a copy in the texts of an error by the path of its source."""
    path, source = request["path"], request["source"]
    if not source:
        return document
    return {
        key: value.replace(path, source) if isinstance(value, str) else value
        for key, value in document.items()
    }
