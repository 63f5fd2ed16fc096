"""Events: their documents and texts, their repetitions, and the settings of their sinks."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from regauge import config
from regauge.monitoring.notify import delivery
from regauge.monitoring.notify.delivery import JOURNAL, SendError, SinkQueue
from regauge.monitoring.notify.events import EVENTS, MAX_TEXT_LENGTH, Event, EventSource
from regauge.monitoring.notify.notifier import Notifier, RateLimit, name_exit, open_notifier
from regauge.monitoring.notify.settings import Email, Notifications
from regauge.monitoring.notify.sinks import Sink, build_mail, build_sinks, build_slack_message
from regauge.supervision.run_events import send_run_events
from regauge.system.errors import ChildError, LimitReachedError, SettingsError, StopSignalError
from regauge.training.settings import TrainSettings

SOURCE = EventSource("train", "pairs", "/runs/pairs", "node-1")
EMAIL = {"host": "mail", "sender": "regauge@x.org", "to": ["a@x.org", "b@x.org"]}


def build_event(name: Any = "failed", **fields: Any) -> Event:
    facts = {"problem": "process 1 was killed by SIGKILL", "failure_kind": "process", "step": 12}
    return Event(name, SOURCE, 1.8e9, **{**facts, "attempt": 2, "usd": 1.5, **fields})


def build_settings(**tables: Any) -> Notifications:
    return config.build(Notifications, tables)


def test_one_message_names_everything_that_a_person_needs() -> None:
    document = build_event(next_action="none: Regauge restarts the run now").document
    assert document["text"] == (
        "train pairs failed on node-1: problem process 1 was killed by SIGKILL (process); step 12; "
        "attempt 2; cost $1.5000; folder /runs/pairs; next none: Regauge restarts the run now"
    )
    assert document["time"] == "2027-01-15T08:00:00+00:00"
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_has_a_subject_of_its_own(name: Any) -> None:
    subjects = {build_event(other).subject for other in EVENTS}
    assert len(subjects) == len(EVENTS)
    assert build_event(name).document["event"] == name


def test_a_message_is_one_line_without_control_characters_and_passwords() -> None:
    problem = "bad\r\nBcc: x@evil.org\x1b[31m at https://me:secret@host/x " + "y" * 5000
    event = build_event(problem=problem)
    for text in (event.text, event.document["problem"]):
        assert "secret" not in text
        assert text.isprintable()
    assert len(event.document["problem"]) == MAX_TEXT_LENGTH


def test_a_problem_adds_no_header_to_a_mail_and_no_mention_to_a_chat() -> None:
    settings = config.build(Email, EMAIL)
    source = EventSource("train", "pairs\nBcc: x@evil.org", "/runs/<!channel>", "node-1")
    event = Event("failed", source, 1.8e9, problem="<!here> & <https://evil.org>")
    mail = build_mail(event, settings)
    assert mail["Bcc"] is None
    assert mail["To"] == "a@x.org, b@x.org"
    message = build_slack_message(event)
    assert "<" not in json.dumps(message)
    assert "&lt;!here&gt; &amp; &lt;https://evil.org&gt;" in message["text"]
    assert [block["type"] for block in message["blocks"]] == ["section", "section"]


def test_repeated_events_are_combined_and_the_last_state_is_sent() -> None:
    limit = RateLimit(300)
    assert limit.admit(build_event(step=1), 0.0) is not None
    assert limit.admit(build_event("recovered"), 1.0) is not None
    for second in range(2, 12):
        assert limit.admit(build_event(step=second), second) is None
    assert limit.take_due(299.0) is None
    event = limit.take_due(300.0)
    assert event is not None
    assert (event.step, event.repeats) == (11, {"failed": 9})
    assert limit.take_due(10_000.0) is None


def test_another_kind_of_failure_and_the_end_of_a_run_are_sent_at_once() -> None:
    limit = RateLimit(300)
    assert limit.admit(build_event(), 0.0)
    assert limit.admit(build_event(failure_kind="storage"), 1.0)
    assert limit.admit(build_event(), 2.0) is None
    final = limit.admit(build_event(is_final=True), 3.0)
    assert final is not None
    assert final.repeats == {"failed": 1}
    assert limit.take_due(10_000.0) is None, "an older event was sent after the end"


class FakeQueue:
    """Records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize("jump", [-3e8, 3e8], ids=["back", "forward"])
def test_a_clock_that_jumps_neither_repeats_nor_loses_events(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, wall = [100.0], [1.8e9]
    monkeypatch.setattr("time.time", lambda: wall[0])
    notifier = Notifier(build_settings(repeat_seconds=60.0), SOURCE, clock=lambda: clock[0])
    queue: Any = FakeQueue()
    notifier._queues = [queue]
    notifier.send("failed", failure_kind="process")
    wall[0] += jump
    clock[0] += 1
    notifier.send("failed", failure_kind="process")
    notifier.poll()
    assert len(queue.events) == 1, "the jump repeated an event"
    clock[0] += 60
    notifier.poll()
    assert [event.time for event in queue.events] == [1.8e9, 1.8e9 + jump]


def test_events_that_the_settings_leave_out_are_not_sent() -> None:
    notifier = Notifier(build_settings(events=["failed"]), SOURCE)
    queue: Any = FakeQueue()
    notifier._queues = [queue]
    notifier.send("recovered")
    notifier.send("failed")
    assert [event.name for event in queue.events] == ["failed"]


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({"webhook": {}}, "set url or url_variable"),
        ({"webhook": {"url": "ftp://x"}}, "write https://host/path"),
        ({"webhook": {"url": "http://x/\nHost: y"}}, "write https://host/path"),
        ({"webhook": {"url": "https://me:secret@x"}}, "set url_variable instead"),
        ({"slack": {"url": "https://hooks.slack.com/services/T/B/X"}}, "unknown key 'slack.url'"),
        ({"email": {**EMAIL, "to": []}}, "to"),
        ({"email": {**EMAIL, "to": ["a@x.org\nBcc: b@y.org"]}}, "write name@host"),
        ({"email": {**EMAIL, "username": "me"}}, "set username and password_file"),
        (
            {"email": {**EMAIL, "username": "me", "password_file": "p", "security": "none"}},
            "set security to starttls or tls",
        ),
        ({"events": ["broken"]}, "events"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tables: Any, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings(**tables)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_secrets_are_read_from_variables_and_files_and_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://hooks.slack.com/services/T0/B0/verysecret"
    monkeypatch.setenv("SLACK_URL", url)
    (tmp_path / "password").write_text("hunter2\n")
    tables = {
        "slack": {"url_variable": "SLACK_URL"},
        "email": {**EMAIL, "username": "me", "password_file": str(tmp_path / "password")},
    }
    settings = build_settings(**tables)
    slack, email = build_sinks(settings)
    assert slack.build_request(build_event())["url"] == url
    assert email.build_request(build_event())["password"] == "hunter2"  # noqa: S105
    saved = json.dumps(config.dump(settings))
    assert "hunter2" not in saved
    assert "verysecret" not in saved
    assert "verysecret" not in slack.redact(f"cannot reach {url}") + slack.name
    assert "hunter2" not in email.redact("535 hunter2 is wrong")


@pytest.mark.parametrize("content", [None, "", "not an address"])
def test_a_missing_secret_is_one_line_with_a_remedy(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "url").write_text(content)
    settings = build_settings(slack={"url_file": str(tmp_path / "url")})
    with pytest.raises(SettingsError, match=r"; (correct|write)"):
        build_sinks(settings)
    with pytest.raises(SettingsError, match="the variable NO_SUCH_URL is not set; set NO_SUCH_URL"):
        build_sinks(build_settings(slack={"url_variable": "NO_SUCH_URL"}))


def test_train_and_predict_read_the_table(tmp_path: Path) -> None:
    tables: Any = {
        "output": {"folder": str(tmp_path)},
        "data": {"path": "data"},
        "task": {"kind": "mlm"},
        "model": {"architecture": "bert"},
        "batch": {"rows": 8, "microbatch_rows": 4},
        "stop": {"steps": 10},
        "monitoring": {"notifications": {"webhook": {"url": "http://127.0.0.1:1/"}}},
    }
    assert config.build(TrainSettings, tables).monitoring.notifications.webhook is not None


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (LimitReachedError("5 USD are spent", "raise the limit"), "over_budget"),
        (ChildError(67, "5 USD are spent; raise the limit"), "over_budget"),
        (StopSignalError(15), "preempted"),
        (ChildError(143, "stopped by a signal; resume"), "preempted"),
        (ValueError("x"), "failed"),
        (SettingsError("x", "y"), "failed"),
    ],
)
def test_the_end_of_a_command_is_one_event(
    error: BaseException, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Event] = []
    monkeypatch.setattr(Notifier, "_put", lambda _, event: sent.extend([event] if event else []))
    settings = build_settings(webhook={"url": "http://127.0.0.1:1/"})

    def fail(*last_events: Any) -> None:
        with open_notifier(settings, SOURCE, tmp_path) as notifier:
            for last in last_events:
                notifier.send(last, is_final=True)
            raise error

    with pytest.raises(type(error)):
        fail()
    with pytest.raises(type(error)):
        fail("finished")
    assert [event.name for event in sent] == [name, "finished"]
    with pytest.raises(type(error)), send_run_events(settings, tmp_path, lambda: False):
        raise error
    assert [event.name for event in sent] == [name, "finished"], "another node is the leader"
    assert all(event.is_final for event in sent)
    assert name_exit(66) == "failed"


def start_queue(tmp_path: Path, **settings: Any) -> SinkQueue:
    sink = Sink("webhook at x", lambda _: {})
    return SinkQueue(sink, build_settings(**settings), tmp_path)


def read_journal(folder: Path) -> list[tuple[str, str, int]]:
    lines = [json.loads(text) for text in (folder / JOURNAL).read_text().splitlines()]
    return [(line["event"], line["state"], line["attempts"]) for line in lines]


def test_transient_problems_are_retried_and_permanent_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SinkQueue, "min_pause_seconds", 0.001)
    transient, permanent = SendError("status 500"), SendError("status 404", is_permanent=True)
    outcomes = [transient, transient, None, permanent, *[transient] * 4]

    def answer(*_: object) -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.setattr(SinkQueue, "_send", answer)
    queue = start_queue(tmp_path)
    for name in ("failed", "stuck", "finished"):
        queue.put(build_event(name))
    queue.begin_close(time.monotonic() + 60)
    queue.close()
    assert outcomes == []
    assert read_journal(tmp_path) == [
        ("failed", "delivered", 3),
        ("stuck", "failed", 1),
        ("finished", "failed", 4),
    ]
    assert caplog.messages == [
        "event 'stuck' not delivered to webhook at x: status 404",
        "event 'finished' not delivered to webhook at x: status 500",
    ]


def test_a_full_queue_drops_its_oldest_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "MAX_QUEUED_EVENTS", 2)
    release = threading.Event()
    monkeypatch.setattr(SinkQueue, "_send", lambda *_: release.wait(60))
    queue = start_queue(tmp_path)
    for name in ("stuck", "failed", "recovered", "finished"):
        queue.put(build_event(name))
    assert read_journal(tmp_path) == [("failed", "dropped", 0)]
    assert "event 'failed' not delivered to webhook at x: the queue is full" in caplog.text
    release.set()
    queue.begin_close(time.monotonic() + 60)
    queue.close()
    delivered = [(name, "delivered", 1) for name in ("stuck", "recovered", "finished")]
    assert read_journal(tmp_path)[1:] == delivered


def test_a_journal_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / JOURNAL).mkdir()

    def refuse(*_: object) -> None:
        raise SendError("status 404", is_permanent=True)

    monkeypatch.setattr(SinkQueue, "_send", refuse)
    for folder in (tmp_path, tmp_path / "missing"):
        queue = start_queue(folder)
        queue.put(build_event())
        queue.begin_close(time.monotonic() + 60)
        queue.close()
    assert caplog.messages == ["event 'failed' not delivered to webhook at x: status 404"] * 2
