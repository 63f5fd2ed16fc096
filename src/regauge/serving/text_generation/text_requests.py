"""The text engine interface: requests in, one event per generated token out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from regauge.data.randomness import draw_uniform
from regauge.models.settings import Generation
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: an end token; `length`: max_new_tokens; `cancelled`: by the caller; `error`: failed."""


class TokenEvent(NamedTuple):
    """A request's token, or the end of the request."""

    request_id: str
    token: int | None
    """New token; None if the event only ends the request. End tokens are left out."""
    finish_reason: FinishReason | None = None
    message: str = ""
    """Why a request ends with `error`."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits on an engine's requests."""

    max_tokens: int | None
    """Maximum tokens of prompt plus answer; None without a limit."""
    vocabulary: int
    """Number of token ids."""
    max_running: int
    """Maximum requests computed together."""
    max_prompt_tokens: int | None = None
    """Maximum prompt tokens; None if only `max_tokens` limits them."""
    has_streams: bool = True
    """Whether tokens are reported one by one, so that their times have limits."""

    def check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raise DataError if a request does not fit the limits."""
        if not len(prompt):
            raise DataError("the prompt is empty", "send a text that is not empty")
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            problem = f"a token id is outside of 0 … {self.vocabulary - 1}"
            raise DataError(problem, "send ids of the tokenizer of the model")
        if self.max_prompt_tokens is not None and len(prompt) > self.max_prompt_tokens:
            problem = f"the prompt has {len(prompt)} tokens, more than {self.max_prompt_tokens}"
            raise RequestTooLongError(problem, "shorten the prompt")
        count = len(prompt) + max_new_tokens
        if self.max_tokens is not None and count > self.max_tokens:
            problem = (
                f"the prompt has {len(prompt)} tokens and the answer up to {max_new_tokens};"
                f" the model reads {self.max_tokens} in all"
            )
            raise RequestTooLongError(problem, "shorten the prompt, or lower max_tokens")


class RequestTooLongError(DataError):
    """Prompt and answer are too long for the model or the memory."""


@dataclass(frozen=True)
class TextRequest:
    """A prompt and how to answer it."""

    request_id: str
    prompt: np.ndarray
    """Prompt tokens, [tokens] int32."""
    generation: Generation
    """Options; stop texts are left to the reader of the tokens."""
    number: int = 0
    """Index of the prompt in a list, which the token draws depend on."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum answer tokens."""
        return self.generation.max_new_tokens or 1

    def draw(self) -> np.ndarray:
        """Return the numbers that select the answer's tokens, [max_new_tokens] fp32.

        They equal those in `LoadedModel.generate` for the same seed and number.
        """
        return draw_uniform(self.generation.seed, 0, self.number, np.arange(self.max_new_tokens))


class TextEngine(ABC):
    """Generates the answers to several requests together: a library adapter."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        """Request limits."""
        self.on_progress: Callable[[], object] = lambda: None
        """Called during a step of many forward passes, after each of them."""
        self._waiting: dict[str, TextRequest] = {}
        self._events: list[TokenEvent] = []
        """What `step` returns next."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute or report anything."""
        return bool(self._waiting or self._events or self.num_running)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def cache_blocks(self) -> tuple[int, int]:
        """Key-value cache blocks in use, and all blocks; zeros if the engine does not tell."""
        return 0, 0

    @property
    def prompt_token_seconds(self) -> float:
        """Mean time to read a prompt token; 0 if the engine does not tell."""
        return 0.0

    def add(self, request: TextRequest) -> None:
        """Queue a request; raises DataError if it does not fit the limits."""
        self.limits.check(request.prompt.tolist(), request.max_new_tokens)
        self._waiting[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown one is ignored, because it may just have ended."""
        if self._waiting.pop(request_id, None) is not None:
            self._end(request_id, "cancelled")
        else:
            self._cancel_running(request_id)

    def step(self) -> list[TokenEvent]:
        """Compute the running requests' next token and return what is new.

        A request whose computation fails ends with an error.
        """
        self._compute()
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _compute(self) -> None:
        """Begin waiting requests, compute the next tokens, and append events."""

    @abstractmethod
    def _cancel_running(self, request_id: str) -> None:
        """End a running request; an unknown one is ignored."""

    def _end(self, request_id: str, reason: FinishReason, message: str = "") -> None:
        """Append the end of a request to the events."""
        self._events.append(TokenEvent(request_id, None, reason, message))

    def close(self) -> None:
        """Release the engine's memory."""
        self._waiting.clear()
