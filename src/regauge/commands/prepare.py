"""Prepare a dataset from text: tokenizer, rows, held-out split and manifest.

For example:

    $ regauge prepare run.toml
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializeAsAny, model_validator

from regauge import commands
from regauge.commands._parts.default_tables import complete_tables
from regauge.config import Settings, choice_of
from regauge.data.prepare.settings import PrepareOptions, Validation
from regauge.data.settings import (
    UNNAMED,
    DataSettings,
    Filter,
    Layouts,
    RowLayout,
    SplitSettings,
    TokenizerSettings,
    unwrap_single,
)
from regauge.data.sources import Source
from regauge.system import hub, log
from regauge.system.errors import SettingsError, find_refusal
from regauge.system.processes import available_cores

if TYPE_CHECKING:
    from regauge.config import Tables
    from regauge.data.dataset import DatasetManifest
    from regauge.data.layouts import Layout
    from regauge.data.prepare.prepare import PrepareJob
    from regauge.data.prepare.workdir import BuildInputs

OUTPUT = "data.path"
SHOWN_KINDS = ("tokens", "integer")
"""Column kinds whose maximum length a dry run shows."""


class PrepareSettings(Settings):
    """A text source, and the dataset prepared from it."""

    data: DataSettings
    """Dataset to write."""
    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")]
    """Text source."""
    filter: Filter = {}
    """Length limits for the field `text`; `[filter.<field>]` limits another field."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    """Tokenizer to load or train."""
    rows: Layouts = Field(default_factory=lambda: {UNNAMED: RowLayout()})
    """Row layout, or several layouts by name: each writes a dataset `<data.path>/<name>`. Keys that
    are missing without a layout are those of the task."""
    split: SplitSettings = SplitSettings()
    """Held-out set selection."""
    validation: Validation | None = None
    """Held-out rows from another source."""
    prepare: PrepareOptions = PrepareOptions()
    """How the work is executed."""

    @classmethod
    def complete_tables(cls, tables: Tables) -> Tables:
        """Return the tables with the task's rows and the model's tokenizer."""
        return complete_tables(tables)

    @model_validator(mode="after")
    def _check_split(self) -> PrepareSettings:
        from regauge.data.layouts import build_layout

        if self.validation is not None and self.split.heldout_fraction:
            problem = "the rows of validation.source are held out, and no others"
            raise SettingsError(problem, "remove split.heldout_fraction")
        for rows in self.rows.values():
            build_layout(rows).check_split(self.split)
        return self


ROOT = PrepareSettings


def main(
    run_file: commands.RunFile,
    *overrides: commands.Override,
    overwrite: commands.Overwrite = False,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Prepare a run file's dataset; a finished dataset is not changed.

    The same command resumes a stopped job; the result has the same bytes.

    For example:

        >>> regauge.prepare("run.toml")
    """
    settings = commands.load_settings(ROOT, run_file, overrides)
    if dry_run:
        return commands.show(plan(settings, overwrite=overwrite), as_json=json)
    answer = run(settings, overwrite=overwrite)
    answer["next"] = shlex.join(["regauge", "train", str(run_file), *overrides])
    return commands.show(answer, as_json=json)


def run(settings: PrepareSettings, *, overwrite: bool = False) -> dict[str, Any]:
    """Prepare the dataset; return its sizes and fingerprint.

    With `overwrite`, a dataset in the folder is replaced when the new one is complete.
    """
    from regauge.data.prepare import prepare

    job = _build_job(settings, overwrite=overwrite)
    manifests = prepare.prepare_datasets(job)
    log.logger.info(f"prepared {job.folder}")
    return unwrap_single(
        {name: _build_answer(job.folder / name, manifest) for name, manifest in manifests.items()}
    )


def plan(settings: PrepareSettings, *, overwrite: bool = False) -> dict[str, Any]:
    """Return the planned work; raises the errors of `run` that do not depend on the output folder.

    If the output folder belongs to another dataset, the answer contains the refusal.
    """
    job = _build_job(settings, overwrite=overwrite)
    layouts = job.build_layouts()
    with hub.local_only():
        work = _describe_work(job)
    return {
        "dataset": str(job.folder),
        **work,
        "source": job.source.kind,
        "rows": unwrap_single({name: _describe_layout(layouts[name]) for name in layouts}),
        "tokenizer": settings.tokenizer.path or f"trained, {settings.tokenizer.vocab_size} entries",
        **(
            {"validation": job.validation.source.kind}
            if job.validation
            else {"heldout_fraction": job.split.heldout_fraction}
        ),
        "processes": job.processes,
    }


def list_datasets(settings: PrepareSettings) -> dict[str, RowLayout]:
    """Return folder -> row layout for the datasets written by `run`."""
    from regauge.data.unprepared import map_by_folder

    return dict(map_by_folder(settings.data.path, settings.rows))


def _describe_work(job: PrepareJob) -> dict[str, Any]:
    from regauge.data.prepare import prepare

    if job.tokenizer.path and find_refusal(job.resolve_tokenizer):
        return {"action": f"download the tokenizer '{job.tokenizer.path}' and prepare the dataset"}
    prepare.check_job(job)
    if address := next(filter(None, (source.remote_location() for source in job.sources)), ""):
        return {"action": f"read {address} and prepare the dataset"}
    inputs = job.collect_inputs()
    sizes = {"pieces": len(inputs.pieces), "bytes": sum(piece.bytes for piece in inputs.pieces)}
    if refusal := find_refusal(lambda: _is_finished(job, inputs)):
        return {"action": "nothing", **sizes, **refusal}
    if _is_finished(job, inputs):
        return {"action": "nothing; the dataset is finished", **sizes}
    prepare.check_disk(job, inputs.pieces)
    verb = "replace" if job.overwrite and job.folder.exists() else "prepare"
    return {"action": f"{verb} the dataset", **sizes}


def _is_finished(job: PrepareJob, inputs: BuildInputs) -> bool:
    from regauge.data.prepare import workdir

    if job.overwrite:
        workdir.check_replaceable(job.folder)
        return False
    return workdir.find_finished(job.folder, inputs) is not None


def _build_job(settings: PrepareSettings, *, overwrite: bool = False) -> PrepareJob:
    from regauge.data.prepare.prepare import PrepareJob

    return PrepareJob(
        folder=Path(settings.data.path).resolve(),
        source=settings.source,
        tokenizer=settings.tokenizer,
        layouts=settings.rows,
        split=settings.split,
        filter=settings.filter,
        validation=settings.validation,
        processes=settings.prepare.processes or available_cores(),
        overwrite=overwrite,
    )


def _describe_layout(layout: Layout) -> dict[str, Any]:
    columns = layout.describe_columns({}).items()
    max_lengths = {name: field.max_length for name, field in columns if field.kind in SHOWN_KINDS}
    return {"layout": layout.kind, "max_lengths": max_lengths}


def _build_answer(folder: Path, manifest: DatasetManifest) -> dict[str, Any]:
    counts = {
        f"{name}_{unit}": getattr(split, unit)
        for name, split in manifest.splits.items()
        for unit in ("rows", "tokens")
    }
    names = {
        name: list(column.class_names)
        for name, column in manifest.columns.items()
        if column.class_names
    }
    return {
        "dataset": str(folder),
        "layout": manifest.layout,
        **counts,
        **({"classes": names} if names else {}),
        "real_token_fraction": round(manifest.real_token_fraction, 4),
        "vocab_size": manifest.tokenizer.vocab_size,
        "skipped": manifest.skipped,
        "truncated": manifest.truncated,
        "warnings": manifest.warnings,
        "fingerprint": manifest.fingerprint,
    }
