"""Prompt slices: how many prompt tokens a step computes beside the answers' next tokens.

The next tokens come after the slice, so its time is limited and not only its tokens.
"""

from __future__ import annotations

MIN_TOKENS = 32
"""Smallest slice: smaller ones take nearly as long."""
FIRST_TOKENS = 64
"""Slice before times were measured."""
BUSY_FACTOR = 3.0
"""A slice may always prolong a step to this many times its length without prompts."""
SMOOTHING = 0.25
"""A new step's weight in the mean times."""


class PromptSlices:
    """Adapts the slices to the measured step times.

    Example: if answers take 0.05 s per step and prompts 2 ms per token, `PromptSlices(512, 0.25)`
    allows 100 prompt tokens per step.
    """

    def __init__(self, max_tokens: int, max_seconds: float) -> None:
        """Take the maximum tokens per step, and the time that a step with a slice should take."""
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._answer_seconds = 0.0
        self.token_seconds = 0.0
        """Mean time per prompt token; 0 before it was measured."""

    def count_tokens(self, num_answers: int) -> int:
        """Return the maximum tokens in the next step, given the answers that get one.

        Without answers, nothing waits for the step.
        """
        if not num_answers:
            return self._max_tokens
        seconds = max(self._max_seconds, BUSY_FACTOR * self._answer_seconds) - self._answer_seconds
        size = int(seconds / self.token_seconds) if self.token_seconds else FIRST_TOKENS
        return min(self._max_tokens, num_answers + max(MIN_TOKENS, size))

    def record_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take a step's time."""
        if not num_prompt_tokens:
            self._answer_seconds = _update_mean(self._answer_seconds, seconds)
        elif num_prompt_tokens >= MIN_TOKENS:
            earlier = self._answer_seconds if num_answers else 0.0
            token_seconds = max(0.0, seconds - earlier) / num_prompt_tokens
            self.token_seconds = _update_mean(self.token_seconds, token_seconds)


def _update_mean(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value
