"""Static batches: the fallback for models that continuous batching does not support.

Requests with the same sampling options are generated together, by the program that `regauge
generate` runs. New requests wait for the end of the batch, and an answer is reported as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.inference.export.buckets import select_buckets
from regauge.inference.export.engine import Engine
from regauge.inference.export.records import TextRecords
from regauge.models.generation.text_generation import find_generation_limit
from regauge.models.settings import Generation
from regauge.serving.text_generation.text_requests import EngineLimits, TokenEvent
from regauge.system.errors import RegaugeError, first_line

if TYPE_CHECKING:
    from regauge.inference.backends import Runner
    from regauge.inference.export.artifact import Artifact
    from regauge.models.generation.text_generation import GenerationProgram
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_requests import TextRequest

BATCH_ERRORS = (RuntimeError, MemoryError, ValueError, IndexError, RegaugeError)
"""Errors of a batch for which a single request may be the cause."""


class StaticTextEngine:
    """A text engine that computes one batch after the other."""

    def __init__(
        self,
        artifact: Artifact,
        runner: Runner,
        program: GenerationProgram,
        settings: TextServing,
    ) -> None:
        """Take an artifact of a causal model, its runner, and the program in it."""
        self._artifact = artifact
        self._runner = runner
        self._program = program
        self._waiting: dict[str, TextRequest] = {}
        self._events: list[TokenEvent] = []
        self.limits = EngineLimits(
            find_generation_limit(program.model),
            program.vocabulary,
            settings.max_running_requests,
            artifact.manifest.buckets[-1].length,
        )

    @property
    def has_work(self) -> bool:
        """Whether requests are left, or events to report."""
        return bool(self._waiting or self._events)

    @property
    def num_running(self) -> int:
        """Zero, because a step computes whole answers."""
        return 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the next batch."""
        return len(self._waiting)

    def add(self, request: TextRequest) -> None:
        """Queue a request; raises DataError if it does not fit the limits."""
        self.limits.check(request.prompt.tolist(), request.max_new_tokens)
        self._waiting[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        """Remove a waiting request."""
        if self._waiting.pop(request_id, None) is not None:
            self._events.append(TokenEvent(request_id, None, "cancelled"))

    def step(self) -> list[TokenEvent]:
        """Compute the next batch and return its answers; a failed request ends with an error."""
        events, self._events = self._events, []
        if batch := self._take_batch():
            events += self._compute(batch)
        return events

    def close(self) -> None:
        """Forget all requests."""
        self._waiting.clear()

    def _take_batch(self) -> list[TextRequest]:
        """Remove and return the oldest requests with the sampling options of the first one."""
        batch: list[TextRequest] = []
        for request in list(self._waiting.values()):
            is_equal = not batch or _options(request) == _options(batch[0])
            if is_equal and len(batch) < self.limits.max_running:
                batch.append(self._waiting.pop(request.request_id))
        return batch

    def _compute(self, batch: list[TextRequest]) -> list[TokenEvent]:
        """Return the events of a batch; after a failure each request is computed alone."""
        try:
            rows = self._generate(batch)
        except BATCH_ERRORS as error:
            if len(batch) > 1:
                return [event for request in batch for event in self._compute([request])]
            return [TokenEvent(batch[0].request_id, None, "error", first_line(error))]
        return [
            event
            for request, row in zip(batch, rows, strict=True)
            for event in _list_events(request, row)
        ]

    def _generate(self, batch: list[TextRequest]) -> np.ndarray:
        """Return the tokens of a batch, [requests, tokens], -1 after the end of an answer."""
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
    """Return the options that all requests of a batch share."""
    generation = request.generation
    return generation.temperature, generation.top_p, generation.top_k


def _list_events(request: TextRequest, row: np.ndarray) -> list[TokenEvent]:
    """Return the events of an answer, [tokens]."""
    tokens = row[: request.max_new_tokens].astype(int)
    tokens = tokens[: int((tokens >= 0).sum())]
    reason: Any = "length" if len(tokens) == request.max_new_tokens else "stop"
    events = [TokenEvent(request.request_id, int(token)) for token in tokens]
    return [*events, TokenEvent(request.request_id, None, reason)]
