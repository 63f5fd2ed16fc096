"""The text of an answer whose tokens arrive one after the other.

Text is released only when no later token can change it: an unfinished character, the bytes of a
byte fallback and a possible stop text start are held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regauge.models.settings import Generation

UNFINISHED_CHARACTER = "\ufffd"
"""What a tokenizer decodes a character's first bytes to."""
WINDOW_TOKENS = 16
"""New tokens after which earlier ones are not decoded again."""


class AnswerText:
    """Decodes an answer's tokens and finds where a stop text ends it."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        generation: Generation,
        byte_token: int | None = None,
    ) -> None:
        """Take the function that decodes tokens, and the options with the stop texts.

        `byte_token` is a byte fallback token that fits no character, if the tokenizer has one.
        """
        self._decode = decode
        self._byte_tokens = [] if byte_token is None else [byte_token]
        self._generation = generation
        self._tokens: list[int] = []
        self._context = 0
        self._start = 0
        self._before = ""
        self._text = self._stable = ""
        self._num_released = 0
        self.has_stopped = False
        """Whether the answer has a stop text; later tokens are not part of it."""

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the new text that later tokens cannot change."""
        if self.has_stopped:
            return ""
        self._tokens += tokens
        self._decode_window()
        stop = self._generation.find_stop(self._text)
        if stop is not None:
            self.has_stopped = True
            self._text = self._text[:stop]
            return self._release(len(self._text))
        return self._release(self._count_stable())

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._release(len(self._text))

    def _decode_window(self) -> None:
        """Decode the tokens after `_before`, and let `_before` grow once in a while.

        The tokens before are decoded too, because a token's text may depend on its neighbors. If
        their text changes, all tokens are decoded.
        """
        known = self._decode(self._tokens[self._context : self._start])
        text = self._decode(self._tokens[self._context :])
        if not text.startswith(known):
            self._context = self._start = 0
            self._before = known = ""
            text = self._decode(self._tokens)
        stable = text
        if self._byte_tokens:  # it makes all bytes before it unfinished
            stable = self._decode([*self._tokens[self._context :], *self._byte_tokens])
        stable = stable.rstrip(UNFINISHED_CHARACTER)
        self._text = self._before + text[len(known) :]
        self._stable = self._before + stable[len(known) :]
        if len(self._tokens) - self._start >= WINDOW_TOKENS and stable == text:
            self._before = self._text
            self._context, self._start = self._start, len(self._tokens)

    def _count_stable(self) -> int:
        """Return how many characters precede text that may change or a stop text's start."""
        text = self._stable
        sizes = (
            size
            for stop in self._generation.stop
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        )
        return len(text) - max(sizes, default=0)

    def _release(self, count: int) -> str:
        part = self._text[self._num_released : count]
        self._num_released = max(self._num_released, count)
        return part
