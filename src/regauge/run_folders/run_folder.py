"""Reader for output folders: finished, still running or killed.

A missing file leaves its field empty; a damaged file is named in `warnings`. This module does not
know what a report looks like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.config import MANIFEST, RUN_IDENTITY
from regauge.config.output_files import (
    ATTEMPTS,
    BENCHMARK,
    CLASS_REPORTS,
    DONE,
    ENVIRONMENT,
    EVALUATION,
    INPUTS,
    LEDGER,
    METRICS,
    PROFILE,
    RESULT,
    SAVED_RUN,
)
from regauge.config.run_names import STAGE_FOLDER, name_run
from regauge.run_folders.documents import (
    AttemptLine,
    ClassesShape,
    DatasetShape,
    Document,
    EnvironmentShape,
    EvaluationShape,
    LedgerLine,
    ResultShape,
    RunShape,
    StageRecord,
    StepMetrics,
    list_failures,
    read_document,
)
from regauge.run_folders.goodput import Goodput, compute_goodput
from regauge.run_folders.series import AttemptSummary, Series, merge_attempts, summarize_attempts
from regauge.system import jsonl
from regauge.system.errors import SettingsError
from regauge.system.json_files import DocumentShape

if TYPE_CHECKING:
    from regauge.tasks import ClassReport

MARKER_FILES = (SAVED_RUN, METRICS, LEDGER, EVALUATION, BENCHMARK, INPUTS)
"""Files that mark an output folder; a report needs one of them."""
COST_KEYS = ("machine_seconds", "device_seconds", "usd")


@dataclass(frozen=True)
class RunFolder:
    """One output folder's content, for any verb."""

    folder: Path
    name: str
    verb: str | None = None
    settings: Document = field(default_factory=dict)
    identity: Document = field(default_factory=dict)
    """Run identity: verb, id, and hashes for the data and the initial weights."""
    environment: Document = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    """One series per metric, without steps repeated by a later attempt."""
    attempts: tuple[AttemptSummary, ...] = ()
    ledger: Document = field(default_factory=dict)
    """Last ledger line; empty without one."""
    cost_series: dict[str, Series] = field(default_factory=dict)
    """Cumulative machine seconds, device seconds and dollars by step, repeated work included."""
    evaluation: Document = field(default_factory=dict)
    model_step: int | None = None
    """Step of the final model's weights; None if the run is not finished."""
    class_reports: dict[str, ClassReport] = field(default_factory=dict)
    """Metrics per class by model, or by held-out set and step; empty for tasks without classes."""
    dataset: Document = field(default_factory=dict)
    """Manifest of the prepared dataset; empty for other verbs."""
    failures: tuple[Document, ...] = ()
    """Failure documents for the attempts, oldest first."""
    goodput: Goodput | None = None
    """Time by account over all attempts; None if not recorded by a supervisor."""
    benchmark: Document = field(default_factory=dict)
    """Training or inference benchmark result."""
    profile: Document = field(default_factory=dict)
    """Training step profile; empty if the run was not profiled."""
    straggler: Document = field(default_factory=dict)
    """The last straggler: rank and delay in seconds per step; empty without one."""
    seconds: float | None = None
    """The stage's wall-clock seconds; None outside a pipeline."""
    num_devices: int | None = None
    """Processes in the last attempt over all nodes, one per device."""
    world_sizes: frozenset[int] = frozenset()
    """Process counts over all nodes, for every attempt."""
    outcome: str | None = None
    """How the run ended, such as `finished`; None if it is running or was killed."""
    warnings: tuple[str, ...] = ()
    """Files that could not be read completely, one sentence each."""

    @property
    def step(self) -> int | None:
        """The last step that counts."""
        return self.attempts[-1].last_step if self.attempts else self.ledger.get("step")


def read_model_metrics(folder: Path, result: Document, step: int | None = None) -> Document:
    """Return a run's held-out metrics at a step, by default those of the final model.

    `result` is the run's `result.json`; the metrics of its other steps are in the log.
    """
    metrics: Document = result.get("metrics", {})
    if step in (None, result.get("model_step")):
        return metrics
    names = metrics or result.get("initial_metrics", {})
    lines = [
        line for line in jsonl.read_lines(folder / METRICS, StepMetrics) if line["step"] == step
    ]
    return {name: line[name] for line in lines for name in names if name in line}


def find_run_folders(folder: Path) -> tuple[Path, ...]:
    """Return a pipeline's stage folders in order, or the folder itself if it is a run.

    Raises SettingsError if the folder does not exist or does not contain a run.
    """
    if not folder.is_dir():
        raise SettingsError(f"no folder {folder}", "name a run's output folder")
    folders = (folder,) if is_run_folder(folder) else find_stage_folders(folder)
    if not folders:
        markers = ", ".join(MARKER_FILES)
        remedy = f"name a folder that contains one of {markers}"
        raise SettingsError(f"{folder} does not contain a run", remedy)
    return folders


def find_stage_folders(folder: Path) -> tuple[Path, ...]:
    """Return a pipeline's numbered stage folders, in order."""
    matches = [(path, STAGE_FOLDER.fullmatch(path.name)) for path in folder.iterdir()]
    numbered = sorted((int(match[1]), path) for path, match in matches if match)
    return tuple(path for _, path in numbered if is_run_folder(path))


def read_run_folder(folder: Path) -> RunFolder:
    """Read one output folder.

    Raises SettingsError without a run, DataError if a newer Regauge wrote it.
    """
    if not is_run_folder(folder):
        raise SettingsError(f"{folder} does not contain a run", "name a run's output folder")
    warnings: list[str] = []

    def read(name: str, shape: type[DocumentShape] = DocumentShape) -> Document:
        return read_document(folder / name, shape, warnings)

    def read_lines(name: str, shape: type[DocumentShape]) -> list[Document]:
        return jsonl.read_lines(folder / name, shape, warnings)

    done, run = read(DONE, StageRecord), read(SAVED_RUN, RunShape)
    result, evaluation = read(RESULT, ResultShape), read(EVALUATION, EvaluationShape)
    metrics, ledger = read_lines(METRICS, StepMetrics), read_lines(LEDGER, LedgerLine)
    launches = jsonl.read_lines(folder / ATTEMPTS, AttemptLine)
    goodput = compute_goodput(launches, ledger[-1]) if ledger else None
    values = [line for line in metrics if "summary" not in line]
    attempts = summarize_attempts(values, goodput.outcomes if goodput else {})
    settings = run or done.get("settings") or evaluation.get("settings", {})
    outcome = _find_outcome(metrics) if metrics else ("finished" if done or result else None)
    stragglers = [line["straggler"] for line in ledger if line.get("straggler")]
    return RunFolder(
        folder=folder,
        name=_find_name(folder),
        verb=done.get("verb") or run.get(RUN_IDENTITY, {}).get("verb"),
        settings=_name_tasks(_drop_keys(settings, "format", RUN_IDENTITY)),
        identity=run.get(RUN_IDENTITY) or evaluation.get("identity", {}),
        environment=_drop_keys(read(ENVIRONMENT, EnvironmentShape), "format"),
        series=merge_attempts(values, attempts),
        attempts=attempts,
        ledger=ledger[-1] if ledger else {},
        cost_series=_build_cost_series(ledger),
        evaluation=evaluation,
        model_step=result.get("model_step") if outcome else None,
        class_reports=evaluation.get("classes") or _name_steps(read(CLASS_REPORTS, ClassesShape)),
        dataset=read(MANIFEST, DatasetShape),
        failures=tuple(
            {"file": path.name, **read_document(path, warnings=warnings)}
            for path in list_failures(folder)
        ),
        goodput=goodput,
        benchmark=read(BENCHMARK),
        profile=read(PROFILE),
        straggler=stragglers[-1] if stragglers else {},
        seconds=done.get("seconds"),
        num_devices=launches[-1].get("processes") if launches else None,
        world_sizes=frozenset(line["processes"] for line in launches if "processes" in line),
        outcome=outcome,
        warnings=tuple(warnings),
    )


def _name_tasks(settings: Document) -> Document:
    """Return settings in which a task list is a table by task name."""
    tasks = settings.get("task")
    if not isinstance(tasks, list):
        return settings
    by_name = {task["name"]: _drop_keys(task, "name") for task in tasks}
    return {**settings, "task": by_name}


def _name_steps(classes: Document) -> dict[str, ClassReport]:
    step = classes.get("step")
    return {f"{name}, step {step:,}": report for name, report in classes.get("classes", {}).items()}


def _build_cost_series(ledger: list[Document]) -> dict[str, Series]:
    keys = ("attempt", "step", *COST_KEYS)
    lines = [{key: line[key] for key in keys if key in line} for line in ledger]
    return merge_attempts(lines, summarize_attempts(lines, {})) if lines else {}


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is an output folder that can be reported on."""
    return any((folder / name).is_file() for name in MARKER_FILES)


def is_other_stage(folder: Path) -> bool:
    """Return whether a folder belongs to a pipeline stage without a report, such as a promotion."""
    return (folder / DONE).is_file() and not is_run_folder(folder)


def locate_run(path: str, folder: Path, run_id: str | None = None) -> tuple[Path, Path] | None:
    """Return the run that contains an artifact's origin, and the origin; None if it is missing.

    `path` may be relative to the export's working folder, which is searched among this process's
    working folder and the parents of the artifact's `folder`. If the artifact has a `run_id`,
    another run in the same place does not count.
    """
    for base in (Path(), *folder.resolve().parents):
        origin = (base / Path(path).expanduser()).resolve()
        for run in (origin, *origin.parents[:3]):
            if (run / SAVED_RUN).is_file() and run_id in (None, read_run_id(run)):
                return run, origin
    return None


def read_run_id(run: Path) -> str | None:
    """Return a run's id; None if the folder is not a run, or its `run.json` is damaged."""
    identity = read_document(run / SAVED_RUN, RunShape, []).get(RUN_IDENTITY) or {}
    return identity.get("run_id")


def find_working_folder(run: Path, output: str) -> Path:
    """Return the folder to which a run's relative paths refer, from its `output.folder`."""
    depth, folder = len(Path(output).parts), run.resolve()
    is_below = not Path(output).is_absolute() and folder.parts[-depth:] == Path(output).parts
    return folder.parents[depth - 1] if is_below else Path()


def _find_outcome(metrics: list[Document]) -> str | None:
    """Return the last attempt's recorded outcome, or None."""
    number = max(line["attempt"] for line in metrics)
    last = [line for line in metrics if line["attempt"] == number]
    summaries = [line["summary"] for line in last if "summary" in line]
    return str(summaries[-1].get("stop_reason", "finished")) if summaries else None


def _drop_keys(document: Document, *names: str) -> Document:
    return {key: value for key, value in document.items() if key not in names}


def _find_name(folder: Path) -> str:
    """Return the run name without a pipeline's stage number."""
    name = name_run(folder)
    match = STAGE_FOLDER.fullmatch(name)
    return match[2] if match else name
