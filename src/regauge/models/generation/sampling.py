"""Draws the next tokens from precomputed numbers.

A number in [0, 1) selects a token by inverse transform sampling: the first one whose cumulative
probability exceeds it. So a draw depends only on its number and the logits of its row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.models.settings import Generation


def filter_logits(logits: Tensor, generation: Generation) -> Tensor:
    """Return logits, [rows, vocabulary] fp32, as they are sampled: -inf for excluded tokens.

    Temperature, top-k (Fan et al., 2018) and top-p (Holtzman et al., 2020) are applied in this
    order, by the classes of transformers.
    """
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers: list[Any] = [TemperatureLogitsWarper(float(generation.temperature))]
    if generation.top_k > 0:
        warpers.append(TopKLogitsWarper(generation.top_k))
    if generation.top_p < 1:
        warpers.append(TopPLogitsWarper(generation.top_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def select_tokens(logits: Tensor, draws: Tensor) -> Tensor:
    """Return the tokens that numbers select, [rows] int64.

    `logits` are [rows, vocabulary] and `draws` are [rows], in [0, 1).
    """
    probabilities = logits.float().softmax(-1)
    cumulative = probabilities.cumsum(-1)
    thresholds = draws.to(cumulative)[:, None] * cumulative[:, -1:]
    is_reached = (cumulative > thresholds) & (probabilities > 0)
    return is_reached.to(torch.int32).argmax(-1)


class FiniteCheck:
    """Finds rows, each with several beams, whose largest logit is not finite at some step."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._failures: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores unchanged, as a logits processor."""
        del input_ids
        self._failures.append(~scores.amax(-1).isfinite().view(self._num_rows, -1).any(1))
        return scores

    def find_failed(self, is_text: Tensor) -> Tensor:
        """Return the failed rows, [rows]; steps after the end in `is_text`, [rows, steps], pass."""
        failures = torch.stack(self._failures, 1)
        failures[:, 1:] &= is_text[:, : failures.shape[1] - 1]
        return failures.any(1)


class TokenSampler:
    """Makes the drawn token the most likely one, as a logits processor of a greedy loop."""

    def __init__(self, generation: Generation, draws: Tensor, prompt_length: int) -> None:
        """Take the numbers of all steps, [rows, steps], and the tokens before the first step."""
        self._generation = generation
        self._draws = draws
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return 0 for each row's drawn token and -inf for all others."""
        step = input_ids.shape[1] - self._prompt_length
        tokens = select_tokens(filter_logits(scores, self._generation), self._draws[:, step])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)
