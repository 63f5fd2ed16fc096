"""Compile a trained model into a verified artifact, or convert it to another format.

For example:

    $ regauge export out/run --to out/artifact
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.config.output_files import SAVED_RUN
from regauge.inference.backends import IsaLevel
from regauge.inference.export.export_settings import ExportSettings, Format
from regauge.inference.export.manifest import ARTIFACT
from regauge.inference.export.phase_log import log_phase
from regauge.system import choices, hub
from regauge.system.errors import SettingsError, find_refusal
from regauge.system.files import check_free
from regauge.system.garbage import pause_collection

if TYPE_CHECKING:
    from regauge.inference.export.sources import ExportSource

OUTPUT = "export.to"
ROOT = ExportSettings
SOURCE_KEYS = ("run", "model", "module")


def main(  # noqa: PLR0913 - the flags of the command line
    run_file: Annotated[Path | None, Parameter(help="Run file, or a run's output folder.")] = None,
    *overrides: commands.Override,
    model: Annotated[
        str | None, Parameter(help="Model folder, or name on the Hugging Face Hub.")
    ] = None,
    to: Annotated[Path | None, Parameter(help="Folder or file to write.")] = None,
    format: Annotated[Format | None, Parameter(help="Output format.")] = None,  # noqa: A002 - the flag
    module: Annotated[
        str | None, Parameter(help="Custom function that returns a model, as module:name.")
    ] = None,
    portable: Annotated[IsaLevel | None, Parameter(help="Instruction set to compile for.")] = None,
    fast: Annotated[
        bool | None, Parameter(negative=(), help="Compile one candidate, for fewer lengths.")
    ] = None,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Export a model from a run or a folder.

    An artifact is compiled for this machine: several backends and precisions are timed, and the
    best one that preserves quality is written with its evidence.

    For example:

        >>> regauge.export("out/run", to="out/artifact")
    """
    flags = [
        ("export.model", model),
        ("export.module", module),
        ("export.to", to),
        ("export.format", format),
        ("candidates.portable", portable),
        ("candidates.fast", "true" if fast else None),
    ]
    assignments = tuple(f"{key}={value}" for key, value in flags if value is not None)
    settings = load_settings(run_file, (*overrides, *assignments))
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    answer = run(settings)
    if settings.export.format == "artifact":
        answer["next"] = f"regauge predict {settings.export.to} --source FILE --to FOLDER"
    return commands.show(answer, as_json=json)


def load_settings(run_file: Path | None, overrides: tuple[str, ...]) -> ExportSettings:
    """Build the settings; by default the run in the run file or folder is exported."""
    if run_file is not None and "=" in str(run_file):  # the first argument is an override
        run_file, overrides = None, (str(run_file), *overrides)
    file = run_file if run_file is not None and not run_file.is_dir() else None
    tables = config.apply_overrides(config.read(file) if file else {}, overrides, ROOT)
    if file:
        tables = commands.allow_user_code(file, tables)
    else:
        choices.allow_imports(tables)
    if not file and run_file is not None:
        tables["output"] = {"folder": str(run_file)}
    tables = fill_tables(tables)
    if file and file.name != SAVED_RUN:  # its threads are those of a single rank
        _use_run_threads(tables)
    source = str(run_file) if run_file else "the command line"
    return config.build(ExportSettings, tables, commands.table_names(), source)


def fill_tables(tables: config.Tables) -> config.Tables:
    """Fill in the model and the path: by default the run in `output.folder`, and a folder in it.

    Raises SettingsError if they are unknown.
    """
    target = dict(tables.get("export", {}))
    if not target.keys() & set(SOURCE_KEYS):
        output = tables.get("output")
        if not isinstance(output, dict) or "folder" not in output:
            raise SettingsError("no model to export", "name a run's folder, or add --model")
        target["run"] = output["folder"]
    if "to" not in target and "run" not in target:
        raise SettingsError("the artifact needs a folder", "name it with --to")
    weight_format = target.get("format", ARTIFACT)
    name = "model.pt" if weight_format == "torch" else weight_format
    target.setdefault("to", str(Path(target.get("run", "")) / name))
    return {**tables, "export": target}


def _use_run_threads(tables: config.Tables) -> None:
    execution = tables.get("execution")
    threads = execution.get("threads") if isinstance(execution, dict) else None
    if threads is not None:
        tables["candidates"] = {"threads": [threads], **tables.get("candidates", {})}


def plan(settings: ExportSettings) -> dict[str, Any]:
    """Return the model and the path to write, and the refusal if the path exists."""
    target = settings.export
    refusal = find_refusal(lambda: check_free(Path(target.to)))
    values = {name: getattr(target, name) for name in SOURCE_KEYS}
    source = {name: value for name, value in values.items() if value is not None}
    step = {"step": target.step} if target.run else {}
    return {**source, **step, "path": target.to, "format": target.format, **refusal}


def run(settings: ExportSettings) -> dict[str, Any]:
    """Write the model; return the path and, for an artifact, the measurements."""
    target = settings.export
    check_free(Path(target.to))
    if target.run is not None:
        return _export_run(settings, Path(target.run))
    with log_phase(f"load: {target.module or target.model}"), pause_collection():
        source = _load_source(settings)
        from regauge.inference.export.export import export_artifact

    return export_artifact(settings, source, None)


def _load_source(settings: ExportSettings) -> ExportSource:
    from regauge.inference.export import sources

    if settings.export.module is not None:
        return sources.CustomModuleSource(settings.export.module)
    folder = hub.resolve_model(str(settings.export.model))
    return sources.ModelFolder(folder, settings, None)


def _export_run(settings: ExportSettings, folder: Path) -> dict[str, Any]:
    import tempfile

    from regauge.training.checkpoint import export_weights
    from regauge.training.model_card import write_card

    target = settings.export
    config.read_saved_run(folder)
    if not (folder / "model" / hub.CONFIG).is_file():
        raise SettingsError(f"{folder} has no final model", "let the run finish first")
    with tempfile.TemporaryDirectory() as scratch:
        model = folder / "model"
        if target.step != "final":
            model = export_weights.export_checkpoint(folder, target.step, Path(scratch) / "model")
            step = export_weights.find_step(folder, target.step)
            target = target.model_copy(update={"step": step})
            settings = settings.model_copy(update={"export": target})
            for output in filter(Path.is_dir, (model, model.with_name("adapter"))):
                write_card(folder, output, step=step)
        if target.format == "artifact":
            return _export_artifact(settings, model, folder)
        written = export_weights.export_model(model, Path(target.to), target.format)
    return {"path": str(written), "format": target.format}


def _export_artifact(settings: ExportSettings, model: Path, run: Path) -> dict[str, Any]:
    """Compile a run's model for the task, or for the first one in a multi-task run."""
    from functools import partial

    with log_phase(f"load: {model}"), pause_collection():
        from regauge.evaluation.offline import compute_heldout_metrics
        from regauge.inference.export import sources
        from regauge.inference.export.export import export_artifact
        from regauge.inference.export.trained_task import find_task_with_dataset

        trained = find_task_with_dataset(run)
        source = sources.ModelFolder(model, settings, trained)
    if trained is None or not (settings.parity.metrics and trained.task.artifacts_have_metrics):
        return export_artifact(settings, source, None)
    task, dataset = trained.task, trained.dataset
    num_rows = settings.parity.num_texts
    compute_metrics = partial(compute_heldout_metrics, task=task, dataset=dataset, rows=num_rows)
    return export_artifact(settings, source, compute_metrics)
