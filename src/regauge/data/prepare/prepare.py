"""Prepares datasets: read, split, train the tokenizer; then per layout: encode, write shards.

All row layouts share the first three phases; an unnamed layout is the only one. The work on each
piece is committed by a rename, so a stopped job can resume at any moment. A dataset's bytes depend
on the inputs alone, not on the processes.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.data import tokenizer
from regauge.data.dataset import REJECTED
from regauge.data.layouts import build_layout
from regauge.data.prepare import process_pool, read_records, split, workdir
from regauge.data.prepare.dataset_build import (
    DatasetBuild,
    SharedPhases,
    format_counts,
    suggest_correction,
    sum_counts,
)
from regauge.data.prepare.split import SplitRules
from regauge.data.settings import unwrap_single
from regauge.system import hub
from regauge.system.choices import did_you_mean
from regauge.system.errors import (
    DataError,
    PreflightError,
    RegaugeError,
    SettingsError,
    TransientError,
)
from regauge.system.log import logger
from regauge.system.units import MEGA

if TYPE_CHECKING:
    from regauge.data.layouts import Layout
    from regauge.data.prepare.settings import Validation
    from regauge.data.settings import Filter, RowLayout, SplitSettings, TokenizerSettings
    from regauge.data.sources import Piece, Source

SOURCE_KEYS = ("source", "validation.source")
"""Keys for the sources of training and validation records."""
DISK_FOR_RECORDS = 2
"""Disk space per byte of input text for fields, hashes and signatures."""
DISK_FOR_ROWS = 3
"""Peak disk space per byte of input text for one layout's token ids and shards."""


@dataclass(frozen=True)
class PrepareJob:
    """Inputs and output folder for `prepare`; `processes` does not affect the bytes."""

    folder: Path
    """Folder for the dataset, or for all datasets if layouts have names."""
    source: Source
    tokenizer: TokenizerSettings
    layouts: dict[str, RowLayout]
    """Name -> row layout; UNNAMED for a single one."""
    split: SplitSettings
    filter: Filter = field(default_factory=dict)
    validation: Validation | None = None
    processes: int = 1
    overwrite: bool = False
    """Whether to replace a dataset in the folder, when the new one is complete."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of training records and, if any, validation records."""
        return (self.source, *([self.validation.source] if self.validation else []))

    @property
    def split_rules(self) -> SplitRules:
        """Everything with an effect on a record's split."""
        return SplitRules(
            self.split,
            drop_duplicates=tuple(source.duplicates == "drop" for source in self.sources),
            validation=self.validation.near_duplicates if self.validation else None,
            division_remedy=self.source.division_remedy(),
        )

    def build_layouts(self) -> dict[str, Layout]:
        return {name: build_layout(rows) for name, rows in self.layouts.items()}

    def resolve_tokenizer(self) -> TokenizerSettings:
        """Return the tokenizer settings with a local folder as path."""
        if self.tokenizer.path is None:
            return self.tokenizer
        folder = str(hub.resolve_tokenizer(self.tokenizer.path))
        return self.tokenizer.model_copy(update={"path": folder})

    def collect_inputs(self) -> workdir.BuildInputs:
        """Return everything with an effect on the bytes; raises DataError for an empty source."""
        tables: dict[str, Any] = {
            "source": config.dump(self.source),
            "tokenizer": config.dump(self.tokenizer),
            "rows": unwrap_single(
                {name: layout.to_document() for name, layout in self.build_layouts().items()}
            ),
            "split": config.dump(self.split),
        }
        limits = {
            name: limit.model_dump(exclude_defaults=True) for name, limit in self.filter.items()
        }
        if any(limits.values()):
            tables["filter"] = limits
        if self.tokenizer.path:
            folder = Path(str(self.resolve_tokenizer().path))
            tables["tokenizer"]["sha256"] = tokenizer.hash_tokenizer(folder)
        validation: tuple[Piece, ...] = ()
        if self.validation is not None:
            tables["validation"] = config.dump(self.validation)
            validation = _list_validation_pieces(self.validation.source)
        pieces = self.source.list_pieces()
        return workdir.BuildInputs(
            tables, (*pieces, *validation), tuple(self.layouts), len(validation)
        )


def prepare_datasets(job: PrepareJob) -> workdir.Manifests:
    """Prepare a job's datasets unless they exist; return name -> manifest."""
    inputs = job.collect_inputs()
    check_job(job)
    if job.overwrite:
        workdir.check_replaceable(job.folder)
    elif manifests := workdir.find_finished(job.folder, inputs):
        logger.info(f"{job.folder} is already prepared; nothing to do")
        return manifests
    check_disk(job, inputs.pieces)
    try:
        with (
            workdir.BuildDir(job.folder, inputs, overwrite=job.overwrite) as build_dir,
            process_pool.ProcessPool(job.processes) as pool,
        ):
            manifests = build_dir.read_manifests() or _run_phases(job, inputs, build_dir, pool)
            build_dir.commit(manifests)
        for name in manifests:
            _log_rejected(job.folder / name / REJECTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "free disk space and run again; it resumes"
        raise TransientError(f"no space left for {job.folder}", remedy) from None
    return manifests


def check_job(job: PrepareJob) -> None:
    """Raise SettingsError for invalid settings that can be detected before reading."""
    settings = job.resolve_tokenizer()
    for layout in job.build_layouts().values():
        layout.check_inputs(settings)
    for name, source in zip(SOURCE_KEYS, job.sources, strict=False):
        if field_names := source.field_names():
            check_fields(job, field_names, name)


def check_fields(job: PrepareJob, field_names: tuple[str, ...], source_key: str) -> None:
    """Raise SettingsError if a layout, a filter or the split uses an unknown field."""
    try:
        _check_fields(job, field_names)
    except SettingsError as error:
        raise (error if source_key == "source" else error.add_location(source_key)) from None


def _check_fields(job: PrepareJob, field_names: tuple[str, ...]) -> None:
    for layout in job.build_layouts().values():
        layout.check_fields(field_names)
    group_fields = (job.split.group_by,) if job.split.group_by else ()
    for name in (*job.filter, *group_fields):
        if name not in field_names:
            raise SettingsError(
                f"the source has no field '{name}' with a value", did_you_mean(name, field_names)
            )


def check_disk(job: PrepareJob, pieces: tuple[Piece, ...]) -> None:
    """Raise PreflightError if the disk is too small for the estimated dataset size."""
    folder = job.folder
    parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    disk_per_byte = DISK_FOR_RECORDS + DISK_FOR_ROWS * len(job.layouts)
    needed_bytes = disk_per_byte * sum(piece.text_bytes for piece in pieces)
    partial_folder = folder.with_name(f"{folder.name}.partial")
    present_bytes = sum(path.stat().st_size for path in partial_folder.rglob("*") if path.is_file())
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes - present_bytes:
        raise PreflightError(
            f"{parent} has {free_bytes / MEGA:.0f} MB free; about {needed_bytes / MEGA:.0f} MB"
            " are needed",
            "free disk space, or choose another data.path",
        )


def _run_phases(
    job: PrepareJob,
    inputs: workdir.BuildInputs,
    build_dir: workdir.BuildDir,
    pool: process_pool.ProcessPool,
) -> workdir.Manifests:
    if build_dir.is_resumed:
        logger.info(f"resuming in {build_dir.folder}")
    builds = [DatasetBuild(name, layout, build_dir) for name, layout in job.build_layouts().items()]
    items = [
        read_records.NumberedPiece(index, piece, is_validation=index >= inputs.num_training)
        for index, piece in enumerate(inputs.pieces)
    ]
    records_folder, rules = build_dir.scratch / "read", job.split_rules
    row_fields = read_records.RowFields(
        tuple(build.layout for build in builds), rules.needs_signatures
    )
    record_filter = read_records.RecordFilter(job.filter, job.split.group_by)
    read_piece = partial(
        read_records.read_piece, job.sources, record_filter, row_fields, records_folder
    )
    counts = read_records.process_pieces(pool, records_folder, items, read_piece, "read")
    _check_records(job, items, counts, builds)
    decisions, warnings = split.decide_splits(build_dir.scratch, items, counts, rules)
    settings = job.resolve_tokenizer()
    folder = split.build_tokenizer(build_dir.scratch, counts, settings, decisions, row_fields)
    loaded_tokenizer = tokenizer.LoadedTokenizer(folder)
    if loaded_tokenizer.omits_unknown_characters:
        warning = "the tokenizer %s has no unknown token: it leaves out unknown characters"
        logger.warning(warning, job.tokenizer.path)
    for build in builds:
        build.layout.check_tokenizer(loaded_tokenizer)
    first_numbers = accumulate((piece_counts["records"] for piece_counts in counts), initial=0)
    numbered = [
        item._replace(first_record=first, class_names=piece_counts.get("class_names"))
        for item, first, piece_counts in zip(items, first_numbers, counts, strict=False)
    ]
    shared = SharedPhases(inputs.settings, numbered, counts, folder, loaded_tokenizer, warnings)
    return {build.name: build.build(shared, pool) for build in builds}


def _check_records(
    job: PrepareJob,
    items: list[read_records.NumberedPiece],
    counts: list[read_records.Counts],
    builds: list[DatasetBuild],
) -> None:
    """Raise an error if a source cannot give rows: it is without records, or they lack fields."""
    for number, key in enumerate(SOURCE_KEYS[: len(job.sources)]):
        pairs = zip(items, counts, strict=True)
        selected = [piece_counts for item, piece_counts in pairs if item.is_validation == number]
        if names := {name for piece_counts in selected for name in piece_counts["field_names"]}:
            check_fields(job, tuple(names), key)
        if sum(piece_counts["records"] for piece_counts in selected):
            continue
        rejected = [build.gather_rejected(len(counts)) for build in builds]
        if sum_counts(selected, "skipped"):
            reasons = format_counts(selected, "skipped", "rejected")
            raise DataError(f"no record is left ({reasons})", f"correct filter or {key}")
        if reasons := format_counts(selected, "rejected"):
            remedy = suggest_correction(selected, f"correct {key}")
            problem = f"all records are rejected ({reasons})"
            raise DataError(problem, f"{remedy}; see the records in {rejected[0]}")
        noun = "the validation source" if number else "the source"
        raise DataError(f"{noun} has no records", f"correct {key} in the run file")


def _log_rejected(path: Path) -> None:
    with path.open(encoding="utf-8") as file:
        reasons = Counter(json.loads(line)["reason"] for line in file)
    if reasons:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        logger.warning(f"rejected records: {reasons.total()} ({counts}), see {path}")


def _list_validation_pieces(source: Source) -> tuple[Piece, ...]:
    """Return the validation source's pieces; their names differ from the source's."""
    try:
        pieces = source.list_pieces()
    except RegaugeError as error:
        remedy = error.remedy.replace("source.", f"{SOURCE_KEYS[1]}.")
        raise type(error)(f"{SOURCE_KEYS[1]}: {error.problem}", remedy) from None
    return tuple(piece._replace(name=f"{SOURCE_KEYS[1]}: {piece.name}") for piece in pieces)
