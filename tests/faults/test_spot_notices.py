"""A rented machine that is taken away: what its owner tells is taken as SIGTERM is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from faults.conftest import FULL, Jobs
from loopback import running
from regauge.errors import SettingsError
from regauge.processes import free_port
from regauge.supervision import spot_notices
from regauge.supervision.signals import Signals
from regauge.supervision.spot_notices import ENDPOINT, Ec2, heard

ACTION = {"action": "terminate", "time": "2026-11-21T08:22:00Z"}
LONG: dict[str, Any] = {"stop": {"steps": 5000}, "output": {"checkpoint": {"every_steps": 1000}}}


@dataclass
class Metadata:
    """The metadata service of an instance; a token is good for so many answers."""

    taken: bool = False
    answers: int = 1000
    status: int = 200
    tokens: list[str] = field(default_factory=list)
    left: int = 0


def _handler(service: Metadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            assert self.path == "/latest/api/token"
            assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            service.tokens.append(f"token-{len(service.tokens)}")
            service.left = service.answers
            self._say(service.status, service.tokens[-1])

        def do_GET(self) -> None:
            assert self.path == "/latest/meta-data/spot/instance-action"
            current = self.headers["X-aws-ec2-metadata-token"] == (service.tokens or [""])[-1]
            service.left -= 1
            if not current or service.left < 0:
                self._say(401, "")
            elif service.taken:
                self._say(200, json.dumps(ACTION))
            else:
                self._say(404, "")

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    return Handler


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """Return a metadata service on loopback that this environment names."""
    service = Metadata()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(service))
    with running(server, "metadata") as address:
        monkeypatch.setenv(ENDPOINT, address)
        yield service


@FULL
def test_a_run_saves_before_its_machine_is_taken_away(jobs: Jobs, metadata: Metadata) -> None:
    notice = {"execution": {"supervision": {"notices": "ec2"}}}
    job = jobs.job(**LONG, **notice).start()
    job.until(10)
    metadata.taken = True
    job.wait()
    assert job.code == 143, job.said
    assert "this machine will be taken away" in job.told
    (end,) = job.attempts
    assert end["end"] == "preempted"
    assert (job.folder / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    jobs.nothing_is_left(job)


def test_a_notice_is_heard(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_notices, "POLL_SECONDS", 0.01)
    signals = Signals()
    with heard("ec2", signals):
        assert not signals.told
        metadata.taken = True
        signals.sleep(10.0)
    assert signals.told


def test_an_old_token_is_renewed(metadata: Metadata) -> None:
    metadata.answers = 2
    source = Ec2()
    assert [source.notice() for _ in range(5)] == [None] * 5
    assert len(metadata.tokens) == 3
    metadata.taken = True
    assert json.loads(source.notice() or "") == ACTION


def test_nobody_there_is_known_before(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_port()}")
    job = jobs.job(execution={"supervision": {"notices": "ec2"}}).start().wait()
    assert job.code == 2
    assert "execution.supervision.notices = 'ec2'" in job.said.splitlines()[-1]
    assert not job.folder.exists()


def test_a_service_that_gives_no_token_is_told(metadata: Metadata) -> None:
    metadata.status = 403
    with (
        pytest.raises(SettingsError, match="gives no token: 403"),
        heard("ec2", Signals()),
    ):
        pass
