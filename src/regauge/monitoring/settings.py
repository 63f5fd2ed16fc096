"""The [monitoring] table: a run's metrics over HTTP. This module does not import torch."""

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
    """IP address for the metrics. `0.0.0.0` serves them to every machine, without a password."""
    targets_folder: str | None = None
    """Folder that gets the address of the metrics while the run exports them, as a file for the
    service discovery of Prometheus. Runs may share it; by default only `exporters` gets one."""
    notifications: Notifications = Notifications()
    """Events that people receive by webhook, chat or e-mail."""

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            problem = f"{host!r} is not an IP address; set 127.0.0.1, or 0.0.0.0 for all interfaces"
            raise ValueError(problem) from None
        return host
