"""A loaded artifact at work: rows in any order and number in, answers in the same order out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from regauge.accelerators import take
from regauge.artifacts.buckets import Ladder
from regauge.artifacts.manifest import MODEL
from regauge.artifacts.rows import Rows, Texts
from regauge.backends import Payload, Shape, Site
from regauge.errors import PreflightError, TransientError, plain
from regauge.log import logger
from regauge.models.inference_modules import examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.artifacts.artifact import Artifact
    from regauge.artifacts.buckets import BucketBatch
    from regauge.artifacts.rows import Records
    from regauge.backends import Runner
    from regauge.models.io_spec import Answers, Fields
    from regauge.models.losses import Batch


NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "failed to allocate")
"""What libraries say of an allocation that failed."""


@dataclass
class Engine:
    """A runner with its ladder."""

    runner: Runner
    ladder: Ladder
    width: int
    step: int = field(default=0, kw_only=True)
    """How far down the ladder's numbers of rows it begins, since memory did not suffice."""
    slots: int = field(default=0, kw_only=True)
    """Tokens that were computed so far, padding included."""
    told: Callable[[int], None] = field(default=lambda _: None, kw_only=True)
    """Called with the number of records that were given to the device, batch by batch."""

    def answers(self, rows: Records) -> np.ndarray:
        """Return what the program answers to records, [records, width] fp32.

        The next batch is given to the device before the answers to one are waited for. Where
        memory does not suffice for a batch, it and all later ones are smaller; raises
        TransientError where it does not for the smallest.
        """
        found = np.empty((len(rows), self.width), np.float32)
        lengths = rows.lengths
        left = deque(self.ladder.batches(lengths, self.step))
        before: tuple[BucketBatch, Tensor] | None = None
        while left:
            output = self._tried(left[0], rows)
            if output is None:
                members = np.concatenate([batch.members for batch in left])
                left = deque(self.ladder.batches(lengths, self.step, members))
                continue
            _fetch(before, found)
            before = left.popleft(), output
        _fetch(before, found)
        return found

    def _tried(self, batch: BucketBatch, rows: Records) -> Tensor | None:
        """Return what a batch gives, or None where it is too large for the memory."""
        try:
            output = self.runner(*rows.inputs(batch))
        except (MemoryError, RuntimeError) as error:
            if not _of_memory(error):
                raise
            if batch.rows == self._fewest(batch.length):
                rows_told = f"{batch.rows} rows of {batch.length} tokens"
                problem = f"no memory for {rows_told}, and no fewer are allowed: {plain(error)}"
                raise TransientError(problem, "free some, or lower text.tokens") from None
            self.step += 1
            logger.warning("no memory for %d rows of %d tokens: fewer", batch.rows, batch.length)
            return None
        self.slots += batch.rows * batch.length * rows.apart
        self.told(len(batch.members))
        return output

    def _fewest(self, length: int) -> int:
        """Return the fewest rows that a batch of a length may be cut down to."""
        rows = next(rung.rows for rung in self.ladder.rungs if rung.length == length)
        return rows[-1] if self.ladder.filled else 1


def loaded(
    artifact: Artifact, *, invariant: bool, threads: int | None = None, device: int = 0
) -> Engine:
    """Load an artifact's payload on the device with an index, and return it at work.

    Where a program lies on several, the index counts as many devices at a time.
    With `invariant`, a text's answer has the same bits whatever is computed beside it: raises
    PreflightError where that was not shown on such a device.
    """
    manifest = artifact.manifest
    if invariant:
        _check_identity(artifact)
    count = threads or manifest.target.threads
    backend = manifest.compiled.backend
    claimed = take(artifact.accelerator, device * backend.devices, count)
    site = Site(artifact.accelerator, claimed, count)
    runner = backend.load(payload(artifact), site)
    filled = invariant or not backend.symbolic
    return Engine(runner, Ladder(manifest.shapes, filled=filled), manifest.program.width)


def warm(engine: Engine, artifact: Artifact) -> None:
    """Compute every shape once that has a graph of its own, so that no graph is made later.

    Of one graph for all shapes the smallest is computed: what is made of weights then is for all.
    """
    inputs, shapes = artifact.manifest.program.inputs, engine.ladder.shapes()
    if artifact.manifest.compiled.backend.symbolic:
        shapes = [min(shapes, key=lambda each: each.rows * each.length)]
    for each in shapes:
        engine.runner(*examples(inputs, each.rows, each.length))
    artifact.accelerator.synchronize()


def _check_identity(artifact: Artifact) -> None:
    proof, here = artifact.manifest.identity, artifact.accelerator.model()
    remedy = "export it on such a device, or do without: predict.invariant = false"
    if proof is None:
        problem = f"{artifact.folder} has no proof that a text keeps its bits in every batch"
        raise PreflightError(problem, remedy)
    if proof.chip != here:
        problem = f"that a text keeps its bits was shown on {proof.chip}, and this is {here}"
        raise PreflightError(problem, remedy)


def payload(artifact: Artifact) -> Payload:
    """Return what a backend loads of an artifact."""
    manifest = artifact.manifest

    def program() -> nn.Module:
        from regauge.artifacts.restore import restored

        return restored(manifest, artifact.folder / MODEL, artifact.weights())

    shapes = [Shape(rung.rows[0], rung.length) for rung in manifest.shapes]
    return Payload(
        artifact.payload,
        manifest.program.inputs,
        shapes,
        manifest.compiled.precision,
        artifact.weights,
        program,
    )


def _fetch(computed: tuple[BucketBatch, Tensor] | None, found: np.ndarray) -> None:
    """Put what was computed into its places of [records, width] fp32."""
    if computed is not None:
        batch, output = computed
        found[batch.members] = output.cpu().float().numpy()[: len(batch.members)]


def _of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(each in str(error).lower() for each in NO_MEMORY)


OUTPUTS: dict[Answers, str] = {
    "vectors": "vectors",
    "classes": "scores",
    "values": "scores",
    "scores": "scores",
}
"""What a task calls the answers of its module."""


class Answering(nn.Module):
    """A compiled program as a task calls its module: batches of tokens in, their answers out."""

    def __init__(self, engine: Engine, answers: Answers, fields: Fields) -> None:
        super().__init__()
        self.engine = engine
        self.compute_dtype = torch.float32
        self._output = OUTPUTS[answers]
        self._fields = fields

    def forward(self, batch: Batch) -> Batch:
        """Return the answers to a batch, [batch, width] fp32; those to empty rows are 0.

        Of rows of candidates, [rows, candidates].
        """
        if self._fields.ranking is not None:
            return {self._output: self._scores(batch, self._fields.ranking.queries)}
        tokens, segments = (batch[name].cpu().numpy() for name in ("tokens", "segments"))
        lengths = (segments > 0).sum(1)
        (there,) = np.nonzero(lengths)
        lengths = np.minimum(lengths, self.engine.ladder.longest)
        texts = Texts.of([tokens[row, : lengths[row]].astype(np.int32) for row in there])
        starts = [_starts(batch["types"], lengths)[there]] if self._fields.joined else []
        answers = np.zeros((len(tokens), self.engine.width), np.float32)
        answers[there] = self.engine.answers(Rows([texts], starts))
        return {self._output: torch.from_numpy(answers).to(batch["tokens"].device)}

    def _scores(self, batch: Batch, queries: int) -> Tensor:
        """Return the scores of candidates, [rows, candidates]; of those that are not there 0."""
        present = batch["present"].cpu().numpy() > 0
        rows, candidates = present.shape
        tokens = batch["tokens"].cpu().numpy().reshape(rows, -1, batch["tokens"].shape[1])
        real = (batch["segments"].cpu().numpy() > 0).sum(1)
        lengths = np.minimum(real, self.engine.ladder.longest).reshape(rows, -1)
        documents = self._fields.apart - queries
        where, which = np.nonzero(present)

        def column(place: int) -> Texts:
            """Return a text of every candidate: the query's stand first in a row."""
            at = np.full_like(which, place)
            if place >= queries:
                at = queries + which * documents + place - queries
            every = zip(where, at, strict=True)
            return Texts.of([tokens[row, text, : lengths[row, text]] for row, text in every])

        features = [batch[name].cpu().numpy()[where, which] for name in ("numbers", "categories")]
        wide = [np.pad(each, ((0, 0), (0, 1))) if not each.shape[1] else each for each in features]
        answers = self.engine.answers(Rows([column(n) for n in range(self._fields.apart)], wide))
        found = np.zeros((rows, candidates), np.float32)
        found[where, which] = answers[:, 0]
        return torch.from_numpy(found).to(batch["tokens"].device)


def _starts(types: Tensor, lengths: np.ndarray) -> np.ndarray:
    """Return where the second half of each text begins, [batch] int32: behind it, if nowhere."""
    of_second = types.cpu().numpy() > 0
    found: np.ndarray = np.where(of_second.any(1), of_second.argmax(1), lengths).astype(np.int32)
    return found
