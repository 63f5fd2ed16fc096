"""A loaded program, which computes records in batches, in bucket shapes.

`Engine` takes records in any order and returns their outputs in the same order. It imports torch
only for a backend that needs it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.inference.backends import ExecutionContext, Payload, Shape, to_array
from regauge.inference.export.buckets import select_buckets
from regauge.models.io_spec import build_example_arrays
from regauge.system import stop_signals
from regauge.system.errors import DataError, PreflightError, TransientError, first_line
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from regauge.inference.backends import Runner
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.buckets import BucketBatch, Buckets
    from regauge.inference.export.records import Records

OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "failed to allocate",
)
"""Parts of libraries' error messages when an allocation fails."""

NON_FINITE = "the model's output is not finite"


@dataclass
class Engine:
    """A runner and buckets for it."""

    runner: Runner
    buckets: Buckets
    output_size: int
    """Numbers per output."""
    halvings: int = field(default=0, kw_only=True)
    """How often the largest batch size is halved, because memory ran out before."""
    computed_tokens: int = field(default=0, kw_only=True)
    """Tokens computed so far, padding included."""
    on_batch: Callable[[int], None] = field(default=lambda _: None, kw_only=True)
    """Called with the number of records in each batch submitted to the device."""

    def compute(self, records: Records) -> np.ndarray:
        """Return the outputs of records, [records, width] fp32.

        Outputs of a shorter bucket are filled with zeros.

        The next batch is submitted to the device before the previous outputs are copied back. If
        memory runs out, this batch and all later ones are halved. Raises TransientError if memory
        does not suffice for the smallest batch.
        """
        lengths = records.lengths
        return self._compute_batches(
            records, lambda indices: self.buckets.make_batches(lengths, self.halvings, indices)
        )

    def compute_bucket(self, records: Records, length: int) -> np.ndarray:
        """Return the outputs of records all padded to `length`, [records, width] fp32.

        `length` is a bucket length in tokens. The records are one batch of the smallest declared
        size that holds them, or of exactly their number if the program takes any. They are computed
        in parts if they are too many, or if memory runs out as in `compute`.

        Raises ValueError for an unknown length or a longer record, and TransientError as
        `compute` does.
        """
        longest = records.lengths.max(initial=0)
        if longest > length:
            raise ValueError(f"a record of {longest} tokens is longer than {length}")
        return self._compute_batches(
            records,
            lambda indices: self.buckets.make_bucket_batches(length, indices, self.halvings),
        )

    def _compute_batches(
        self, records: Records, split: Callable[[np.ndarray], Iterable[BucketBatch]]
    ) -> np.ndarray:
        """Return the outputs of records, [records, width] fp32.

        `split` returns batches for the records with these indices, at the current halvings.
        """
        outputs = np.zeros((len(records), self.output_size), np.float32)
        pending = deque(split(np.arange(len(records))))
        submitted: tuple[BucketBatch, np.ndarray | Tensor] | None = None
        while pending:
            stop_signals.check_stop()
            output = self._run_batch(pending[0], records)
            if output is None:
                pending = deque(split(np.concatenate([batch.record_indices for batch in pending])))
                continue
            _copy_outputs(submitted, outputs)
            submitted = pending.popleft(), output
        _copy_outputs(submitted, outputs)
        return outputs

    def _run_batch(self, batch: BucketBatch, records: Records) -> np.ndarray | Tensor | None:
        """Return a batch's output, or None if it does not fit the memory."""
        try:
            output = self.runner(*records.build_inputs(batch))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if batch.num_rows == self._min_rows(batch.length):
                problem = (
                    f"no memory for {batch.num_rows} rows of {batch.length} tokens,"
                    f" the smallest batch: {first_line(error)}"
                )
                remedy = "free memory, or lower text.max_seq_length"
                raise TransientError(problem, remedy) from None
            self.halvings += 1
            logger.warning(
                "Out of memory at %d rows of %d tokens; retrying with half the rows.",
                batch.num_rows,
                batch.length,
            )
            return None
        self.computed_tokens += batch.num_rows * batch.length * records.texts_per_record
        self.on_batch(len(batch.record_indices))
        return output

    def _min_rows(self, length: int) -> int:
        rows = next(bucket.batch_sizes for bucket in self.buckets.shapes if bucket.length == length)
        return rows[-1] if self.buckets.needs_row_padding else 1


def load_engine(
    artifact: Artifact, *, batch_invariant: bool, threads: int | None = None, device: int = 0
) -> Engine:
    """Load an artifact's payload and return its engine.

    `device` is the device index; for a program on several devices, it counts groups of that many.
    With `batch_invariant`, an output has the same bits in every batch; raises PreflightError if the
    artifact lacks a proof of this for this chip.
    """
    manifest = artifact.manifest
    if batch_invariant and artifact.needs_proof:
        _check_batch_invariance(artifact)
    num_threads = threads or manifest.target.threads
    backend = manifest.compiled.backend
    context = ExecutionContext(artifact.accelerator, device * backend.num_devices, num_threads)
    runner = backend.load(build_payload(artifact), context)
    buckets = select_buckets(artifact, batch_invariant=batch_invariant)
    return Engine(runner, buckets, artifact.program.output_size)


def warm_up(engine: Engine, artifact: Artifact) -> None:
    """Compute each shape with a separate graph once, so that none is compiled later.

    If one graph serves all shapes, computes only the smallest shape: it prepares the weights for
    all shapes.
    """
    inputs, batches = artifact.program.inputs, engine.buckets.make_empty_batches()
    if artifact.manifest.compiled.backend.has_dynamic_shapes:
        batches = [min(batches, key=lambda batch: batch.num_rows * batch.length)]
    for batch in batches:
        engine.runner(*build_example_arrays(inputs, batch.num_rows, batch.length))
    artifact.accelerator.synchronize()


def _check_batch_invariance(artifact: Artifact) -> None:
    """Raise PreflightError if the artifact was not proved batch-invariant on this chip."""
    proof, chip = artifact.manifest.batch_invariance, artifact.accelerator.model_name()
    if proof is None:
        problem = f"{artifact.folder} is not proved batch-invariant"
        raise PreflightError(problem, "export it again, or set predict.batch_invariant = false")
    if proof.chip != chip:
        problem = f"batch invariance was proved on {proof.chip}; this machine has {chip}"
        raise PreflightError(problem, "export it here, or set predict.batch_invariant = false")


def build_payload(artifact: Artifact) -> Payload:
    """Return an artifact's payload for its backend to load."""
    manifest = artifact.manifest

    def restore() -> nn.Module:
        program: Any = artifact.restore_program()
        if manifest.program.output_kind == "text":
            program.options = artifact.generation_options
        restored: nn.Module = program
        return restored

    shapes = [Shape(bucket.batch_sizes[0], bucket.length) for bucket in manifest.buckets]
    return Payload(
        artifact.payload_folder,
        artifact.program.inputs,
        shapes,
        manifest.compiled.precision,
        artifact.load_weights,
        restore,
        artifact.weights_file,
    )


def _copy_outputs(
    submitted: tuple[BucketBatch, np.ndarray | Tensor] | None, outputs: np.ndarray
) -> None:
    """Copy a batch's output into its records' rows; `outputs` is [records, width]."""
    if submitted is not None:
        batch, output = submitted
        count = len(batch.record_indices)
        values = to_array(output)[:count]
        outputs[batch.record_indices, : values.shape[1]] = values


def check_finite(outputs: np.ndarray) -> None:
    """Raise DataError if a record's output, [records, width], has NaN or infinity."""
    lost = np.flatnonzero(~np.isfinite(outputs).all(1))
    if len(lost):
        raise DataError(f"record {lost[0]}: {NON_FINITE}", "load an earlier checkpoint")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed, by the library's message."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(part in message for part in OUT_OF_MEMORY_MESSAGES)
