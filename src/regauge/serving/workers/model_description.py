"""The manifest of a model that is not exported, built in a process that ends before it serves.

Building it imports torch and loads the weights, which the server's process must not keep.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from regauge import config
from regauge.inference.export.manifest import ArtifactManifest
from regauge.inference.export.uncompiled import UncompiledModel, open_model
from regauge.registry.model_reference import locate_model
from regauge.serving.wire import encode_message, receive_message
from regauge.serving.workers.worker_requests import LoadRequest
from regauge.system import children, choices
from regauge.system.errors import ChildError, PreflightError
from regauge.system.hub import resolve_model

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence


class ModelDescription:
    """A worker that sends a model's manifest and ends."""

    def __init__(self, request: LoadRequest) -> None:
        """Build the manifest; raises the errors of `open_model`."""
        self._manifest = open_model(request.path, keep_weights=False).manifest

    def serve(self, connection: socket.socket) -> None:
        """Send the manifest."""
        document = config.dump(self._manifest)
        connection.sendall(encode_message({"type": "ready", "manifest": document}))

    def close(self) -> None:
        """Do nothing: the weights were released before."""


def describe_model(path: str, command: Sequence[str]) -> UncompiledModel:
    """Return a model that workers load; `command` starts one.

    Raises ChildError with the errors of `open_model`, and PreflightError if the process dies.
    """
    folder = resolve_model(locate_model(path))
    custom_paths = list(choices.list_allowed_paths())
    request = LoadRequest(path=path, only_describes=True, custom_paths=custom_paths)
    process, connection = children.connect(command)
    try:
        with closing(connection):
            connection.sendall(encode_message(request.to_header()))
            message = receive_message(connection)
    except ConnectionError:
        message = None
    finally:
        process.kill()
        process.wait()
    if message is None:
        problem = f"the process that reads {path} ended without a message"
        raise PreflightError(problem, "see its messages above")
    header = message.header
    if header["type"] == "error":
        raise ChildError(header["code"], f"{header['error']}; {header['remedy']}")
    manifest = config.build(ArtifactManifest, header["manifest"])
    return UncompiledModel(folder, manifest, path=path)
