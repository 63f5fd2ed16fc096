"""Access to object stores, such as s3://bucket/key, through fsspec, with retries.

The errors of each store are different. This module retries them, except for permanent errors.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from regauge.system.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MAX_TRIES = 6
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 20.0
CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS = 10, 20
PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    RegaugeError,
)
"""Errors a retry cannot fix."""
FILESYSTEM_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {
        "config_kwargs": {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
        }
    },
}
"""File system -> options. s3fs retries by itself, so botocore's retries are off."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def find_protocol(address: str) -> str:
    """Return the part of an address before `://`; `file` for a local path."""
    return address.partition("://")[0] if "://" in address else "file"


def open_filesystem(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises SettingsError if fsspec does not support the protocol or a package is missing.
    """
    protocol = find_protocol(address)
    is_http = protocol in {"http", "https"}
    try:
        options = _build_http_options() if is_http else FILESYSTEM_OPTIONS.get(protocol, {})
        filesystem, path = fsspec.url_to_fs(address, **options)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(protocol)
        remedy = f"pip install 'regauge[{extra}]'" if extra else "use a protocol of fsspec"
        raise SettingsError(str(error), remedy) from None
    return filesystem, path


def retry(action: Callable[[], T], on_try: Callable[[], None] = lambda: None) -> T:
    """Run an action until it succeeds; raises the error of the last try.

    The wait between tries doubles. `on_try` is called before each try.
    """
    wait = MIN_WAIT_SECONDS
    for index in range(MAX_TRIES):
        on_try()
        try:
            return action()
        except PERMANENT_ERRORS:
            raise
        except Exception:
            if index == MAX_TRIES - 1:
                raise
        time.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311 - spreads simultaneous clients
        wait = min(2 * wait, MAX_WAIT_SECONDS)
    raise AssertionError


def _build_http_options() -> dict[str, Any]:
    """Return options for HTTP requests: time limits, and the environment's proxy."""
    import aiohttp

    limit = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=READ_TIMEOUT_SECONDS
    )
    return {"client_kwargs": {"timeout": limit, "trust_env": True}}
