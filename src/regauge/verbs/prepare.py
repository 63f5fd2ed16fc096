"""Prepare a dataset from text: tokenizer, rows, held-out split and manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializeAsAny, model_validator

from regauge import log, verbs
from regauge.config import Settings, choice_of
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
from regauge.errors import find_refusal

if TYPE_CHECKING:
    from regauge.data.dataset import DatasetManifest
    from regauge.data.layouts import Layout
    from regauge.preparation.prepare import PrepareJob

OUTPUT = "data.path"
SHOWN_KINDS = ("tokens", "integer")
"""The kinds of columns whose maximum length a dry run shows."""


class PrepareOptions(Settings):
    """Execution of `prepare`; these options do not change the dataset."""

    processes: int = Field(default=0, ge=0)
    """Number of processes that read and encode; 0 is one for each CPU core."""


class PrepareSettings(Settings):
    """A source of text, and the dataset that is prepared from it."""

    data: DataSettings
    """The dataset that is written."""
    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")]
    """Source of the text."""
    filter: Filter = {}
    """Length limits of the field `text`; `[filter.<field>]` limits another field."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    """Tokenizer that is loaded or trained."""
    rows: Layouts = Field(default_factory=lambda: {UNNAMED: RowLayout()})
    """Layout of the rows, or several layouts by name: each writes a dataset
    `<data.path>/<name>`."""
    split: SplitSettings = SplitSettings()
    """Selection of the held-out set."""
    prepare: PrepareOptions = PrepareOptions()
    """Execution of the work."""

    @model_validator(mode="after")
    def _check_split(self) -> PrepareSettings:
        from regauge.data.layouts import build_layout

        for rows in self.rows.values():
            build_layout(rows).check_split(self.split)
        return self


ROOT = PrepareSettings


def main(
    run_file: verbs.RunFile,
    *overrides: verbs.Override,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Prepare the dataset of a run file; a finished dataset is not changed.

    The same command resumes a stopped job; the result has the same bytes.
    """
    settings = verbs.load_settings(ROOT, run_file, overrides)
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    answer = {**run(settings), "next": f"regauge train {run_file}"}
    return verbs.show(answer, as_json=json)


def run(settings: PrepareSettings) -> dict[str, Any]:
    """Prepare the dataset; return its sizes and its fingerprint."""
    from regauge.preparation import prepare

    job = _build_job(settings)
    manifests = prepare.prepare_datasets(job)
    log.logger.info(f"prepared {job.folder}")
    return unwrap_single(
        {name: _build_answer(job.folder / name, manifest) for name, manifest in manifests.items()}
    )


def plan(settings: PrepareSettings) -> dict[str, Any]:
    """Return the planned work; raises the errors of `run` that do not depend on the output folder.

    If the output folder belongs to another dataset, the answer contains the refusal.
    """
    from regauge.preparation import prepare

    job = _build_job(settings)
    prepare.check_job(job)
    layouts = job.build_layouts()
    return {
        "dataset": str(job.folder),
        **_describe_work(job),
        "source": job.source.kind,
        "rows": unwrap_single({name: _describe_layout(layouts[name]) for name in layouts}),
        "tokenizer": settings.tokenizer.path or f"trained, {settings.tokenizer.vocab_size} entries",
        "heldout_fraction": job.split.heldout_fraction,
        "processes": job.processes,
    }


def list_datasets(settings: PrepareSettings) -> dict[str, RowLayout]:
    """Return the row layouts of the datasets that `run` writes, by folder."""
    from regauge.data.unprepared import map_by_folder

    return dict(map_by_folder(settings.data.path, settings.rows))


def _describe_work(job: PrepareJob) -> dict[str, Any]:
    """Return the remaining work and the size of the inputs; contacts no other machine."""
    from regauge.preparation import prepare, workdir

    if address := job.source.remote_location():
        return {"action": f"read {address} and prepare the dataset"}
    inputs = job.collect_inputs()
    sizes = {"pieces": len(inputs.pieces), "bytes": sum(piece.bytes for piece in inputs.pieces)}
    if refusal := find_refusal(lambda: workdir.find_finished(job.folder, inputs)):
        return {"action": "nothing", **sizes, **refusal}
    if workdir.find_finished(job.folder, inputs):
        return {"action": "nothing; the dataset is finished", **sizes}
    prepare.check_disk(job, inputs.pieces)
    return {"action": "prepare the dataset", **sizes}


def _build_job(settings: PrepareSettings) -> PrepareJob:
    from regauge.preparation.prepare import PrepareJob
    from regauge.processes import available_cores

    return PrepareJob(
        folder=Path(settings.data.path).resolve(),
        source=settings.source,
        tokenizer=settings.tokenizer,
        layouts=settings.rows,
        split=settings.split,
        filter=settings.filter,
        processes=settings.prepare.processes or available_cores(),
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
    return {
        "dataset": str(folder),
        "layout": manifest.layout,
        **counts,
        "real_token_fraction": round(manifest.real_token_fraction, 4),
        "vocab_size": manifest.tokenizer.vocab_size,
        "skipped": manifest.skipped,
        "truncated": manifest.truncated,
        "warnings": manifest.warnings,
        "fingerprint": manifest.fingerprint,
    }
