"""Files at addresses, such as s3://bucket/key, as fsspec knows them: opened, and asked again.

Every store has errors of its own; here they are tried again, or told in one line.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from regauge.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
TRIES = 6
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 20.0
CONNECT_SECONDS, ANSWER_SECONDS = 10, 20
FOR_GOOD = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    RegaugeError,
)
"""What no further try would change."""
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {
        "config_kwargs": {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": ANSWER_SECONDS,
        }
    },
}
"""What a file system is opened with: s3fs tries again by itself, and botocore below it need not."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def protocol(address: str) -> str:
    """Return what stands before `://`; a path is a file."""
    return address.partition("://")[0] if "://" in address else "file"


def opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and its path there; raises SettingsError."""
    kind = protocol(address)
    try:
        options = _web() if kind in {"http", "https"} else OPTIONS.get(kind, {})
        found: tuple[Any, str] = fsspec.url_to_fs(address, **options)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(kind)
        remedy = f"pip install 'regauge[{extra}]'" if extra else "name one that fsspec knows"
        raise SettingsError(str(error), remedy) from None
    return found


def again(work: Callable[[], T], heard: Callable[[], None] = lambda: None) -> T:
    """Do something until it works, with waits that double; raises the last try's error."""
    wait = FIRST_WAIT_SECONDS
    for number in range(TRIES):
        heard()
        try:
            return work()
        except FOR_GOOD:
            raise
        except Exception:
            if number == TRIES - 1:
                raise
        time.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311 - not all at once
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)
    raise AssertionError


def _web() -> dict[str, Any]:
    """Return how the web is asked: through a proxy if there is one, and never without an end."""
    import aiohttp

    limit = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS
    )
    return {"client_kwargs": {"timeout": limit, "trust_env": True}}
