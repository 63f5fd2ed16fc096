"""The request of an event for each sink: an HTTP request, or an e-mail.

Secrets are read once, when a command starts, and never written.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from regauge.monitoring.notify.events import clean_text
from regauge.monitoring.notify.settings import check_url
from regauge.system.errors import SettingsError
from regauge.system.files import read_content

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.monitoring.notify.events import Event
    from regauge.monitoring.notify.settings import Email, Notifications, Slack, Webhook

MAX_PROBLEM_LENGTH = 200
ICONS = {
    "finished": ":white_check_mark:",
    "recovered": ":large_green_circle:",
    "failed": ":x:",
    "stuck": ":hourglass:",
}
"""Chat message emoji; other events have `:warning:`."""
TABLE = "monitoring.notifications"
EMAIL_KEYS = ("host", "security", "username", "ca_file", "sender", "to")
"""Settings passed unchanged to the sending process."""


@dataclass(frozen=True)
class Sink:
    name: str
    """Name and host for warnings, without the URL path."""
    build_request: Callable[[Event], dict[str, Any]]
    """Returns the request for `send_request`."""
    secrets: tuple[str, ...] = ()

    def redact(self, text: str) -> str:
        """Return the sink's answer or error as one short line without secrets."""
        for secret in sorted(filter(None, self.secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        return clean_text(text)[:MAX_PROBLEM_LENGTH]


def build_sinks(settings: Notifications) -> list[Sink]:
    """Return the configured sinks; raises SettingsError if a secret cannot be read."""
    sinks = []
    if settings.webhook is not None:
        sinks.append(_build_webhook(settings.webhook))
    if settings.slack is not None:
        url = _read_url(settings.slack, "slack")
        sinks.append(_build_http_sink("slack", url, settings.slack.ca_file, build_slack_message))
    if settings.email is not None:
        sinks.append(_build_email(settings.email))
    return sinks


def _build_webhook(settings: Webhook) -> Sink:
    url = settings.url or _read_url(settings, "webhook")
    token = _read_secret(settings.token_variable, settings.token_file, "webhook.token")
    return _build_http_sink("webhook", url, settings.ca_file, lambda event: event.document, token)


def _build_http_sink(
    name: str,
    url: str,
    ca_file: str | None,
    build_document: Callable[[Event], dict[str, Any]],
    token: str = "",
) -> Sink:
    """Return a sink that receives documents by POST; every part of the URL may be secret."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Content-Type": "application/json", "User-Agent": "regauge"}

    def build_request(event: Event) -> dict[str, Any]:
        body = json.dumps(build_document(event))
        return {"kind": "http", "url": url, "headers": headers, "body": body, "ca_file": ca_file}

    parts = urlsplit(url)
    path = parts.path if len(parts.path) > 1 else ""
    secrets = (token, url, path, parts.query, parts.password or "")
    return Sink(f"{name} at {parts.hostname}", build_request, secrets)


def _build_email(settings: Email) -> Sink:
    password = _read_secret(settings.password_variable, settings.password_file, "email.password")
    login = f"\0{settings.username}\0{password}"
    encoded = [base64.b64encode(text.encode()).decode() for text in (password, login) if password]
    request = {
        **{name: getattr(settings, name) for name in EMAIL_KEYS},
        "kind": "smtp",
        "port": settings.resolved_port,
        "password": password,
    }

    def build_request(event: Event) -> dict[str, Any]:
        return {**request, "message": build_mail(event, settings).as_bytes().decode("ascii")}

    return Sink(f"email by {settings.host}", build_request, (password, *encoded))


def build_slack_message(event: Event) -> dict[str, Any]:
    """Return a Slack incoming webhook message: a text, and the same as blocks."""
    icon = ICONS.get(event.name, ":warning:")
    lines = [f"*{label}:* {_escape_markup(text)}" for label, text in event.facts.items()]
    headline = f"{icon} *{_escape_markup(event.subject)}*"
    return {
        "text": _escape_markup(event.text),
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": headline}},
            {"type": "section", "text": {"type": "mrkdwn", "text": "\n".join(lines)}},
        ],
    }


def build_mail(event: Event, settings: Email) -> EmailMessage:
    """Return an event's e-mail: facts as text, and the JSON document as attachment."""
    message = EmailMessage()
    message["Subject"] = f"[regauge] {event.subject}"
    message["From"] = settings.sender
    message["To"] = ", ".join(settings.to)
    message["Date"] = format_datetime(event.utc_time)
    message["Message-ID"] = make_msgid(domain=settings.sender.rpartition("@")[2])
    message["Auto-Submitted"] = "auto-generated"
    lines = [f"{label}: {text}" for label, text in event.facts.items()]
    message.set_content("\n".join([f"{event.subject}.", "", *lines, ""]))
    document = json.dumps(event.document, indent=1).encode()
    message.add_attachment(document, "application", "json", filename="event.json")
    return message


def _escape_markup(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _read_url(settings: Webhook | Slack, name: str) -> str:
    url = _read_secret(settings.url_variable, settings.url_file, f"{name}.url")
    source = settings.url_file or f"the variable {settings.url_variable}"
    try:
        check_url(url)
    except ValueError:
        problem = f"{source} does not contain a valid address for {TABLE}.{name}"
        raise SettingsError(problem, "write https://host/path into it") from None
    return url


def _read_secret(variable: str | None, file: str | None, key: str) -> str:
    """Return a variable's or file's content, stripped."""
    if variable is not None:
        secret = os.environ.get(variable, "").strip()
        if not secret:
            problem = f"{TABLE}.{key}_variable: the variable {variable} is not set"
            raise SettingsError(problem, f"set {variable}")
        return secret
    if file is None:
        return ""
    remedy = f"correct {TABLE}.{key}_file"
    content = read_content(Path(file).expanduser(), remedy)
    secret = (content or b"").decode(errors="replace").strip()
    if not secret:
        problem = "is empty" if content is not None else "does not exist"
        raise SettingsError(f"{file} {problem}", remedy)
    return secret
