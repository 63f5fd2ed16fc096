"""A search through the documentation of Python: who looks for a summary is shown some bodies.

One of them is the summary's own; the others are the nearest by their words (BM25), which makes
them hard to tell apart. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import Field

from regauge.data.lexical import split_words
from regauge.data.sources import Piece, Record, Rejected, Value, _files
from regauge.data.sources._docstrings import TEXT_SHARE, Documentation, Documented, documents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class _Page(NamedTuple):
    """A documented object with a summary and a body."""

    file: str
    found: Documented
    summary: str
    body: str

    @property
    def key(self) -> bytes:
        """What pages are sampled and shuffled by: their summary alone."""
        return hashlib.blake2b(self.summary.encode(), digest_size=16).digest()


class PythonDocsSearch(Documentation):
    """A record for each candidate: `query`, `document`, its features and its `label`.

    Features are `module` and `kind`, `parameters` (of a function), `words`, `depth` (of its name),
    and `overlap`: the share of the query's words that it has.
    """

    queries: int = Field(default=4000, ge=1)
    """Summaries that are looked for: a sample by their content, or all where they are fewer."""
    candidates: int = Field(default=8, ge=2)
    """Bodies that each is shown, its own among them."""

    def fields(self) -> tuple[str, ...]:
        """Return the fields that records have."""
        features = ("module", "kind", "parameters", "words", "depth", "overlap")
        return ("query", "document", *features, "label")

    def pieces(self) -> tuple[Piece, ...]:
        """Return everything as one piece: a candidate may come from anywhere."""
        files = [file for root in self.files() for file in root]
        return (_files.whole(*files, text_share=TEXT_SHARE),)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the candidates of one query after the other, in an order that says nothing."""
        pages: dict[bytes, _Page] = {}  # of equal summaries the first, or none could be found
        for name in piece.files:
            for found in documents(name):
                if isinstance(found, Rejected):
                    yield found
                elif pair := self.pair(found.text):
                    page = _Page(name, found, *pair)
                    pages.setdefault(page.key, page)
        corpus = list(pages.values())
        asked = sorted(range(len(corpus)), key=lambda place: corpus[place].key)[: self.queries]
        words = [frozenset(split_words(page.body)) for page in corpus]
        for query, others in self._shown(corpus, sorted(asked)):
            page = corpus[query]
            shown = [(_shuffled(corpus[place].key, page.key), place) for place in (query, *others)]
            for _, place in sorted(shown):
                yield _record(page, corpus[place], words[place])

    def _shown(
        self, corpus: Sequence[_Page], asked: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each query with the other pages that are nearest."""
        import bm25s

        index = bm25s.BM25()
        index.index([split_words(page.body) for page in corpus], show_progress=False)
        for query in asked:
            known = [
                word for word in split_words(corpus[query].summary) if word in index.vocab_dict
            ]
            scores = index.get_scores(known) if known else np.zeros(len(corpus))
            nearest = np.argsort(-scores, kind="stable")[: self.candidates].tolist()
            yield query, [place for place in nearest if place != query][: self.candidates - 1]


def _record(query: _Page, page: _Page, words: frozenset[str]) -> Record:
    asked = set(split_words(query.summary))
    found = page.found
    fields: dict[str, Value] = {
        "query": query.summary,
        "document": page.body,
        "module": found.place.partition(".")[0],
        "kind": found.kind,
        "words": len(page.body.split()),
        "depth": found.place.count("."),
        "overlap": len(asked & words) / len(asked),
        "label": int(page is query),
    }
    if found.parameters is not None:
        fields["parameters"] = found.parameters
    return Record(page.file, found.place, fields)


def _shuffled(page: bytes, query: bytes) -> bytes:
    return hashlib.blake2b(page, key=query, digest_size=8).digest()
