"""Evaluate trained models on held-out rows or on files, side by side.

For example:

    $ regauge evaluate out/run --source test.csv
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands import AsJson, DryRun, Override
from regauge.config.output_files import EVALUATION
from regauge.data.dataset import read_manifest
from regauge.data.sources._suffixes import build_source_table
from regauge.evaluation.evaluation_files import (
    describe_inputs,
    find_collection,
    find_result,
    write_inputs,
)
from regauge.evaluation.settings import EvaluateSettings
from regauge.inference.export.trained_task import find_trained_task
from regauge.system import choices, log, processes
from regauge.system.errors import SettingsError
from regauge.system.files import check_folder
from regauge.training.defaults import count_local_processes
from regauge.training.run_record import TASKS

if TYPE_CHECKING:
    from regauge.training.settings import TrainSettings

ROOT = EvaluateSettings
OUTPUT = "output.folder"
PREPARED = "data"
"""Output subfolder with the prepared records of `evaluate.source`."""
SHOWN = ("rows", "notes", "classes")
"""Keys of an evaluation document in the answer."""
MAX_SHOWN_CLASSES = 30
MAX_SHOWN_CELLS = 10
"""Largest class count for which a terminal shows metrics by class and the confusion matrix."""


def main(
    run_file: Annotated[Path, Parameter(help="Run file, or run, model or artifact folder.")],
    *overrides: Override,
    source: Annotated[
        str | None, Parameter(help="Files with the records to evaluate, such as test.csv.")
    ] = None,
    to: Annotated[Path | None, Parameter(help="Output folder.")] = None,
    overwrite: commands.Overwrite = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Evaluate models on a dataset's held-out rows, or on records in files.

    A folder is evaluated with its run's task and dataset. A finished evaluation is not changed.

    For example:

        >>> regauge.evaluate("out/run", source="test.csv")
    """
    settings = _load_settings(run_file, overrides, source, to)
    evaluate = plan if dry_run else run
    answer = evaluate(settings, overwrite=overwrite)
    commands.show(answer if json or dry_run else _arrange(answer), as_json=json)
    return answer


def plan(settings: EvaluateSettings, *, overwrite: bool = False) -> dict[str, Any]:
    """Return the planned evaluation, without importing torch."""
    rows = _check(settings)
    folder = Path(settings.output.folder)
    is_finished = not overwrite and find_result(folder, describe_inputs(settings)) is not None
    return {
        **({"action": f"nothing: {_describe_finished(folder)}"} if is_finished else {}),
        "output": settings.output.folder,
        "models": dict(settings.models),
        **rows,
        "processes": settings.execution.processes,
    }


def run(settings: EvaluateSettings, *, overwrite: bool = False) -> dict[str, Any]:
    """Evaluate with the process count from the settings or the launcher; return the table.

    The table of a finished evaluation with the same inputs is returned unchanged, unless it is to
    be overwritten.
    """
    _check(settings)
    folder, inputs = Path(settings.output.folder), describe_inputs(settings)
    if not overwrite and (table := find_result(folder, inputs)):
        log.logger.info("%s", _describe_finished(folder))
    else:
        table = _evaluate(settings, folder)
        if processes.detect_world().is_main_process:
            write_inputs(folder, inputs)
    return {"output": str(folder / EVALUATION), **{name: table[name] for name in SHOWN}}


def _describe_finished(folder: Path) -> str:
    return f"{folder} is finished; nothing is changed"


def _check(settings: EvaluateSettings) -> dict[str, Any]:
    check_folder(Path(settings.output.folder), "output.folder")
    manifest = read_manifest(Path(settings.data.path))
    if settings.evaluate.task_settings == "given":
        settings.task.check_dataset(manifest)
    num_rows = manifest.splits["heldout"].rows
    source = settings.evaluate.source
    if source:
        return {"source": source.kind}
    return {"heldout_rows": min(num_rows, settings.evaluation.rows or num_rows)}


def _evaluate(settings: EvaluateSettings, folder: Path) -> dict[str, Any]:
    if collection := find_collection(settings):
        from regauge.evaluation.search import evaluate_search

        return evaluate_search(settings, collection)
    if settings.evaluate.source:
        settings = _prepare_source(settings, folder / PREPARED)
    size = count_local_processes(settings.execution.processes, settings.accelerator)
    if size == 1 or processes.is_launched():
        from regauge.evaluation.offline import evaluate_models

        return evaluate_models(settings, processes.detect_world(settings.execution.processes))
    commands.run_in_processes("evaluate", settings, size, folder, ("--overwrite",))
    return config.read(folder / EVALUATION)


def _prepare_source(settings: EvaluateSettings, folder: Path) -> EvaluateSettings:
    from regauge.data.prepare.evaluation_data import prepare_like

    source = settings.evaluate.source
    if source is None:
        raise AssertionError("there is no source")
    dataset = Path(settings.data.path)
    task = settings.task.resolve_defaults(read_manifest(dataset))
    prepared = prepare_like(dataset, source, folder)
    options = settings.evaluate.model_copy(update={"source": None, "training_data": str(dataset)})
    data = settings.data.model_copy(update={"path": str(prepared)})
    return settings.model_copy(update={"evaluate": options, "data": data, "task": task})


def _load_settings(
    run_file: Path, overrides: tuple[str, ...], source: str | None, to: Path | None
) -> EvaluateSettings:
    """Build the settings from a run file, or from a folder and the flags.

    A `run.json` stands for its run folder.
    """
    run_file = run_file.parent if config.is_saved_run(run_file) else run_file
    is_folder = run_file.is_dir()
    tables = _describe_folder(run_file, source) if is_folder else config.read(run_file)
    if to is not None:
        tables["output"] = {**tables.get("output", {}), "folder": str(to)}
    tables = config.apply_overrides(tables, overrides)
    if source is not None:
        table = _build_source(source, tables)
        tables["evaluate"] = {**tables.get("evaluate", {}), "source": table}
    if is_folder:
        choices.allow_imports(config.apply_overrides({}, overrides))
        _check_tables(run_file, tables)
    else:
        tables = commands.allow_user_code(run_file, tables)
    return config.build(EvaluateSettings, tables, commands.table_names(), str(run_file))


def _describe_folder(folder: Path, source: str | None) -> config.Tables:
    """Return the tables that evaluate a folder's model with its run's task, if any.

    The output folder name includes the `source` files, so that each has its own evaluation.
    """
    trained = find_trained_task(folder)
    owner = folder.resolve()
    if trained is not None and owner == trained.run:
        _check_single_task(folder, trained.settings)
    if trained is not None and owner.is_relative_to(trained.run):
        owner = trained.run
    parts = folder.resolve().relative_to(owner).parts
    name = " ".join((owner.name, *(part for part in parts if part != "model")))
    files = re.findall(r"\w+", Path(source).name.partition(".")[0]) if source else ()
    tables: config.Tables = {
        "models": {name: str(folder)},
        "output": {"folder": str(owner.with_name("-".join((owner.name, "evaluation", *files))))},
        "evaluate": {"title": f"Evaluation of {name}"},
    }
    if trained is None:
        return tables
    return {
        **tables,
        "seed": trained.settings.seed,
        "data": {"path": trained.config.data.path},
        "task": config.dump(trained.config.task),
    }


def _check_single_task(folder: Path, settings: TrainSettings) -> None:
    """Raise SettingsError for a run with several tasks: each has a model and a dataset."""
    first, *others = [config.name for config in settings.task_configs]
    if others:
        problem = f"{folder} has the tasks {', '.join((first, *others))}"
        models = [folder / "model", *(folder / TASKS / name / "model" for name in others)]
        remedy = f"name the model of one: {', '.join(map(str, models))}"
        raise SettingsError(problem, remedy)


def _check_tables(folder: Path, tables: config.Tables) -> None:
    examples = {"task": "task.kind=classify", "data": "data.path=out/dataset"}
    missing = [example for name, example in examples.items() if name not in tables]
    if missing:
        problem = f"{folder} is not from a run, so its task and its dataset are unknown"
        raise SettingsError(problem, f"add them, such as {' '.join(missing)}")


def _build_source(files: str, tables: config.Tables) -> config.Tables:
    """Build a file source's table, with the options of the dataset's source of its kind.

    So columns and delimiters of a CSV file are those of the training data.
    """
    table = build_source_table(files)
    data = tables.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if not isinstance(path, str):
        return table
    original = read_manifest(Path(path)).settings.get("source", {})
    return {**original, **table} if original.get("kind") == table["kind"] else table


def _arrange(answer: dict[str, Any]) -> dict[str, Any]:
    arranged = {name: shown for name, shown in answer.items() if name != "classes"}
    for model, report in answer["classes"].items():
        classes, matrix = report["classes"], report.get("confusion_matrix", ())
        if len(classes) <= MAX_SHOWN_CLASSES:
            arranged[f"classes of {model}"] = classes
        if 0 < len(matrix) <= MAX_SHOWN_CELLS:
            names = [row["name"] for row in classes]
            arranged[f"confusion matrix of {model}, actual by predicted"] = [
                {
                    "name": name,
                    **{f"→ {other}": count for other, count in zip(names, cells, strict=True)},
                }
                for name, cells in zip(names, matrix, strict=True)
            ]
    return arranged
