"""A loaded artifact at work: rows in any order and number in, answers in the same order out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from regauge.backends import Payload, Shape, Site
from regauge.inference.manifest import MODEL
from regauge.inference.shapes import Batch, Ladder, padded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from regauge.backends import Runner
    from regauge.inference.artifact import Artifact


@dataclass(frozen=True)
class Engine:
    """A runner with its ladder."""

    runner: Runner
    ladder: Ladder
    width: int

    def answers(self, ids: Sequence[np.ndarray]) -> np.ndarray:
        """Return what the program answers to texts as tokens, [texts, width] fp32."""
        lengths = np.array([len(each) for each in ids], np.int64)
        found = np.empty((len(ids), self.width), np.float32)
        for batch, output in self.outputs(self.ladder.batches(lengths), ids):
            found[batch.members] = output
        return found

    def outputs(
        self, batches: Iterable[Batch], ids: Sequence[np.ndarray]
    ) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield each batch with what the program answers to its members, [members, width].

        The next one is given to the device before the answers to one are waited for.
        """
        waiting: tuple[Batch, Tensor] | None = None
        for batch in batches:
            output = self.runner(*texts([ids[member] for member in batch.members], batch))
            if waiting is not None:
                yield _fetched(*waiting)
            waiting = batch, output
        if waiting is not None:
            yield _fetched(*waiting)


def texts(ids: Sequence[np.ndarray], batch: Batch) -> tuple[Tensor, Tensor]:
    """Return what a program of texts takes: tokens, [rows, length], and lengths, [rows]."""
    lengths = np.zeros(batch.rows, np.int32)
    lengths[: len(ids)] = [len(each) for each in ids]
    tokens = padded(ids, batch.rows, batch.length)
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def loaded(artifact: Artifact, *, invariant: bool, threads: int | None = None) -> Engine:
    """Load an artifact's payload on a device that is claimed here, and return it at work.

    With `invariant`, a text's answer has the same bits whatever is computed beside it.
    """
    manifest = artifact.manifest
    count = threads or manifest.target.threads
    device = artifact.accelerator.claim(0, count)
    site = Site(artifact.accelerator, device, count)
    runner = manifest.compiled.backend.load(payload(artifact), site)
    filled = invariant or not manifest.compiled.backend.symbolic
    return Engine(runner, Ladder(manifest.shapes, filled=filled), manifest.program.width)


def payload(artifact: Artifact) -> Payload:
    """Return what a backend loads of an artifact."""
    manifest = artifact.manifest

    def program() -> nn.Module:
        from regauge.inference.programs import restored

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


def _fetched(batch: Batch, output: Tensor) -> tuple[Batch, np.ndarray]:
    found: np.ndarray = output[: len(batch.members)].float().cpu().numpy()
    return batch, found
