"""From trained weights to an artifact: candidates are built, proved and timed; the best is kept."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators, safetensors_io
from regauge.artifacts import artifact as artifacts
from regauge.artifacts import batch_invariance
from regauge.artifacts import candidates as trying
from regauge.artifacts.manifest import (
    MANIFEST,
    PARITY,
    PAYLOAD,
    ROWS,
    WEIGHTS,
    Compiled,
    Identity,
    Manifest,
    Origin,
    Target,
)
from regauge.config import FORMAT, dump
from regauge.errors import DataError, RegaugeError
from regauge.files import write_json
from regauge.log import logger

if TYPE_CHECKING:
    from regauge.artifacts.candidates import Metrics
    from regauge.artifacts.export_settings import Exporting, Goal
    from regauge.artifacts.sources import Subject

Row = dict[str, Any]
FINALISTS, NEAR = 3, 0.6
"""How many of the best are timed once more, and how near to it they have to be."""
BETTER: dict[Goal, tuple[str, bool]] = {
    "throughput": ("texts_per_second", True),
    "usd": ("texts_per_second", True),  # on one machine the fastest is the cheapest
    "latency": ("one_text_ms", False),
}
"""By the goal: which figure of a candidate counts, and whether more of it is better."""


def export(settings: Exporting, subject: Subject, measured: Metrics | None) -> dict[str, Any]:
    """Write the artifact of a subject; return what was found of every candidate.

    `measured` gives the metrics of a run on its held-out rows. Raises DataError where no candidate
    keeps the quality.
    """
    accelerator = settings.accelerator or accelerators.choose()[0]
    accelerators.require(accelerator)
    asked = trying.listed(settings.candidates, accelerator, subject.described)
    with (
        artifacts.written(Path(settings.target.path)) as folder,
        tempfile.TemporaryDirectory() as scratch,
    ):
        subject.keep(folder)
        records, origin = subject.records(settings)
        engine = trying.reference(subject.described, settings)
        answers = engine.answers(records)
        work = trying.Work(settings, subject.described, accelerator, records, answers, measured)
        work = replace(work, quality=work.measured(engine))
        seen, (place, row) = _best(work, asked, scratch)
        shutil.move(scratch_of(scratch, place), folder / PAYLOAD)
        best = trying.built(work, asked[place], folder / PAYLOAD)
        safetensors_io.write(folder / WEIGHTS, best.weights)
        about = {"records": len(records), "origin": origin, "bound": settings.proof.bound}
        write_json(folder / PARITY, {"format": FORMAT, **about, **row})
        write_json(folder / ROWS, {"format": FORMAT, "rows": seen})
        manifest = _manifest(work, best, subject, folder)
        write_json(folder / MANIFEST, dump(manifest))
    return {
        "written": settings.target.path,
        "candidates": [_shown(row) for row in seen],
        "kept": _whole_name(row),
        "invariant": "yes" if manifest.identity else "no",
    }


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
    sort = sorted(within, key=lambda each: each[1][figure], reverse=more)
    final = [place for place, row in sort if _near(row[figure], sort[0][1][figure])][:FINALISTS]
    if len(final) > 1:
        made = [trying.built(work, asked[place], scratch_of(scratch, place)) for place in final]
        for place, paces in zip(final, trying.raced(work, made), strict=True):
            rows[place] |= paces
            logger.info("once more, in turns: %s", _told(rows[place]))
    chosen = (max if more else min)(final, key=lambda place: rows[place][figure])
    return rows, (chosen, rows[chosen])


def _near(figure: float, best: float) -> bool:
    """Return whether a figure is so near to the best that the machine's moods may decide."""
    return NEAR < figure / best < 1 / NEAR


def _manifest(work: trying.Work, best: trying.Built, subject: Subject, folder: Path) -> Manifest:
    """Return what an artifact says of itself, with what was shown of its batches."""
    settings, described, candidate = work.settings, work.described, best.candidate
    rungs, proof = best.rungs, None
    if settings.proof.invariant:
        shown = batch_invariance.shown(best.runner, rungs, subject.made)
        if shown is not None:
            rungs, proof = shown.rungs, Identity(chip=_chip(best), texts=shown.texts)
    backend, level = candidate.backend, settings.candidates.portable
    target = settings.target
    origin = target.run or target.model or target.module or ""
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
        origin=Origin(path=origin, step=str(settings.target.step), sha256=subject.sha256),
        files=artifacts.stored(folder),
    )


def scratch_of(scratch: str, place: int) -> Path:
    """Return where a candidate's payload is made."""
    return Path(scratch) / str(place)


def _chip(best: trying.Built) -> str:
    return best.site.accelerator.model()


def _shown(row: Row) -> Row:
    """Return what of a candidate's row fits a terminal; all of it is in the artifact."""
    if "failed" in row:
        return {"name": _name(row), "threads": row["threads"], "failed": row["failed"]}
    kept = ("threads", "texts_per_second", "one_text_ms", "cosine_least", "same_class", "loss")
    shown = {key: row[key] for key in kept if key in row}
    return {"name": _name(row), **shown, "texts_per_second": round(row["texts_per_second"], 1)}


def _name(row: Row) -> str:
    """Return what a candidate is computed by and in."""
    integers = "" if row["quantized"] == "no" else f" {row['quantized']}"
    return f"{row['backend']} {row['precision']}{integers}"


def _whole_name(row: Row) -> str:
    return f"{_name(row)} {row['threads']} threads"


def _told(row: Row) -> str:
    if "failed" in row:
        return f"{_whole_name(row)}: fails: {row['failed']}"
    return f"{_whole_name(row)}: {row['texts_per_second']:.0f} texts/s, loss {row['loss']:.2g}"
