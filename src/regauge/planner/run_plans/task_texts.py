"""The texts of a row that a task encodes: their fields, and how they share a batch.

The classes of the tasks know this, too, but they import numpy. A test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class TaskTexts:
    """Text fields of a row, and the length to which they are padded.

    `separate`: each text to its bucket. `longest`: all texts of a row to the bucket of the longest
    one. `joined`: the texts are one sequence. `whole`: rows to the maximum length.
    """

    padding: Literal["separate", "longest", "joined", "whole"]
    fields: tuple[str, ...] = ()
    """Fields with one text in each row; empty for rows of tokens alone."""
    candidate_fields: tuple[str, ...] = ()
    """Fields with one text for each candidate of a row."""
    can_pack: bool = True
    """Whether batches of any shape have their texts in packed rows."""

    @property
    def all_fields(self) -> tuple[str, ...]:
        """All text fields."""
        return self.fields + self.candidate_fields

    def count_sequences(self, candidates: int) -> int:
        """Return the sequences of a row with a number of candidates, padding included."""
        if self.padding in ("joined", "whole"):
            return 1
        return len(self.fields) + candidates * len(self.candidate_fields)


def read_task_texts(table: Mapping[str, Any]) -> TaskTexts:
    """Return the texts of a task, by its table in a run file.

    The rows of a task of another package are taken as whole rows.
    """
    return READERS.get(str(table.get("kind")), _read_whole_rows)(table)


def _list_names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _read_contrastive(table: Mapping[str, Any]) -> TaskTexts:
    documents = _list_names(table.get("document", "document"))
    negatives = _list_names(table.get("negatives", ()))
    return TaskTexts("separate", (str(table.get("query", "query")), *documents, *negatives))


def _read_triplet(table: Mapping[str, Any]) -> TaskTexts:
    names = ("anchor", "positive", "negative")
    return TaskTexts("separate", tuple(str(table.get(name, name)) for name in names))


def _read_mlm(table: Mapping[str, Any]) -> TaskTexts:
    return TaskTexts("whole", ("first", "second") if table.get("next_sentence") else ())


def _read_rank(table: Mapping[str, Any]) -> TaskTexts:
    queries = _list_names(table.get("query", "query"))
    documents = _list_names(table.get("document", "document"))
    can_pack = table.get("encoders", "shared") == "shared"
    return TaskTexts("longest", queries, documents, can_pack)


def _read_whole_rows(_: Mapping[str, Any]) -> TaskTexts:
    return TaskTexts("whole")


READERS: dict[str, Callable[[Mapping[str, Any]], TaskTexts]] = {
    "classify": lambda table: TaskTexts("joined", _list_names(table.get("text_fields", "text"))),
    "clm": _read_whole_rows,
    "contrastive": _read_contrastive,
    "distill": lambda table: TaskTexts("separate", _list_names(table.get("text_fields", "text"))),
    "dpo": lambda _: TaskTexts("longest", ("chosen", "rejected"), can_pack=False),
    "mlm": _read_mlm,
    "rank": _read_rank,
    "sft": _read_whole_rows,
    "similarity": lambda table: TaskTexts(
        "separate", _list_names(table.get("text_fields", ("sentence1", "sentence2")))
    ),
    "tokens": lambda table: TaskTexts("separate", (str(table.get("words", "tokens")),)),
    "triplet": _read_triplet,
}
"""Readers of the tables of tasks, by kind."""
