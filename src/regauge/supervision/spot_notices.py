"""Spot interruption notices: the cloud announces that it will reclaim this machine.

Amazon EC2 announces it in the instance metadata, two minutes ahead. Its user guide recommends a
poll every five seconds ("Spot Instance interruption notices"). IMDSv2 requires a token.
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

from regauge.system.errors import SettingsError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.supervision.signals import SupervisorSignals

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable with the metadata service address, as in the AWS SDKs."""
DEFAULT_ENDPOINT = "http://169.254.169.254"
REQUEST_SECONDS = 5.0
"""Time between two requests for a notice."""
ANSWER_SECONDS = 2.0
TOKEN_SECONDS = 21600


class Ec2Metadata:
    """Client for the metadata service of an EC2 instance."""

    def __init__(self) -> None:
        self.endpoint = os.environ.get(ENDPOINT, DEFAULT_ENDPOINT)
        self._token = ""

    def read_notice(self) -> str | None:
        """Return the instance's interruption notice, or None. Raises OSError."""
        status, notice = self._read()
        if status == HTTPStatus.UNAUTHORIZED:  # the token has expired
            self._token = ""
            status, notice = self._read()
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise OSError(f"{self.endpoint} answers with status {status}")
        return notice

    def _read(self) -> tuple[int, str]:
        if not self._token:
            status, self._token = self._request(
                "PUT",
                "/latest/api/token",
                {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)},
            )
            if status != HTTPStatus.OK:
                raise OSError(f"{self.endpoint} refuses a token with status {status}")
        path = "/latest/meta-data/spot/instance-action"
        return self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        address = urlsplit(self.endpoint)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=ANSWER_SECONDS)
        with closing(connection):
            try:
                connection.request(method, path, headers=headers)
                response = connection.getresponse()
                return response.status, response.read().decode(errors="replace")
            except HTTPException as error:
                raise OSError(f"{self.endpoint}: {error}") from None


@contextmanager
def watch_spot_notices(kind: str, signals: SupervisorSignals) -> Iterator[None]:
    """Treat a spot notice as SIGTERM within the block; `kind` is none or ec2.

    Raises SettingsError if the metadata service does not answer.
    """
    if kind == "none":
        yield
        return
    metadata = Ec2Metadata()
    try:
        metadata.read_notice()
    except OSError as error:
        raise SettingsError(
            f"execution.supervision.spot_notices = '{kind}': {error}",
            "remove spot_notices on machines outside EC2",
        ) from None
    has_ended = threading.Event()
    thread = threading.Thread(
        target=_poll, args=(metadata, signals, has_ended), name="spot-notices", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(ANSWER_SECONDS)


def _poll(metadata: Ec2Metadata, signals: SupervisorSignals, has_ended: threading.Event) -> None:
    while True:
        try:
            notice = metadata.read_notice()
        except OSError:
            notice = None
        if notice is not None:
            text = " ".join(notice.split())
            logger.warning("spot notice: this machine will be reclaimed (%s); saving", text)
            signals.request_stop(signal.SIGTERM)
            return
        if has_ended.wait(REQUEST_SECONDS):
            return
