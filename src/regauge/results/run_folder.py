"""What an output folder holds, read as it is: finished, still growing, or cut off by a kill.

A file that is missing is an empty part of the run; one that is damaged is named in `remarks`.
Nothing here knows how a report looks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regauge import jsonl
from regauge.config import FACTS, FORMAT
from regauge.errors import DataError, SettingsError
from regauge.results.series import Attempt, Series, attempts, merged
from regauge.supervision.cost_meter import ATTEMPTS
from regauge.supervision.goodput import Goodput, goodput

KNOWN = (
    "run.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "evaluation.json",
    "benchmark.json",
    "inputs.json",
)
"""A folder with one of these is an output folder that can be reported on."""

_STAGE = re.compile(r"(\d+)-(.+)")

Document = dict[str, Any]
SPENT = ("attempt", "step", "machine_seconds", "device_seconds", "usd")


@dataclass(frozen=True)
class Run:
    """An output folder of any verb."""

    folder: Path
    name: str
    verb: str | None = None
    settings: Document = field(default_factory=dict)
    facts: Document = field(default_factory=dict)
    """What the run writes of itself beside its settings: its data, its weights of step 0."""
    environment: Document = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    """Values by name, over the steps that count."""
    attempts: tuple[Attempt, ...] = ()
    ledger: Document = field(default_factory=dict)
    """The last state of the ledger; empty where there is none."""
    spent: dict[str, Series] = field(default_factory=dict)
    """Machine seconds, device seconds and dollars by step; of a repeated step, after the last."""
    evaluation: Document = field(default_factory=dict)
    dataset: Document = field(default_factory=dict)
    """The manifest, where the run prepared data."""
    failures: tuple[Document, ...] = ()
    goodput: Goodput | None = None
    """Where the time of all attempts went; None where no supervisor wrote it down."""
    benchmark: Document = field(default_factory=dict)
    """How fast training was on growing numbers of processes, or how fast artifacts answer."""
    profile: Document = field(default_factory=dict)
    """Where a step goes; empty where the run was not profiled."""
    slowest: Document = field(default_factory=dict)
    """The process that held the others up last, and by how much; empty for none."""
    seconds: float | None = None
    """Wall-clock of the whole stage, where a pipeline took it."""
    devices: int | None = None
    """Processes of the last attempt on all machines: one for each device."""
    end: str | None = None
    """How it ended, `finished` or more; None for a run that goes on or was cut off."""
    remarks: tuple[str, ...] = ()
    """What could not be read."""

    @property
    def step(self) -> int | None:
        """The last step that counts."""
        return self.attempts[-1].last if self.attempts else self.ledger.get("step")


def discover(folder: Path) -> tuple[Path, ...]:
    """Return the output folders of a pipeline in its order, or the folder itself.

    Raises SettingsError where there is nothing to report on.
    """
    if not folder.is_dir():
        raise SettingsError(f"no folder {folder}", "name the output folder of a run")
    found = (folder,) if holds_run(folder) else stages(folder)
    if not found:
        known = ", ".join(KNOWN)
        raise SettingsError(f"{folder} holds no run", f"name a folder that holds one of {known}")
    return found


def stages(folder: Path) -> tuple[Path, ...]:
    """Return the numbered output folders in a pipeline's folder, in their order."""
    found = [(path, _STAGE.fullmatch(path.name)) for path in folder.iterdir()]
    numbered = sorted((int(stage[1]), path) for path, stage in found if stage)
    return tuple(path for _, path in numbered if holds_run(path))


def read(folder: Path) -> Run:
    """Read one output folder; SettingsError where it is none, DataError for a later format."""
    if not holds_run(folder):
        raise SettingsError(f"{folder} holds no run", "name the output folder of a run")
    remarks: list[str] = []
    done = _document(folder / "done.json", remarks)
    measured = _lines(folder / "metrics.jsonl", remarks)
    ledger = _lines(folder / "ledger.jsonl", remarks)
    result = _document(folder / "result.json", remarks)
    saved = _document(folder / "run.json", remarks)
    dataset = _document(folder / "manifest.json", remarks)
    evaluation = _document(folder / "evaluation.json", remarks)
    values = [line for line in measured if "summary" not in line]
    useful = goodput(folder)
    found = attempts(values, useful.ends if useful else {})
    failures = sorted((folder / "failures").glob("*.json"))
    return Run(
        folder=folder,
        name=_name(folder),
        verb=done.get("verb") or saved.get(FACTS, {}).get("verb"),
        settings=_by_name(
            _without(
                saved or done.get("settings") or evaluation.get("settings", {}), "format", FACTS
            )
        ),
        facts=saved.get(FACTS) or evaluation.get("facts", {}),
        environment=_without(_document(folder / "environment.json", remarks), "format"),
        series=merged(values, found),
        attempts=found,
        ledger=ledger[-1] if ledger else {},
        spent=_spent(ledger),
        evaluation=evaluation,
        dataset=dataset,
        failures=tuple({"file": path.name, **_document(path, remarks)} for path in failures),
        goodput=useful,
        benchmark=_document(folder / "benchmark.json", remarks),
        profile=_document(folder / "profile.json", remarks),
        slowest=next((line["slowest"] for line in reversed(ledger) if line.get("slowest")), {}),
        seconds=done.get("seconds"),
        devices=(jsonl.last(folder / ATTEMPTS) or {}).get("processes"),
        end=_end(measured) if measured else ("finished" if done or result else None),
        remarks=tuple(remarks),
    )


def _by_name(settings: Document) -> Document:
    """Return settings with the tasks of a run that has several by their names."""
    tasks = settings.get("task")
    if not isinstance(tasks, list):
        return settings
    named = {
        each["name"]: {key: value for key, value in each.items() if key != "name"} for each in tasks
    }
    return {**settings, "task": named}


def _spent(ledger: list[Document]) -> dict[str, Series]:
    told = [{name: line[name] for name in SPENT if name in line} for line in ledger]
    return merged(told, attempts(told, {})) if told else {}


def holds_run(folder: Path) -> bool:
    """Return whether a folder is an output folder that can be reported on."""
    return any((folder / name).is_file() for name in KNOWN)


def _end(measured: list[Document]) -> str | None:
    """Return how the last attempt says that it ended, or None."""
    last = max(line["attempt"] for line in measured)
    found = [line["summary"] for line in measured if "summary" in line and line["attempt"] == last]
    return str(found[-1].get("reason", "finished")) if found else None


def _without(document: Document, *names: str) -> Document:
    return {key: value for key, value in document.items() if key not in names}


def _name(folder: Path) -> str:
    """Return the folder's name without the number that a pipeline put before it."""
    name = folder.resolve().name
    stage = _STAGE.fullmatch(name)
    return stage[2] if stage else name


def _document(path: Path, remarks: list[str]) -> Document:
    """Return a JSON object; empty, with a remark, where the file is damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        remarks.append(f"{path.name} is damaged and was left out: {error}")
        return {}
    if not isinstance(document, dict):
        remarks.append(f"{path.name} holds no JSON object and was left out")
        return {}
    if document.get("format", 0) > FORMAT:
        raise DataError(f"{path} is of a later Regauge", "update Regauge to read it")
    return document


def _lines(path: Path, remarks: list[str]) -> list[Document]:
    """Return the complete lines; a torn one, left by a kill, is counted in a remark."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [_line(line) for line in text.splitlines() if line.strip()]
    torn = sum(line is None for line in lines)
    if torn:
        remarks.append(f"{path.name}: {torn} torn line{'s' * (torn > 1)} left out")
    return [line for line in lines if line is not None]


def _line(text: str) -> Document | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    whole = isinstance(line, dict) and {"attempt", "step"} <= line.keys()
    return line if whole else None
