"""Sends metrics to MLflow: to a tracking server, or to a database in the run folder.

All attempts in a run share one MLflow run, found by its tag `regauge.run_id`. MLflow cannot replace
values, so a resumed attempt sends only the values that MLflow lacks. MLflow does not allow `@` in
names, so `recall@10` becomes `recall_at_10`. MLflow parameters cannot change: a setting that
differs in a later attempt is a tag, such as `attempt-2/execution.processes`.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import field_validator

from regauge.config import flatten
from regauge.monitoring.trackers import RunInfo
from regauge.monitoring.trackers._earlier_attempts import deliver_once
from regauge.monitoring.trackers._service import Deliver, MetricsLine, ServiceTracker
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FILE = "mlflow.db"
DATABASE = "sqlite:///"
SCHEMES = ("http", "https", "sqlite")
RUN_ID, ATTEMPT, FOLDER = "regauge.run_id", "regauge.attempt", "regauge.folder"
VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
"""MLflow environment variables while a run is tracked: without telemetry, with few log lines, and
without retries, because the sender retries. Variables already set are not changed."""
PERMANENT_ERROR_CODES = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}
MAX_ENTITIES_PER_REQUEST = {"metrics": 1000, "params": 100, "tags": 100}
MAX_NAME_LENGTH, MAX_PARAMETER_LENGTH, MAX_TAG_LENGTH = 250, 6000, 5000
"""MLflow limits for one request and for text lengths."""


class Mlflow(ServiceTracker):
    """One MLflow run with parameters, metrics by step, and the result."""

    uri: str | None = None
    """Tracking server (`http://host:5000`) or `sqlite:///file`. By default `mlflow.db` in the
    folder of the run."""
    experiment: str = "regauge"
    """MLflow experiment name."""

    @field_validator("uri")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = urlsplit(value)
        if address.scheme not in SCHEMES or "//" not in value:
            raise ValueError("write http://host:port, https://host or sqlite:///file")
        if address.password or address.username:
            variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            raise SettingsError(
                "a password in 'uri' would be saved in run.json", f"set {variables} instead"
            )
        return value

    def list_packages(self) -> tuple[str, ...]:
        is_database = self.uri is None or self.uri.startswith("sqlite")
        return ("mlflow", "sqlalchemy", "alembic") if is_database else ("mlflow",)

    def name_destination(self, run: RunInfo) -> str:
        return f"mlflow at {self._find_uri(run)}"

    def list_variables(self, run: RunInfo) -> Mapping[str, str]:
        del run
        return VARIABLES

    def connect(self, run: RunInfo) -> Deliver:
        return _connect(self._find_uri(run), self.experiment, run)

    def is_permanent(self, error: Exception) -> bool:
        error_code = getattr(error, "error_code", "")
        return isinstance(error, ImportError) or error_code in PERMANENT_ERROR_CODES

    def _find_uri(self, run: RunInfo) -> str:
        return self.uri or f"sqlite:///{run.folder.resolve() / FILE}"


def _connect(uri: str, experiment: str, run: RunInfo) -> Deliver:
    """Find or create a run's MLflow run; return a function that sends lines to it."""
    from mlflow import MlflowClient

    if uri.startswith(DATABASE):
        _create_database(Path(uri.removeprefix(DATABASE)))
    client: Any = MlflowClient(tracking_uri=uri)
    existing = client.get_experiment_by_name(experiment)
    if existing is None:
        artifacts = str(run.folder.resolve() / "mlflow") if uri.startswith(DATABASE) else None
        experiment_id = client.create_experiment(experiment, artifact_location=artifacts)
    else:
        experiment_id = existing.experiment_id
    is_same_run = f"tags.`{RUN_ID}` = '{run.run_id}'"
    runs = client.search_runs([experiment_id], is_same_run, max_results=1)
    logged = _list_recorded(client, runs[0]) if runs and run.attempt > 1 else ()
    mlflow_run = runs[0] if runs else client.create_run(experiment_id, tags={RUN_ID: run.run_id})
    run_id = mlflow_run.info.run_id
    client.update_run(run_id, status="RUNNING", name=run.name)
    settings = {_format_name(key): _format_setting(value) for key, value in flatten(run.settings)}
    recorded = mlflow_run.data.params
    changed = {key: text for key, text in settings.items() if recorded.get(key, text) != text}
    tags = {ATTEMPT: str(run.attempt), FOLDER: str(run.folder.resolve())}
    tags |= {f"attempt-{run.attempt}/{key}": text for key, text in changed.items()}
    parameters = {key: settings[key] for key in settings.keys() - recorded.keys()}
    _log_texts(client, run_id, parameters, tags)
    return deliver_once(partial(_deliver, client, run_id), logged, _format_name, run)


def _create_database(path: Path) -> None:
    """Create a database with all tables, unless the file exists.

    MLflow creates the tables in many steps, and cannot resume them. So the file gets its name when
    it is complete: a run killed in between leaves nothing behind.
    """
    from mlflow import MlflowClient

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        incomplete = Path(folder) / path.name
        MlflowClient(tracking_uri=f"{DATABASE}{incomplete}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another process was faster
            path.hardlink_to(incomplete)


def _list_recorded(client: Any, mlflow_run: Any) -> Collection[tuple[str, int]]:
    """Return names and steps for all values that MLflow has from earlier attempts."""
    run_id, names = mlflow_run.info.run_id, mlflow_run.data.metrics
    return {
        (name, metric.step) for name in names for metric in client.get_metric_history(run_id, name)
    }


def _deliver(client: Any, run_id: str, lines: list[MetricsLine]) -> None:
    """Send lines; resending a line changes nothing, because its timestamp is the same."""
    from mlflow.entities import Metric

    metrics = [
        Metric(_format_name(key), value, int(line.timestamp * 1000), line.step)
        for line in lines
        for key, value in line.values.items()
    ]
    _log_batches(client, run_id, "metrics", metrics)
    _log_texts(client, run_id, {}, {key: text for line in lines for key, text in line.tags.items()})
    for status in (line.final_status for line in lines if line.final_status):
        client.set_terminated(run_id, status=status)


def _log_texts(
    client: Any, run_id: str, parameters: Mapping[str, str], tags: Mapping[str, str]
) -> None:
    from mlflow.entities import Param, RunTag

    params = [Param(key, parameters[key]) for key in sorted(parameters)]
    _log_batches(client, run_id, "params", params)
    run_tags = [
        RunTag(_format_name(key), _truncate(tags[key], MAX_TAG_LENGTH)) for key in sorted(tags)
    ]
    _log_batches(client, run_id, "tags", run_tags)


def _log_batches(client: Any, run_id: str, kind: str, entities: list[Any]) -> None:
    """Send metrics, parameters or tags, in requests of limited size."""
    size = MAX_ENTITIES_PER_REQUEST[kind]
    for start in range(0, len(entities), size):
        client.log_batch(run_id, **{kind: entities[start : start + size]})


def _format_name(name: str) -> str:
    """Reduce a name to the characters and length that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)[:MAX_NAME_LENGTH]


def _format_setting(value: object) -> str:
    """Return a setting as text, truncated to MLflow's limit; `run.json` has all of it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _truncate(text, MAX_PARAMETER_LENGTH)


def _truncate(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
