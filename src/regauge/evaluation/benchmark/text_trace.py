"""Request texts: from a source, or sentences from documentation."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from regauge.data.sources import Record
from regauge.data.sources.python_docs import PythonDocs
from regauge.inference.export.probe_texts import STDLIB_FOLDER, STDLIB_PACKAGES
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.sources import Source
    from regauge.evaluation.benchmark.serving_settings import TraceSettings

SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
CHARACTERS = range(20, 401)
"""Default text lengths; servers refuse texts with more tokens than the model reads."""


@dataclass(frozen=True)
class TextTrace:
    """Texts for requests, in their real lengths."""

    texts: tuple[str, ...]
    origin: str

    def describe(self) -> dict[str, Any]:
        """Return the texts' origin, count and lengths."""
        lengths = [len(text) for text in self.texts]
        return {
            "origin": self.origin,
            "count": len(lengths),
            "mean_characters": statistics.fmean(lengths),
            "max_characters": max(lengths),
        }


def read_trace(settings: TraceSettings) -> TextTrace:
    """Return the source's first texts, or sentences from docstrings without a source.

    Raises DataError if the source does not contain any text.
    """
    if settings.source is not None:
        origin = f"source '{settings.source.kind}'"
        texts = _read_texts(settings.source)
    else:
        origin = "sentences of docstrings of Python's standard library"
        roots = tuple(str(STDLIB_FOLDER / name) for name in STDLIB_PACKAGES)
        texts = _split_sentences(_read_texts(PythonDocs(roots=roots)))
    distinct = tuple(islice(dict.fromkeys(texts), settings.count))
    if not distinct:
        raise DataError("trace.source does not contain text", "name another trace.source")
    return TextTrace(distinct, origin)


def _read_texts(source: Source) -> Iterator[str]:
    """Yield the texts in all record fields of a source."""
    for piece in source.list_pieces():
        for record in source.read(piece):
            if isinstance(record, Record):
                values = record.fields.values()
                yield from (value for value in values if isinstance(value, str) and value.strip())


def _split_sentences(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        for part in SENTENCE.split(text):
            sentence = " ".join(part.split())
            if len(sentence) in CHARACTERS:
                yield sentence
