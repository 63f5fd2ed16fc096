"""The [prometheus] table: a local Prometheus, and the thresholds of alerts.

This module does not import torch.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from regauge.config import Settings


class AlertThresholds(Settings):
    """Limits beyond which an alert fires."""

    alive_seconds: int = Field(default=30, ge=1)
    """Seconds without a running rank process, a ready worker, or an answer from a scrape target."""
    progress_seconds: int = Field(default=300, ge=1)
    """Seconds without a finished step."""
    checkpoint_seconds: int = Field(default=1800, ge=1)
    """Maximum age in seconds for the newest checkpoint."""
    straggler_ratio: float = Field(default=0.1, gt=0)
    """Share of the step time by which one rank delays the others."""
    goodput_ratio: float = Field(default=0.5, ge=0, le=1)
    """Minimum productive share of a run's time."""
    budget_ratio: float = Field(default=0.9, gt=0, le=1)
    """Budget share at which a run counts as near its limit."""
    error_ratio: float = Field(default=0.01, gt=0, lt=1)
    """Maximum share of failed server requests, or failed `predict` records."""
    queue_seconds: float = Field(default=1.0, gt=0)
    """Maximum expected wait in a server queue."""
    drain_seconds: int = Field(default=60, ge=1)
    """Seconds within which a server ends after it stops accepting requests."""
    error_seconds: int = Field(default=600, ge=1)
    """Seconds for which a device error or a failure keeps firing after it occurred."""
    missing_seconds: int = Field(default=300, ge=1)
    """Seconds after which a missing metric is reported."""
    zero_seconds: int = Field(default=1800, ge=1)
    """Seconds after which a counter stuck at 0 is reported."""


class Prometheus(Settings):
    """A local Prometheus, its targets, and the alerts."""

    port: int = Field(default=9090, ge=1, le=65535)
    """Prometheus port on the loopback interface."""
    alertmanager_port: int = Field(default=9093, ge=1, le=65535)
    """Alertmanager port on the loopback interface."""
    scrape_seconds: int = Field(default=15, ge=1)
    """Interval at which targets are read and rules are evaluated."""
    retention_days: int = Field(default=15, ge=1)
    """Prometheus data retention in days."""
    targets: tuple[str, ...] = ()
    """Other targets as `host:port`, such as device exporters and servers without API keys."""
    servers: tuple[str, ...] = ()
    """Servers as `host:port` that get the key in `server_key_file`."""
    server_key_file: str | None = None
    """File with the API key, and nothing else, for the metrics of `servers`."""
    run_port: int = Field(default=9464, ge=1, le=65535)
    """Metrics port of runs and servers on Kubernetes, as set in their run files."""
    webhook: str | None = None
    """URL to which Alertmanager sends alerts; by default it only shows them."""
    alerts: AlertThresholds = AlertThresholds()
    """Limits beyond which an alert fires."""

    @field_validator("targets", "servers")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            host, _, port = target.rpartition(":")
            if not host or "/" in target or not port.isdecimal():
                raise ValueError(f"{target!r} is not an address; write it as localhost:9400")
        return targets

    @field_validator("webhook")
    @classmethod
    def _check_webhook(cls, webhook: str | None) -> str | None:
        if webhook is not None and not webhook.startswith(("http://", "https://")):
            raise ValueError(f"{webhook!r} is not a URL; write it as https://host/path")
        return webhook


class MonitorSettings(Settings):
    """The table read by `monitor`."""

    prometheus: Prometheus = Prometheus()
