"""Compile a trained model into an artifact with its evidence, or write it as others load it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import config, verbs
from regauge.errors import SettingsError
from regauge.inference.export_settings import Exporting, Format
from regauge.log import logger

if TYPE_CHECKING:
    from regauge.inference.exporting import Trained

OUTPUT = "target.path"
ROOT = Exporting
ARTIFACT = "artifact"


def main(
    run_file: Annotated[
        Path | None, Parameter(help="a run file, or the output folder of a run")
    ] = None,
    *overrides: verbs.Override,
    model: Annotated[str | None, Parameter(help="a model's folder or its name on the hub")] = None,
    to: Annotated[Path | None, Parameter(help="folder or file to write")] = None,
    format: Annotated[Format | None, Parameter(help="form to write")] = None,  # noqa: A002 - the flag
    portable: Annotated[str | None, Parameter(help="instruction set, such as x86-64-v3")] = None,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Write the model of a run, or of a folder, compiled for this machine and proved.

    Several ways to compute it are tried; the best that keeps the quality is kept.
    """
    flags = [
        ("target.model", model),
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
    if run_file is None:
        tables, where = config.override({}, assigned), "the command line"
    elif run_file.is_dir():
        tables, where = config.override({}, assigned), str(run_file)
        tables.setdefault("target", {}).setdefault("run", str(run_file))
    else:
        tables, where = config.override(config.read(run_file), assigned), str(run_file)
        tables = verbs.own(run_file, tables)
        output = tables.get("output")
        if (
            isinstance(output, dict)
            and "folder" in output
            and "model" not in tables.get("target", {})
        ):
            tables.setdefault("target", {}).setdefault("run", output["folder"])
    target = tables.setdefault("target", {})
    if "run" not in target and "model" not in target:
        raise SettingsError("nothing is said to be exported", "name a run's folder, or --model")
    if "path" not in target and "run" in target:
        target["path"] = str(Path(target["run"]) / ARTIFACT)
    if "path" not in target:
        raise SettingsError("nothing says where the artifact goes", "name a folder with --to")
    return config.build(Exporting, tables, verbs.tables(), where)


def plan(settings: Exporting) -> dict[str, Any]:
    """Return what would be written."""
    target = settings.target
    origin = {"run": target.run, "step": target.step} if target.run else {"model": target.model}
    return {**origin, "path": target.path, "format": target.format}


def run(settings: Exporting) -> dict[str, Any]:
    """Write the model; return where it lies, and of an artifact what was found."""
    import tempfile

    from regauge.checkpoint import exchange
    from regauge.models import finding

    target = settings.target
    exchange.make_way(Path(target.path))
    if target.run is None:
        from regauge.inference.exporting import export

        return export(settings, finding.at(str(target.model)), None)
    folder = Path(target.run)
    tables = config.read(folder / "run.json")
    if not (folder / "model" / finding.CONFIG).is_file():
        raise SettingsError(f"{folder} has no final model", "let the run finish first")
    with tempfile.TemporaryDirectory() as scratch:
        model = folder / "model"
        if target.step != "final":
            model = exchange.moment(folder, target.step, Path(scratch) / "model")
        if target.format == "artifact":
            from regauge.inference.exporting import export

            return export(settings, model, _trained(tables))
        task = tables.get("task", {})
        first = task if isinstance(task, dict) else task[0]
        pooled = first.get("kind") == "contrastive"
        written = exchange.export(model, Path(target.path), target.format, pooled=pooled)
    return {"written": str(written), "format": target.format}


def _trained(tables: config.Tables) -> Trained | None:
    """Return what a run trained for, first where for several; None where its rows are gone."""
    from regauge.inference.exporting import Trained
    from regauge.training.settings import Training

    aim = config.build(Training, tables, verbs.tables()).aims[0]
    dataset = Path(aim.data.path)
    if not dataset.is_dir():
        told = "%s is gone: how the run cut its texts is not known, its metrics are not measured"
        logger.warning(told, dataset)
        return None
    return Trained(aim.task, dataset)
