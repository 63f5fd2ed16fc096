"""`regauge top` on a launched job and on a live server, in a real terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.training_jobs import Workplace, count_steps, create_workplace, wait_until
from monitor.terminal import Terminal, terminal
from serve.servers import ServerProcess, encoder, start_server

__all__ = ["encoder", "terminal"]
KEY = "a-key-of-the-server"
ENDLESS: dict[str, Any] = {
    "stop": {"steps": 1_000_000},
    "execution": {"processes": 2, "timeout_seconds": 300},
}


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    workplace = create_workplace(tmp_path)
    yield workplace
    workplace.clean_up()


@pytest.fixture
def server(encoder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    variables = {"REGAUGE_API_KEYS": KEY}
    with start_server(tmp_path / "server", f"model={encoder}", environment=variables) as server:
        yield server


def embed(server: ServerProcess, texts: list[str]) -> None:
    server.embed(texts, headers={"Authorization": f"Bearer {KEY}"})


@pytest.mark.timeout(400)
def test_a_launched_job_from_its_start_to_its_cancellation(
    workplace: Workplace, terminal: Terminal
) -> None:
    handle = workplace.launch(workplace.write_run(**ENDLESS), "train")
    variables = {"XDG_STATE_HOME": workplace.environment["XDG_STATE_HOME"]}
    terminal.width, terminal.height = 120, 30
    terminal.start("top", handle, variables=variables)
    wait_until(lambda: count_steps(workplace.root / "out-run") > 2, "a step")
    screen = terminal.wait_for(lambda text: re.search(r"^ +1 +alive", text, re.MULTILINE))
    assert "out-run  train  running" in screen
    assert handle[:60] in screen.replace("\n", "")
    assert "/1,000,000 steps" in screen

    answer = workplace.run("top", handle, "--json")
    assert answer.code == 0, answer.error
    document = answer.document
    assert document["state"] == "running"
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    assert document["progress"]["done"] > 2

    assert workplace.run("job", "cancel", handle).code == 0
    terminal.wait_for("cancelled")
    terminal.press("q")
    terminal.wait_for("code=0")


def test_a_live_server_under_requests(server: ServerProcess, terminal: Terminal) -> None:
    terminal.start("top", server.address, variables={"REGAUGE_API_KEYS": KEY})
    screen = terminal.wait_for("ready")
    assert re.search(r"^model +[0-9a-f]{12} +1 +0 ", screen, re.MULTILINE)
    embed(server, ["w5 w6", "w7"])
    terminal.wait_for(lambda text: re.search(r"records +2\b", text))
    embed(server, ["w8 w9"])
    assert server.get("/missing").status_code == 404
    screen = terminal.wait_for(lambda text: re.search(r"status 4xx +1\b", text))
    assert re.search(r"records +3\b", screen)
    assert re.search(r"status 5xx +0\b", screen)

    server.stop()
    terminal.wait_for("does not answer")
    assert re.search(r"records +3\b", terminal.read())  # the last snapshot stays
    terminal.press("q")
    terminal.wait_for("code=0")


def test_a_snapshot_of_a_server_needs_its_key(
    server: ServerProcess, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = workplace.run("top", server.address, "--json")
    assert refused.code == 2
    assert refused.error.count("\n") == 1
    assert "needs an API key; set REGAUGE_API_KEYS" in refused.error
    embed(server, ["w5"])
    monkeypatch.setenv("REGAUGE_API_KEYS", KEY)
    answer = workplace.run("top", server.address, "--json")
    assert answer.code == 0, answer.error
    document = json.loads(answer.output)
    assert document["state"] == "ready"
    assert document["batches"]["records"] == 1
    assert [row["workers"] for row in document["models"]] == [1]
