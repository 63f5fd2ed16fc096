"""Spot interruption notices have the effect of SIGTERM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from faults.conftest import FULL, Jobs
from loopback import Answer, Request, answer_requests
from regauge.supervision import spot_notices
from regauge.supervision.signals import SupervisorSignals
from regauge.supervision.spot_notices import ENDPOINT, Ec2Metadata, watch_spot_notices
from regauge.system.errors import SettingsError
from regauge.system.processes import find_free_port

ACTION = {"action": "terminate", "time": "2026-11-21T08:22:00Z"}
LONG: dict[str, Any] = {"stop": {"steps": 5000}, "output": {"checkpoint": {"every_steps": 1000}}}


@dataclass
class Metadata:
    """The metadata service of an instance; a token is valid for a number of answers."""

    is_reclaimed: bool = False
    answers_per_token: int = 1000
    status: int = 200
    tokens: list[str] = field(default_factory=list)
    answers_left: int = 0

    def respond(self, request: Request) -> Answer:
        if request.method == "PUT":
            assert request.path == "/latest/api/token"
            assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            self.tokens.append(f"token-{len(self.tokens)}")
            self.answers_left = self.answers_per_token
            return self.status, self.tokens[-1].encode(), {}
        assert request.path == "/latest/meta-data/spot/instance-action"
        has_token = request.headers["X-aws-ec2-metadata-token"] == (self.tokens or [""])[-1]
        self.answers_left -= 1
        if not has_token or self.answers_left < 0:
            return 401, b"", {}
        return (200, json.dumps(ACTION).encode(), {}) if self.is_reclaimed else (404, b"", {})


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """Return a metadata service on loopback that this environment names."""
    service = Metadata()
    with answer_requests(service.respond, "metadata") as address:
        monkeypatch.setenv(ENDPOINT, address)
        yield service


@FULL
def test_a_run_saves_before_its_machine_is_reclaimed(jobs: Jobs, metadata: Metadata) -> None:
    notice = {"execution": {"supervision": {"spot_notices": "ec2"}}}
    job = jobs.create(**LONG, **notice).start()
    job.wait_for_step(10)
    metadata.is_reclaimed = True
    job.wait()
    assert job.code == 143, job.stderr
    assert "spot notice: this machine will be reclaimed" in job.stderr_line
    (end,) = job.attempts
    assert end["outcome"] == "preempted"
    assert (job.folder / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    jobs.assert_nothing_is_left(job)


def test_a_notice_requests_a_stop(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_notices, "REQUEST_SECONDS", 0.01)
    signals = SupervisorSignals()
    with watch_spot_notices("ec2", signals):
        assert not signals.is_stop_requested
        metadata.is_reclaimed = True
        signals.sleep(10.0)
    assert signals.is_stop_requested


def test_an_expired_token_is_renewed(metadata: Metadata) -> None:
    metadata.answers_per_token = 2
    client = Ec2Metadata()
    assert [client.read_notice() for _ in range(5)] == [None] * 5
    assert len(metadata.tokens) == 3
    metadata.is_reclaimed = True
    assert json.loads(client.read_notice() or "") == ACTION


def test_a_missing_metadata_service_is_refused_before_the_start(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{find_free_port()}")
    job = jobs.create(execution={"supervision": {"spot_notices": "ec2"}}).start().wait()
    assert job.code == 2
    assert "execution.supervision.spot_notices = 'ec2'" in job.stderr.splitlines()[-1]
    assert not job.folder.exists()


def test_a_refused_token_is_reported(metadata: Metadata) -> None:
    metadata.status = 403
    with (
        pytest.raises(SettingsError, match="refuses a token with status 403"),
        watch_spot_notices("ec2", SupervisorSignals()),
    ):
        pass
