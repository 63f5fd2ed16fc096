"""From trained weights to an artifact: candidates are built, proved and timed; the best is kept."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators, tensorfiles
from regauge.checkpoint.folder import write_json
from regauge.config import FORMAT, dump
from regauge.data.shards import read_manifest
from regauge.errors import DataError, RegaugeError
from regauge.inference import artifact as artifacts
from regauge.inference import candidates as trying
from regauge.inference import identity, programs
from regauge.inference.manifest import (
    MANIFEST,
    MODEL,
    PARITY,
    PAYLOAD,
    ROWS,
    TOKENIZER,
    WEIGHTS,
    Compiled,
    Identity,
    Manifest,
    Origin,
    Target,
)
from regauge.inference.measured import metrics
from regauge.inference.samples import samples
from regauge.inference.texts import Reader
from regauge.log import logger
from regauge.models import weights as folders
from regauge.models.inputs import Fields

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator
    from regauge.inference.export_settings import Exporting, Goal
    from regauge.inference.rows import Rows
    from regauge.tasks import Task

Row = dict[str, Any]
BETTER: dict[Goal, tuple[str, bool]] = {
    "throughput": ("texts_per_second", True),
    "usd": ("texts_per_second", True),  # on one machine the fastest is the cheapest
    "latency": ("one_text_ms", False),
}
"""By the goal: which figure of a candidate counts, and whether more of it is better."""


@dataclass(frozen=True)
class Trained:
    """What a run trained for."""

    task: Task
    dataset: Path
    """The one that it was trained on."""

    @property
    def fields(self) -> Fields:
        """What its model reads of a record."""
        return self.task.fields(read_manifest(self.dataset))


def export(settings: Exporting, model: Path, trained: Trained | None) -> dict[str, Any]:
    """Write the artifact of a model's folder; return what was found of every candidate.

    Raises DataError where no candidate keeps the quality.
    """
    fields = trained.fields if trained else Fields()
    dataset = trained.dataset if trained else None
    accelerator = settings.accelerator or accelerators.choose()[0]
    accelerators.require(accelerator)
    asked = trying.listed(settings.candidates, accelerator)
    with (
        artifacts.written(Path(settings.target.path)) as folder,
        tempfile.TemporaryDirectory() as scratch,
    ):
        described = programs.of_folder(model, settings.text, fields)
        programs.keep_folder(model, folder / MODEL)
        programs.keep_tokenizer(model, folder / TOKENIZER)
        reader = Reader(folder / TOKENIZER, described.reads, described.fields)
        found = samples(settings.proof.source, dataset, settings.proof.texts, fields)
        rows = reader.read(found.columns).rows
        work = _work(settings, described, accelerator, rows, trained)
        seen, (place, row) = _best(work, asked, scratch)
        shutil.move(scratch_of(scratch, place), folder / PAYLOAD)
        best = trying.built(work, asked[place], folder / PAYLOAD)
        tensorfiles.write(folder / WEIGHTS, best.weights)
        about = {"texts": len(rows), "origin": found.origin, "bound": settings.proof.bound}
        write_json(folder / PARITY, {"format": FORMAT, **about, **row})
        write_json(folder / ROWS, {"format": FORMAT, "rows": seen})
        manifest = _manifest(work, best, model, folder)
        write_json(folder / MANIFEST, dump(manifest))
    return {
        "written": settings.target.path,
        "candidates": [_shown(row) for row in seen],
        "kept": " ".join(str(value) for value in asked[place].facts.values()),
        "invariant": "yes" if manifest.identity else "no",
    }


def _work(
    settings: Exporting,
    described: programs.Described,
    accelerator: Accelerator,
    rows: Rows,
    trained: Trained | None,
) -> trying.Work:
    """Return what all candidates share: what fp32 answers, and how good that is."""
    engine = trying.reference(described, settings)
    measured = None
    if settings.proof.metrics == "auto" and trained is not None:
        whose: dict[str, Any] = {"task": trained.task, "dataset": trained.dataset}
        measured = partial(metrics, **whose, rows=settings.proof.texts)
    work = trying.Work(settings, described, accelerator, rows, engine.answers(rows), measured)
    return replace(work, quality=work.measured(engine))


def _best(
    work: trying.Work, asked: list[trying.Candidate], scratch: str
) -> tuple[list[Row], tuple[int, Row]]:
    """Return what was seen of every candidate, and the best that keeps the quality."""
    rows: list[Row] = []
    for place, candidate in enumerate(asked):
        try:
            row = trying.tried(work, trying.built(work, candidate, scratch_of(scratch, place)))
        except RegaugeError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers raise whatever they like
            row = trying.failed(candidate, error)
        logger.info("%s", _told(row))
        rows.append(row)
    bound = work.settings.proof.bound
    within = [(at, row) for at, row in enumerate(rows) if row.get("loss", bound + 1) <= bound]
    if not within:
        reason = next((row["failed"] for row in rows if "failed" in row), None)
        least = min((row["loss"] for row in rows if "loss" in row), default=None)
        said = f"it fails: {reason}" if least is None else f"the least loss is {least:.2g}"
        raise DataError(
            f"no candidate keeps the quality within {bound:g}: {said}",
            "name other candidates, or raise proof.bound",
        )
    figure, more = BETTER[work.settings.candidates.goal]
    chosen = (max if more else min)(within, key=lambda each: itemgetter(figure)(each[1]))
    return rows, chosen


def _manifest(work: trying.Work, best: trying.Built, model: Path, folder: Path) -> Manifest:
    """Return what an artifact says of itself, with what was shown of its batches."""
    settings, described, candidate = work.settings, work.described, best.candidate
    rungs, proof = best.rungs, None
    if settings.proof.invariant:
        shown = identity.shown(best.runner, rungs, programs.vocabulary(folder / MODEL))
        if shown is not None:
            rungs, proof = shown.rungs, Identity(chip=_chip(best), texts=shown.texts)
    backend, level = candidate.backend, settings.candidates.portable
    origin = settings.target.run or settings.target.model or str(model)
    return Manifest(
        format=FORMAT,
        program=described.told,
        compiled=Compiled(
            precision=candidate.precision,
            quantized=candidate.quantized,
            backend=backend,
            versions=backend.versions(),
        ),
        target=Target(
            accelerator=work.accelerator.kind,
            needs=tuple(sorted(backend.needs(best.site, level))),
            chip=_chip(best),
            threads=candidate.threads,
        ),
        shapes=rungs,
        identity=proof,
        origin=Origin(path=origin, step=str(settings.target.step), sha256=_hash(model)),
        files=artifacts.stored(folder),
    )


def scratch_of(scratch: str, place: int) -> Path:
    """Return where a candidate's payload is made."""
    return Path(scratch) / str(place)


def _chip(best: trying.Built) -> str:
    return best.site.accelerator.model()


def _hash(model: Path) -> str:
    import hashlib

    from regauge.data.shards import file_sha256

    each = [file_sha256(path) for path in folders.weight_files(model)]
    return each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()


def _shown(row: Row) -> Row:
    """Return what of a candidate's row fits a terminal; all of it is in the artifact."""
    name = f"{row['backend']} {row['precision']}"
    name += "" if row["quantized"] == "no" else f" {row['quantized']}"
    if "failed" in row:
        return {"name": name, "threads": row["threads"], "failed": row["failed"]}
    kept = ("threads", "texts_per_second", "one_text_ms", "cosine_least", "same_class", "loss")
    shown = {key: row[key] for key in kept if key in row}
    return {"name": name, **shown, "texts_per_second": round(row["texts_per_second"], 1)}


def _told(row: Row) -> str:
    name = f"{row['backend']} {row['precision']} {row['threads']} threads"
    if row["quantized"] != "no":
        name += f" {row['quantized']}"
    if "failed" in row:
        return f"{name}: fails: {row['failed']}"
    return f"{name}: {row['texts_per_second']:.0f} texts/s, loss {row['loss']:.2g}"
