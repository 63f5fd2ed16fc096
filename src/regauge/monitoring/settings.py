"""The [monitoring] table of a run file: the metrics of a run over HTTP. No torch here."""

from __future__ import annotations

import ipaddress

from pydantic import Field, field_validator

from regauge.config import Settings
from regauge.monitoring.notify.settings import Notifications


class Monitoring(Settings):
    """How a run can be watched while it runs; nothing here changes its result."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """TCP port of the metrics for Prometheus, or 0 for any free port; by default none are served.
    If another program uses the port, the run warns and takes a free one."""
    host: str = "127.0.0.1"
    """IP address of the metrics. `0.0.0.0` serves them to every machine, without a password."""
    notifications: Notifications = Notifications()
    """The events that people receive by a webhook, a chat or e-mail."""

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            problem = f"{host!r} is no IP address; write 127.0.0.1, or 0.0.0.0 for every interface"
            raise ValueError(problem) from None
        return host
