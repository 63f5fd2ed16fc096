"""Selects real records for parity checks and timing."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regauge.data.dataset import Dataset
from regauge.data.randomness import hash_keys
from regauge.data.sources import Record
from regauge.data.sources.python_docs import PythonDocs
from regauge.models.io_spec import InputSpec
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from regauge.data.sources import Source

STDLIB_FOLDER = Path(json.__file__).parent.parent
STDLIB_PACKAGES = ("asyncio", "email", "logging", "unittest")
"""Standard library packages whose docstrings are the default texts."""
DOCUMENTATION_INTERVAL = 4
"""One in this many default texts is a docstring; the others are random words."""
WORD_COUNTS = (1, 2, 3, 5, 8, 13, 21, 34)
"""Lengths of random-word texts."""


class ProbeTexts(NamedTuple):
    """Texts and features of records."""

    columns: list[list[str]]
    """A list per text field."""
    values: dict[str, list[Any]]
    """Lists of numeric and categorical values, by field name."""
    origin: str
    """Where the records come from, for the evidence."""


def select_probe_texts(
    source: Source | None,
    dataset: Path | None,
    count: int,
    input_spec: InputSpec,
    list_words: Callable[[], Sequence[str]] = tuple,
) -> ProbeTexts:
    """Return records from the source, else held-out dataset rows, else docstrings.

    Docstrings cover few subjects, so three of four are replaced by random words from `list_words`,
    if it returns any. Raises DataError if no record in the source has the fields in `input_spec`.
    """
    if source is not None:
        probe = _select_records(_read_source(source), input_spec, count, f"source '{source.kind}'")
        if not probe.columns[0]:
            names = ", ".join(input_spec.text_fields) or "any text"
            problem = f"parity.source has no record with {names}"
            raise DataError(problem, "name another parity.source")
        return probe
    if dataset is not None:
        origin = f"held-out rows of {dataset}"
        probe = _select_records(_read_heldout(dataset), input_spec, count, origin)
        if probe.columns[0]:
            return probe
    roots = tuple(str(STDLIB_FOLDER / name) for name in STDLIB_PACKAGES)
    origin = "docstrings of Python's standard library"
    probe = _select_records(_read_source(PythonDocs(roots=roots)), InputSpec(), count, origin)
    [texts] = probe.columns
    if words := list_words():
        origin += ", and random words of the vocabulary"
        texts = [
            _random_text(words, index) if index % DOCUMENTATION_INTERVAL else text
            for index, text in enumerate(texts)
        ]
    num_texts = max(1, len(input_spec.text_fields))
    columns = [[*texts[offset:], *texts[:offset]] for offset in range(num_texts)]
    return probe._replace(columns=columns, origin=origin)


def _random_text(vocabulary: Sequence[str], key: int) -> str:
    draws = hash_keys(key, np.arange(1 + max(WORD_COUNTS), dtype=np.uint64))
    count = WORD_COUNTS[int(draws[0] % np.uint64(len(WORD_COUNTS)))]
    indices = draws[1 : 1 + count] % np.uint64(len(vocabulary))
    return " ".join(vocabulary[int(index)] for index in indices)


def _select_records(
    records: Iterable[dict[str, Any]], input_spec: InputSpec, count: int, origin: str
) -> ProbeTexts:
    """Return the first records with all text fields; without named fields, any texts."""
    if not input_spec.text_fields:
        return ProbeTexts([list(islice(_iterate_texts(records), count))], {}, origin)
    complete = (
        record
        for record in records
        if all(_is_text(record.get(name)) for name in input_spec.text_fields)
    )
    selected = list(islice(complete, count))
    columns = [[record[name] for record in selected] for name in input_spec.text_fields]
    names = (*input_spec.numeric_features, *input_spec.categorical_features)
    values = {name: [record.get(name) for record in selected] for name in names}
    return ProbeTexts(columns, values, origin)


def _iterate_texts(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    for record in records:
        for value in record.values():
            values = value if isinstance(value, list) else [value]
            yield from filter(_is_text, values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _read_source(source: Source) -> Iterator[dict[str, Any]]:
    for piece in source.list_pieces():
        yield from (item.fields for item in source.read(piece) if isinstance(item, Record))


def _read_heldout(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield held-out rows' original records, if the dataset kept them."""
    yield from Dataset(folder).read_texts("heldout")
