"""A loaded program, which computes records in batches, in bucket shapes.

`Engine` takes records in any order and returns their outputs in the same order. `EngineModule`
wraps it as the module for a task to evaluate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regauge.accelerators import claim_device
from regauge.inference.backends import ExecutionContext, Payload, Shape
from regauge.inference.export.buckets import select_buckets
from regauge.inference.export.records import TextRecords, TokenizedTexts
from regauge.models.inference_modules import example_inputs
from regauge.system import stop_signals
from regauge.system.errors import PreflightError, TransientError, first_line
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from regauge.inference.backends import Runner
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.buckets import BucketBatch, Buckets
    from regauge.inference.export.records import Records
    from regauge.models.io_spec import InputSpec, OutputKind
    from regauge.models.losses import Batch


OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "failed to allocate",
)
"""Parts of libraries' error messages when an allocation fails."""


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

        Raises ValueError if there is no such bucket or a record is longer, and TransientError as
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
        submitted: tuple[BucketBatch, Tensor] | None = None
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

    def _run_batch(self, batch: BucketBatch, records: Records) -> Tensor | None:
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
    claimed = claim_device(artifact.accelerator, device * backend.num_devices, num_threads)
    context = ExecutionContext(artifact.accelerator, claimed, num_threads)
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
        engine.runner(*example_inputs(inputs, batch.num_rows, batch.length))
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
    )


def _copy_outputs(submitted: tuple[BucketBatch, Tensor] | None, outputs: np.ndarray) -> None:
    """Copy a batch's output into its records' rows; `outputs` is [records, width]."""
    if submitted is not None:
        batch, output = submitted
        count = len(batch.record_indices)
        values = output.cpu().float().numpy()[:count]
        outputs[batch.record_indices, : values.shape[1]] = values


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed, by the library's message."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(part in message for part in OUT_OF_MEMORY_MESSAGES)


OUTPUT_NAMES: dict[OutputKind, str] = {
    "vectors": "vectors",
    "classes": "scores",
    "values": "scores",
    "scores": "scores",
}
"""Output kind -> key in the batch returned by a task's module."""


class EngineModule(nn.Module):
    """An engine as a task's module: maps a batch of tokens to a batch of outputs."""

    def __init__(self, engine: Engine, output_kind: OutputKind, input_spec: InputSpec) -> None:
        super().__init__()
        self.engine = engine
        self.compute_dtype = torch.float32
        self._output_name = OUTPUT_NAMES[output_kind]
        self._input_spec = input_spec

    def forward(self, batch: Batch) -> Batch:
        """Return a batch's outputs, [batch, width] fp32; 0 for empty rows.

        For a ranker the output is [rows, candidates].
        """
        if self._input_spec.ranking is not None:
            return {
                self._output_name: self._score_candidates(
                    batch, self._input_spec.ranking.num_query_texts
                )
            }
        tokens, segments = (batch[name].cpu().numpy() for name in ("tokens", "segments"))
        lengths = (segments > 0).sum(1)
        (filled,) = np.nonzero(lengths)
        lengths = np.minimum(lengths, self.engine.buckets.max_length)
        texts = TokenizedTexts.from_lists(
            [tokens[row, : lengths[row]].astype(np.int32) for row in filled]
        )
        starts = (
            [_second_text_starts(batch["types"], lengths)[filled]]
            if self._input_spec.is_pair
            else []
        )
        outputs = np.zeros((len(tokens), self.engine.output_size), np.float32)
        outputs[filled] = self.engine.compute(TextRecords([texts], starts))
        return {self._output_name: torch.from_numpy(outputs).to(batch["tokens"].device)}

    def _score_candidates(self, batch: Batch, queries: int) -> Tensor:
        """Return candidate scores, [rows, candidates]; 0 for absent candidates.

        `queries` is the number of texts per query.
        """
        present = batch["present"].cpu().numpy() > 0
        rows, candidates = present.shape
        tokens = batch["tokens"].cpu().numpy().reshape(rows, -1, batch["tokens"].shape[1])
        num_tokens = (batch["segments"].cpu().numpy() > 0).sum(1)
        lengths = np.minimum(num_tokens, self.engine.buckets.max_length).reshape(rows, -1)
        texts_per_record = self._input_spec.num_separate_texts
        documents = texts_per_record - queries
        row_of, candidate_of = np.nonzero(present)

        def select_text(index: int) -> TokenizedTexts:
            """Return one text for every candidate; a row holds the query texts first."""
            slots = np.full_like(candidate_of, index)
            if index >= queries:
                slots = queries + candidate_of * documents + index - queries
            pairs = zip(row_of, slots, strict=True)
            return TokenizedTexts.from_lists(
                [tokens[row, slot, : lengths[row, slot]] for row, slot in pairs]
            )

        features = [
            batch[name].cpu().numpy()[row_of, candidate_of] for name in ("numbers", "categories")
        ]
        padded = [
            values if values.shape[1] else np.pad(values, ((0, 0), (0, 1))) for values in features
        ]
        texts = [select_text(index) for index in range(texts_per_record)]
        outputs = self.engine.compute(TextRecords(texts, padded))
        scores = np.zeros((rows, candidates), np.float32)
        scores[row_of, candidate_of] = outputs[:, 0]
        return torch.from_numpy(scores).to(batch["tokens"].device)


def _second_text_starts(types: Tensor, lengths: np.ndarray) -> np.ndarray:
    """Return where each row's second text starts, [batch] int32; the row's length if none."""
    is_second = types.cpu().numpy() > 0
    starts: np.ndarray = np.where(is_second.any(1), is_second.argmax(1), lengths).astype(np.int32)
    return starts
