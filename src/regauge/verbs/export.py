"""Compile a trained model into an artifact with its evidence, or write it as others load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import choices, config, verbs
from regauge.artifacts.export_settings import Exporting, Format
from regauge.artifacts.manifest import ARTIFACT
from regauge.backends import Level
from regauge.checkpoint.layout import check_free
from regauge.errors import SettingsError, find_refusal
from regauge.log import logger

OUTPUT = "target.path"
ROOT = Exporting
ORIGINS = ("run", "model", "module")


def main(
    run_file: Annotated[
        Path | None, Parameter(help="a run file, or the output folder of a run")
    ] = None,
    *overrides: verbs.Override,
    model: Annotated[str | None, Parameter(help="a model's folder or its name on the hub")] = None,
    to: Annotated[Path | None, Parameter(help="folder or file to write")] = None,
    format: Annotated[Format | None, Parameter(help="form to write")] = None,  # noqa: A002 - the flag
    module: Annotated[str | None, Parameter(help="a function of yours, module:name")] = None,
    portable: Annotated[Level | None, Parameter(help="instruction set to compile for")] = None,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Write the model of a run, or of a folder, compiled for this machine and proved.

    Several ways to compute it are tried; the best that keeps the quality is kept.
    """
    flags = [
        ("target.model", model),
        ("target.module", module),
        ("target.path", to),
        ("target.format", format),
        ("candidates.portable", portable),
    ]
    given = tuple(f"{key}={value}" for key, value in flags if value is not None)
    settings = _settings(run_file, (*overrides, *given))
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def _settings(run_file: Path | None, assigned: tuple[str, ...]) -> Exporting:
    """Return the settings; what is trained by a run file, or in a folder, is what is exported."""
    if run_file is not None and "=" in str(run_file):  # only assignments were given
        run_file, assigned = None, (str(run_file), *assigned)
    file = run_file if run_file is not None and not run_file.is_dir() else None
    tables = config.override(config.read(file) if file else {}, assigned)
    if file:
        tables = verbs.own(file, tables)
    else:
        choices.allow(tables)
    target = dict(tables.get("target", {}))
    tables["target"] = target
    if not target.keys() & set(ORIGINS):
        output = tables.get("output") if file else {"folder": str(run_file)} if run_file else None
        if not isinstance(output, dict) or "folder" not in output:
            raise SettingsError("nothing is said to be exported", "name a run's folder, or --model")
        target["run"] = output["folder"]
    if "path" not in target and "run" not in target:
        raise SettingsError("nothing says where the artifact goes", "name a folder with --to")
    target.setdefault("path", str(Path(target.get("run", "")) / ARTIFACT))
    where = str(run_file) if run_file else "the command line"
    return config.build(Exporting, tables, verbs.tables(), where)


def plan(settings: Exporting) -> dict[str, Any]:
    """Return what would be written, and why it would not be when something is there."""
    target = settings.target
    refusal = find_refusal(lambda: check_free(Path(target.path)))
    origin = {name: getattr(target, name) for name in ORIGINS if getattr(target, name) is not None}
    step = {"step": target.step} if target.run else {}
    return {**origin, **step, "path": target.path, "format": target.format, **refusal}


def run(settings: Exporting) -> dict[str, Any]:
    """Write the model; return where it lies, and of an artifact what was found."""
    from regauge.checkpoint import export_weights

    target = settings.target
    export_weights.make_way(Path(target.path))
    if target.run is not None:
        return _of_run(settings, Path(target.run))
    from regauge.artifacts import sources
    from regauge.artifacts.export import export
    from regauge.models import hub

    if target.module is not None:
        return export(settings, sources.OfModule(target.module), None)
    return export(settings, sources.OfFolder(hub.at(str(target.model)), settings, None), None)


def _of_run(settings: Exporting, folder: Path) -> dict[str, Any]:
    """Write the model of a run."""
    import tempfile

    from regauge.checkpoint import export_weights
    from regauge.models import hub

    target, tables = settings.target, config.read(folder / "run.json")
    if not (folder / "model" / hub.CONFIG).is_file():
        raise SettingsError(f"{folder} has no final model", "let the run finish first")
    with tempfile.TemporaryDirectory() as scratch:
        model = folder / "model"
        if target.step != "final":
            model = export_weights.moment(folder, target.step, Path(scratch) / "model")
        if target.format == "artifact":
            return _artifact(settings, model, tables)
        written = export_weights.export(model, Path(target.path), target.format)
    return {"written": str(written), "format": target.format}


def _artifact(settings: Exporting, model: Path, tables: config.Tables) -> dict[str, Any]:
    """Compile a model that a run trained for its task, the first where it has several."""
    from functools import partial

    from regauge.artifacts import sources
    from regauge.artifacts.export import export
    from regauge.evaluation.artifact_metrics import metrics
    from regauge.training.settings import Training

    aim = config.build(Training, tables, verbs.tables()).task_configs[0]
    dataset = Path(aim.data.path)
    if not dataset.is_dir():
        told = "%s is gone: how the run cut its texts is not known, its metrics are not measured"
        logger.warning(told, dataset)
        return export(settings, sources.OfFolder(model, settings, None), None)
    subject = sources.OfFolder(model, settings, sources.Trained(aim.task, dataset))
    if settings.proof.metrics == "no" or aim.task.writes:
        return export(settings, subject, None)
    rows = settings.proof.texts
    return export(settings, subject, partial(metrics, task=aim.task, dataset=dataset, rows=rows))
