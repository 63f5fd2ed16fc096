"""A run in MLflow: with a real MLflow server on the loopback interface, and with a database."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.jobs import lines
from distributed.runs import settings
from loopback import serve
from regauge import config
from regauge.monitoring.trackers import RunInfo, Tracker, mlflow, start_trackers
from regauge.monitoring.trackers.mlflow import FILE, Mlflow
from regauge.system import processes
from regauge.system.errors import SettingsError
from regauge.system.processes import find_free_port
from regauge.training.run import attempt

HERE = all(importlib.util.find_spec(name) for name in ("mlflow", "sqlalchemy", "alembic"))
needs_mlflow = pytest.mark.skipif(
    not HERE, reason="mlflow is not installed: delivery to it is not proved"
)
SETTINGS = {"seed": 1, "batch": {"rows": 8}, "model": {"config": {}}, "data": {"files": ["a", "b"]}}


def run_info(folder: Path, attempt: int = 1, resumed_step: int = 0, **changes: Any) -> RunInfo:
    run_settings = config.merge(SETTINGS, changes)
    return RunInfo("pairs", "a1b2", folder, attempt, 20, resumed_step, run_settings)


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database without runs; creating one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with processes.restore_environment():
        os.environ.update(mlflow.VARIABLES)
        client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def application(empty: Path) -> Iterator[Any]:
    """Return the web application of MLflow, without passwords, with a separate database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow.server.auth", None)
        # The warnings of the server's libraries are not about Regauge.
        with processes.restore_environment(), warnings.catch_warnings(action="ignore"):
            os.environ.update(mlflow.VARIABLES)
            from mlflow.server import app
            from mlflow.server.handlers import initialize_backend_stores

            store = empty.with_name("server.db")
            shutil.copy(empty, store)
            initialize_backend_stores(f"sqlite:///{store}", default_artifact_root=str(store.parent))
        yield app


@contextmanager
def serving(application: Any, port: int = 0) -> Iterator[str]:
    """Serve the application until the end of the block."""
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", port, application, threaded=True)
    with serve(server, "mlflow-server") as address:
        yield address


@pytest.fixture(scope="module")
def server(application: Any) -> Iterator[str]:
    with serving(application) as uri:
        yield uri


@pytest.fixture
def experiment() -> str:
    return f"experiment {uuid.uuid4().hex[:6]}"


@pytest.fixture
def find_only_run(server: str, experiment: str) -> Callable[[], Any]:
    """Return a function that returns the one MLflow run of the test's experiment."""

    def find_run() -> Any:
        mlflow_client = client(server)
        experiment_id = mlflow_client.get_experiment_by_name(experiment).experiment_id
        (run,) = mlflow_client.search_runs([experiment_id])
        return run

    return find_run


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    metrics = client(uri).get_metric_history(run.info.run_id, name)
    metrics.sort(key=lambda metric: metric.timestamp)
    return [(metric.step, metric.value) for metric in metrics]


@needs_mlflow
def test_parameters_metrics_and_the_result_are_in_one_run(
    server: str, experiment: str, find_only_run: Callable[[], Any], tmp_path: Path
) -> None:
    tracker = Mlflow(uri=server, experiment=experiment)
    with start_trackers([tracker], run_info(tmp_path)) as group:
        group.log(10, {"train/loss": 3.5, "train/learning_rate": 1e-3})
        group.log(20, {"train/loss": 2.5, "heldout/recall@10": 0.75})
        group.finish({"steps": 20, "stop_reason": "finished", "heldout/recall@10": 0.75})
    run = find_only_run()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "pairs"
    assert run.data.params == {
        "seed": "1",
        "batch.rows": "8",
        "model.config": "{}",
        "data.files": '["a", "b"]',
    }
    assert history(server, run, "train/loss") == [(10, 3.5), (20, 2.5)]
    assert run.data.metrics["heldout/recall_at_10"] == 0.75
    assert run.data.metrics["result/heldout/recall_at_10"] == 0.75
    assert run.data.metrics["result/steps"] == 20
    tags = run.data.tags
    assert (tags["regauge.run_id"], tags["regauge.attempt"]) == ("a1b2", "1")
    assert tags["result.stop_reason"] == "finished"
    assert list(tmp_path.iterdir()) == [], "a server needs no local files"


@needs_mlflow
def test_a_resumed_attempt_continues_the_same_run(
    server: str, experiment: str, find_only_run: Callable[[], Any], tmp_path: Path
) -> None:
    tracker = Mlflow(uri=server, experiment=experiment)

    def fail() -> None:
        with start_trackers([tracker], run_info(tmp_path)) as group:
            group.log(10, {"train/loss": 3.5})
            group.log(20, {"train/loss": 9.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert find_only_run().info.status == "FAILED"
    resumed_info = run_info(
        tmp_path, 2, 10, seed=1, batch={"rows": 8, "microbatch_rows": 4}, data={"x": 1}
    )
    resumed_info.settings["seed"] = 2
    with start_trackers([tracker], resumed_info) as group:
        group.log(20, {"train/loss": 2.5})
        group.finish({"steps": 20})
    run = find_only_run()
    assert run.info.status == "FINISHED"
    assert history(server, run, "train/loss") == [(10, 3.5), (20, 9.0)], "a step is shown twice"
    assert run.data.params["batch.microbatch_rows"] == "4"
    assert run.data.params["seed"] == "1"
    assert run.data.tags["attempt-2/seed"] == "2"
    assert run.data.tags["regauge.attempt"] == "2"


@needs_mlflow
def test_nan_and_long_texts_are_delivered(
    server: str, experiment: str, find_only_run: Callable[[], Any], tmp_path: Path
) -> None:
    tracker = Mlflow(uri=server, experiment=experiment)
    many = {f"field-{number}": number for number in range(250)}
    with start_trackers([tracker], run_info(tmp_path, model={"long": "x" * 9000, **many})) as group:
        group.log(1, {"train/loss": math.nan, "odd!name": 1.0, "y" * 300: 2.0})
        group.finish({"stop_reason": "z" * 9000})
    run = find_only_run()
    assert math.isnan(run.data.metrics["train/loss"])
    assert run.data.metrics["odd_name"] == 1.0
    assert run.data.metrics["y" * 250] == 2.0
    assert run.data.params["model.long"] == "x" * 5999 + "…"
    assert run.data.params["model.field-249"] == "249"
    assert len(run.data.tags["result.stop_reason"]) == 5000


@needs_mlflow
def test_a_server_that_starts_late_gets_everything(
    application: Any, server: str, experiment: str, find_only_run: Callable[[], Any], tmp_path: Path
) -> None:
    del server  # it serves the same application
    port = find_free_port()
    tracker = Mlflow(uri=f"http://127.0.0.1:{port}", experiment=experiment, wait_seconds=20)
    tracker.start(run_info(tmp_path))
    for step in range(1, 31):
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish({"steps": 30})
    with serving(application, port) as uri:
        tracker.close()
        expected = [(step, float(step)) for step in range(1, 31)]
        assert history(uri, find_only_run(), "train/loss") == expected
    assert find_only_run().info.status == "FINISHED"


@needs_mlflow
def test_a_lost_server_is_abandoned_and_lost_values_are_logged_once(
    application: Any, experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(application) as uri:
        tracker = Mlflow(uri=uri, experiment=experiment, wait_seconds=0.2)
        tracker.start(run_info(tmp_path))
        tracker.log(1, {"train/loss": 1.0})
        while client(uri).get_experiment_by_name(experiment) is None:
            threading.Event().wait(0.02)
        while not tracker._sender or tracker._sender._num_delivered < 1:
            threading.Event().wait(0.02)
    for step in (2, 3):
        tracker.log(step, {"train/loss": 1.0, "train/mfu": 0.1})
    tracker.close()
    messages = [message for message in caplog.messages if "not delivered to" in message]
    assert len(messages) == 1
    assert messages[0].startswith(f"4 values not delivered to mlflow at {uri}: ")


@needs_mlflow
def test_a_silent_server_does_not_delay_the_end(
    experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracker = Mlflow(uri=uri, experiment=experiment, wait_seconds=0.1)
        with start_trackers([tracker], run_info(tmp_path)) as group:
            group.log(1, {"train/loss": 1.0})
            group.finish({"steps": 1})
    assert f"2 values not delivered to mlflow at {uri}" in caplog.text


@needs_mlflow
def test_a_refused_experiment_is_logged_and_does_not_end_the_run(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Mlflow(uri=server, experiment="", wait_seconds=20)
    with start_trackers([tracker], run_info(tmp_path)) as group:
        group.log(1, {"train/loss": 1.0})
    assert "1 values not delivered to" in caplog.text
    assert "INVALID_PARAMETER_VALUE" in caplog.text


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


CONNECT = """
import sys
from pathlib import Path
from regauge.monitoring.trackers import RunInfo
from regauge.monitoring.trackers.mlflow import Mlflow
Mlflow().connect(RunInfo("pairs", "a1b2", Path(sys.argv[1])))
"""


@pytest.mark.full
@needs_mlflow
def test_a_run_that_is_killed_while_it_creates_the_database_leaves_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONNECT, str(tmp_path)]
    environment = {**os.environ, **mlflow.VARIABLES}
    with subprocess.Popen(command, env=environment) as process:
        while not any(path.stat().st_size for path in tmp_path.glob(f".{FILE}-*/{FILE}")):
            assert process.poll() is None
        process.kill()
    assert not (tmp_path / FILE).exists()
    subprocess.run(command, env=environment, check=True)
    mlflow_client = client(f"sqlite:///{tmp_path / FILE}")
    experiment_id = mlflow_client.get_experiment_by_name("regauge").experiment_id
    assert len(mlflow_client.search_runs([experiment_id])) == 1
    assert len(list(tmp_path.glob(f".{FILE}-*"))) == 1, "the killed process left its folder"


@needs_mlflow
@pytest.mark.usefixtures("_threads")
def test_the_database_of_a_run_has_the_values_of_metrics_jsonl(empty: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = settings(
        folder,
        datasets.write_packed(tmp_path / "data"),
        "mlm",
        output={"trackers": ("jsonl", {"kind": "mlflow", "wait_seconds": 20.0})},
    )
    folder.mkdir()
    (folder / "ranks").mkdir()
    shutil.copy(empty, tmp_path / FILE)
    run_attempt_with(run, tmp_path / FILE)
    uri = f"sqlite:///{folder / FILE}"
    mlflow_client = client(uri)
    experiment_id = mlflow_client.get_experiment_by_name("regauge").experiment_id
    (mlflow_run,) = mlflow_client.search_runs([experiment_id])
    metric_lines = lines(folder)
    assert len([line for line in metric_lines if "train/loss" in line]) == 12
    for name in ("train/loss", "train/grad_norm", "heldout/loss"):
        expected = [(int(line["step"]), line[name]) for line in metric_lines if name in line]
        assert sorted(history(uri, mlflow_run, name)) == expected
    assert mlflow_run.data.params["batch.rows"] == "8"
    assert mlflow_run.data.params["model.config.hidden_size"] == "32"
    assert mlflow_run.data.tags["result.stop_reason"] == "finished"


def run_attempt_with(run: Any, database: Path) -> None:
    """Run an attempt whose database exists before the tracker starts."""
    original_start = Mlflow.start

    def start(self: Mlflow, facts: RunInfo) -> None:
        shutil.copy(database, facts.folder / FILE)
        original_start(self, facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mlflow, "start", start)
        attempt(run, processes.World())


@pytest.fixture
def install_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets which packages appear to be installed."""

    def show_only(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in names or None)

    return show_only


def build_tracker(**table: Any) -> Tracker:
    tracker: Tracker = config.parse_choice("trackers", {"kind": "mlflow", **table})
    return tracker


def test_only_a_database_needs_more_packages(install_only: Callable[..., None]) -> None:
    install_only("mlflow")
    with pytest.raises(SettingsError, match="needs the package sqlalchemy"):
        build_tracker()
    assert build_tracker(uri="http://host:5000"), "a server has the database"


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("host:5000", "write http://host:port"),
        ("ftp://host", "write http://host:port"),
        ("mlruns", "write http://host:port"),
        ("https://me:secret@host", "would be saved in run.json"),
    ],
)
def test_an_invalid_address_is_refused(
    uri: str, problem: str, install_only: Callable[..., None]
) -> None:
    install_only("mlflow", "sqlalchemy", "alembic")
    with pytest.raises(SettingsError, match=problem) as caught:
        build_tracker(uri=uri)
    assert "secret" not in str(caught.value)
