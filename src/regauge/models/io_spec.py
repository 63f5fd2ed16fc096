"""What a program takes and gives, described; nothing here imports torch."""

from __future__ import annotations

from typing import Final, Literal

from regauge.config import Settings
from regauge.models.settings import Interactions

ROWS: Final = "rows"
LENGTH: Final = "length"
"""The sizes of a tensor that are not fixed."""
Answers = Literal["vectors", "classes", "values", "scores", "text", "tensor"]
"""What comes out: a vector of a text; scores of its classes; a value; the score of a candidate;
the text that a model goes on with; a tensor of an own module."""


class Input(Settings):
    """One tensor that a program takes."""

    name: str
    """Name of the argument."""
    shape: tuple[int | Literal["rows", "length"], ...]
    """Sizes; those that change from call to call have names."""
    dtype: Literal["int32", "int64", "float32"] = "float32"
    """What it consists of."""


class Ranking(Settings):
    """How the parts of a record make a score."""

    queries: int
    """How many of the texts, the first ones, are the query's."""
    calibrated: bool
    """Whether scores are logits of a probability, and not an order alone."""
    encoders: Literal["shared", "apart"]
    """Whether one encoder reads all texts, or one those of queries and one the others."""
    interactions: Interactions
    """What is made of the features."""


class Fields(Settings):
    """What a program reads of a record."""

    texts: tuple[str, ...] = ()
    """Fields with the texts; with none given, a record is one text, whatever its name."""
    limits: tuple[int, ...] = ()
    """Most tokens of each, with the special ones around it."""
    joined: bool = False
    """Whether two texts are read as one, the second behind the first."""
    numbers: tuple[str, ...] = ()
    """Fields with real numbers, which may be missing."""
    categories: tuple[str, ...] = ()
    """Fields whose values name a kind, and may be missing."""
    ranking: Ranking | None = None
    """What is made of them, where candidates are ranked."""

    @property
    def apart(self) -> int:
        """How many texts of a record are read apart from each other."""
        return 1 if self.joined else max(1, len(self.texts))

    def longest(self, positions: int | None) -> int | None:
        """Return the most tokens of a row: what its texts may have, and the model has places for.

        None where nothing says it; `positions` is None for a model that has any number.
        """
        if not self.limits:
            return positions
        asked = sum(self.limits) if self.joined else max(self.limits)
        return asked if positions is None else min(asked, positions)


def of_texts(fields: Fields) -> tuple[Input, ...]:
    """Return what a program takes that reads such records.

    Tokens and how many of them are real; of texts that are joined, where the second begins; of
    candidates their numbers, NaN where one is missing, and the buckets of their categories.
    """
    several = (fields.apart,) if fields.apart > 1 else ()
    inputs = [
        Input(name="tokens", shape=(ROWS, *several, LENGTH), dtype="int32"),
        Input(name="lengths", shape=(ROWS, *several), dtype="int32"),
    ]
    if fields.joined:
        inputs.append(Input(name="starts", shape=(ROWS,), dtype="int32"))
    if fields.ranking is not None:  # no compiler likes a tensor without a number in it
        numbers, categories = max(1, len(fields.numbers)), max(1, len(fields.categories))
        inputs.append(Input(name="numbers", shape=(ROWS, numbers)))
        inputs.append(Input(name="categories", shape=(ROWS, categories), dtype="int64"))
    return tuple(inputs)
