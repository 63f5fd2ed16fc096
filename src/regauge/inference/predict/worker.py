"""Worker: loads an artifact; reads, computes and writes shards.

`WorkerSpec` describes a job in a form to send to another process or machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge import config
from regauge.inference.export.engine import load_engine, warm_up
from regauge.inference.export.generator import decode_answers
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.export.uncompiled import open_model
from regauge.inference.predict.job import JobSlot, PredictJob
from regauge.inference.predict.settings import PredictSettings
from regauge.inference.predict.shard import (
    PieceReader,
    RecordSpec,
    ShardWriter,
    compute_shard,
    read_shard,
)
from regauge.system import choices

if TYPE_CHECKING:
    from regauge.data.sources import Piece
    from regauge.data.values import FieldKind
    from regauge.inference.export.engine import Engine
    from regauge.inference.predict.fields import InputFields
    from regauge.inference.predict.shard import EncodedShard
    from regauge.inference.predict.shard_queue import ShardId

SCRATCH = "scratch"
"""Subfolder in a job's folder for unfinished files."""


class WorkerResources(NamedTuple):
    """What a worker occupies."""

    accelerator: str
    """Accelerator kind."""
    devices: int
    threads: int
    """CPU threads per device."""


@dataclass(frozen=True)
class WorkerSpec:
    """A job as it is sent to a worker process; it can be pickled."""

    settings: dict[str, Any]
    """All tables in the run file."""
    pieces: tuple[Piece, ...]
    inputs: InputFields
    kept_fields: dict[str, FieldKind]
    """Fields to copy into the output -> kind."""
    slot: JobSlot
    resources: WorkerResources
    custom_paths: tuple[str, ...] = ()
    """Import paths that the command allows, such as a custom module's task."""

    @property
    def job(self) -> PredictJob:
        """The job; raises SettingsError if custom code cannot be imported."""
        choices.allow_imports((self.settings, self.custom_paths))
        settings = config.build(PredictSettings, self.settings)
        return PredictJob(settings, self.pieces, self.slot)


@dataclass(frozen=True)
class Worker:
    """A loaded artifact with input reader and output writer."""

    engine: Engine
    preprocessor: Preprocessor
    piece_reader: PieceReader
    writer: ShardWriter
    ready_seconds: float
    """Seconds to load and warm up the artifact."""

    def process_shard(self, shard: ShardId) -> dict[str, Any] | None:
        """Read, compute and write a shard; return the ledger line.

        Returns None if the shard is past the end of the piece.
        """
        encoded = self.read_shard(shard)
        if encoded is None:
            return None
        return self.writer.write(encoded, compute_shard(self.engine, encoded))

    def read_shard(self, shard: ShardId) -> EncodedShard | None:
        """Return a shard's encoded records; None if it is past the end of the piece."""
        return read_shard(self.piece_reader, self.preprocessor, self.writer.record_spec, shard)


def build_worker(spec: WorkerSpec, device: int, halvings: int = 0) -> Worker:
    """Load and warm up a job's artifact on the device with this index.

    The largest batch size is halved `halvings` times, because earlier workers ran out of memory.
    Raises the errors from `open_model`.
    """
    start = time.perf_counter()
    job = spec.job
    settings = job.settings
    artifact = open_model(settings.artifact, settings.generation)
    program = artifact.program
    tokenization = program.required_tokenization
    preprocessor = Preprocessor(artifact.tokenizer_folder, tokenization, program.fields)
    shard_records = settings.predict.shard_records
    if shard_records == "auto":
        raise TypeError("predict.shard_records is not resolved")
    record_spec = RecordSpec(
        spec.inputs,
        settings.predict.prompt_name,
        shard_records,
        spec.kept_fields,
        settings.output,
        program.fields.numeric_features,
        program.fields.categorical_features,
        settings.generation,
        program.output_size,
        needs_words=program.output_kind == "entities",
    )
    engine = load_engine(artifact, batch_invariant=settings.predict.batch_invariant, device=device)
    engine.halvings = halvings
    warm_up(engine, artifact)
    scratch_folder = job.job_folder / SCRATCH
    decode = partial(decode_answers, preprocessor, settings.generation)
    return Worker(
        engine,
        preprocessor,
        PieceReader(settings.source, spec.pieces, record_spec),
        ShardWriter(job.folder, scratch_folder, program, record_spec, decode),
        time.perf_counter() - start,
    )
