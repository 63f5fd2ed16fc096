"""Static batches: the fallback for models without support for continuous batching.

Requests with the same sampling options are generated together, by the program that `regauge
generate` runs. New requests wait for the end of the batch, and an answer is reported as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from regauge.inference.export.buckets import select_buckets
from regauge.inference.export.engine import NON_FINITE, Engine
from regauge.inference.export.records import TextRecords
from regauge.models.generation.text_generation import find_generation_limit
from regauge.models.settings import Generation
from regauge.serving.text_generation.text_requests import EngineLimits, TextEngine, TokenEvent
from regauge.system.errors import RegaugeError, first_line

if TYPE_CHECKING:
    from regauge.inference.backends import Runner
    from regauge.inference.export.artifact import Artifact
    from regauge.models.generation.text_generation import GenerationProgram
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_requests import TextRequest

BATCH_ERRORS = (RuntimeError, MemoryError, ValueError, IndexError, RegaugeError)
"""Batch errors that a single request may have caused."""


class StaticTextEngine(TextEngine):
    """A text engine that computes one batch after the other."""

    def __init__(
        self,
        artifact: Artifact,
        runner: Runner,
        program: GenerationProgram,
        settings: TextServing,
    ) -> None:
        """Take a causal model's artifact, its runner and program."""
        limits = EngineLimits(
            find_generation_limit(program.model),
            program.vocabulary,
            settings.max_running_requests,
            artifact.manifest.buckets[-1].length,
            has_streams=False,
        )
        super().__init__(limits)
        program.model.register_forward_hook(lambda *_: self.on_progress())
        self._artifact = artifact
        self._runner = runner
        self._program = program

    def _compute(self) -> None:
        if batch := self._take_batch():
            self._answer(batch)

    def _cancel_running(self, request_id: str) -> None:
        """Do nothing: nothing is computed between two steps."""

    def _take_batch(self) -> list[TextRequest]:
        """Remove and return the oldest requests with the first one's sampling options."""
        batch: list[TextRequest] = []
        for request in list(self._waiting.values()):
            is_equal = not batch or _options(request) == _options(batch[0])
            if is_equal and len(batch) < self.limits.max_running:
                batch.append(self._waiting.pop(request.request_id))
        return batch

    def _answer(self, batch: list[TextRequest]) -> None:
        """Append a batch's events; after a failure each request is computed alone."""
        try:
            rows = self._generate(batch)
        except BATCH_ERRORS as error:
            if len(batch) == 1:
                self._end(batch[0].request_id, "error", first_line(error))
                return
            for request in batch:
                self._answer([request])
        else:
            for request, row in zip(batch, rows, strict=True):
                self._append_answer(request, row)

    def _append_answer(self, request: TextRequest, row: np.ndarray) -> None:
        """Append the events for an answer, [tokens]; NaN if it failed."""
        if np.isnan(row).any():
            self._end(request.request_id, "error", NON_FINITE)
            return
        tokens = row[: request.max_new_tokens].astype(int)
        tokens = tokens[: int((tokens >= 0).sum())]
        self._events += [TokenEvent(request.request_id, int(token)) for token in tokens]
        self._end(request.request_id, "length" if len(tokens) == request.max_new_tokens else "stop")

    def _generate(self, batch: list[TextRequest]) -> np.ndarray:
        """Return a batch's tokens, [requests, tokens], -1 after the end of an answer."""
        count = max(request.max_new_tokens for request in batch)
        temperature, top_p, top_k = _options(batch[0])
        generation = Generation(
            max_new_tokens=count, temperature=temperature, top_p=top_p, top_k=top_k
        )
        records = TextRecords.from_lists([request.prompt for request in batch])
        if generation.is_sampled:
            draws = np.ones((len(batch), count), np.float32)
            for row, request in zip(draws, batch, strict=True):
                row[: request.max_new_tokens] = request.draw()
            records = TextRecords(records.texts, [*records.features, draws])
        artifact = replace(self._artifact, generation=generation)
        buckets = select_buckets(artifact, batch_invariant=False)
        self._program.options = generation
        return Engine(self._runner, buckets, count).compute(records)


def _options(request: TextRequest) -> tuple[float, float, int]:
    generation = request.generation
    return generation.temperature, generation.top_p, generation.top_k
