"""Selects each request's next token with the request's own options.

transformers applies one set of sampling options and one random generator to a batch. This sampler
replaces the logits processors and leaves a greedy choice: all other tokens get -inf.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regauge.models.generation.sampling import filter_logits, select_tokens
from regauge.serving.text_generation.paged_attention import CURRENT, BatchLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from regauge.serving.text_generation.text_requests import TextRequest


@dataclass
class SampledRequest:
    """A running request, and how to select tokens for it."""

    request: TextRequest
    draws: np.ndarray | None
    """Numbers that select tokens, [max_new_tokens] fp32; None for the most likely token."""
    processors: Any | None
    """Logits processors from the model's generation configuration, or None."""


class RequestSampler:
    """The logits processors for a batch in transformers' continuous batching."""

    tensors_required = 0
    """How many rows of an argument tensor the interface reserves."""
    do_processing = True

    def __init__(self, device: torch.device) -> None:
        self.requests: dict[str, SampledRequest] = {}
        """Request id -> running request."""
        self.states: list[Any] = []
        """Requests in the current batch with a new token, in row order."""
        self.batch: list[Any] = []
        """All requests in the current batch."""
        self.failed_rows: list[int] = []
        """Rows in the current batch whose largest logit is not finite."""
        self.recorded: Tensor | None = None
        """The last batch's logits, [rows, vocabulary], if `records` is true."""
        self.records = False
        self._device = device

    def fill_defaults(self, arguments: Tensor) -> None:
        """Do nothing: requests do not use arguments."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Do nothing: requests do not use arguments."""

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Tensor) -> Tensor:
        """Store the next batch's requests and attention layout."""
        self.batch = [future.state for future in requests_in_batch]
        self.states = [future.state for future in requests_in_batch if future.has_new_token]
        lengths = [
            (future.query_length, future.state.position_offset - future.query_length)
            for future in requests_in_batch
        ]
        CURRENT.layout = BatchLayout(lengths, self._device)
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Return scores, [rows, vocabulary] fp32; the largest one is the selected token."""
        del input_ids, logits_processor_args
        count = len(self.states)
        if self.records:
            self.recorded = scores[:count].clone()
        self.failed_rows = (~scores[:count].amax(-1).isfinite()).nonzero()[:, 0].tolist()
        sampled: dict[tuple[float, float, int], list[int]] = defaultdict(list)
        for row, state in enumerate(self.states):
            request = self.requests[state.request_id]
            if request.processors is not None:
                ids = torch.tensor([list_tokens(state)], device=scores.device)
                scores[row : row + 1] = request.processors(ids, scores[row : row + 1])
            if request.draws is not None:
                options = request.request.generation
                sampled[options.temperature, options.top_p, options.top_k].append(row)
        for rows in sampled.values():
            self._select(scores, rows)
        return scores

    def _select(self, scores: Tensor, rows: list[int]) -> None:
        """Draw tokens for rows with the same options."""
        requests = [self.requests[self.states[row].request_id] for row in rows]
        numbers = [
            float(request.draws[_count_answer(self.states[row], request)])
            for row, request in zip(rows, requests, strict=True)
            if request.draws is not None
        ]
        indices = torch.tensor(rows, device=scores.device)
        draws = torch.tensor(numbers, dtype=torch.float32, device=scores.device)
        filtered = filter_logits(scores[indices], requests[0].request.generation)
        tokens = select_tokens(filtered, draws)
        scores[indices] = -torch.inf
        scores[indices, tokens] = 0.0


def list_tokens(state: Any) -> list[int]:
    """Return a request's prompt and answer so far."""
    tokens: list[int] = state.initial_tokens + state.generated_tokens
    return tokens


def _count_answer(state: Any, request: SampledRequest) -> int:
    """Return how many tokens a request has generated.

    A request whose memory was taken away recomputes the answer as part of the prompt.
    """
    return len(state.initial_tokens) + len(state.generated_tokens) - len(request.request.prompt)
