"""Real texts that a program is proved and timed on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regauge.data.shards import Dataset
from regauge.data.sources import Record
from regauge.data.sources.python_docs import PythonDocs
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.sources import Source

LIBRARY = Path(json.__file__).parent.parent
DOCUMENTED = ("asyncio", "email", "logging", "unittest")
"""Packages whose documentation is read where nothing else is named."""


class Samples(NamedTuple):
    """Texts, and where they are from."""

    texts: list[str]
    origin: str


def samples(source: Source | None, dataset: Path | None, count: int) -> Samples:
    """Return texts of a source, else of a dataset's held-out rows, else of documentation.

    Raises DataError where a source has none.
    """
    if source is not None:
        found = Samples(list(islice(_of_source(source), count)), f"source '{source.kind}'")
        if not found.texts:
            raise DataError("proof.source holds no text", "name another one")
        return found
    held = list(islice(_of_dataset(dataset), count)) if dataset is not None else []
    if held:
        return Samples(held, f"held-out rows of {dataset}")
    roots = tuple(str(LIBRARY / name) for name in DOCUMENTED)
    documentation = _of_source(PythonDocs(roots=roots))
    return Samples(list(islice(documentation, count)), "documentation of Python's library")


def _of_source(source: Source) -> Iterator[str]:
    for piece in source.pieces():
        for found in source.read(piece):
            if isinstance(found, Record):
                values = found.fields.values()
                yield from (each for each in values if isinstance(each, str) and each.strip())


def _of_dataset(folder: Path) -> Iterator[str]:
    """Yield the texts of held-out rows, where they were kept."""
    for row in Dataset(folder).texts("heldout"):
        for value in row.values():
            many = value if isinstance(value, list) else [value]
            yield from (text for text in many if isinstance(text, str) and text.strip())
