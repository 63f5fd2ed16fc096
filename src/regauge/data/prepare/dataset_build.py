"""Builds one layout's dataset: encodes the records, writes shards and manifest.

The earlier phases' results are shared with other layouts of the same corpus.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from regauge.data import dataset
from regauge.data.classes import LabelClasses, LabelCounts, find_classes
from regauge.data.columns import VALUE_TYPES
from regauge.data.prepare import encode, read_records, write_shards
from regauge.data.prepare.phase_progress import PhaseProgress
from regauge.data.sources import UNDECODABLE
from regauge.system.errors import DataError
from regauge.system.files import open_in_place
from regauge.system.log import logger
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.data.columns import ColumnStats
    from regauge.data.layouts import Layout
    from regauge.data.prepare.process_pool import ProcessPool
    from regauge.data.prepare.workdir import BuildDir
    from regauge.data.tokenizer import LoadedTokenizer


@dataclass(frozen=True)
class SharedPhases:
    """Results of the phases shared by all layouts."""

    settings: dict[str, Any]
    """Run file tables, for the manifest."""
    pieces: list[read_records.NumberedPiece]
    """All pieces, in order."""
    read: list[read_records.Counts]
    """Phase 1 counts, by piece."""
    tokenizer: Path
    """Tokenizer folder."""
    loaded_tokenizer: LoadedTokenizer
    warnings: dict[str, int]
    """Split warning -> records."""


def sum_counts(counts: list[read_records.Counts], *kinds: str) -> dict[str, int]:
    """Return reason -> count, summed over pieces and the given kinds."""
    total: Counter[str] = Counter()
    for piece_counts in counts:
        for kind in kinds:
            total.update(piece_counts.get(kind, {}))
    return dict(sorted(total.items()))


def format_counts(counts: list[read_records.Counts], *kinds: str) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sum_counts(counts, *kinds).items())


def suggest_correction(counts: list[read_records.Counts], default: str) -> str:
    """Return the remedy for the rejection reasons, or `default` for others."""
    reasons = sum_counts(counts, "rejected")
    if UNDECODABLE in reasons:
        return "convert the files to UTF-8"
    if any(reason.startswith("no integer field") for reason in reasons):
        return f"list a field of classes in rows.labels, or {default}"
    return default


@dataclass(frozen=True)
class DatasetBuild:
    """One layout's unfinished dataset; an unnamed layout is the only one."""

    name: str
    layout: Layout
    build_dir: BuildDir

    @property
    def folder(self) -> Path:
        """Build folder."""
        return self.build_dir.folder / self.name

    @property
    def encoded_folder(self) -> Path:
        return self.build_dir.scratch / "encode" / self.name

    def build(self, shared: SharedPhases, pool: ProcessPool) -> dataset.DatasetManifest:
        """Encode the records, write the shards, and return the manifest."""
        encode_piece = partial(
            encode.encode_piece, self.layout, self.encoded_folder, self.build_dir.scratch
        )
        phase = self._format_phase("encode")
        encoded = read_records.process_pieces(
            pool, self.encoded_folder, shared.pieces, encode_piece, phase
        )
        self.gather_rejected(len(shared.pieces))
        counts = [*shared.read, *encoded]
        self._check_rejected(shared, encoded)
        self.layout.set_classes(_find_classes(self.layout, shared, encoded))
        self._log_counts(counts)
        shutil.copytree(
            shared.tokenizer, self.folder / dataset.TOKENIZER_FOLDER, dirs_exist_ok=True
        )
        self.layout.write_tokenizer_files(self.folder / dataset.TOKENIZER_FOLDER)
        return self._write_dataset(shared, counts)

    def gather_rejected(self, num_pieces: int) -> Path:
        """Write the rejections from all pieces so far to one file, in source order."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / dataset.REJECTED
        with open(path, "wb", opener=open_in_place) as file:
            for index in range(num_pieces):
                for folder in (self.build_dir.scratch / "read", self.encoded_folder):
                    piece_file = folder / f"{index:06d}.rejected.jsonl"
                    if piece_file.exists():
                        file.write(piece_file.read_bytes())
        return path

    def _check_rejected(self, shared: SharedPhases, encoded: list[read_records.Counts]) -> None:
        """Raise DataError if most records in a source are rejected.

        Each of several layouts may use another source's records: then only records rejected by all
        layouts count.
        """
        for is_validation in (False, True):
            selected = [item.is_validation == is_validation for item in shared.pieces]
            read = list(compress(shared.read, selected))
            counts = [*read, *compress(encoded, selected)]
            at_read = sum(sum_counts(read, "rejected").values())
            num_records = at_read + sum(piece_counts["records"] for piece_counts in read)
            num_rejected = at_read if self.name else sum(sum_counts(counts, "rejected").values())
            if num_rejected > num_records / 2:
                source = "validation.source" if is_validation else "source"
                reasons = format_counts(counts, "rejected")
                records = "validation records" if is_validation else "records"
                problem = f"most {records} are rejected: {num_rejected} of {num_records}"
                path = self.folder / dataset.REJECTED
                remedy = suggest_correction(counts, f"correct rows or {source}")
                raise DataError(f"{problem} ({reasons})", f"{remedy}; see the records in {path}")

    def _write_dataset(
        self, shared: SharedPhases, counts: list[read_records.Counts]
    ) -> dataset.DatasetManifest:
        splits: dict[str, dataset.SplitInfo] = {}
        stats: dict[str, ColumnStats] = {}
        pad_id = shared.loaded_tokenizer.info.pad_token_id
        num_bytes = sum(item.piece.bytes for item in shared.pieces)
        for split in write_shards.SPLITS:
            with PhaseProgress(self._format_phase(f"write {split}"), num_bytes) as progress:
                rows = write_shards.build_rows(
                    self.layout, pad_id, split, self._read_encoded(shared, progress)
                )
                texts = write_shards.write_texts(
                    self.layout, split, self.folder, self._read_encoded(shared)
                )
                splits[split], stats[split] = write_shards.write_split(
                    self.layout, split, self.folder, rows, texts
                )
        self._check_rows(splits, shared, counts)
        left_out = dict(self.layout.left_out)
        for reason, count in left_out.items():
            records, folder = format_count(count, "record"), self.build_dir.final / self.name
            logger.info(f"{folder}: {records} left out ({reason})")
        return dataset.DatasetManifest(
            layout=self.layout.kind,
            columns=self.layout.describe_columns(stats),
            splits=splits,
            tokenizer=shared.loaded_tokenizer.info,
            special_tokens="read",
            skipped=dict(sorted((sum_counts(counts, "skipped", "rejected") | left_out).items())),
            truncated=sum_counts(counts, "truncated"),
            warnings=sum_counts(counts, "warnings") | shared.warnings,
            settings={**shared.settings, "rows": self.layout.to_document()},
            files=dataset.hash_other_files(self.folder),
        )

    def _check_rows(
        self,
        splits: dict[str, dataset.SplitInfo],
        shared: SharedPhases,
        counts: list[read_records.Counts],
    ) -> None:
        """Raise DataError without training rows, or if a validation source gives no rows."""
        reasons = format_counts(counts, "skipped", "rejected")
        see = f"see the records in {self.folder / dataset.REJECTED}"
        folder = self.build_dir.final / self.name
        is_for_evaluation = shared.settings["split"]["heldout_fraction"] == 1
        split, kind = ("heldout", "held-out") if is_for_evaluation else ("train", "training")
        if not splits[split].rows:
            problem = f"{folder} has no {kind} rows ({reasons})"
            raise DataError(problem, f"correct rows or source; {see}")
        has_validation = any(item.is_validation for item in shared.pieces)
        if has_validation and not splits["heldout"].rows and not self.name:
            problem = f"{folder} has no validation rows ({reasons})"
            raise DataError(problem, f"correct rows or validation.source; {see}")

    def _read_encoded(
        self, shared: SharedPhases, progress: PhaseProgress | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the encoded batches in order; `progress` counts the bytes of finished pieces."""
        for numbered_piece in shared.pieces:
            for batch in read_records.read_batches(self.encoded_folder, numbered_piece.piece_index):
                yield _number_labels(batch, self.layout.classes)
            if progress:
                progress.advance(numbered_piece.piece.bytes)

    def _format_phase(self, phase: str) -> str:
        return f"{phase} {self.name}".rstrip()

    def _log_counts(self, counts: list[read_records.Counts]) -> None:
        folder = self.build_dir.final / self.name
        for name, count in sum_counts(counts, "truncated").items():
            logger.info(
                f"{folder}: {format_count(count, 'text')} of '{name}' truncated at their limit"
            )
        for warning, count in sum_counts(counts, "warnings").items():
            logger.warning(f"{folder}: in {format_count(count, 'record')}, {warning}")


def _find_classes(
    layout: Layout, shared: SharedPhases, encoded: list[read_records.Counts]
) -> dict[str, LabelClasses]:
    classes: dict[str, LabelClasses] = {}
    for field, declared in layout.declared_classes().items():
        total = LabelCounts(Counter(), Counter())
        for counts in encoded:
            labels = counts["labels"][field]
            total.train.update(labels["train"])
            total.heldout.update(labels["heldout"])
            total = total._replace(num_lists=total.num_lists + labels["lists"])
        orders = [counts.get("class_names", {}).get(field) for counts in shared.read]
        source_names = tuple(orders[0] or ()) if orders.count(orders[0]) == len(orders) else ()
        spelling = layout.settings.label_spelling
        classes[field] = find_classes(field, total, declared, source_names, spelling)
    return classes


def _number_labels(batch: pa.RecordBatch, classes: dict[str, LabelClasses]) -> pa.RecordBatch:
    fields, columns = list(batch.schema), list(batch.columns)
    for index, field in enumerate(fields):
        if field.name in classes and field.type == VALUE_TYPES["label"]:
            columns[index] = classes[field.name].number(columns[index])
            fields[index] = pa.field(field.name, columns[index].type)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
