"""Real records that a program is proved and timed on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regauge.data.dataset import Dataset
from regauge.data.randomness import keyed
from regauge.data.sources import Record
from regauge.data.sources.python_docs import PythonDocs
from regauge.errors import DataError
from regauge.models.io_spec import Fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from regauge.data.sources import Source

LIBRARY = Path(json.__file__).parent.parent
DOCUMENTED = ("asyncio", "email", "logging", "unittest")
"""Packages whose documentation is read where nothing else is named."""
EVERY = 4
"""Of so many texts one is documentation, and the others are made."""
SIZES = (1, 2, 3, 5, 8, 13, 21, 34)
"""Words of texts that are made."""


class Samples(NamedTuple):
    """Texts of records, and where they are from."""

    columns: list[list[str]]
    """A list for each text of a record."""
    values: dict[str, list[Any]]
    """Lists of what else is read of a record, by name."""
    origin: str


def samples(
    source: Source | None,
    dataset: Path | None,
    count: int,
    fields: Fields,
    words: Callable[[], Sequence[str]] = tuple,
) -> Samples:
    """Return records of a source, else of a dataset's held-out rows, else of documentation.

    Most texts of the last are some of these words instead, where there are any: documentation
    has few subjects, and a program is asked of all. Raises DataError where a source has none with
    these fields.
    """
    if source is not None:
        found = _read(_of_source(source), fields, count, f"source '{source.kind}'")
        if not found.columns[0]:
            wanted = ", ".join(fields.texts) or "any text"
            raise DataError(f"proof.source has no record with {wanted}", "name another one")
        return found
    if dataset is not None:
        held = _read(_of_dataset(dataset), fields, count, f"held-out rows of {dataset}")
        if held.columns[0]:
            return held
    roots = tuple(str(LIBRARY / name) for name in DOCUMENTED)
    told = "documentation of Python's library"
    documented = _read(_of_source(PythonDocs(roots=roots)), Fields(), count, told)
    [texts] = documented.columns
    if known := words():
        told += ", and words of the vocabulary in no order"
        texts = [_text(known, at) if at % EVERY else text for at, text in enumerate(texts)]
    columns = [[*texts[at:], *texts[:at]] for at in range(max(1, len(fields.texts)))]
    return documented._replace(columns=columns, origin=told)


def _text(vocabulary: Sequence[str], number: int) -> str:
    """Return a text of some words, keyed by its number."""
    drawn = keyed(number, np.arange(1 + max(SIZES), dtype=np.uint64))
    size = SIZES[int(drawn[0] % np.uint64(len(SIZES)))]
    places = drawn[1 : 1 + size] % np.uint64(len(vocabulary))
    return " ".join(vocabulary[int(place)] for place in places)


def _read(records: Iterable[dict[str, Any]], fields: Fields, count: int, origin: str) -> Samples:
    """Return the first records that have all texts; where none are named, every text is one."""
    if not fields.texts:
        return Samples([list(islice(_every(records), count))], {}, origin)
    whole = (each for each in records if all(_is_text(each.get(name)) for name in fields.texts))
    some = list(islice(whole, count))
    columns = [[each[name] for each in some] for name in fields.texts]
    others = (*fields.numbers, *fields.categories)
    return Samples(columns, {name: [each.get(name) for each in some] for name in others}, origin)


def _every(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    for record in records:
        for value in record.values():
            many = value if isinstance(value, list) else [value]
            yield from filter(_is_text, many)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _of_source(source: Source) -> Iterator[dict[str, Any]]:
    for piece in source.pieces():
        yield from (each.fields for each in source.read(piece) if isinstance(each, Record))


def _of_dataset(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield held-out rows as they were read, where they were kept."""
    yield from Dataset(folder).texts("heldout")
