"""Turn text into a dataset: tokenizer, rows, a held-out split, and a manifest over all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializeAsAny, model_validator

from regauge import log, verbs
from regauge.config import Settings, chosen
from regauge.data.settings import (
    ALONE,
    Data,
    Filter,
    Layouts,
    RowLayout,
    Split,
    Tokenizer,
    unwrapped,
)
from regauge.data.sources import Source
from regauge.errors import find_refusal

if TYPE_CHECKING:
    from regauge.data.dataset import Manifest
    from regauge.data.layouts import Layout
    from regauge.preparation.prepare import Job

OUTPUT = "data.path"
SHOWN = ("tokens", "number")
"""The kinds of columns that a dry run tells of."""


class Work(Settings):
    """How `prepare` works; nothing here changes a byte of the dataset."""

    processes: int = Field(default=0, ge=0)
    """Processes that read and encode; 0 is one for every core."""


class Prepare(Settings):
    """A source, and the rows to make of it."""

    data: Data
    """Where the dataset goes."""
    source: Annotated[SerializeAsAny[Source], chosen("data/sources")]
    """Where the text comes from."""
    filter: Filter = {}
    """How long texts may be; `[filter.<field>]` for those of other fields than `text`."""
    tokenizer: Tokenizer = Tokenizer()
    """What turns text into tokens."""
    rows: Layouts = Field(default_factory=lambda: {ALONE: RowLayout()})
    """What a row is, or several layouts by name: each makes the dataset `<data.path>/<name>`."""
    split: Split = Split()
    """What is held out."""
    prepare: Work = Work()
    """How the work is done."""

    @model_validator(mode="after")
    def _split_suits_the_rows(self) -> Prepare:
        from regauge.data.layouts import layout_of

        for rows in self.rows.values():
            layout_of(rows).check_split(self.split)
        return self


ROOT = Prepare


def main(
    run_file: verbs.RunFile,
    *overrides: verbs.Override,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Prepare the dataset of a run file; a finished one is left as it is.

    A job that was stopped goes on where it was, and ends with the same bytes.
    """
    settings = verbs.load(ROOT, run_file, overrides)
    answer = plan(settings) if dry_run else run(settings)
    return verbs.show(answer, as_json=json)


def run(settings: Prepare) -> dict[str, Any]:
    """Make the dataset and return what it holds."""
    from regauge.preparation import prepare

    job = _job(settings)
    manifests = prepare.prepare(job)
    log.logger.info(f"prepared: {job.folder}")
    return unwrapped({name: _answer(job.folder / name, manifests[name]) for name in manifests})


def plan(settings: Prepare) -> dict[str, Any]:
    """Return what `run` would do; raises what it would raise before it starts.

    Why the folder of another dataset would be refused is part of the answer.
    """
    from regauge.preparation import prepare

    job = _job(settings)
    prepare.check(job)
    return {
        "dataset": str(job.folder),
        **_survey(job),
        "source": job.source.kind,
        "rows": unwrapped({name: _columns(layout) for name, layout in job.made().items()}),
        "tokenizer": settings.tokenizer.path or f"trained, {settings.tokenizer.vocabulary} entries",
        "heldout_share": job.split.heldout_share,
        "processes": job.processes,
    }


def list_datasets(settings: Prepare) -> dict[str, RowLayout]:
    """Return the rows of the datasets that `run` makes, by their folders."""
    from regauge.data.unprepared import by_folder

    return dict(by_folder(settings.data.path, settings.rows))


def _survey(job: Job) -> dict[str, Any]:
    """Return what there is to do, and how much of it; nobody outside of this machine is asked."""
    from regauge.preparation import prepare, workdir

    if address := job.source.elsewhere():
        return {"would_do": f"ask for {address}, and prepare it"}
    inputs = job.inputs()
    amount = {"pieces": len(inputs.pieces), "bytes": sum(piece.bytes for piece in inputs.pieces)}
    if refusal := find_refusal(lambda: workdir.finished(job.folder, inputs)):
        return {"would_do": "nothing", **amount, **refusal}
    if workdir.finished(job.folder, inputs):
        return {"would_do": "nothing: it is there already", **amount}
    prepare.check_disk(job, inputs.pieces)
    return {"would_do": "prepare it", **amount}


def _job(settings: Prepare) -> Job:
    from regauge.preparation.prepare import Job
    from regauge.processes import available_cores

    return Job(
        folder=Path(settings.data.path).resolve(),
        source=settings.source,
        tokenizer=settings.tokenizer,
        layouts=settings.rows,
        split=settings.split,
        filter=settings.filter,
        processes=settings.prepare.processes or available_cores(),
    )


def _columns(layout: Layout) -> dict[str, Any]:
    columns = layout.fields({}).items()
    limits = {name: field.limit for name, field in columns if field.kind in SHOWN}
    return {"layout": layout.kind, "limits": limits}


def _answer(folder: Path, manifest: Manifest) -> dict[str, Any]:
    counts = {
        f"{name}_{what}": getattr(split, what)
        for name, split in manifest.splits.items()
        for what in ("rows", "tokens")
    }
    return {
        "dataset": str(folder),
        "layout": manifest.layout,
        **counts,
        "real_token_share": round(manifest.real_token_share, 4),
        "vocabulary": manifest.tokenizer.vocabulary,
        "skipped": manifest.skipped,
        "truncated": manifest.truncated,
        "identity": manifest.identity,
    }
