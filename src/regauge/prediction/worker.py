"""What computes the shards of a job is told this, wherever it is; and what it is then."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge import choices, config
from regauge.artifacts import artifact as artifacts
from regauge.errors import SettingsError
from regauge.prediction.job import Job, Place
from regauge.prediction.settings import Predicting

if TYPE_CHECKING:
    from regauge.artifacts.engine import Engine
    from regauge.artifacts.preprocess import Reader
    from regauge.data.sources import Piece
    from regauge.prediction.shard import Shelf, Taken, Writer
    from regauge.prediction.shard_queue import Shard

ASIDE = "aside"


@dataclass(frozen=True)
class Order:
    """A job, as it is told to another process."""

    settings: dict[str, Any]
    """The tables of the run file, whole."""
    pieces: tuple[Piece, ...]
    texts: tuple[str, ...]
    """Fields with the texts of a record."""
    kept: dict[str, str]
    """Fields that stand beside an answer, with their kinds."""
    place: Place

    @property
    def job(self) -> Job:
        """The job itself; raises SettingsError for code of a user that is not there."""
        choices.allow(self.settings)
        settings = config.build(Predicting, self.settings)
        return Job(settings, self.pieces, self.place)


@dataclass(frozen=True)
class Worker:
    """A loaded artifact, and what it reads and writes."""

    engine: Engine
    reader: Reader
    shelf: Shelf
    writer: Writer
    ready_seconds: float
    """From the first look at the artifact to the end of the warm-up."""

    def answer(self, shard: Shard) -> dict[str, Any] | None:
        """Read, answer and write a shard; return its line, or None where its piece ends before."""
        taken = self.read(shard)
        return None if taken is None else self.writer.write(taken, self.compute(taken))

    def read(self, shard: Shard) -> Taken | None:
        """Return the records of a shard, encoded."""
        from regauge.prediction import shard as shards

        return shards.read(self.shelf, self.reader, self.writer.asked, shard)

    def compute(self, taken: Taken) -> Any:
        """Return the answers to the records of a shard."""
        from regauge.prediction import shard as shards

        return shards.compute(self.engine, taken)


def worker(order: Order, device: int, step: int = 0) -> Worker:
    """Return what computes shards, on the device with this index.

    `step` is how far down the ladder it begins, since memory did not suffice for others. Raises
    what `artifact.opened` does.
    """
    from regauge.artifacts import engine as engines
    from regauge.artifacts.preprocess import Reader
    from regauge.prediction.shard import Asked, Shelf, Writer

    began = time.perf_counter()
    job = order.job
    settings = job.settings
    artifact = artifacts.opened(settings.artifact)
    program = artifact.manifest.program
    reads = program.reads
    if reads is None:
        raise SettingsError(
            f"{settings.artifact} reads no texts", "load it in Python: regauge.load"
        )
    reader = Reader(artifact.tokenizer, reads, program.fields)
    asked = Asked(
        order.texts,
        settings.predict.prompt,
        settings.predict.rows,
        order.kept,
        settings.output,
        program.fields.numbers,
        program.fields.categories,
    )
    engine = engines.loaded(artifact, invariant=settings.predict.invariant, device=device)
    engine.step = step
    engines.warm(engine, artifact)
    return Worker(
        engine,
        reader,
        Shelf(settings.source, order.pieces, asked),
        Writer(job.folder, job.own / ASIDE, program, asked, reader.decoded),
        time.perf_counter() - began,
    )
