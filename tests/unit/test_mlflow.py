"""A run in MLflow: against MLflow's own server, in a thread on loopback, and its database."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import socket
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
from loopback import running
from regauge import config, processes
from regauge.errors import SettingsError
from regauge.processes import free_port
from regauge.trackers import RunFacts, Tracker, mlflow, started
from regauge.trackers.mlflow import FILE, Mlflow
from regauge.training.run import attempt

HERE = all(importlib.util.find_spec(name) for name in ("mlflow", "sqlalchemy", "alembic"))
needs_mlflow = pytest.mark.skipif(
    not HERE, reason="mlflow is not installed: what gets to it is not proved"
)
SETTINGS = {"seed": 1, "batch": {"rows": 8}, "model": {"config": {}}, "data": {"files": ["a", "b"]}}


def facts(folder: Path, attempt: int = 1, resumed_step: int = 0, **changes: Any) -> RunFacts:
    found = config.merge(SETTINGS, changes)
    return RunFacts("pairs", "a1b2", folder, attempt, 20, resumed_step, found)


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database without runs: to make one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with processes.own_environment():
        os.environ.update(mlflow.VARIABLES)
        client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def application(empty: Path) -> Iterator[Any]:
    """Return MLflow's own web application, without passwords, over a database of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow.server.auth", None)
        # What the server's libraries warn of is about themselves.
        with processes.own_environment(), warnings.catch_warnings(action="ignore"):
            os.environ.update(mlflow.VARIABLES)
            from mlflow.server import app
            from mlflow.server.handlers import initialize_backend_stores

            store = empty.with_name("server.db")
            shutil.copy(empty, store)
            initialize_backend_stores(f"sqlite:///{store}", default_artifact_root=str(store.parent))
        yield app


@contextmanager
def serving(application: Any, port: int = 0) -> Iterator[str]:
    """Serve the application for as long as the block lasts."""
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", port, application, threaded=True)
    with running(server, "mlflow-server") as address:
        yield address


@pytest.fixture(scope="module")
def server(application: Any) -> Iterator[str]:
    with serving(application) as uri:
        yield uri


@pytest.fixture
def experiment() -> str:
    return f"experiment {uuid.uuid4().hex[:6]}"


@pytest.fixture
def only(server: str, experiment: str) -> Callable[[], Any]:
    """Return a function that returns the one MLflow run of the test's experiment."""

    def found() -> Any:
        own = client(server)
        number = own.get_experiment_by_name(experiment).experiment_id
        (run,) = own.search_runs([number])
        return run

    return found


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    found = client(uri).get_metric_history(run.info.run_id, name)
    return [(each.step, each.value) for each in sorted(found, key=lambda each: each.timestamp)]


@needs_mlflow
def test_parameters_metrics_and_the_result_are_in_one_run(
    server: str, experiment: str, only: Callable[[], Any], tmp_path: Path
) -> None:
    own = Mlflow(uri=server, experiment=experiment)
    with started([own], facts(tmp_path)) as together:
        together.log(10, {"train/loss": 3.5, "train/learning_rate": 1e-3})
        together.log(20, {"train/loss": 2.5, "heldout/recall@10": 0.75})
        together.finish({"steps": 20, "reason": "finished", "heldout/recall@10": 0.75})
    run = only()
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
    assert tags["result.reason"] == "finished"
    assert list(tmp_path.iterdir()) == [], "a server's run has nothing here"


@needs_mlflow
def test_a_resumed_attempt_goes_on_in_the_same_run(
    server: str, experiment: str, only: Callable[[], Any], tmp_path: Path
) -> None:
    own = Mlflow(uri=server, experiment=experiment)

    def fail() -> None:
        with started([own], facts(tmp_path)) as together:
            together.log(10, {"train/loss": 3.5})
            together.log(20, {"train/loss": 9.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert only().info.status == "FAILED"
    again = facts(tmp_path, 2, 10, seed=1, batch={"rows": 8, "microbatch_rows": 4}, data={"x": 1})
    again.settings["seed"] = 2
    with started([own], again) as together:
        together.log(20, {"train/loss": 2.5})
        together.finish({"steps": 20})
    run = only()
    assert run.info.status == "FINISHED"
    assert history(server, run, "train/loss") == [(10, 3.5), (20, 9.0), (20, 2.5)]
    assert run.data.metrics["train/loss"] == 2.5, "the later value is not the one that is shown"
    assert run.data.params["batch.microbatch_rows"] == "4"
    assert run.data.params["seed"] == "1"
    assert run.data.tags["attempt-2/seed"] == "2"
    assert run.data.tags["regauge.attempt"] == "2"


@needs_mlflow
def test_what_is_no_number_and_what_is_too_long_gets_there(
    server: str, experiment: str, only: Callable[[], Any], tmp_path: Path
) -> None:
    own = Mlflow(uri=server, experiment=experiment)
    many = {f"field-{number}": number for number in range(250)}
    with started([own], facts(tmp_path, model={"long": "x" * 9000, **many})) as together:
        together.log(1, {"train/loss": math.nan, "odd!name": 1.0, "y" * 300: 2.0})
        together.finish({"reason": "z" * 9000})
    run = only()
    assert math.isnan(run.data.metrics["train/loss"])
    assert run.data.metrics["odd_name"] == 1.0
    assert run.data.metrics["y" * 250] == 2.0
    assert run.data.params["model.long"] == "x" * 5999 + "…"
    assert run.data.params["model.field-249"] == "249"
    assert len(run.data.tags["result.reason"]) == 5000


@needs_mlflow
def test_a_server_that_comes_late_gets_everything(
    application: Any, server: str, experiment: str, only: Callable[[], Any], tmp_path: Path
) -> None:
    del server  # the application is the same
    port = free_port()
    own = Mlflow(uri=f"http://127.0.0.1:{port}", experiment=experiment, wait_seconds=20)
    own.start(facts(tmp_path))
    for step in range(1, 31):
        own.log(step, {"train/loss": float(step)})
    own.finish({"steps": 30})
    with serving(application, port) as uri:
        own.close()
        expected = [(step, float(step)) for step in range(1, 31)]
        assert history(uri, only(), "train/loss") == expected
    assert only().info.status == "FINISHED"


@needs_mlflow
def test_a_server_that_goes_away_is_left_and_what_was_lost_is_said_once(
    application: Any, experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(application) as uri:
        own = Mlflow(uri=uri, experiment=experiment, wait_seconds=0.2)
        own.start(facts(tmp_path))
        own.log(1, {"train/loss": 1.0})
        while client(uri).get_experiment_by_name(experiment) is None:
            threading.Event().wait(0.02)
        while not own._sender or own._sender._taken < 1:
            threading.Event().wait(0.02)
    for step in (2, 3):
        own.log(step, {"train/loss": 1.0, "train/mfu": 0.1})
    own.close()
    told = [message for message in caplog.messages if "did not get to" in message]
    assert len(told) == 1
    assert told[0].startswith(f"4 values did not get to {uri}: ")


@needs_mlflow
def test_a_server_that_never_answers_does_not_hold_the_end_up(
    experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        own = Mlflow(uri=uri, experiment=experiment, wait_seconds=0.1)
        with started([own], facts(tmp_path)) as together:
            together.log(1, {"train/loss": 1.0})
            together.finish({"steps": 1})
    assert f"2 values did not get to {uri}" in caplog.text


@needs_mlflow
def test_an_experiment_that_mlflow_refuses_is_said_and_ends_nothing(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Mlflow(uri=server, experiment="", wait_seconds=20)
    with started([own], facts(tmp_path)) as together:
        together.log(1, {"train/loss": 1.0})
    assert "1 values did not get to" in caplog.text
    assert "INVALID_PARAMETER_VALUE" in caplog.text


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_mlflow
@pytest.mark.usefixtures("_threads")
def test_a_run_s_own_database_has_what_metrics_jsonl_has(empty: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = settings(
        folder,
        datasets.packed(tmp_path / "data"),
        "mlm",
        output={"trackers": ("jsonl", {"kind": "mlflow", "wait_seconds": 20.0})},
    )
    folder.mkdir()
    (folder / "ranks").mkdir()
    shutil.copy(empty, tmp_path / FILE)
    attempt_with(run, tmp_path / FILE)
    uri = f"sqlite:///{folder / FILE}"
    own = client(uri)
    number = own.get_experiment_by_name("regauge").experiment_id
    (found,) = own.search_runs([number])
    told = lines(folder)
    assert len([line for line in told if "train/loss" in line]) == 12
    for name in ("train/loss", "train/gradient_norm", "heldout/loss"):
        expected = [(int(line["step"]), line[name]) for line in told if name in line]
        assert sorted(history(uri, found, name)) == expected
    assert found.data.params["batch.rows"] == "8"
    assert found.data.params["model.config.hidden_size"] == "32"
    assert found.data.tags["result.reason"] == "finished"


def attempt_with(run: Any, database: Path) -> None:
    """Do an attempt whose database is there already when the tracker comes to it."""
    begun = Mlflow.start

    def start(self: Mlflow, facts: RunFacts) -> None:
        shutil.copy(database, facts.folder / FILE)
        begun(self, facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mlflow, "start", start)
        attempt(run, processes.World())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says which packages are there."""

    def only(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in names or None)

    return only


def built(**table: Any) -> Tracker:
    tracker: Tracker = config.choose("trackers", {"kind": "mlflow", **table})
    return tracker


def test_without_the_package_the_way_out_is_named(installed: Callable[..., None]) -> None:
    installed()
    with pytest.raises(SettingsError, match=r"needs the package mlflow; pip install .*\[mlflow\]"):
        built()
    installed("mlflow")
    with pytest.raises(SettingsError, match="needs the package sqlalchemy"):
        built()
    assert built(uri="http://host:5000"), "a server has the database"


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("host:5000", "write http://host:port"),
        ("ftp://host", "write http://host:port"),
        ("mlruns", "write http://host:port"),
        ("https://me:secret@host", "would be saved in run.json"),
    ],
)
def test_an_address_that_is_none_is_refused(
    uri: str, problem: str, installed: Callable[..., None]
) -> None:
    installed("mlflow", "sqlalchemy", "alembic")
    with pytest.raises(SettingsError, match=problem) as caught:
        built(uri=uri)
    assert "secret" not in str(caught.value)
