"""API keys accepted by a server."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE = "REGAUGE_API_KEYS"
SCHEME = "bearer "


class ApiKeys:
    """Client keys; without keys, every request is accepted.

    Only hashes are kept. A key is compared with all of them in constant time, so an answer does not
    reveal how much of a wrong key was right.
    """

    def __init__(self, keys: list[str]) -> None:
        self.digests = tuple(_hash(key) for key in keys)

    @classmethod
    def from_digests(cls, digests: Sequence[bytes]) -> ApiKeys:
        """Build keys from known hashes."""
        keys = cls([])
        keys.digests = tuple(digests)
        return keys

    @classmethod
    def read(cls, path: str | None) -> ApiKeys:
        """Read keys from a file, or without one from `REGAUGE_API_KEYS`.

        Raises SettingsError if the file is unreadable or does not contain a key.
        """
        if path is None:
            return cls([key for key in os.environ.get(VARIABLE, "").split(",") if key.strip()])
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = f"the API keys in {path} cannot be read: {type(error).__name__}"
            raise SettingsError(problem, "correct serve.http.api_keys_file") from None
        keys = [line for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise SettingsError(f"{path} does not contain an API key", "write one key per line")
        return cls(keys)

    @property
    def is_required(self) -> bool:
        return bool(self.digests)

    def find_client(self, authorization: str | None) -> str | None:
        """Return a client identifier for this header, or None if the key is wrong."""
        header = authorization or ""
        key = header[len(SCHEME) :] if header[: len(SCHEME)].lower() == SCHEME else ""
        digest = _hash(key)
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return digest.hex()[:16] if any(matches) else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
