"""Records as an artifact's model reads them: prompts before texts, cut where it ends to read."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regauge.artifacts.rows import Rows, Texts
from regauge.data import chat_templates
from regauge.data.columns import buckets, value
from regauge.data.tokenizer import Encoder
from regauge.models import sentence_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from regauge.data.sources import Value
    from regauge.models.io_spec import Fields

Ids = list[np.ndarray]
NOTHING: Mapping[str, Sequence[Value | None]] = MappingProxyType({})


class Read(NamedTuple):
    """Records as tokens."""

    rows: Rows
    truncated: int
    """How many texts were longer than the model reads."""


class Reader:
    """A tokenizer with its prompts and its limits."""

    def __init__(self, folder: Path, reads: sentence_transformers.Reads, fields: Fields) -> None:
        foreign = reads.manner == "transformers"
        self._encoder = Encoder(folder, closed=not foreign, lowercase=reads.lowercase)
        self._special = foreign
        self._reads = reads
        self._fields = fields
        self._folder = folder

    @property
    def longest(self) -> int:
        """The most tokens of a text, with the special ones around it."""
        return self._reads.tokens

    def read(
        self,
        columns: Sequence[Sequence[str]],
        prompt: str | None = None,
        values: Mapping[str, Sequence[Value | None]] = NOTHING,
    ) -> Read:
        """Return records as tokens, given as a column for each of their texts.

        `prompt` is the name of what is put before each text, if not what the model's own is;
        `values` are the fields of candidates that are no text.
        """
        before = self._reads.before(prompt)
        if self._fields.joined and self._special:
            return self._pairs(*([before + text for text in column] for column in columns))
        given = self._fields.limits or (self._reads.tokens,) * len(columns)
        limits = [min(limit, self._reads.tokens) for limit in given]
        found = [
            self._encoded(texts, limit, before)
            for texts, limit in zip(columns, limits, strict=True)
        ]
        truncated = sum(count for _, count in found)
        lists = [ids for ids, _ in found]
        if not self._fields.joined:
            features = self._features(values, len(lists[0]))
            return Read(Rows(list(map(Texts.of, lists)), features), truncated)
        first = lists[0]
        joined = [self._joined(*pair) for pair in zip(*lists, strict=True)]
        truncated += sum(len(ids) > self._reads.tokens for ids in joined)
        joined = [self._cut(ids) for ids in joined]
        starts = np.fromiter(map(len, first), np.int32, len(first))
        return Read(Rows([Texts.of(joined)], [starts]), truncated)

    def _features(
        self, values: Mapping[str, Sequence[Value | None]], count: int
    ) -> list[np.ndarray]:
        """Return numbers, [records, numbers] fp32, and buckets, [records, categories] int64."""
        ranking = self._fields.ranking
        if ranking is None:
            return []
        numbers = np.full((count, max(1, len(self._fields.numbers))), np.nan, np.float32)
        for place, name in enumerate(self._fields.numbers):
            numbers[:, place] = [value(each, "real") for each in values[name]]
        hashes = np.full((count, max(1, len(self._fields.categories))), -1, np.int64)
        for place, name in enumerate(self._fields.categories):
            hashes[:, place] = [value(each, "category") for each in values[name]]
        return [numbers, buckets(hashes, ranking.interactions.buckets)]

    def _encoded(self, texts: Sequence[str], limit: int, before: str) -> tuple[Ids, int]:
        """Return the ids of texts between the special tokens, and how many were cut."""
        whole = [before + text for text in texts] if before else list(texts)
        if self._reads.ends != "closed":
            return self._prompts(whole, limit)
        found = self._encoder.encode(whole, special=self._special)
        room = limit - self._encoder.overhead
        truncated = sum(len(ids) > room for ids in found)
        return [self._encoder.wrap(ids[:room]) for ids in found], truncated

    def _prompts(self, texts: Sequence[str], limit: int) -> tuple[Ids, int]:
        """Return the ids of what is to be gone on with; of one that is too long its end."""
        if self._reads.ends == "chat":
            written = chat_templates.template(self._folder, None)
            found = self._encoder.encode([written.prompt(text) for text in texts], special=True)
            return [ids[-limit:] for ids in found], sum(len(ids) > limit for ids in found)
        found = self._encoder.encode(texts, special=self._special)
        room = limit - len(self._encoder.prefix)
        opened = [self._encoder.opened(ids[-room:]) for ids in found]
        return opened, sum(len(ids) > room for ids in found)

    def decoded(self, ids: np.ndarray) -> list[str]:
        """Return the texts of answers, [records, tokens], in which a number below 0 is nothing."""
        return [self._encoder.decode(row[row >= 0].astype(int).tolist()) for row in ids]

    def _pairs(self, firsts: Sequence[str], seconds: Sequence[str]) -> Read:
        """Return pairs of texts in the tokenizer's own form."""
        found = self._encoder.pairs(firsts, seconds, self._reads.tokens)
        starts = np.fromiter((pair.start for pair in found), np.int32, len(found))
        rows = Rows([Texts.of([pair.ids for pair in found])], [starts])
        return Read(rows, sum(pair.cut for pair in found))

    def _cut(self, ids: np.ndarray) -> np.ndarray:
        """Return a text that is no longer than the model reads, and ends as all do."""
        if len(ids) <= self._reads.tokens:
            return ids
        end = self._encoder.suffix
        return np.concatenate([ids[: self._reads.tokens - len(end)], end])

    def _joined(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return two texts as one: what every text begins with stands there once."""
        return np.concatenate([first, second[len(self._encoder.prefix) :]])
