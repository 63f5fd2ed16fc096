"""`prepare` phase 2: decides each record's split, and builds the tokenizer.

Near-duplicate clusters are made of the texts that the rows read, by any of the layouts. Other
fields, such as an id, decide nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from regauge.data import duplicates, tokenizer
from regauge.data.prepare import read_records
from regauge.data.prepare.encode import (
    DECISIONS,
    DROPPED,
    DUPLICATE,
    HELDOUT,
    LEAKED,
    REPEAT,
    TRAIN,
)
from regauge.data.prepare.phase_progress import PhaseProgress
from regauge.data.values import format_key
from regauge.system.errors import DataError
from regauge.system.files import replace_atomically, write_json
from regauge.system.json_files import read_json
from regauge.system.log import logger
from regauge.system.units import MIB
from regauge.system.wording import format_clause, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from regauge.data.settings import SplitSettings, TokenizerSettings

SPLIT_UNITS = "split.json"
MAX_DEVIATION = 0.25
"""Relative deviation from the requested held-out share that needs no warning."""
LEAK_WARNING = DROPPED[LEAKED]
TEXTS_PER_BATCH = 512
SEPARATE = "set split.similarity = 1 to separate near-duplicates"
OTHER_SEED = "set another split.seed, or add records"
"""Remedies for a held-out share far from the requested one."""
SHARED_TEXTS = "held-out record with the texts of a training record"
"""Warning about a split by groups."""


@dataclass(frozen=True)
class SplitUnits:
    """Units drawn by the split: near-duplicate clusters, or groups."""

    count: int
    largest: int
    """Records in the largest unit."""
    num_leaked: int = 0
    """Training records that nearly duplicate validation records."""
    num_repeated: int = 0
    """Records with the texts of an earlier one."""
    num_shared: int = 0
    """Held-out records with the texts of a training record, in another group."""


@dataclass(frozen=True)
class SplitRules:
    """Everything with an effect on a record's split."""

    settings: SplitSettings
    drop_duplicates: tuple[bool, ...] = (False,)
    """Whether to drop equal records: in the source, and in the validation source."""
    validation: Literal["drop", "keep"] | None = None
    """What to do with training records that nearly duplicate validation records."""
    division_remedy: str = ""
    """Remedy for a source with a single record."""

    @property
    def needs_signatures(self) -> bool:
        """Whether records need MinHash signatures to find near-duplicates."""
        compares_sources = self.validation is not None and self.settings.similarity < 1
        return compares_sources or self.settings.needs_signatures


def decide_splits(
    scratch: Path,
    items: list[read_records.NumberedPiece],
    counts: list[read_records.Counts],
    rules: SplitRules,
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the decision for every record in the pieces, in order, and the counted warnings.

    A decision, [records] uint8, is TRAIN, HELDOUT, or a reason in DROPPED. Raises DataError if all
    training records nearly duplicate validation records.
    """
    path, units_path = scratch / DECISIONS, scratch / SPLIT_UNITS
    pairs = list(zip(items, counts, strict=True))
    num_training = sum(table["records"] for item, table in pairs if not item.is_validation)
    if not (path.exists() and units_path.exists()):
        with (
            PhaseProgress("split", 0),
            replace_atomically(path, durable=False) as temporary,
            temporary.open("wb") as file,
        ):
            decided, units = _compute_decisions(scratch / "read", len(items), num_training, rules)
            write_json(units_path, asdict(units))
            np.save(file, decided)
    decisions: np.ndarray = np.load(path)
    units = SplitUnits(**read_json(units_path, "delete that file"))
    _check_fraction(decisions, units, rules)
    _check_leaked(decisions, units, num_training)
    parts = [f"{format_count(len(decisions), 'record')}, {(decisions == HELDOUT).sum():,} held out"]
    for decision, name in DROPPED.items():
        if num_dropped := int((decisions == decision).sum()):
            parts.append(f"{num_dropped:,} dropped ({name})")
    if units.num_repeated:
        parts.append(f"{units.num_repeated:,} with the texts of an earlier record")
    logger.info(", ".join(parts))
    if units.num_shared:
        num_heldout = format_count(int((decisions == HELDOUT).sum()), "held-out record")
        logger.warning(
            f"{units.num_shared:,} of {num_heldout} have the texts of a training record in another"
            f" group of '{rules.settings.group_by}'"
        )
    num_kept = units.num_leaked if rules.validation == "keep" else 0
    warnings = {LEAK_WARNING: num_kept, SHARED_TEXTS: units.num_shared}
    return decisions, {warning: count for warning, count in warnings.items() if count}


def build_tokenizer(
    scratch: Path,
    counts: list[read_records.Counts],
    settings: TokenizerSettings,
    decisions: np.ndarray,
    row_fields: read_records.RowFields,
) -> Path:
    """Copy the tokenizer, or train it on the training records; return the folder."""
    folder = scratch / "tokenizer"
    if folder.exists():
        return folder
    unfinished = scratch / "tokenizer.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with PhaseProgress("tokenizer", 0):
        if settings.path:
            tokenizer.copy_tokenizer(Path(settings.path), unfinished)
        else:
            text_bytes = max(sum(piece_counts["text_bytes"] for piece_counts in counts), 1)
            fraction = min(1.0, settings.sample_mib * MIB / text_bytes)
            batches = read_records.read_all_batches(scratch / "read", len(counts))
            texts = _sample_texts(batches, decisions, fraction, row_fields)
            tokenizer.train_tokenizer(texts, settings, unfinished)
    unfinished.replace(folder)
    return folder


def _read_column(folder: Path, num_pieces: int, name: str, dtype: np.dtype) -> list[np.ndarray]:
    """Return a fixed-width binary column for all records as views of the mapped files."""
    views = []
    for batch in read_records.read_all_batches(folder, num_pieces):
        column = batch.column(name)
        shape = batch.num_rows, column.type.byte_width // dtype.itemsize
        values = np.frombuffer(column.buffers()[1], dtype=dtype, count=math.prod(shape))
        views.append(values.reshape(shape))
    return views


def _compute_decisions(
    folder: Path, num_pieces: int, num_training: int, rules: SplitRules
) -> tuple[np.ndarray, SplitUnits]:
    """Return the decisions, [records] uint8, and the drawn units."""
    split = rules.settings
    all_hashes = _read_column(folder, num_pieces, read_records.HASH, np.dtype("u1"))
    equal = _link_layouts(all_hashes, duplicates.HASH_BYTES, _find_equal)
    labels = equal
    if rules.needs_signatures:
        signatures = _read_column(folder, num_pieces, read_records.SIGNATURE, np.dtype("<u4"))
        labels = _link_layouts(
            signatures,
            duplicates.HASHES,
            lambda parts: duplicates.find_clusters(
                duplicates.SignatureTable(parts), split.similarity
            ),
        )
    hashes = np.concatenate([part[:, : duplicates.HASH_BYTES] for part in all_hashes])
    num_repeated, num_shared = int(_find_repeats(equal).sum()), 0
    decisions = np.full(len(hashes), TRAIN, dtype=np.uint8)
    if rules.validation is not None:
        is_heldout = np.arange(len(hashes)) >= num_training
        is_leaked = np.isin(labels, labels[is_heldout]) & ~is_heldout
        units = SplitUnits(0, 0, int(is_leaked.sum()))
    elif split.group_by is None:
        is_heldout, units = _hold_out_clusters(labels, hashes, split)
    else:
        is_heldout, units = _hold_out_groups(folder, num_pieces, split)
        num_shared = int(np.isin(equal[is_heldout], equal[~is_heldout]).sum())
    decisions[is_heldout] = HELDOUT
    sources = (slice(0, num_training), slice(num_training, None))
    if split.near_duplicates == "drop":
        for records in sources:
            decisions[records][_find_repeats(labels[records])] = REPEAT
    if rules.validation == "drop":
        decisions[is_leaked] = LEAKED
    if any(rules.drop_duplicates):
        equal = _find_equal(_read_column(folder, num_pieces, read_records.CONTENT, np.dtype("u1")))
    for records, has_drop in zip(sources, rules.drop_duplicates, strict=False):
        if has_drop:
            decisions[records][_find_repeats(equal[records])] = DUPLICATE
    return decisions, replace(units, num_repeated=num_repeated, num_shared=num_shared)


def _link_layouts(
    columns: list[np.ndarray],  # [records of a batch, layouts x width]
    width: int,
    find_labels: Callable[[list[np.ndarray]], np.ndarray],
) -> np.ndarray:  # [records] int64
    """Return the lowest record number in each cluster, which is linked by any of the layouts."""
    num_layouts = columns[0].shape[1] // width
    by_layout = zip(*(np.split(part, num_layouts, axis=1) for part in columns), strict=True)
    labels, *others = [find_labels(list(parts)) for parts in by_layout]
    for other in others:
        labels = duplicates.link(labels, np.arange(len(other)), other)
    return labels


def _find_equal(hashes: list[np.ndarray]) -> np.ndarray:
    return duplicates.find_equal_records(np.concatenate(hashes))


def _find_repeats(labels: np.ndarray) -> np.ndarray:  # [records] bool
    """Return whether an earlier record has the same label."""
    is_repeat = np.ones(len(labels), dtype=bool)
    is_repeat[np.unique(labels, return_index=True)[1]] = False
    return is_repeat


def _check_leaked(decisions: np.ndarray, units: SplitUnits, num_training: int) -> None:
    """Warn about training records that nearly duplicate validation records.

    Raises DataError if they leave no training record.
    """
    if not units.num_leaked:
        return
    is_dropped = bool((decisions == LEAKED).any())
    problem = (
        f"{units.num_leaked} of {num_training} training records are near-duplicates of"
        f" validation records and are {'left out' if is_dropped else 'kept'}"
    )
    if is_dropped and not (decisions == TRAIN).any():
        remedy = (
            "name another validation.source, or set split.similarity = 1 or"
            ' validation.near_duplicates = "keep"'
        )
        raise DataError(problem, remedy)
    logger.warning(problem)


def _hold_out_clusters(
    labels: np.ndarray, hashes: np.ndarray, split: SplitSettings
) -> tuple[np.ndarray, SplitUnits]:
    """Return for every record whether its cluster is held out, and the clusters' sizes."""
    representatives = duplicates.find_representatives(labels, hashes)
    is_heldout = np.zeros(len(hashes), dtype=bool)
    clusters, sizes = np.unique(representatives, return_counts=True)
    for record in clusters.tolist():
        draw = duplicates.draw_uniform(hashes[record].tobytes(), split.seed, "heldout")
        is_heldout[record] = draw < split.heldout_fraction
    result: np.ndarray = is_heldout[representatives]
    return result, SplitUnits(len(clusters), int(sizes.max(initial=0)))


def _hold_out_groups(
    folder: Path, num_pieces: int, split: SplitSettings
) -> tuple[np.ndarray, SplitUnits]:
    """Return for every record whether its group is held out, and the groups' sizes."""
    sizes: Counter[str] = Counter()
    is_heldout: list[bool] = []
    for batch in read_records.read_all_batches(folder, num_pieces):
        for text in batch.column("fields").to_pylist():
            key = format_key(json.loads(text)[split.group_by])
            draw = duplicates.draw_uniform(key.encode(), split.seed, "heldout")
            is_heldout.append(draw < split.heldout_fraction)
            sizes[key] += 1
    units = SplitUnits(len(sizes), max(sizes.values(), default=0))
    return np.array(is_heldout, dtype=bool), units


def _check_fraction(decisions: np.ndarray, units: SplitUnits, rules: SplitRules) -> None:
    """Warn if the held-out share is far from the requested one.

    Raises DataError if no training record is left.
    """
    split, num_records = rules.settings, len(decisions)
    num_heldout, num_train = (int((decisions == kind).sum()) for kind in (HELDOUT, TRAIN))
    requested, share = split.heldout_fraction, num_heldout / max(num_heldout + num_train, 1)
    is_close = abs(share - requested) <= MAX_DEVIATION * requested
    if rules.validation is not None or (is_close and (num_train or requested == 1)):
        return
    records = format_clause(num_records, "record", "are")
    cause, remedy = _explain_share(units, rules, num_records)
    problem = f"{num_heldout:,} of {records} held out, and split.heldout_fraction is"
    if not num_train:
        raise DataError(f"{problem} {requested:g}: {cause}", remedy)
    logger.warning(f"{problem} {requested:g}: {cause}; {remedy}")


def _explain_share(units: SplitUnits, rules: SplitRules, num_records: int) -> tuple[str, str]:
    """Return why the held-out share is far from the requested one, and the remedy."""
    split = rules.settings
    if num_records == 1:
        return "the source has one record", rules.division_remedy
    if units.num_repeated + 1 == num_records:
        cause = "all records are one cluster of near-duplicates with the same texts"
        return cause, "correct rows or source"
    unit = (
        "cluster of near-duplicates" if split.group_by is None else f"group of '{split.group_by}'"
    )
    cause = f"the split draws from only {units.count} units"
    if units.count == 1:
        cause = f"all records are one {unit}"
    elif units.largest > MAX_DEVIATION * split.heldout_fraction * num_records > 1:
        cause = f"the largest {unit} has {format_count(units.largest, 'record')}"
    if split.group_by is not None:
        is_single = units.count == 1
        return cause, "name another field in split.group_by" if is_single else OTHER_SEED
    if split.near_duplicates == "keep" and units.num_repeated > units.largest / 2:
        return cause, 'set split.near_duplicates = "drop" to keep one of several equal texts'
    is_similar = units.largest > 1 and split.needs_signatures
    return cause, SEPARATE if is_similar else OTHER_SEED


def _sample_texts(
    batches: Iterator[pa.RecordBatch],
    decisions: np.ndarray,
    fraction: float,
    row_fields: read_records.RowFields,
) -> Iterator[list[str]]:
    """Yield batches of training texts from a keyed record sample."""
    start, texts = 0, []
    for batch in batches:
        batch_decisions = decisions[start : start + batch.num_rows]
        start += batch.num_rows
        for row in np.flatnonzero(batch_decisions == TRAIN).tolist():
            content_hash = batch.column(read_records.HASH)[row].as_py()
            if duplicates.draw_uniform(content_hash, 0, "tokenizer") < fraction:
                fields = json.loads(batch.column("fields")[row].as_py())
                texts.append(row_fields.join_texts(fields))
        if len(texts) >= TEXTS_PER_BATCH:
            yield texts
            texts = []
    yield texts
