"""API keys accepted by a server."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.serving.web_origins import is_loopback
from regauge.system.errors import SettingsError
from regauge.system.files import read_stamps
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.system.files import Stamps

VARIABLE = "REGAUGE_API_KEYS"
WATCH_SECONDS = 2.0
"""How often the file of the keys is compared."""


class ApiKeys:
    """Client keys; without keys, every request is accepted.

    Only hashes are kept. A key is compared with all of them in constant time, so an answer does not
    reveal how much of a wrong key was right.
    """

    def __init__(self, keys: list[str], path: Path | None = None) -> None:
        self.digests = tuple(_hash(key) for key in keys)
        self._path = path
        self._stamps = () if path is None else _read_stamps(path)

    @classmethod
    def from_digests(cls, digests: Sequence[bytes]) -> ApiKeys:
        """Build keys from known hashes."""
        keys = cls([])
        keys.digests = tuple(digests)
        return keys

    @classmethod
    def read(cls, path: str | None) -> ApiKeys:
        """Read keys from a file, or without one from `REGAUGE_API_KEYS`.

        Raises SettingsError if the file is unreadable, or if one of them does not contain a key.
        """
        if path is not None:
            file = Path(path).expanduser()
            return cls(_read_file(file), file)
        variable = os.environ.get(VARIABLE)
        keys = [key for key in (variable or "").split(",") if key.strip()]
        if variable is not None and not keys:
            remedy = "write keys between commas, or unset it to accept every client"
            raise SettingsError(f"{VARIABLE} does not contain an API key", remedy)
        return cls(keys)

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled; an invalid one is reported."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._path is None or not self.has_changed():
                continue
            try:
                self.digests = tuple(_hash(key) for key in _read_file(self._path))
            except SettingsError as error:
                logger.error("The API keys stay as they are: %s", error)
            else:
                logger.info("The API keys have changed; there are %d", len(self.digests))

    def has_changed(self) -> bool:
        """Return whether the file has changed since the last call or the start."""
        previous, self._stamps = (
            self._stamps,
            () if self._path is None else _read_stamps(self._path),
        )
        return self._stamps != previous

    def warn_if_open(self, host: str) -> None:
        """Log a warning if clients on other machines need no key."""
        if not self.is_required and not is_loopback(host):
            message = "The server accepts every client that reaches %s; set %s"
            logger.warning(message, host, "serve.http.api_keys_file")

    @property
    def is_required(self) -> bool:
        return bool(self.digests)

    def find_client(self, authorization: str | None) -> str | None:
        """Return a client identifier for this header, or None if the key is wrong."""
        digest = _hash(_read_key(authorization or ""))
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return digest.hex()[:16] if any(matches) else None


def _read_key(authorization: str) -> str:
    """Return the key in a header: a bearer token, or the password that a browser asks for."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _read_file(path: Path) -> list[str]:
    """Return the keys in a file; raises SettingsError if it is unreadable or has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"the API keys in {path} cannot be read: {type(error).__name__}"
        raise SettingsError(problem, "correct serve.http.api_keys_file") from None
    keys = [line for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"{path} does not contain an API key", "write one key per line")
    return keys


def _read_stamps(path: Path) -> Stamps:
    """Return what changes with a file; empty without it."""
    try:
        return read_stamps([path])
    except OSError:
        return ()


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
