"""Metrics for MLflow: a tracking server, or a database in the run's folder.

Every attempt of a run goes on in one MLflow run, which is found by its tag `regauge.run_id`. Of a
step that is run again MLflow keeps both values and shows the later one. It allows neither `@` in a
name (`recall@10` is `recall_at_10` there) nor another value of a parameter: what a later attempt
has otherwise is a tag, `attempt-2/execution.processes`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, field_validator, model_validator

from regauge.config import flat
from regauge.errors import SettingsError
from regauge.trackers import RunFacts, Tracker
from regauge.trackers._sender import Deliver, Line, Sender

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = "mlflow.db"
SCHEMES = ("http", "https", "sqlite")
RUN_ID, ATTEMPT, FOLDER = "regauge.run_id", "regauge.attempt", "regauge.folder"
VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
"""What MLflow is told in the environment while a run is tracked: to be quiet, and that not it but
the sender tries again. A value from outside is left as it is."""
REFUSED = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}
"""Codes of MLflow's errors that come again however often something is tried."""
MOST_METRICS, MOST_OTHERS = 1000, 100
LONGEST_NAME, LONGEST_PARAMETER, LONGEST_TAG = 250, 6000, 5000
"""What MLflow takes in one request, and of one text."""


class Mlflow(Tracker):
    """One MLflow run with parameters, metrics by step, and the result."""

    uri: str | None = None
    """Tracking server (`http://host:5000`) or `sqlite:///file`; by default one in the folder."""
    experiment: str = "regauge"
    """Name of the experiment that the run belongs to."""
    wait_seconds: float = Field(default=10.0, ge=0)
    """Longest wait at the run's end for what MLflow has not taken yet."""

    _sender: Sender | None = PrivateAttr(default=None)
    _imposed: tuple[str, ...] = PrivateAttr(default=())
    _ended: bool = PrivateAttr(default=False)
    _step: int = PrivateAttr(default=0)

    @field_validator("uri")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        found = urlsplit(value)
        if found.scheme not in SCHEMES or "//" not in value:
            raise ValueError("write http://host:port, https://host or sqlite:///file")
        if found.password or found.username:
            ways = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            raise SettingsError(
                "a password in 'uri' would be saved in run.json", f"put it into {ways}"
            )
        return value

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        database = self.uri is None or self.uri.startswith("sqlite")
        needed = ("mlflow", "sqlalchemy", "alembic") if database else ("mlflow",)
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            raise SettingsError(
                f"the tracker 'mlflow' needs the package {missing[0]}",
                'pip install "regauge[mlflow]", or leave the tracker out',
            )
        return self

    def start(self, run: RunFacts) -> None:
        """Begin to send; MLflow is imported and its run made or found beside the training."""
        self.close()
        run.folder.mkdir(parents=True, exist_ok=True)
        self._imposed = tuple(name for name in VARIABLES if name not in os.environ)
        os.environ.update({name: VARIABLES[name] for name in self._imposed})
        own = self.uri or f"sqlite:///{run.folder.resolve() / FILE}"
        self._sender = Sender(own, partial(_connected, own, self.experiment, run), _refused)
        self._step, self._ended = run.resumed_step, False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values that are sent at another time."""
        self._step = step
        if self._sender:
            self._sender.put(Line(step, dict(values)))

    def finish(self, summary: Mapping[str, object]) -> None:
        """Send the result: numbers as metrics `result/…`, texts as tags `result.…`."""
        numbers = {f"result/{name}": float(value) for name, value in _numbers(summary)}
        texts = {
            f"result.{name}": str(value)
            for name, value in summary.items()
            if f"result/{name}" not in numbers
        }
        self._ended = True
        if self._sender:
            self._sender.put(Line(self._step, numbers, texts, end="FINISHED"))

    def close(self) -> None:
        """Wait for what is on its way, though not for long, and say what was lost."""
        if self._sender:
            if not self._ended:
                self._sender.put(Line(self._step, end="FAILED"))
            self._sender.close(self.wait_seconds)
        self._sender = None
        for name in self._imposed:
            os.environ.pop(name, None)
        self._imposed = ()


def _numbers(summary: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _connected(uri: str, experiment: str, run: RunFacts) -> Deliver:
    """Return what sends lines to the MLflow run of a run, which is made where there is none."""
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(experiment)
    if known is None:
        place = str(run.folder.resolve() / "mlflow") if uri.startswith("sqlite") else None
        number = client.create_experiment(experiment, artifact_location=place)
    else:
        number = known.experiment_id
    found = client.search_runs([number], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
    own = found[0] if found else client.create_run(number, tags={RUN_ID: run.run_id})
    name = own.info.run_id
    client.update_run(name, status="RUNNING", name=run.name)
    asked = {_name(key): _text(value) for key, value in flat(run.settings)}
    told = own.data.params
    others = {key: text for key, text in asked.items() if told.get(key, text) != text}
    tags = {ATTEMPT: str(run.attempt), FOLDER: str(run.folder.resolve())}
    tags |= {f"attempt-{run.attempt}/{key}": text for key, text in others.items()}
    _note(client, name, {key: asked[key] for key in asked.keys() - told.keys()}, tags)
    return partial(_deliver, client, name)


def _deliver(client: Any, name: str, lines: list[Line]) -> None:
    """Send lines; sent once more they change nothing, since their times are the same."""
    from mlflow.entities import Metric

    metrics = [
        Metric(_name(key), value, int(line.at * 1000), line.step)
        for line in lines
        for key, value in line.values.items()
    ]
    for first in range(0, len(metrics), MOST_METRICS):
        client.log_batch(name, metrics=metrics[first : first + MOST_METRICS])
    _note(client, name, {}, {key: text for line in lines for key, text in line.notes.items()})
    for end in (line.end for line in lines if line.end):
        client.set_terminated(name, status=end)


def _note(client: Any, name: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
    """Send texts, some at a time."""
    from mlflow.entities import Param, RunTag

    params = [Param(key, parameters[key]) for key in sorted(parameters)]
    for first in range(0, len(params), MOST_OTHERS):
        client.log_batch(name, params=params[first : first + MOST_OTHERS])
    notes = [RunTag(_name(key), _cut(tags[key], LONGEST_TAG)) for key in sorted(tags)]
    for first in range(0, len(notes), MOST_OTHERS):
        client.log_batch(name, tags=notes[first : first + MOST_OTHERS])


def _refused(error: Exception) -> bool:
    """Return whether MLflow will answer so however often it is asked."""
    return isinstance(error, ImportError) or getattr(error, "error_code", "") in REFUSED


def _name(name: str) -> str:
    """Return a name as MLflow allows it."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)[:LONGEST_NAME]


def _text(value: object) -> str:
    """Return a setting as text; a long one is cut, and run.json has all of it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _cut(text, LONGEST_PARAMETER)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
