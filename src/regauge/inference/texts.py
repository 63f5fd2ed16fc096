"""Texts as an artifact's model reads them: its prompt before them, cut where it ends to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regauge.data.tokenizer import Encoder
from regauge.errors import SettingsError
from regauge.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from regauge.models.sentences import Reads


class Read(NamedTuple):
    """Texts as tokens."""

    ids: list[np.ndarray]
    """Of each text, int32, with the special ones around it."""
    truncated: int
    """How many were longer than the model reads."""


class Reader:
    """A tokenizer with its prompts and its limit."""

    def __init__(self, folder: Path, reads: Reads) -> None:
        foreign = reads.manner == "transformers"
        self._encoder = Encoder(folder, closed=not foreign)
        self._special = foreign
        self._reads = reads
        self._room = reads.tokens - self._encoder.overhead

    def prompt(self, name: str | None) -> str:
        """Return the text of a prompt: the named one, or the artifact's own.

        Raises SettingsError for a name that the artifact does not know.
        """
        prompts, wanted = self._reads.prompts, name or self._reads.prompt
        if wanted is None:
            return ""
        if wanted not in prompts:
            near = did_you_mean(wanted, tuple(prompts)) if prompts else "the artifact has none"
            raise SettingsError(f"no prompt is called '{wanted}'", near)
        return prompts[wanted]

    def read(self, texts: Sequence[str], prompt: str = "") -> Read:
        """Return texts as tokens; `prompt` is put before each."""
        whole = [prompt + text for text in texts] if prompt else list(texts)
        if self._reads.lowercase:
            whole = [text.lower() for text in whole]
        found = self._encoder.encode(whole, special=self._special)
        truncated = sum(len(ids) > self._room for ids in found)
        return Read([self._encoder.wrap(ids[: self._room]) for ids in found], truncated)
