"""Servers of tests, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer


@contextmanager
def running(server: BaseServer, name: str) -> Iterator[str]:
    """Serve in a thread for as long as the block lasts; return the address."""
    thread = threading.Thread(target=server.serve_forever, name=name)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
