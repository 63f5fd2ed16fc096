"""The text of an answer whose tokens arrive one after the other.

Text is released only when no later token can change it: an unfinished character and a possible stop
text start are held back.
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

    def __init__(self, decode: Callable[[list[int]], str], generation: Generation) -> None:
        """Take the function that decodes tokens, and the options with the stop texts."""
        self._decode = decode
        self._generation = generation
        self._tokens: list[int] = []
        self._context = 0
        self._start = 0
        self._before = ""
        self._text = ""
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
        window = self._decode_window()
        self._text = self._before + window
        stop = self._generation.find_stop(self._text)
        if stop is not None:
            self.has_stopped = True
            self._text = self._text[:stop]
            return self._release(len(self._text))
        return self._release(self._count_stable())

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._release(len(self._text))

    def _decode_window(self) -> str:
        """Return the text after `_before`, and let `_before` grow once in a while.

        The tokens before are decoded too, because a token's text may depend on its neighbors. If
        their text changes, all tokens are decoded.
        """
        known = self._decode(self._tokens[self._context : self._start])
        text = self._decode(self._tokens[self._context :])
        if not text.startswith(known):
            self._context = self._start = 0
            self._before = ""
            return self._decode(self._tokens)
        text = text[len(known) :]
        is_long = len(self._tokens) - self._start >= WINDOW_TOKENS
        if is_long and not text.endswith(UNFINISHED_CHARACTER):
            self._before += text
            self._context, self._start = self._start, len(self._tokens)
            return ""
        return text

    def _count_stable(self) -> int:
        """Return how many characters precede an unfinished character or a stop text's start."""
        text = self._text.rstrip(UNFINISHED_CHARACTER)
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
