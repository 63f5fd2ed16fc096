"""The `monitoring.notifications` table; this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from regauge.config import Settings
from regauge.config.validation import require_pattern
from regauge.monitoring.notify.events import EVENTS, EventName

Variable = Annotated[
    str, require_pattern(r"[A-Za-z_]\w*", "the name of an environment variable; such as MY_TOKEN")
]
Address = Annotated[
    str, require_pattern(r"[^@\s,<>]+@[^@\s,<>]+", "an e-mail address; write name@host")
]
DEFAULT_PORTS = {"starttls": 587, "tls": 465, "none": 25}


class SecretUrl(Settings):
    """An HTTP address that may be a secret."""

    url_variable: Variable | None = None
    """Environment variable with the address."""
    url_file: str | None = None
    """File with the address."""
    ca_file: str | None = None
    """CA certificates (PEM) to trust; by default the system's."""

    @model_validator(mode="after")
    def _check_one_url(self) -> Self:
        names = [name for name in ("url", "url_variable", "url_file") if hasattr(self, name)]
        if _count_keys(self, *names) != 1:
            raise ValueError(f"the sink has one address; set {' or '.join(names)}")
        return self


class Webhook(SecretUrl):
    """A sink that receives each event as one JSON document by POST."""

    url: str | None = None
    """The address; it is saved in run.json, so a secret one belongs in `url_variable`."""
    token_variable: Variable | None = None
    """Environment variable with a token, which is sent as `Authorization: Bearer`."""
    token_file: str | None = None
    """File with the token."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None:
            check_url(url)
            if urlsplit(url).username or urlsplit(url).password:
                problem = "a password in 'url' would be saved in run.json"
                raise ValueError(f"{problem}; set url_variable instead")
        return url

    @model_validator(mode="after")
    def _check_one_token(self) -> Self:
        _require_at_most_one(self, "token_variable", "token_file")
        return self


class Slack(SecretUrl):
    """An incoming webhook for Slack, or a compatible chat such as Mattermost."""


class Email(Settings):
    """A mail server that sends each event to some people."""

    host: str = Field(min_length=1)
    """SMTP server host."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Server port; by default 587 for starttls, 465 for tls and 25 for none."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """Connection encryption; `none` does not send a password."""
    sender: Address
    """Sender address."""
    to: tuple[Address, ...] = Field(min_length=1, strict=False)
    """Recipient addresses."""
    username: str | None = None
    """Login name; unset sends without a login."""
    password_variable: Variable | None = None
    """Environment variable with the password."""
    password_file: str | None = None
    """File with the password."""
    ca_file: str | None = None
    """CA certificates (PEM) to trust; by default the system's."""

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        _require_at_most_one(self, "password_variable", "password_file")
        has_password = bool(self.password_variable or self.password_file)
        if has_password != (self.username is not None):
            raise ValueError("a login has a name and a password; set username and password_file")
        if has_password and self.security == "none":
            raise ValueError("a password needs encryption; set security to starttls or tls")
        return self

    @property
    def resolved_port(self) -> int:
        return self.port or DEFAULT_PORTS[self.security]


class Notifications(Settings):
    """Run events that people receive, and where; without a sink nothing is sent."""

    webhook: Webhook | None = None
    """Any HTTP server that accepts JSON."""
    slack: Slack | None = None
    """Slack, or a chat with compatible webhooks."""
    email: Email | None = None
    """A mail server."""
    events: tuple[EventName, ...] = Field(default=EVENTS, strict=False)
    """The events to send."""
    no_progress_seconds: float | None = Field(default=1800.0, gt=0)
    """Time without a step after which a run that does not hang is reported as stuck."""
    repeat_seconds: float = Field(default=300.0, ge=0)
    """Minimum time between two equal events; those between are counted in the next one."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=600)
    """Time limit per delivery."""
    max_attempts: int = Field(default=4, ge=1, le=20)
    """Delivery attempts per event; the pauses between them double."""
    exit_seconds: float = Field(default=5.0, ge=0, le=600)
    """Seconds to wait for pending notifications on exit."""


def check_url(url: str) -> None:
    """Raise ValueError for anything but an HTTP address."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("the address is not valid; write https://host/path")


def _count_keys(table: Settings, *names: str) -> int:
    return sum(getattr(table, name) is not None for name in names)


def _require_at_most_one(table: Settings, *names: str) -> None:
    if _count_keys(table, *names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude each other; remove one")
