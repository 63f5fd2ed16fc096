"""The job that turns a source into datasets: read, split, tokenizer; for each: encode, write.

The first three are one for all layouts of rows; a layout without a name is the only one. Each
piece's work is committed by a rename, so the job can be killed at any moment and goes on where it
was; the bytes of a dataset depend on the inputs alone, not on the processes.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.choices import did_you_mean
from regauge.data import tokenizer
from regauge.data.layouts import layout_of
from regauge.data.settings import unwrapped
from regauge.errors import DataError, PreflightError, SettingsError, TransientError
from regauge.log import logger
from regauge.preparation import process_pool, read_records, split, workdir
from regauge.preparation.dataset_build import Corpus, Counted, Making
from regauge.units import MEGA

if TYPE_CHECKING:
    from regauge.data import settings
    from regauge.data.layouts import Layout
    from regauge.data.sources import Piece, Source

DISK_FOR_RECORDS = 2
"""Bytes on the disk per byte of text that is read: fields, hashes, signatures."""
DISK_FOR_ROWS = 3
"""The same for each layout at the worst moment: token ids and shards."""


@dataclass(frozen=True)
class Job:
    """What to make of a source and where; `processes` has no part in the bytes."""

    folder: Path
    source: Source
    tokenizer: settings.Tokenizer
    layouts: dict[str, settings.RowLayout]
    split: settings.Split
    filter: settings.Filter = field(default_factory=dict)
    processes: int = 1

    def made(self) -> dict[str, Layout]:
        """Return the layouts by name."""
        return {name: layout_of(rows) for name, rows in self.layouts.items()}

    def inputs(self) -> workdir.Inputs:
        """Return everything that decides the bytes; raises DataError for an empty source."""
        tables: dict[str, Any] = {
            "source": config.dump(self.source),
            "tokenizer": config.dump(self.tokenizer),
            "rows": unwrapped({name: made.document() for name, made in self.made().items()}),
            "split": config.dump(self.split),
        }
        wanted = self.filter.items()
        limits = {name: limit.model_dump(exclude_defaults=True) for name, limit in wanted}
        if any(limits.values()):
            tables["filter"] = limits
        if self.tokenizer.path:
            tables["tokenizer"]["sha256"] = tokenizer.fingerprint(Path(self.tokenizer.path))
        return workdir.Inputs(tables, self.source.pieces(), tuple(self.layouts))


def prepare(job: Job) -> workdir.Manifests:
    """Make the datasets, or find that they are there already; return their manifests by name."""
    inputs = job.inputs()
    check(job)
    if found := workdir.finished(job.folder, inputs):
        logger.info(f"{job.folder} is prepared already: nothing to do")
        return found
    check_disk(job, inputs.pieces)
    try:
        with workdir.Work(job.folder, inputs) as place, process_pool.Pool(job.processes) as pool:
            manifests = place.manifests() or _make(job, inputs, place, pool)
            place.commit(manifests)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "free some and run again: it continues where it was"
        raise TransientError(f"no space left for {job.folder}", remedy) from None
    return manifests


def check(job: Job) -> None:
    """Raise SettingsError for what cannot be made, as far as is known before reading."""
    for layout in job.made().values():
        layout.check_inputs(job.tokenizer)
    if known := job.source.fields():
        check_fields(job, known)


def check_fields(job: Job, known: tuple[str, ...]) -> None:
    """Raise SettingsError for a field of a layout, a filter or the split that no record has."""
    for layout in job.made().values():
        layout.check_fields(known)
    by = (job.split.by,) if job.split.by else ()
    for name in (*job.filter, *by):
        if name not in known:
            raise SettingsError(f"the source has no field '{name}'", did_you_mean(name, known))


def check_disk(job: Job, pieces: tuple[Piece, ...]) -> None:
    """Raise PreflightError where the disk is too small for what the pieces may become."""
    folder = job.folder
    place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    share = DISK_FOR_RECORDS + DISK_FOR_ROWS * len(job.layouts)
    wanted = share * sum(piece.text_bytes for piece in pieces)
    partial_folder = folder.with_name(f"{folder.name}.partial")
    present = sum(path.stat().st_size for path in partial_folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free
    if free < wanted - present:
        raise PreflightError(
            f"{place} has {free / MEGA:.0f} MB free and about {wanted / MEGA:.0f} MB are needed",
            "free some, or choose another data.path",
        )


def _make(
    job: Job, inputs: workdir.Inputs, place: workdir.Work, pool: process_pool.Pool
) -> workdir.Manifests:
    if place.started:
        logger.info(f"going on with {place.folder}")
    makings = [Making(name, layout, place) for name, layout in job.made().items()]
    items = [read_records.Numbered(number, piece) for number, piece in enumerate(inputs.pieces)]
    records, signed = place.work / "read", job.split.compares_words
    read_piece = partial(read_records.read_piece, job.source, job.filter, records, signed=signed)
    read = read_records.over_pieces(pool, records, items, read_piece, "read")
    _check_read(job, read, makings)
    drop = job.source.duplicates == "drop"
    decisions = split.decide(place.work, len(items), job.split, drop=drop)
    folder = split.make_tokenizer(place.work, len(items), job.tokenizer, decisions)
    encoder = tokenizer.Encoder(folder)
    for making in makings:
        making.layout.check_tokenizer(encoder)
    firsts = accumulate((counts["records"] for counts in read), initial=0)
    numbered = [item._replace(first=first) for item, first in zip(items, firsts, strict=False)]
    corpus = Corpus(inputs.settings, numbered, read, folder, encoder)
    return {making.name: making.make(corpus, pool) for making in makings}


def _check_read(job: Job, read: list[read_records.Counts], makings: list[Making]) -> None:
    """Raise where no row can come of what was read: nothing there, or not the fields."""
    if not sum(counts["records"] for counts in read):
        rejected = [making.gather_rejected(len(read)) for making in makings]
        counted = Counted(read)
        if counted.total("skipped"):
            problem = f"no record is left: {counted.told('skipped', 'rejected')}"
            raise DataError(problem, "correct filter or source")
        if count := sum(counted.total("rejected").values()):
            raise DataError(f"all {count} records are rejected", f"see why in {rejected[0]}")
        raise DataError("the source holds no record", "correct source in the run file")
    check_fields(job, tuple({name for counts in read for name in counts["names"]}))
