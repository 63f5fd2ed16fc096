"""A run in Weights & Biases: offline records on disk, and a service that cannot be reached."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.jobs import lines
from distributed.runs import settings
from regauge import config
from regauge.monitoring.trackers import RunInfo, start_trackers, wandb
from regauge.monitoring.trackers.jsonl import Jsonl
from regauge.monitoring.trackers.wandb import FOLDER, Wandb
from regauge.system import processes
from regauge.system.errors import SettingsError
from regauge.training.run import attempt

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: it is not proved"
)
API_KEY = "a" * 40
PATIENCE = 120.0
HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER_BYTES = 7, 32768, 7
FULL_RECORD, LAST_PART = 1, 4


@pytest.fixture(autouse=True)
def _isolate_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a home folder without credentials; online runs use no network."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def run_info(folder: Path, attempt: int = 1, resumed_step: int = 0) -> RunInfo:
    run_settings = {"seed": attempt, "batch": {"rows": 8}, "data": {"files": ["a", "b"]}}
    return RunInfo("pairs", "a1b2", folder, attempt, 20, resumed_step, run_settings)


def read_records(folder: Path) -> list[Any]:
    """Return the records of all offline runs of a folder, oldest first.

    A file of W&B is a log of LevelDB: blocks of 32 KiB with records of checksum, length and type.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for path in sorted((folder / FOLDER).glob("*run-*/run-*.wandb")):
        data, offset, parts = path.read_bytes(), HEADER_BYTES, b""
        while offset + RECORD_HEADER_BYTES <= len(data):
            if BLOCK_BYTES - offset % BLOCK_BYTES < RECORD_HEADER_BYTES:
                offset += BLOCK_BYTES - offset % BLOCK_BYTES
                continue
            _, length, kind = struct.unpack_from("<IHB", data, offset)
            offset += RECORD_HEADER_BYTES
            parts += data[offset : offset + length]
            offset += length
            if kind in {FULL_RECORD, LAST_PART}:
                records.append(Record.FromString(parts))
                parts = b""
    return records


def read_items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged metrics, without the values that W&B adds."""
    rows = [read_items(r.history.item) for r in read_records(folder) if r.HasField("history")]
    return [{key: row[key] for key in row if not key.startswith("_")} for row in rows]


def read_summary(folder: Path) -> dict[str, Any]:
    updates = [read_items(r.summary.update) for r in read_records(folder) if r.HasField("summary")]
    return {key: value for update in updates for key, value in update.items()}


def read_runs(folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    """Return the run of each attempt with its configuration."""
    runs = [record.run for record in read_records(folder) if record.HasField("run")]
    return [(run, read_items(run.config.update)) for run in runs]


def read_exit_codes(folder: Path) -> list[int]:
    return [r.exit.exit_code for r in read_records(folder) if r.HasField("exit")]


@contextlib.contextmanager
def count_connections() -> Iterator[tuple[str, list[Any]]]:
    """Yield an address that refuses to answer, and the list of its connections."""
    connections: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@needs_wandb
def test_settings_metrics_and_the_result_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    exit_functions = sys.exit, sys.excepthook
    tracker = Wandb(project="pairs-project", tags=("small",), wait_seconds=PATIENCE)
    with start_trackers([tracker], run_info(folder)) as group:
        group.log(10, {"train/loss": 3.5, "train/learning_rate": 1e-3})
        group.log(20, {"train/loss": 2.5, "heldout/recall@10": 0.75})
        group.finish({"steps": 20, "stop_reason": "finished", "heldout/recall@10": 0.75})
    assert read_history(folder) == [
        {"step": 10, "train/loss": 3.5, "train/learning_rate": 1e-3},
        {"step": 20, "train/loss": 2.5, "heldout/recall@10": 0.75},
    ]
    summary = read_summary(folder)
    assert summary["result/heldout/recall@10"] == 0.75
    assert summary["result.stop_reason"] == "finished"
    ((run, values),) = read_runs(folder)
    assert (run.run_id, run.display_name, run.project) == ("a1b2", "pairs", "pairs-project")
    assert list(run.tags) == ["small"]
    assert (values["seed"], values["batch"], values["data"]) == (
        1,
        {"rows": 8},
        {"files": ["a", "b"]},
    )
    assert read_exit_codes(folder) == [0]
    assert (sys.exit, sys.excepthook) == exit_functions
    assert list((tmp_path / "home").iterdir()) == [], "a file outside of the folder of the run"


@pytest.mark.full
@needs_wandb
def test_a_folder_never_has_the_name_of_a_moved_one(tmp_path: Path) -> None:
    """A client names its folder by the second, in which an earlier attempt may have ended."""
    folder = tmp_path / "run"
    with start_trackers([Jsonl()], run_info(folder)) as group:
        group.log(10, {"train/loss": 3.5})
    now = time.time()
    for seconds in range(8):
        name = time.strftime("offline-run-%Y%m%d_%H%M%S-a1b2", time.localtime(now + seconds))
        (folder / FOLDER / name).mkdir(parents=True)
        wandb.OfflineFolders(folder / FOLDER).record_complete(Path(name), 20)
    trackers = [Jsonl(), Wandb(wait_seconds=PATIENCE)]
    with start_trackers(trackers, run_info(folder, 2, 10)) as group:
        group.log(20, {"train/loss": 2.5})
        group.finish({"steps": 20})
    assert [row["train/loss"] for row in read_history(folder)] == [3.5, 2.5]
    assert len(list((folder / FOLDER / wandb.INCOMPLETE).iterdir())) == 8


@needs_wandb
def test_attempts_share_one_run_and_a_repeated_step_is_recorded_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trackers = [Jsonl(), Wandb(wait_seconds=PATIENCE)]

    def fail() -> None:
        with start_trackers(trackers, run_info(folder)) as group:
            group.log(10, {"train/loss": 3.5})
            group.log(20, {"train/loss": 9.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert read_exit_codes(folder) == [1]
    with start_trackers(trackers, run_info(folder, 2, 10)) as group:
        group.log(20, {"train/loss": 2.5})
        group.finish({"steps": 20})
    assert [row["train/loss"] for row in read_history(folder)] == [3.5, 2.5]
    with start_trackers(trackers, run_info(folder, 3, 20)) as group:
        group.log(20, {"heldout/loss": 2.0})
        group.log(30, {"train/loss": 1.5})
        group.finish({"steps": 30})
    rows = [(row["step"], row.get("train/loss")) for row in read_history(folder)]
    assert rows == [(10, 3.5), (20, 2.5), (30, 1.5)], "records of a complete attempt"
    runs = read_runs(folder)
    assert {run.run_id for run, _ in runs} == {"a1b2"}
    attempts = [(values["seed"], values["regauge"]["attempt"]) for _, values in runs]
    assert attempts == [(2, 2), (3, 3)]
    axes = [r.metric for r in read_records(folder) if r.HasField("metric")]
    assert {(axis.glob_name, axis.step_metric) for axis in axes} >= {("*", "step")}


@needs_wandb
def test_offline_mode_uses_no_network_and_online_mode_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setattr(wandb, "INIT_SECONDS", 1.0)
    with count_connections() as (address, connections):
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        track_run(tmp_path / "offline", Wandb(mode="offline", wait_seconds=PATIENCE))
        assert connections == []
        assert not [message for message in caplog.messages if "recording offline" in message]
        track_run(tmp_path / "online", Wandb(mode="online", wait_seconds=PATIENCE))
        assert connections


def track_run(folder: Path, tracker: Wandb) -> None:
    with start_trackers([tracker], run_info(folder)) as group:
        group.log(10, {"train/loss": 3.5})
        group.finish({"steps": 10})


@needs_wandb
def test_an_unreachable_service_loses_no_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{processes.find_free_port()}")
    monkeypatch.setattr(wandb, "INIT_SECONDS", 1.0)
    folder = tmp_path / "run"
    track_run(folder, Wandb(mode="online", wait_seconds=PATIENCE))
    assert read_history(folder) == [{"step": 10, "train/loss": 3.5}]
    (message,) = [message for message in caplog.messages if "recording offline" in message]
    assert f"'wandb sync {folder / FOLDER}/offline-run-*' uploads the records later" in message
    assert not [message for message in caplog.messages if "not delivered" in message]


@needs_wandb
def test_a_missing_api_key_never_prompts_and_records_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    folder = tmp_path / "run"
    track_run(folder, Wandb(wait_seconds=PATIENCE))
    assert read_history(folder) == [{"step": 10, "train/loss": 3.5}]
    assert "wandb: recording offline: no API key is set; 'wandb sync " in caplog.text


@needs_wandb
def test_the_records_of_a_training_run_equal_metrics_jsonl(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    table = {"kind": "wandb", "wait_seconds": PATIENCE}
    output = {"trackers": ("jsonl", table)}
    run = settings(folder, datasets.write_packed(tmp_path / "data"), "mlm", output=output)
    folder.mkdir()
    (folder / "ranks").mkdir()
    attempt(run, processes.World())
    history = read_history(folder)
    for name in ("train/loss", "train/grad_norm", "heldout/loss"):
        expected = [(line["step"], line[name]) for line in lines(folder) if name in line]
        assert [(row["step"], row[name]) for row in history if name in row] == expected
        assert expected
    ((_, values),) = read_runs(folder)
    assert values["model"]["config"]["hidden_size"] == 32


@needs_wandb
def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SettingsError, match="'mode'"):
        config.parse_choice("trackers", {"kind": "wandb", "mode": "disabled"})
