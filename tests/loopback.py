"""HTTP servers of tests, on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer


@contextmanager
def serve(server: BaseServer, name: str) -> Iterator[str]:
    """Run a server in a thread for the duration of the block; yield its address."""
    thread = threading.Thread(target=server.serve_forever, name=name)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
