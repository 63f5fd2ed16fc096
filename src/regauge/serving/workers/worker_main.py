"""The main module of a worker process: socket, model, and errors.

    python -m regauge.serving.workers.worker_main FD

FD is a socket to the server. The first message is a `LoadRequest`. The worker answers with `ready`,
or with `error` and ends. Then it answers requests until the server closes the socket. `wire`
defines the messages.
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import closing
from typing import Protocol

from regauge.serving.wire import SOCKET_BYTES, encode_message, receive_message
from regauge.serving.workers.worker_requests import LoadRequest
from regauge.system import log
from regauge.system.errors import describe_error
from regauge.system.stop_signals import STOP_SIGNALS


class LoadedWorker(Protocol):
    """A loaded model that answers a socket's requests."""

    def serve(self, connection: socket.socket) -> None:
        """Send `ready`, and answer requests until the server closes the socket."""

    def close(self) -> None:
        """Release the model."""


def main(descriptor: int) -> int:
    """Load the requested model and serve the socket with this descriptor; return the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the server decides when its workers end
    log.configure(quiet=True)
    with socket.socket(fileno=descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        message = receive_message(connection)
        if message is None:
            return 0
        request = LoadRequest(**message.header)
        try:
            worker = _load(request)
        except Exception as error:  # noqa: BLE001 - the server reports it
            report = describe_error(error)
            document = request.name_origin(report.to_document())
            connection.sendall(encode_message({"type": "error", **document}))
            return report.code
        with closing(worker):
            worker.serve(connection)
    return 0


def _load(request: LoadRequest) -> LoadedWorker:
    request.prepare_process()
    if request.only_describes:
        from regauge.serving.workers.model_description import ModelDescription

        return ModelDescription(request)
    if request.generation is not None:
        from regauge.serving.text_generation.text_worker import TextEngineWorker

        return TextEngineWorker.load(request)
    from regauge.serving.workers.engine_worker import EngineWorker

    return EngineWorker.load(request)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
