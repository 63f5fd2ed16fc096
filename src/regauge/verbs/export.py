"""Write a trained model in a form that others load: transformers, peft, torch, and more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import config, verbs
from regauge.config import Settings
from regauge.errors import SettingsError

OUTPUT = "target.path"
Format = Literal["hf", "peft", "torch", "sentence-transformers"]


class Target(Settings):
    """What is exported, and as what."""

    run: str
    """Output folder of the run whose model is written."""
    path: str
    """Folder to write; for the format torch a file."""
    format: Format = "hf"
    """`hf`: a transformers folder, with adapters merged; `peft`: those alone; or another form."""
    step: Literal["final", "latest", "best"] | int = "final"
    """Which moment of the run: its final model, or a checkpoint."""


class Export(Settings):
    """Everything about an export."""

    target: Target
    """What is exported, and as what."""


ROOT = Export


def main(
    run_file: Annotated[Path, Parameter(help="output folder of a run, or a run file")],
    *overrides: verbs.Override,
    to: Annotated[Path | None, Parameter(help="folder or file to write")] = None,
    format: Annotated[Format | None, Parameter(help="form to write")] = None,  # noqa: A002 - the flag
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Write the model of a run in a form that others load."""
    flags = [("path", to), ("format", format)]
    given = tuple(f"target.{key}={value}" for key, value in flags if value is not None)
    if run_file.is_dir():
        tables = config.override({"target": {"run": str(run_file)}}, (*overrides, *given))
        settings = config.build(Export, tables, (), str(run_file))
    else:
        settings = verbs.load(Export, run_file, (*overrides, *given))
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def plan(settings: Export) -> dict[str, Any]:
    """Return what would be written."""
    target = settings.target
    return {"run": target.run, "step": target.step, "path": target.path, "format": target.format}


def run(settings: Export) -> dict[str, Any]:
    """Write the model; return where it lies."""
    import tempfile

    from regauge.checkpoint import exchange
    from regauge.models.finding import CONFIG

    target, folder = settings.target, Path(settings.target.run)
    tables = config.read(folder / "run.json")
    if not (folder / "model" / CONFIG).is_file():
        raise SettingsError(f"{folder} has no final model", "let the run finish first")
    task = tables.get("task", {})
    first = task if isinstance(task, dict) else task[0]
    pooled = first.get("kind") == "contrastive"
    with tempfile.TemporaryDirectory() as scratch:
        model = folder / "model"
        if target.step != "final":
            model = exchange.moment(folder, target.step, Path(scratch) / "model")
        written = exchange.export(model, Path(target.path), target.format, pooled=pooled)
    return {"written": str(written), "format": target.format}
