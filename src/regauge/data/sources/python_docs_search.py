"""Search in the documentation of Python: a summary is the query, and bodies are the candidates.

One candidate is the body of the query; the others are its nearest neighbors by words (BM25), which
makes the ranking difficult. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import Field

from regauge.data.lexical import split_words
from regauge.data.sources import Piece, Record, Rejected, _files
from regauge.data.sources._docstrings import (
    TEXT_SHARE,
    DocumentationSource,
    DocumentedObject,
    read_documentation,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from regauge.data.values import Value


class _Page(NamedTuple):
    file: str
    item: DocumentedObject
    summary: str
    body: str

    @property
    def key(self) -> bytes:
        """Hash of the summary, which determines the sample and the order."""
        return hashlib.blake2b(self.summary.encode(), digest_size=16).digest()


class PythonDocsSearch(DocumentationSource):
    """A record per candidate: `query`, `document`, its features and its `label`.

    The features are `module`, `kind`, `parameters` (of a function), `words`, `depth` (of its name)
    and `overlap` (the share of the query's words that the document has).
    """

    queries: int = Field(default=4000, ge=1)
    """Number of queries, which are a sample by content; all are used if there are fewer."""
    candidates: int = Field(default=8, ge=2)
    """Candidates per query, including the correct one."""

    def field_names(self) -> tuple[str, ...]:
        features = ("module", "kind", "parameters", "words", "depth", "overlap")
        return ("query", "document", *features, "label")

    def list_pieces(self) -> tuple[Piece, ...]:
        """Return all files as one piece, because candidates may come from any file."""
        inputs = [file for files in self.list_files() for file in files]
        return (_files.build_piece(*inputs, text_share=TEXT_SHARE),)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the candidates of one query after another, in an order that reveals nothing."""
        pages: dict[bytes, _Page] = {}  # a repeated summary has no unique answer: keep the first
        for name in piece.files:
            for item in read_documentation(name):
                if isinstance(item, Rejected):
                    yield item
                elif pair := self.split_pair(item.text):
                    page = _Page(name, item, *pair)
                    pages.setdefault(page.key, page)
        corpus = list(pages.values())
        by_key = sorted(range(len(corpus)), key=lambda number: corpus[number].key)
        words = [frozenset(split_words(page.body)) for page in corpus]
        for query, neighbors in self._find_neighbors(corpus, sorted(by_key[: self.queries])):
            page = corpus[query]
            candidates = sorted(
                (_sort_key(corpus[number].key, page.key), number) for number in (query, *neighbors)
            )
            for _, number in candidates:
                yield _build_record(page, corpus[number], words[number])

    def _find_neighbors(
        self, corpus: Sequence[_Page], queries: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each query with the pages that are nearest to it, by their numbers."""
        import bm25s

        index = bm25s.BM25()
        index.index([split_words(page.body) for page in corpus], show_progress=False)
        for query in queries:
            known = [
                word for word in split_words(corpus[query].summary) if word in index.vocab_dict
            ]
            scores = index.get_scores(known) if known else np.zeros(len(corpus))
            nearest = np.argsort(-scores, kind="stable")[: self.candidates].tolist()
            yield query, [number for number in nearest if number != query][: self.candidates - 1]


def _build_record(query: _Page, page: _Page, words: frozenset[str]) -> Record:
    query_words = set(split_words(query.summary))
    item = page.item
    fields: dict[str, Value] = {
        "query": query.summary,
        "document": page.body,
        "module": item.location.partition(".")[0],
        "kind": item.kind,
        "words": len(page.body.split()),
        "depth": item.location.count("."),
        "overlap": len(query_words & words) / len(query_words),
        "label": int(page is query),
    }
    if item.parameters is not None:
        fields["parameters"] = item.parameters
    return Record(page.file, item.location, fields)


def _sort_key(page: bytes, query: bytes) -> bytes:
    return hashlib.blake2b(page, key=query, digest_size=8).digest()
