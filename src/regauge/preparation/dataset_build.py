"""One layout's part of `prepare`: the text encoded, its rows written, and the manifest over them.

What it is made of is shared with other layouts of the same corpus, and read only.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from regauge.data import dataset
from regauge.errors import DataError
from regauge.log import logger
from regauge.preparation import encode, read_records, write_shards
from regauge.preparation.progress import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from regauge.data.columns import Found
    from regauge.data.layouts import Layout
    from regauge.data.tokenizer import Encoder
    from regauge.preparation.process_pool import Pool
    from regauge.preparation.workdir import Work

REJECTED = "rejected.jsonl"


@dataclass(frozen=True)
class Corpus:
    """What the phases that all layouts share have made."""

    settings: dict[str, Any]
    items: list[read_records.Numbered]
    read: list[read_records.Counts]
    tokenizer: Path
    encoder: Encoder


@dataclass(frozen=True)
class Counted:
    """The counts of all pieces and phases."""

    counts: list[read_records.Counts]

    def total(self, *kinds: str) -> dict[str, int]:
        """Return the counts under these names, added up by reason."""
        found: Counter[str] = Counter()
        for counts in self.counts:
            for kind in kinds:
                found.update(counts.get(kind, {}))
        return dict(sorted(found.items()))

    def told(self, *kinds: str) -> str:
        """Return the same in words."""
        return ", ".join(f"{count} {reason}" for reason, count in self.total(*kinds).items())


@dataclass(frozen=True)
class Making:
    """A dataset that is being made; one without a name is the only one of its corpus."""

    name: str
    layout: Layout
    place: Work

    @property
    def folder(self) -> Path:
        """Where the dataset is put together."""
        return self.place.folder / self.name

    @property
    def encoded(self) -> Path:
        """Where its encoded pieces are."""
        return self.place.work / "encode" / self.name

    def make(self, corpus: Corpus, pool: Pool) -> dataset.Manifest:
        """Encode and write the rows, and return the manifest over them."""
        encode_piece = partial(encode.encode_piece, self.layout, self.encoded, self.place.work)
        phase = self._phase("encode")
        encoded = read_records.over_pieces(pool, self.encoded, corpus.items, encode_piece, phase)
        self.gather_rejected(len(corpus.items))
        counted = Counted([*corpus.read, *encoded])
        self._report(counted)
        shutil.copytree(corpus.tokenizer, self.folder / "tokenizer", dirs_exist_ok=True)
        self.layout.finish(self.folder / "tokenizer")
        return self._write(corpus, counted)

    def gather_rejected(self, count: int) -> Path:
        """Write the rejections of the pieces so far as one file, in the source's order."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / REJECTED
        with path.open("wb") as file:
            for number in range(count):
                for folder in (self.place.work / "read", self.encoded):
                    part = folder / f"{number:06d}.rejected.jsonl"
                    if part.exists():
                        file.write(part.read_bytes())
        return path

    def _write(self, corpus: Corpus, counted: Counted) -> dataset.Manifest:
        splits: dict[str, dataset.Split] = {}
        found: dict[str, Found] = {}
        pad = corpus.encoder.facts.pad
        for split in write_shards.SPLITS:
            with Phase(self._phase(f"write {split}"), _bytes(corpus)) as progress:
                rows = write_shards.rows_of(
                    self.layout, pad, split, self._batches(corpus, progress)
                )
                texts = write_shards.write_texts(
                    self.layout, split, self.folder, self._batches(corpus)
                )
                splits[split], found[split] = write_shards.write_split(
                    self.layout, split, self.folder, rows, texts
                )
        if not splits["train"].rows:
            reasons = counted.told("skipped", "rejected")
            problem = f"no record became a row of {self.place.final / self.name} ({reasons})"
            raise DataError(problem, "correct rows or source")
        left_out = dict(self.layout.left_out)
        for reason, count in left_out.items():
            logger.info(f"{self.place.final / self.name}: {count} records left out, {reason}")
        return dataset.Manifest(
            layout=self.layout.kind,
            fields=self.layout.fields(found),
            splits=splits,
            tokenizer=corpus.encoder.facts,
            skipped=dict(sorted((counted.total("skipped", "rejected") | left_out).items())),
            truncated=counted.total("truncated"),
            settings={**corpus.settings, "rows": self.layout.document()},
        )

    def _batches(self, corpus: Corpus, progress: Phase | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the encoded batches in order; `progress` counts the bytes of each piece done."""
        for item in corpus.items:
            yield from read_records.records(self.encoded, item.number)
            if progress:
                progress.advance(item.piece.bytes)

    def _phase(self, what: str) -> str:
        return f"{what} {self.name}".rstrip()

    def _report(self, counted: Counted) -> None:
        final = self.place.final / self.name
        for name, count in counted.total("truncated").items():
            logger.info(f"{final}: {count} texts of '{name}' are longer than their limit and cut")
        if rejected := sum(counted.total("rejected").values()):
            reasons = counted.told("rejected")
            logger.warning(f"rejected records: {rejected} ({reasons}), see {final / REJECTED}")


def _bytes(corpus: Corpus) -> int:
    return sum(item.piece.bytes for item in corpus.items)
