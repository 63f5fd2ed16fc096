"""Documents and lines in a run's output folder, and their tolerant reader.

`config/output_files.py` has the file names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.config import SavedTask, check_format
from regauge.config.output_files import FAILURES
from regauge.system import jsonl
from regauge.system.errors import DataError
from regauge.system.json_files import DocumentShape, find_json, find_mismatch
from regauge.system.jsonl import Count
from regauge.tasks import ClassReport, Direction

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Document = dict[str, Any]


class StepMetrics(jsonl.StepLine):
    """A line of `metrics.jsonl`; the other values are numbers."""

    seconds: float | None = None
    """Seconds since the attempt started."""
    summary: Document | None = None
    """Result for a finished run, instead of metrics."""


class CostLine(DocumentShape):
    """A line with the run's cost so far."""

    machine_seconds: float = Field(default=0.0, ge=0)
    device_seconds: float = Field(default=0.0, ge=0)
    usd: float | None = None


class PaidLine(CostLine):
    """A line in `attempts.jsonl`: an attempt or command starts or ends."""

    started_at: float | None = None
    ended_at: float | None = None
    nodes: int = Field(default=1, ge=1)
    processes: int = Field(default=1, ge=1)
    usd_per_hour: float | None = None
    """USD per hour for one node."""
    outcome: str | None = None


class AttemptLine(PaidLine):
    """A line in a training run's `attempts.jsonl`."""

    attempt: Count
    planned_steps: Count | None = None
    accelerator: str | None = None


class StragglerShape(DocumentShape):
    """The straggler in a ledger line."""

    rank: int
    delay_seconds: float


class LedgerLine(jsonl.StepLine, CostLine):
    """A line in a training run's `ledger.jsonl`; all values count from the start of the run."""

    seconds: dict[str, float] = {}
    """Seconds by account."""
    tokens: Count | None = None
    compiled_graphs: Count | None = None
    mfu: float | None = None
    padding_fraction: float | None = None
    straggler: StragglerShape | None = None
    memory_bytes: dict[str, float] | None = None
    chip: str = ""
    peak_flops_per_second: float | None = None


class PhaseSeconds(DocumentShape):
    """A shard's time by phase, in seconds."""

    read: float
    compute: float
    write: float


class ShardLine(DocumentShape):
    """A line in a `predict` job's ledger: one finished shard."""

    piece: Count
    part: Count
    is_last: bool
    source_bytes: Count = 0
    rows: Count
    quarantined: Count
    skipped: Count
    truncated: Count
    tokens: Count
    computed_tokens: Count
    dropped_fields: dict[str, Count] = {}
    missing_fields: dict[str, Count] = {}
    bytes: dict[str, Count]
    sha256: dict[str, str]
    quarantine_sha256: dict[str, str] = {}
    seconds: PhaseSeconds


class JobShape(DocumentShape):
    """`job.json` from `predict`: each piece's bytes and stamp."""

    pieces: dict[str, list[Any]]


class SettingsShape(DocumentShape):
    task: Document | list[SavedTask] | None = None
    execution: Document = {}
    stop: Document = {}
    accelerator: Document = {}


class RunShape(SettingsShape):
    run: Document = {}


class StageRecord(DocumentShape):
    """`done.json` from a finished pipeline stage."""

    verb: str | None = None
    seconds: float | None = None
    settings: SettingsShape = SettingsShape()


class ResultShape(DocumentShape):
    """`result.json` from a training run."""

    metrics: Document = {}
    initial_metrics: Document = {}
    model_step: Count | None = None
    usd: float | None = None


class ClassesShape(DocumentShape):
    """`classes.json` from a training run: metrics per class at a step, by held-out set."""

    step: Count
    classes: dict[str, ClassReport] = {}


class EvaluationShape(DocumentShape):
    classes: dict[str, ClassReport] = {}
    title: str = ""
    rows: list[Document] = []
    directions: dict[str, Direction] = {}
    notes: list[Any] = []
    settings: SettingsShape = SettingsShape()
    identity: Document = {}


class EnvironmentShape(DocumentShape):
    packages: dict[str, str] | None = None


class SplitShape(DocumentShape):
    rows: int = 0


class DatasetShape(DocumentShape):
    """A dataset's or artifact's manifest."""

    splits: dict[str, SplitShape] = {}


class FailureShape(DocumentShape):
    """A document in `failures/`: why an attempt failed."""

    attempt: Count | None = None
    kind: str
    rank: int
    problem: str


def read_document(
    path: Path, shape: type[DocumentShape] = DocumentShape, warnings: list[str] | None = None
) -> Document:
    """Return the JSON object in a file; an empty one if the file is missing or damaged.

    `warnings` gets one sentence about a damaged file. With it, DataError is raised for a document
    of another format version.
    """
    try:
        document = find_json(path, "restore it")
    except (DataError, OSError) as error:
        reason = error.problem if isinstance(error, DataError) else str(error)
        _warn(warnings, f"{reason}; it was ignored")
        return {}
    if document is None:
        return {}
    if "format" in document and warnings is not None:
        check_format(document, path, "repeat the run with this version")
    if problem := find_mismatch(document, shape):
        _warn(warnings, f"{path.name} is damaged and was ignored: {problem}")
        return {}
    return document


def _warn(warnings: list[str] | None, text: str) -> None:
    if warnings is not None:
        warnings.append(text)


def list_failures(folder: Path) -> list[Path]:
    """Return documents for a run's failed attempts, oldest first."""
    return sorted((folder / FAILURES).glob("*.json"))


def training_seconds(line: Mapping[str, Any]) -> float:
    """Return the seconds spent in steps, and waiting for their data, up to a ledger line."""
    seconds = line.get("seconds", {})
    return float(seconds.get("step", 0.0) + seconds.get("data_wait", 0.0))
