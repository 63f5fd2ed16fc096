"""Builds the dataset of one layout: encodes its records, writes its shards and its manifest.

The results of the earlier phases are shared with other layouts of the same corpus.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from regauge.data import dataset
from regauge.errors import DataError
from regauge.files import open_in_place
from regauge.log import logger
from regauge.preparation import encode, read_records, write_shards
from regauge.preparation.phase_progress import PhaseProgress
from regauge.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from regauge.data.columns import ColumnStats
    from regauge.data.layouts import Layout
    from regauge.data.tokenizer import LoadedTokenizer
    from regauge.preparation.process_pool import ProcessPool
    from regauge.preparation.workdir import BuildDir


@dataclass(frozen=True)
class SharedPhases:
    """The results of the phases that all layouts share."""

    settings: dict[str, Any]
    """Tables of the run file, for the manifest."""
    pieces: list[read_records.NumberedPiece]
    """All pieces, in order."""
    read: list[read_records.Counts]
    """Counts of phase 1, by piece."""
    tokenizer: Path
    """Folder of the tokenizer."""
    loaded_tokenizer: LoadedTokenizer


@dataclass(frozen=True)
class PhaseCounts:
    """The counts of all pieces and phases."""

    counts: list[read_records.Counts]

    def sum_counts(self, *kinds: str) -> dict[str, int]:
        """Return the counts of the given kinds, summed by reason."""
        total: Counter[str] = Counter()
        for counts in self.counts:
            for kind in kinds:
                total.update(counts.get(kind, {}))
        return dict(sorted(total.items()))

    def format_counts(self, *kinds: str) -> str:
        """Return the counts of the given kinds as text."""
        return ", ".join(f"{count} {reason}" for reason, count in self.sum_counts(*kinds).items())


@dataclass(frozen=True)
class DatasetBuild:
    """The unfinished dataset of one layout; a layout without a name is the only one."""

    name: str
    layout: Layout
    build_dir: BuildDir

    @property
    def folder(self) -> Path:
        """The folder in which the dataset is built."""
        return self.build_dir.folder / self.name

    @property
    def encoded_folder(self) -> Path:
        """The folder of the encoded pieces."""
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
        counts = PhaseCounts([*shared.read, *encoded])
        self._check_rejected(shared, counts)
        self._log_counts(counts)
        shutil.copytree(
            shared.tokenizer, self.folder / dataset.TOKENIZER_FOLDER, dirs_exist_ok=True
        )
        self.layout.write_tokenizer_files(self.folder / dataset.TOKENIZER_FOLDER)
        return self._write_dataset(shared, counts)

    def gather_rejected(self, num_pieces: int) -> Path:
        """Write the rejections of all pieces so far to one file, in the order of the source."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / dataset.REJECTED
        with open(path, "wb", opener=open_in_place) as file:
            for index in range(num_pieces):
                for folder in (self.build_dir.scratch / "read", self.encoded_folder):
                    piece_file = folder / f"{index:06d}.rejected.jsonl"
                    if piece_file.exists():
                        file.write(piece_file.read_bytes())
        return path

    def _check_rejected(self, shared: SharedPhases, counts: PhaseCounts) -> None:
        """Raise DataError if most records are rejected.

        Of several layouts, each may use the records of another source: then only records count that
        no layout can use.
        """
        at_read = sum(PhaseCounts(shared.read).sum_counts("rejected").values())
        num_records = at_read + sum(piece_counts["records"] for piece_counts in shared.read)
        num_rejected = at_read if self.name else sum(counts.sum_counts("rejected").values())
        if num_rejected > num_records / 2:
            reasons = counts.format_counts("rejected")
            problem = f"most records are rejected: {num_rejected} of {num_records} ({reasons})"
            path = self.folder / dataset.REJECTED
            raise DataError(problem, f"correct rows or source; see the records in {path}")

    def _write_dataset(self, shared: SharedPhases, counts: PhaseCounts) -> dataset.DatasetManifest:
        splits: dict[str, dataset.SplitInfo] = {}
        stats: dict[str, ColumnStats] = {}
        pad_id = shared.loaded_tokenizer.info.pad_token_id
        for split in write_shards.SPLITS:
            with PhaseProgress(
                self._format_phase(f"write {split}"), _count_bytes(shared)
            ) as progress:
                rows = write_shards.build_rows(
                    self.layout, pad_id, split, self._read_encoded(shared, progress)
                )
                texts = write_shards.write_texts(
                    self.layout, split, self.folder, self._read_encoded(shared)
                )
                splits[split], stats[split] = write_shards.write_split(
                    self.layout, split, self.folder, rows, texts
                )
        if not splits["train"].rows:
            reasons = counts.format_counts("skipped", "rejected")
            problem = f"{self.build_dir.final / self.name} has no training rows ({reasons})"
            raise DataError(problem, "correct rows or source")
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
            skipped=dict(sorted((counts.sum_counts("skipped", "rejected") | left_out).items())),
            truncated=counts.sum_counts("truncated"),
            warnings=counts.sum_counts("warnings"),
            settings={**shared.settings, "rows": self.layout.to_document()},
            files=dataset.hash_other_files(self.folder),
        )

    def _read_encoded(
        self, shared: SharedPhases, progress: PhaseProgress | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the encoded batches in order; `progress` counts the bytes of finished pieces."""
        for numbered_piece in shared.pieces:
            yield from read_records.read_batches(self.encoded_folder, numbered_piece.piece_index)
            if progress:
                progress.advance(numbered_piece.piece.bytes)

    def _format_phase(self, phase: str) -> str:
        return f"{phase} {self.name}".rstrip()

    def _log_counts(self, counts: PhaseCounts) -> None:
        folder = self.build_dir.final / self.name
        rejected_file = folder / dataset.REJECTED
        for name, count in counts.sum_counts("truncated").items():
            logger.info(
                f"{folder}: {format_count(count, 'text')} of '{name}' truncated at their limit"
            )
        for warning, count in counts.sum_counts("warnings").items():
            logger.warning(f"{folder}: in {format_count(count, 'record')}, {warning}")
        if num_rejected := sum(counts.sum_counts("rejected").values()):
            reasons = counts.format_counts("rejected")
            logger.warning(f"rejected records: {num_rejected} ({reasons}), see {rejected_file}")


def _count_bytes(shared: SharedPhases) -> int:
    return sum(numbered_piece.piece.bytes for numbered_piece in shared.pieces)
