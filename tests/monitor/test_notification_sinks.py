"""Notifications with real sinks on the loopback interface, well-behaved and hostile."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notification_sinks import (
    MailSink,
    WebhookSink,
    be_silent,
    drip,
    greet_without_end,
    reset,
    run_hostile,
    send_endless_body,
    send_endless_headers,
    webhook,
)
from regauge import config
from regauge.monitoring.notify.delivery import JOURNAL
from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import Notifier, open_notifier
from regauge.monitoring.notify.settings import Notifications
from regauge.system.processes import find_free_port

__all__ = ["webhook"]
PATIENCE = 60.0
MAX_EXIT_SECONDS = 30.0
"""Generous limit of an exit that may take one second, on a busy machine."""
LOGIN = ("me", "hunter2")


def build_settings(**tables: Any) -> Notifications:
    defaults = {"timeout_seconds": PATIENCE, "exit_seconds": PATIENCE}
    return config.build(Notifications, {**defaults, **tables})


def send(settings: Notifications, folder: Path, *names: Any) -> None:
    """Send events and wait for the end of their deliveries."""
    source = EventSource("train", "pairs", str(folder), "node-1")
    with open_notifier(settings, source) as notifier:
        for name in names:
            notifier.send(name, problem="process 1 was killed by SIGKILL", step=12, usd=0.5)


def email_table(port: int, **changes: Any) -> dict[str, Any]:
    table = {"host": "127.0.0.1", "port": port, "sender": "r@x.org", "to": ["a@x.org"]}
    return table | changes


def read_states(folder: Path) -> list[tuple[str, str]]:
    lines = [json.loads(text) for text in (folder / JOURNAL).read_text().splitlines()]
    return [(line["state"], line["problem"]) for line in lines]


def read_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "regauge"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a self-signed certificate of 127.0.0.1 and its key."""
    path = tmp_path_factory.mktemp("certificate") / "server.pem"
    names = "subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "36500"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", names, "-keyout", str(path)]
    subprocess.run([*command, "-out", f"{path}.crt"], check=True, capture_output=True)
    with path.open("a") as file:
        file.write(Path(f"{path}.crt").read_text())
    return path


def test_a_webhook_receives_one_document_per_event(
    webhook: WebhookSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_TOKEN", "t0ken")
    table = {"url": webhook.url, "token_variable": "HOOK_TOKEN"}
    send(build_settings(webhook=table), tmp_path, "failed", "recovered", "finished")
    assert webhook.events == ["failed", "recovered", "finished"]
    first = webhook.documents[0]
    assert (first["run"], first["host"], first["step"], first["usd"]) == (
        "pairs",
        "node-1",
        12,
        0.5,
    )
    assert webhook.headers[0]["Authorization"] == "Bearer t0ken"
    assert webhook.headers[0]["Content-Type"] == "application/json"
    assert read_states(tmp_path) == [("delivered", "")] * 3
    assert "t0ken" not in (tmp_path / JOURNAL).read_text()


def test_a_server_that_fails_twice_receives_the_event(webhook: WebhookSink, tmp_path: Path) -> None:
    webhook.statuses += [500, 429]
    send(build_settings(webhook={"url": webhook.url}), tmp_path, "failed")
    assert webhook.events == ["failed"]
    assert len(webhook.headers) == 3
    assert read_states(tmp_path) == [("delivered", "")]


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 403, 404])
def test_redirects_and_refusals_are_permanent_and_reach_no_other_server(
    status: int, webhook: WebhookSink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with WebhookSink().run() as other:
        webhook.statuses, webhook.location = [status], other.url
        send(build_settings(webhook={"url": webhook.url}), tmp_path, "failed")
        assert other.headers == []
    assert len(webhook.headers) == 1
    [(state, problem)] = read_states(tmp_path)
    assert (state, problem.split(",")[0]) == ("failed", f"status {status}")
    assert len(read_warnings(caplog)) == 1


def test_slack_receives_a_text_and_blocks(webhook: WebhookSink, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(webhook.url)
    send(build_settings(slack={"url_file": str(tmp_path / "url")}), tmp_path, "stuck")
    [message] = webhook.documents
    assert message["text"].startswith("train pairs is stuck on node-1: problem process 1")
    headline, facts = (block["text"]["text"] for block in message["blocks"])
    assert headline == ":hourglass: *train pairs is stuck on node-1*"
    assert "*Step:* 12" in facts


@pytest.mark.parametrize("security", ["none", "starttls"])
def test_an_email_has_the_facts_and_the_document(
    security: str, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_encrypted = security == "starttls"
    monkeypatch.setenv("MAIL_PASSWORD", LOGIN[1])
    sink = MailSink(
        LOGIN if is_encrypted else None, certificate=certificate if is_encrypted else None
    )
    login = {"username": LOGIN[0], "password_variable": "MAIL_PASSWORD"} if is_encrypted else {}
    with sink.run() as port:
        table = email_table(
            port,
            security=security,
            to=["a@x.org", "b@x.org"],
            ca_file=str(certificate),
            **login,
        )
        send(build_settings(email=table), tmp_path, "failed")
    assert read_states(tmp_path) == [("delivered", "")]
    [mail] = sink.mails
    assert mail["Subject"] == "[regauge] train pairs failed on node-1"
    body, attachment = mail.iter_parts()
    assert "Problem: process 1 was killed by SIGKILL" in body.get_content()
    assert json.loads(attachment.get_content())["event"] == "failed"


def test_a_refused_login_is_permanent_and_its_password_is_not_logged(
    certificate: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "password").write_text("wr0ng")
    sink = MailSink(LOGIN, certificate=certificate)
    with sink.run() as port:
        login = {"username": "me", "password_file": str(tmp_path / "password")}
        table = email_table(port, ca_file=str(certificate), **login)
        send(build_settings(email=table), tmp_path, "failed")
    [(state, problem)] = read_states(tmp_path)
    assert (state, sink.mails) == ("failed", [])
    assert "535" in problem
    assert "wrong password ***" in problem
    assert "wr0ng" not in caplog.text + problem


def test_a_wrong_certificate_is_permanent(
    certificate: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = MailSink(certificate=certificate)
    with sink.run() as port:
        send(build_settings(email=email_table(port)), tmp_path, "failed")
    assert "CERTIFICATE_VERIFY_FAILED" in read_states(tmp_path)[0][1]
    assert sink.mails == []
    assert len(read_warnings(caplog)) == 1


def test_a_recipient_that_is_refused_is_reported_and_the_others_receive_it(tmp_path: Path) -> None:
    sink = MailSink(refused="a@x.org")
    with sink.run() as port:
        table = email_table(port, security="none", to=["a@x.org", "b@x.org"])
        send(build_settings(email=table), tmp_path, "failed")
    assert len(sink.mails) == 1
    assert read_states(tmp_path) == [("failed", "refused: a@x.org")]


HOSTILE: list[Callable[[socket.socket], None]] = [be_silent, drip, reset, send_endless_headers]


@pytest.mark.parametrize("behave", HOSTILE, ids=lambda behave: behave.__name__)
@pytest.mark.parametrize("kind", ["webhook", "email"])
def test_a_hostile_sink_delays_neither_an_event_nor_the_exit(
    behave: Callable[[socket.socket], None],
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    behave = greet_without_end if kind == "email" and behave is send_endless_headers else behave
    with run_hostile(behave) as port:
        webhook_table = {"url": f"http://127.0.0.1:{port}/"}
        tables = {"webhook": webhook_table, "email": email_table(port, security="none")}
        settings = build_settings(**{kind: tables[kind]}, timeout_seconds=0.5, exit_seconds=1.0)
        began_at = time.monotonic()
        send(settings, tmp_path, "failed", "finished")
        assert time.monotonic() - began_at < MAX_EXIT_SECONDS
    assert [state for state, _ in read_states(tmp_path)] == ["failed", "failed"]
    assert len(read_warnings(caplog)) == 2, "one line per event"


def test_an_endless_body_is_not_read(tmp_path: Path) -> None:
    with run_hostile(send_endless_body) as port:
        settings = build_settings(webhook={"url": f"http://127.0.0.1:{port}/"})
        send(settings, tmp_path, "failed")
    assert read_states(tmp_path) == [("delivered", "")]


def test_a_sink_that_is_down_leaves_the_other_sinks_alone(
    webhook: WebhookSink, tmp_path: Path
) -> None:
    email = email_table(find_free_port(), security="none")
    send(build_settings(webhook={"url": webhook.url}, email=email), tmp_path, "failed")
    assert webhook.events == ["failed"]
    assert sorted(state for state, _ in read_states(tmp_path)) == ["delivered", "failed"]


def test_an_event_is_queued_without_any_input_or_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller, which may be the loop that watches a run, opens no connection and no process."""
    with run_hostile(be_silent) as port:
        settings = build_settings(
            webhook={"url": f"http://127.0.0.1:{port}/"}, timeout_seconds=0.5, exit_seconds=0.0
        )
        notifier = Notifier(settings, EventSource("train", "pairs", str(tmp_path)))
        callers: list[str] = []
        popen = subprocess.Popen

        def record_caller(*arguments: Any, **options: Any) -> Any:
            callers.append(threading.current_thread().name)
            return popen(*arguments, **options)

        monkeypatch.setattr(subprocess, "Popen", record_caller)
        for _ in range(100):
            notifier.send("finished", is_final=True)
        notifier.close()
        assert set(callers) <= {"notifications webhook at 127.0.0.1"}
