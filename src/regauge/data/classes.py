"""Label classes: their texts in records, their names, and their numbers in rows.

An encoded record has its classes as texts. Their numbers follow when all records are read: names
are sorted, and whole numbers are kept.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data.values import parse_integer, read_integer
from regauge.system.errors import DataError
from regauge.system.log import logger
from regauge.system.wording import join_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regauge.data.values import Value

MAX_CLASSES = 2**16
"""Maximum classes per field."""
NO_CLASS = -1
"""Number for a missing class in a list."""
_WHOLE = re.compile(r"(?:0|[1-9]\d{0,18})(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_MAX_SHOWN = 5
"""Maximum classes listed in a message."""


Spelling = Literal["strip", "fold"] | None
"""Which spellings are one class; see `rows.label_spelling`."""


class LabelCounts(NamedTuple):
    """A field's class texts and how many rows have them."""

    train: Counter[str]
    heldout: Counter[str]
    num_lists: int = 0
    """How many records have a list of classes."""


class LabelClasses(NamedTuple):
    numbers: dict[str, int]
    """Class text -> number."""
    names: tuple[str, ...] | None = None
    """Names of classes 0, 1, …; None if the records have numbers."""
    is_list: bool = False

    def number(self, texts: pa.ListArray) -> pa.Array:
        """Return records' class numbers, int64; lists if a record has several classes.

        A missing text in a list becomes NO_CLASS.
        """
        keys = pa.array(self.numbers, pa.string())
        values = np.array([*self.numbers.values(), NO_CLASS], np.int64)
        positions = pc.index_in(pc.list_flatten(texts), value_set=keys)
        flat = pa.array(values[pc.fill_null(positions, len(keys)).to_numpy()])
        if not self.is_list:
            return flat
        offsets = np.zeros(len(texts) + 1, np.int32)
        np.cumsum(pc.list_value_length(texts).to_numpy(), out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), flat)


def list_class_texts(value: Value | None, spelling: Spelling = None) -> list[str]:
    """Return a label's classes as texts: one, or a list's without repetition.

    Raises TypeError if the value is missing or is not a class.
    """
    texts = map(format_class, value if isinstance(value, list) else [value])
    by_class: dict[str, str] = {}
    for text in texts:
        by_class.setdefault(normalize_spelling(text, spelling), text)
    return list(by_class.values())


def normalize_spelling(text: str, spelling: Spelling) -> str:
    """Return a text that is equal for all spellings of a class."""
    if spelling is None:
        return text
    stripped = " ".join(text.split())
    return stripped.casefold() if spelling == "fold" else stripped


def format_class(value: Value | None) -> str:
    """Return a class as text; 7, 7.0 and "7" are one class. Raises TypeError for other values."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return str(value if (number := read_integer(value)) is None else number)
    kind = "no value" if value is None or value == "" else type(value).__name__
    raise TypeError(f"{kind} {'' if value is None else str(value)[:80]}".rstrip())


def replace_numbers(value: Value | None, names: Sequence[str]) -> Value | None:
    """Replace a label's numbers 0, 1, … by the names its source declares.

    A number may be a text, as in CSV files, unless it is a name. Returns None for a negative
    number, which marks a missing label.
    """
    if isinstance(value, list):
        return [replace_numbers(item, names) for item in value]
    number = _read_number(value, names) if isinstance(value, str) else read_integer(value)
    if number is None or number >= len(names):
        return value
    return names[number] if number >= 0 else None


def _read_number(text: str, names: Sequence[str]) -> int | None:
    """Return a text's integer; None for a name and for other texts."""
    if text in names:
        return None
    try:
        return parse_integer(text)
    except ValueError:
        return None


def find_classes(
    field: str,
    counts: LabelCounts,
    declared: tuple[str, ...] = (),
    source_names: tuple[str, ...] = (),
    spelling: Spelling = None,
) -> LabelClasses:
    """Return a field's classes.

    `declared` are the names in the run file, and `source_names` a ClassLabel's. Without them, whole
    numbers are kept, and the names in the training rows are sorted. Raises DataError for a class
    missing from the declared ones or from the training rows.
    """
    if spelling is not None:
        chosen = _choose_spellings(field, counts, declared or source_names, spelling)
        train, heldout = (_rename(texts, chosen) for texts in (counts.train, counts.heldout))
        merged = LabelCounts(train, heldout, counts.num_lists)
        classes = find_classes(field, merged, declared, source_names)
        numbers = {text: classes.numbers[name] for text, name in chosen.items()}
        return classes._replace(numbers={**classes.numbers, **numbers})
    texts = list(dict.fromkeys([*counts.train, *counts.heldout]))
    if len(counts.train) == 1:
        logger.warning("all training records have the class '%s' of '%s'", *counts.train, field)
    is_list, are_whole = counts.num_lists > 0, all(map(_WHOLE.fullmatch, texts))
    if declared:
        is_indexed = are_whole and not any(map(_NUMBER.fullmatch, declared))
        whole = _number_whole(texts) if is_indexed else []
        indices = {text: number for text, number in whole if number < len(declared)}
        numbers = indices if is_indexed else _number_names(declared)
        _check_known(field, counts, numbers, "add it to rows.labels, or correct the records")
        return LabelClasses(numbers, declared, is_list)
    if source_names and set(texts) <= set(source_names):
        return LabelClasses(_number_names(source_names), source_names, is_list)
    _check_count(field, texts)
    if not are_whole and all(map(_NUMBER.fullmatch, texts)):
        _raise_no_classes(field, texts)
    remedy = f"set rows.labels.{field} to the list of all classes, or remove these records"
    if are_whole:
        numbers = dict(_number_whole(texts))
        used = {numbers[text] for text in counts.train}
        known = {text: number for text, number in numbers.items() if number in used}
        _check_known(field, counts, known, remedy)
        _warn_about_gaps(field, used)
        return LabelClasses(numbers, None, is_list)
    names = tuple(sorted(counts.train))
    _warn_about_twins(field, names)
    _check_known(field, counts, _number_names(names), remedy)
    return LabelClasses(_number_names(names), names, is_list)


def _choose_spellings(
    field: str, counts: LabelCounts, known: tuple[str, ...], spelling: Spelling
) -> dict[str, str]:
    """Return text -> the text of its class: a known name, or the most frequent spelling."""
    chosen = {normalize_spelling(name, spelling): name for name in known}
    if len(chosen) < len(known):
        problem = f"two names of '{field}' are one class by rows.label_spelling"
        raise DataError(problem, "remove one of them, or remove rows.label_spelling")
    total = counts.train + counts.heldout
    for text in sorted(total, key=lambda text: (text not in counts.train, -total[text], text)):
        chosen.setdefault(normalize_spelling(text, spelling), normalize_spelling(text, "strip"))
    return {text: chosen[normalize_spelling(text, spelling)] for text in total}


def _rename(counts: Counter[str], names: dict[str, str]) -> Counter[str]:
    renamed: Counter[str] = Counter()
    for text, count in counts.items():
        renamed[names[text]] += count
    return renamed


def _number_names(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _number_whole(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Return whole numbers as texts and as integers; "7." and "7.00" are 7."""
    return [(text, int(text.partition(".")[0])) for text in texts]


def _check_known(field: str, counts: LabelCounts, known: dict[str, int], remedy: str) -> None:
    for split, texts in (("training", counts.train), ("held-out", counts.heldout)):
        for text in sorted(texts.keys() - known.keys()):
            records = "record has" if texts[text] == 1 else "records have"
            problem = f"{texts[text]} {split} {records} the class '{text}' in '{field}', which"
            if split == "held-out" and text not in counts.train:
                raise DataError(f"{problem} no training record has", remedy)
            raise DataError(f"{problem} is not declared", remedy)


def _check_count(field: str, texts: list[str]) -> None:
    numbers = [int(text.partition(".")[0]) for text in texts if _WHOLE.fullmatch(text)]
    if len(texts) > MAX_CLASSES:
        problem = f"'{field}' has {len(texts)} classes; the maximum is {MAX_CLASSES}"
        raise DataError(problem, "name a field with few values in rows.labels")
    if len(numbers) == len(texts) and max(numbers, default=0) >= MAX_CLASSES:
        problem = f"'{field}' has the class {max(numbers)}; the maximum is {MAX_CLASSES - 1}"
        raise DataError(problem, "number the classes from 0")


def _raise_no_classes(field: str, texts: list[str]) -> None:
    example = next(text for text in texts if not _WHOLE.fullmatch(text))
    if all(float(text).is_integer() for text in texts):
        names = ", ".join(f'"{text}"' for text in sorted(texts, key=float)[:_MAX_SHOWN])
        problem = f"'{field}' has the class {example}; classes are numbered from 0"
        raise DataError(problem, f"name all classes, such as rows.labels.{field} = [{names}]")
    problem = f"'{field}' has numbers that are not classes, such as {example}"
    remedy = f"move '{field}' to rows.floats, and set task.problem_type = \"regression\""
    raise DataError(problem, remedy)


def _warn_about_gaps(field: str, numbers: set[int]) -> None:
    """Warn if no training record has some number below the largest one."""
    missing = [number for number in range(max(numbers, default=0)) if number not in numbers]
    if missing:
        shown = join_first(missing, _MAX_SHOWN)
        logger.warning("no training record has the class %s of '%s'", shown, field)


def _warn_about_twins(field: str, names: tuple[str, ...]) -> None:
    """Warn if names differ only in white space or case."""
    by_class: dict[str, str] = {}
    twins = []
    for name in names:
        first = by_class.setdefault(normalize_spelling(name, "fold"), name)
        if first != name:
            twins.append(f"'{first}' and '{name}'")
    if twins:
        message = "classes of '%s' differ in white space or case only: %s; to merge them, set %s"
        shown = join_first(twins, _MAX_SHOWN)
        logger.warning(message, field, shown, 'rows.label_spelling = "fold"')
