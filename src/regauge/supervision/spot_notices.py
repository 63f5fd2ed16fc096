"""Notices that this machine will be taken away, as those who rent it out give them.

Amazon EC2 tells a spot instance two minutes before, and asks to look every five seconds ("Spot
Instance interruption notices" in its user guide; IMDSv2 wants a token first).
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from regauge.errors import SettingsError
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.supervision.signals import Signals

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Where the metadata of an instance is, as Amazon's own libraries read it from the environment."""
USUAL = "http://169.254.169.254"
POLL_SECONDS = 5.0
ANSWER_SECONDS = 2.0
TOKEN_SECONDS = 21600


class Ec2:
    """The metadata service of an instance."""

    def __init__(self) -> None:
        self.endpoint = os.environ.get(ENDPOINT, USUAL)
        self._token = ""

    def notice(self) -> str | None:
        """Return what the instance is told; None where it is told nothing. Raises OSError."""
        status, told = self._read()
        if status == HTTPStatus.UNAUTHORIZED:  # the token is too old
            self._token = ""
            status, told = self._read()
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise OSError(f"{self.endpoint} answers {status}")
        return told

    def _read(self) -> tuple[int, str]:
        if not self._token:
            status, self._token = self._asked(
                "PUT",
                "/latest/api/token",
                {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)},
            )
            if status != HTTPStatus.OK:
                raise OSError(f"{self.endpoint} gives no token: {status}")
        path = "/latest/meta-data/spot/instance-action"
        return self._asked("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _asked(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        place = urlsplit(self.endpoint)
        connection = HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_SECONDS)
        with closing(connection):
            try:
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(errors="replace")
            except HTTPException as error:
                raise OSError(f"{self.endpoint}: {error}") from None


@contextmanager
def heard(kind: str, signals: Signals) -> Iterator[None]:
    """Take a notice as SIGTERM is taken, for as long as the block lasts; `kind` is none or ec2.

    Raises SettingsError where nobody gives any.
    """
    if kind == "none":
        yield
        return
    source = Ec2()
    try:
        source.notice()
    except OSError as error:
        raise SettingsError(
            f"execution.supervision.notices = '{kind}': {error}", "leave it out on other machines"
        ) from None
    ended = threading.Event()
    thread = threading.Thread(
        target=_listen, args=(source, signals, ended), name="notices", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(ANSWER_SECONDS)


def _listen(source: Ec2, signals: Signals, ended: threading.Event) -> None:
    while True:
        try:
            told = source.notice()
        except OSError:
            told = None
        if told is not None:
            logger.warning("this machine will be taken away (%s): saving", " ".join(told.split()))
            signals.caught(signal.SIGTERM)
            return
        if ended.wait(POLL_SECONDS):
            return
