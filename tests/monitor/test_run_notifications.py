"""The events of real training runs with faults, as a webhook receives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.conftest import Jobs, jobs, runs, send_sigterm, worlds
from notification_sinks import WebhookSink, be_silent, notify, run_hostile, webhook
from regauge.monitoring.notify.delivery import JOURNAL

__all__ = ["jobs", "runs", "webhook", "worlds"]
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
JUMPING = """
import sys, time
from pathlib import Path
from regauge import config
from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import open_notifier
from regauge.monitoring.notify.settings import Notifications

url, folder, clock, jump = sys.argv[1:]
tables = {"webhook": {"url": url}, "timeout_seconds": 60.0, "exit_seconds": 60.0}
settings = config.build(Notifications, tables)
with open_notifier(settings, EventSource("train", "x", folder)) as events:
    before = time.time()
    events.send("failed", failure_kind="process")
    Path(clock).write_text(jump)
    print(round((time.time() - before) / 86400))
    events.send("failed", failure_kind="process")
    events.poll()
    events.send("finished", is_final=True)
"""


def test_a_killed_rank_gives_failed_recovered_and_finished(
    jobs: Jobs, webhook: WebhookSink
) -> None:
    job = jobs.create({"kind": "kill", "rank": 1, "step": 10}, monitoring=notify(webhook.url))
    job.finish()
    failed, recovered, finished = webhook.documents
    assert webhook.events == ["failed", "recovered", "finished"]
    assert failed["failure_kind"] == "process"
    assert failed["problem"] == "process 1 was killed by SIGKILL"
    assert failed["next_action"] == "none: Regauge restarts the run now"
    assert (failed["attempt"], recovered["attempt"], finished["attempt"]) == (1, 2, 2)
    assert failed["step"] >= 10
    assert finished["step"] == 24
    assert finished["folder"] == str(job.folder.resolve())
    assert [document["is_final"] for document in webhook.documents] == [False, False, True]


def test_a_stopped_rank_gives_stuck_recovered_and_finished(
    jobs: Jobs, webhook: WebhookSink
) -> None:
    job = jobs.create({"kind": "stop", "rank": 1, "step": 10}, monitoring=notify(webhook.url))
    job.finish()
    assert webhook.events == ["stuck", "recovered", "finished"]
    assert "process 1 hangs (it is stopped)" in webhook.documents[0]["problem"]
    assert webhook.documents[0]["failure_kind"] == "hang"


def test_a_slow_run_without_progress_is_stuck_until_its_next_step(
    jobs: Jobs, webhook: WebhookSink
) -> None:
    table = notify(
        webhook.url, no_progress_seconds=2.0, repeat_seconds=0.0, events=["stuck", "recovered"]
    )
    fault = {"kind": "sleep", "rank": 0, "step": 10, "seconds": 5.0}
    supervision = {"supervision": {"hang_timeout_seconds": 60.0}}
    jobs.create(fault, monitoring=table, execution=supervision).finish()
    assert webhook.events[-2:] == ["stuck", "recovered"]
    stuck, recovered = webhook.documents[-2:]
    assert stuck["problem"].startswith("no step for 2 s; process ")
    assert stuck["step"] == 10
    assert recovered["step"] > 10


def test_a_hang_that_is_a_lack_of_progress_too_gives_one_event(
    jobs: Jobs, webhook: WebhookSink
) -> None:
    table = notify(webhook.url, no_progress_seconds=2.0, repeat_seconds=0.0)
    job = jobs.create({"kind": "stop", "rank": 1, "step": 10}, monitoring=table).finish()
    assert [attempt["outcome"] for attempt in job.attempts] == ["hang", "finished"]
    assert webhook.events[-1] == "finished"
    stuck = [document for document in webhook.documents if document["event"] == "stuck"]
    assert [document["attempt"] for document in stuck if document["step"] == 10] == [1]
    later = [document for document in webhook.documents if document["attempt"] == 2]
    assert "recovered" in [document["event"] for document in later]


def test_a_run_over_its_budget_gives_over_budget(jobs: Jobs, webhook: WebhookSink) -> None:
    job = jobs.create(
        monitoring=notify(webhook.url),
        stop={"steps": 24, "usd": 1e-6},
        execution={"price": {"usd_per_hour": 10.0}},
    )
    job.finish(67)
    [document] = webhook.documents
    assert document["event"] == "over_budget"
    assert document["usd"] > 0
    assert document["next_action"]


def test_a_preempted_run_gives_preempted_and_recovered_when_it_resumes(
    jobs: Jobs, webhook: WebhookSink
) -> None:
    fault = {"kind": "sleep", "rank": 0, "step": 9, "count": 15, "seconds": 0.3}
    job = jobs.create(fault, monitoring=notify(webhook.url)).start()
    job.wait_for_step(9)
    send_sigterm(job)
    job.wait()
    assert job.code == 143, job.stderr
    assert webhook.events == ["preempted"]
    job.faults = []
    job.finish()
    assert webhook.events == ["preempted", "recovered", "finished"]


def test_a_silent_sink_changes_neither_the_result_nor_the_exit(jobs: Jobs) -> None:
    with run_hostile(be_silent) as port:
        limits = {"timeout_seconds": 1.0, "exit_seconds": 1.0}
        table = notify(f"http://127.0.0.1:{port}/", **limits)
        job = jobs.create({"kind": "kill", "rank": 1, "step": 10}, monitoring=table).finish()
    assert len(job.losses) == 24
    lines = [json.loads(text) for text in (job.folder / JOURNAL).read_text().splitlines()]
    assert {(line["event"], line["state"]) for line in lines} >= {("finished", "failed")}
    assert {line["state"] for line in lines} == {"failed"}
    jobs.assert_nothing_is_left(job)


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is missing: no jump is proved")
@pytest.mark.parametrize("days", [-400, 400], ids=["back", "forward"])
def test_a_jump_of_the_system_clock_neither_repeats_nor_loses_an_event(
    days: int, webhook: WebhookSink, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0d")
    variables = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    arguments = [webhook.url, str(tmp_path), str(clock), f"{days:+}d"]
    result = subprocess.run(
        [sys.executable, "-c", JUMPING, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == str(days), f"the clock did not jump: {result.stderr}"
    events = {document["time"]: document["event"] for document in webhook.documents}
    assert list(events.values()) == ["failed", "finished"], result.stderr
    assert webhook.documents[-1]["repeats"] == {"failed": 1}
