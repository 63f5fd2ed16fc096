"""The job that turns a source into a dataset: read, split, tokenizer, encode, write.

Each piece's work is committed by a rename, so the job can be killed at any moment and goes on
where it was; the bytes of the dataset depend on the inputs alone, not on the processes.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import config
from regauge.data import encoding, parallel, reading, shards, splitting, tokenizer, work, writing
from regauge.data.progress import MEGA, Phase
from regauge.errors import DataError, PreflightError, SettingsError, TransientError
from regauge.log import logger
from regauge.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.data import settings
    from regauge.data.sources import Piece, Source

DISK_PER_TEXT = 5
"""Bytes on the disk per byte of text at the worst moment: records, token ids and shards."""
REJECTED = "rejected.jsonl"


@dataclass(frozen=True)
class Job:
    """What to make and where; `processes` has no part in the bytes."""

    folder: Path
    source: Source
    tokenizer: settings.Tokenizer
    rows: settings.RowLayout
    split: settings.Split
    processes: int = 1

    def inputs(self) -> work.Inputs:
        """Return everything that decides the bytes; raises DataError for an empty source."""
        parts = ("source", "tokenizer", "rows", "split")
        tables = {part: config.dump(getattr(self, part)) for part in parts}
        if self.tokenizer.path:
            tables["tokenizer"]["sha256"] = tokenizer.fingerprint(Path(self.tokenizer.path))
        return work.Inputs(tables, self.source.pieces())


@dataclass(frozen=True)
class Outcome:
    """What the phases before the writing found."""

    tokenizer: shards.TokenizerFacts
    counts: list[reading.Counts]

    def total(self, *kinds: str) -> dict[str, int]:
        """Return the counts of all pieces under these names, added up by reason."""
        found: Counter[str] = Counter()
        for counts in self.counts:
            for kind in kinds:
                found.update(counts.get(kind, {}))
        return dict(sorted(found.items()))

    @property
    def skipped(self) -> dict[str, int]:
        """Records that became no row, by reason."""
        return self.total("skipped", "rejected")


def prepare(job: Job) -> shards.Manifest:
    """Make the dataset, or find that it is there already, and return its manifest."""
    inputs = job.inputs()
    check_fields(job.rows, job.source.fields())
    if found := work.finished(job.folder, inputs):
        logger.info(f"{job.folder} is this dataset already: nothing to do")
        return found
    check_disk(job.folder, inputs.pieces)
    try:
        with work.Work(job.folder, inputs) as place, parallel.Pool(job.processes) as pool:
            manifest = place.manifest() or _make(job, inputs, place, pool)
            place.commit(manifest)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "free some and run again: it continues where it was"
        raise TransientError(f"no space left for {job.folder}", remedy) from None
    return manifest


def check_fields(layout: settings.RowLayout, known: tuple[str, ...]) -> None:
    """Raise SettingsError for a field of the layout that the source does not have."""
    for name in (*layout.texts(), *layout.numbers):
        if known and name not in known:
            raise SettingsError(f"the source has no field '{name}'", did_you_mean(name, known))


def check_disk(folder: Path, pieces: tuple[Piece, ...]) -> None:
    """Raise PreflightError where the disk is too small for what the pieces may become."""
    place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    wanted = DISK_PER_TEXT * sum(piece.text_bytes for piece in pieces)
    partial_folder = folder.with_name(f"{folder.name}.partial")
    present = sum(path.stat().st_size for path in partial_folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(place).free
    if free < wanted - present:
        raise PreflightError(
            f"{place} has {free / MEGA:.0f} MB free and about {wanted / MEGA:.0f} MB are needed",
            "free some, or choose another data.path",
        )


def _make(job: Job, inputs: work.Inputs, place: work.Work, pool: parallel.Pool) -> shards.Manifest:
    if place.started:
        logger.info(f"going on with {place.folder}")
    items = [reading.Numbered(number, piece) for number, piece in enumerate(inputs.pieces)]
    read_piece = partial(reading.read_piece, job.source, place.work / "read")
    read = _over_pieces(pool, place.work / "read", items, read_piece)
    _gather_rejected(place, len(items))
    _check_read(job, place, read)
    drop = job.source.duplicates == "drop"
    decisions = splitting.decide(place.work, len(items), job.split, drop=drop)
    folder = splitting.make_tokenizer(place.work, len(items), job.tokenizer, decisions)
    facts = _facts(job.rows, folder)
    firsts = accumulate((counts["records"] for counts in read), initial=0)
    numbered = [item._replace(first=first) for item, first in zip(items, firsts, strict=False)]
    encode = partial(encoding.encode_piece, job.rows, place.work, folder)
    encoded = _over_pieces(pool, place.work / "encode", numbered, encode)
    _gather_rejected(place, len(items))
    shutil.copytree(folder, place.folder / "tokenizer", dirs_exist_ok=True)
    outcome = Outcome(facts, [*read, *encoded])
    _report(job.folder, outcome)
    return _write(job, inputs, place, outcome)


def _over_pieces(
    pool: parallel.Pool,
    folder: Path,
    items: list[reading.Numbered],
    function: Callable[[reading.Numbered], tuple[int, reading.Counts]],
) -> list[reading.Counts]:
    """Apply a function to the pieces that are not yet done, and return the counts of all."""
    done = {item.number: reading.committed(folder, item.number) for item in items}
    todo = [item for item in items if done[item.number] is None]
    total = sum(item.piece.bytes for item in items)
    with Phase(folder.name, total, total - sum(item.piece.bytes for item in todo)) as progress:
        for number, counts in pool.each(function, todo):
            done[number] = counts
            progress.advance(items[number].piece.bytes)
    return [done[item.number] or {} for item in items]


def _check_read(job: Job, place: work.Work, read: list[reading.Counts]) -> None:
    """Raise where no row can come of what was read: nothing there, or not the fields."""
    if not sum(counts["records"] for counts in read):
        rejected = sum(sum(counts["rejected"].values()) for counts in read)
        if rejected:
            where = place.folder / REJECTED
            raise DataError(f"all {rejected} records are rejected", f"see why in {where}")
        raise DataError("the source holds no record", "correct source in the run file")
    check_fields(job.rows, tuple({name for counts in read for name in counts["names"]}))


def _facts(layout: settings.RowLayout, folder: Path) -> shards.TokenizerFacts:
    encoder = tokenizer.Encoder(folder)
    for name, limit in layout.limits().items():
        if limit <= encoder.overhead:
            raise SettingsError(
                f"'{name}' has {limit} tokens and the tokenizer's special ones take them all",
                "raise its limit",
            )
    return encoder.facts


def _gather_rejected(place: work.Work, count: int) -> None:
    """Write the rejections of all pieces that are there as one file, in the source's order."""
    with (place.folder / REJECTED).open("wb") as file:
        for number in range(count):
            for phase in ("read", "encode"):
                path = place.work / phase / f"{number:06d}.rejected.jsonl"
                if path.exists():
                    file.write(path.read_bytes())


def _write(job: Job, inputs: work.Inputs, place: work.Work, outcome: Outcome) -> shards.Manifest:
    pieces = inputs.pieces
    splits: dict[str, shards.Split] = {}
    lengths: dict[str, writing.Lengths] = {}
    for name in writing.SPLITS:
        with Phase(f"write {name}", sum(piece.bytes for piece in pieces)) as progress:
            batches = writing.encoded_batches(place.work / "encode", pieces, progress.advance)
            rows = writing.rows_of(job.rows, outcome.tokenizer.pad, name, batches)
            splits[name], lengths[name] = writing.write_split(job.rows, name, place.folder, rows)
    if not splits["train"].rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in outcome.skipped.items())
        raise DataError(f"no record became a row ({reasons})", "correct rows or source")
    return shards.Manifest(
        layout=job.rows.layout,
        fields=writing.fields(job.rows, lengths),
        splits=splits,
        tokenizer=outcome.tokenizer,
        skipped=outcome.skipped,
        truncated=outcome.total("truncated"),
        settings=inputs.settings,
    )


def _report(folder: Path, outcome: Outcome) -> None:
    for name, count in outcome.total("truncated").items():
        logger.info(f"{count} texts of '{name}' were longer than their limit and are cut")
    if rejected := outcome.total("rejected"):
        reasons = ", ".join(f"{reason} {count}" for reason, count in rejected.items())
        total = sum(rejected.values())
        logger.warning(f"{total} records rejected ({reasons}): see {folder / REJECTED}")
