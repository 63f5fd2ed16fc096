"""Chooses a job's fields by their names and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.data.values import parse_float
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection

    from regauge.commands._recipes.data_file import DataFile
    from regauge.data.values import Value

LABEL_NAMES = ("label", "labels", "class", "category", "target", "intent", "sentiment", "topic")
RELEVANCE_NAMES = ("label", "relevance", "score", "rating", "grade", "clicked")
QUERY_NAMES = ("query", "question", "anchor", "sentence1", "text1", "title", "summary")
DOCUMENT_NAMES = (
    "document",
    "answer",
    "positive",
    "passage",
    "sentence2",
    "text2",
    "context",
    "body",
    "text",
)
GROUP_NAMES = ("query_id", "qid", "group_id", "session_id")
NEGATIVE_NAMES = ("negative", "hard_negative")
TEXT_NAMES = ("text", "sentence", "content", "body", "review", "document", "title")
SCORE_NAMES = ("score", "similarity", "label", "relevance", "rating")
WORD_NAMES = ("tokens", "words")
TAG_NAMES = ("tags", "ner_tags", "labels", "pos_tags", "upos")
VECTOR_NAMES = ("embedding", "vector", "embeddings")
PREFERENCE_FIELDS = ("chosen", "rejected")
CHAT_FIELDS = (("messages",), ("instruction", "output"))
"""Conversation fields; a record has all fields in one of these groups."""
MAX_CLASSES = 100
"""Largest number of distinct values at which a field counts as a label."""


def find_label(data: DataFile, names: Collection[str] = LABEL_NAMES) -> str:
    """Return the label field: by its name, or the one with the fewest values.

    Raises DataError if there is none.
    """
    if (label := _find_by_name(data, names)) is not None:
        return label
    candidates = [
        (field.num_distinct, name)
        for name, field in data.fields.items()
        if 1 < field.num_distinct <= min(MAX_CLASSES, data.num_records // 2)
    ]
    if not candidates:
        raise _missing(data, "a label", names)
    return min(candidates)[1]


def find_text(data: DataFile, excluded: Collection[str] = ()) -> str:
    """Return the text field: by its name, or the one with the longest texts.

    Raises DataError if no field has texts.
    """
    texts = _list_texts(data, excluded)
    if (text := _find_by_name(data, TEXT_NAMES, texts)) is not None:
        return text
    if not texts:
        raise _missing(data, "a text", TEXT_NAMES)
    return max(texts, key=lambda name: data.fields[name].num_tokens)


def find_pair(data: DataFile, excluded: Collection[str] = ()) -> tuple[str, str]:
    """Return the fields with the query and the matching document.

    They are found by name; otherwise they are the first two text fields other than labels. Raises
    DataError if there are fewer than two.
    """
    texts = [
        name
        for name in _list_texts(data, {*excluded, *NEGATIVE_NAMES})
        if name.lower() not in LABEL_NAMES or data.fields[name].num_distinct > MAX_CLASSES
    ]
    query = _find_by_name(data, QUERY_NAMES, texts)
    document = _find_by_name(data, DOCUMENT_NAMES, [name for name in texts if name != query])
    rest = [name for name in texts if name not in (query, document)]
    query = query or (rest.pop(0) if rest else None)
    document = document or (rest.pop(0) if rest else None)
    if query is None or document is None:
        raise _missing(data, "a query and a document", ("query", "document"))
    return query, document


def find_group(data: DataFile) -> str | None:
    """Return the field with the query id, if any."""
    return _find_by_name(data, GROUP_NAMES)


def find_negatives(data: DataFile) -> list[str]:
    """Return the fields with texts not matching the query."""
    return [name for name in NEGATIVE_NAMES if name in data.fields]


def find_features(data: DataFile, excluded: Collection[str]) -> list[str]:
    """Return the numeric fields, which are a candidate's features."""
    return [
        name
        for name, field in data.fields.items()
        if name not in excluded
        and not name.lower().endswith("id")
        and all(isinstance(value, int | float) for value in field.values)
    ]


def find_score(data: DataFile) -> str:
    """Return the field with a number; raises DataError if there is none."""
    numbers = [name for name, field in data.fields.items() if all(map(_is_number, field.values))]
    return _choose(data, "a number", SCORE_NAMES, numbers)


def find_tagged(data: DataFile) -> tuple[str, str]:
    """Return the fields with the words of a sentence and with their tags.

    They are found by name; otherwise they are the first two lists. Raises DataError if there are
    fewer than two.
    """
    lists = [
        name
        for name, field in data.fields.items()
        if all(isinstance(value, list) for value in field.values)
    ]
    words = _choose(data, "a list of words", WORD_NAMES, lists)
    lists.remove(words)
    return words, _choose(data, "a list of tags", TAG_NAMES, lists)


def find_vector(data: DataFile) -> str:
    """Return the field with a list of numbers; raises DataError if there is none."""
    vectors = [
        name
        for name, field in data.fields.items()
        if all(isinstance(value, list) and value for value in field.values)
        and all(isinstance(number, int | float) for number in field.values[0])  # type: ignore[union-attr]
    ]
    return _choose(data, "a vector", VECTOR_NAMES, vectors)


def find_triplet(data: DataFile) -> tuple[str, str, str]:
    """Return the fields with the anchor, the matching text and another text."""
    negatives = find_negatives(data)
    if not negatives:
        raise _missing(data, "a text that does not match", NEGATIVE_NAMES)
    return (*find_pair(data), negatives[0])


def check_preferences(data: DataFile) -> None:
    """Raise DataError if the records do not have a chosen and a rejected answer."""
    if not set(PREFERENCE_FIELDS) <= set(data.fields):
        raise _missing(data, "a chosen and a rejected answer", PREFERENCE_FIELDS)


def check_conversations(data: DataFile) -> None:
    """Raise DataError if the records are not conversations."""
    if not any(set(group) <= set(data.fields) for group in CHAT_FIELDS):
        raise _missing(data, "conversations", ("messages", "instruction and output"))


def _list_texts(data: DataFile, excluded: Collection[str]) -> list[str]:
    return [name for name, field in data.fields.items() if field.is_text and name not in excluded]


def _is_number(value: Value) -> bool:
    """Return whether a value is a number, or a text that `prepare` reads as one."""
    if not isinstance(value, str):
        return isinstance(value, int | float)
    try:
        parse_float(value)
    except ValueError:
        return False
    return True


def _choose(data: DataFile, content: str, names: Collection[str], candidates: list[str]) -> str:
    """Return a field by its name, or the first candidate; raises DataError without one."""
    if not candidates:
        raise _missing(data, content, names)
    return _find_by_name(data, names, candidates) or candidates[0]


def _find_by_name(
    data: DataFile, names: Collection[str], candidates: Collection[str] | None = None
) -> str | None:
    by_name = {name.lower(): name for name in (data.fields if candidates is None else candidates)}
    return next((by_name[name] for name in names if name in by_name), None)


def _missing(data: DataFile, content: str, names: Collection[str]) -> DataError:
    fields = ", ".join(data.fields)
    return DataError(
        f"{data.source['files'][0]} has no field with {content}; its fields are: {fields}",
        f"rename a field, for example to {' or '.join(tuple(names)[:2])}",
    )
