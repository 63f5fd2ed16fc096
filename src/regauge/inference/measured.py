"""The held-out metrics of a compiled program: by the one evaluation path, and its own batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from regauge.accelerators import REFERENCE
from regauge.config import choose
from regauge.data.order import sample
from regauge.data.shards import Dataset
from regauge.inference.engine import loaded
from regauge.inference.rows import Rows, Texts
from regauge.processes import World
from regauge.training.objectives import feed
from regauge.training.scoring import Heldout

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator
    from regauge.inference.artifact import Artifact
    from regauge.inference.engine import Engine
    from regauge.models.inputs import Answers, Fields
    from regauge.models.losses import Batch
    from regauge.tasks import Task

MICROBATCH_ROWS = 64
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


def answering(artifact: Artifact) -> Answering:
    """Return an artifact at work, loaded on a device of its own kind."""
    program = artifact.manifest.program
    engine = loaded(artifact, invariant=False)
    return Answering(engine, program.answers, program.fields)


def metrics(module: nn.Module, task: Task, dataset: Path, rows: int) -> dict[str, float]:
    """Return the metrics of a module on so many held-out rows; empty where none are held out."""
    found = Dataset(dataset)
    if not len(found.split("heldout")):
        return {}
    reference: Accelerator = choose("accelerators", REFERENCE)
    share = feed(
        task,
        found,
        "heldout",
        world=World(),
        rows=MICROBATCH_ROWS,
        ladder=task.ladder(found.manifest),
        seed=0,
    )
    numbers = sample(len(share), rows, found.manifest.identity)
    mark, device = reference.end_microbatch, torch.device("cpu")
    return Heldout(task, reference, mark, device, share, numbers).metrics(module)


def _starts(types: Tensor, lengths: np.ndarray) -> np.ndarray:
    """Return where the second half of each text begins, [batch] int32: behind it, if nowhere."""
    of_second = types.cpu().numpy() > 0
    found: np.ndarray = np.where(of_second.any(1), of_second.argmax(1), lengths).astype(np.int32)
    return found
