"""The tables of a run file that say where rows are and how they are made."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WrapSerializer, model_validator

from regauge.config import Settings

SHORTEST = 4
"""The least tokens a row or a field may hold: two special ones and some text."""
ALONE = ""
"""The name of a layout that has no other beside it; as a path it is the dataset's own folder."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
T = TypeVar("T")


class Data(Settings):
    """A prepared dataset: `prepare` writes it, every other verb reads it."""

    path: str
    """Folder of the dataset."""
    workers: int = Field(default=1, ge=0)
    """Threads that build batches ahead of the device; 0 builds them in the loop."""
    prefetch_steps: int = Field(default=2, ge=1)
    """Steps whose batches are built before they are asked for."""


class Tokenizer(Settings):
    """The tokenizer of a dataset: trained on its own train split, or loaded."""

    path: str | None = None
    """Folder of a tokenizer to use as it is; without one a byte-level BPE is trained."""
    vocabulary: int = Field(default=8192, ge=300)
    """Entries of a trained vocabulary, special tokens and the 256 bytes included."""
    minimum_count: int = Field(default=2, ge=1)
    """How often a pair must occur to become an entry."""
    normalize: Literal["nfc", "lowercase", "none"] = "nfc"
    """What is done to text before it is cut; "lowercase" is NFKC and lower case."""
    sample_mib: int = Field(default=256, ge=1)
    """Text to train on; of a larger corpus a keyed sample of its records is taken."""


class RowLayout(Settings):
    """What a row is: packed documents or named fields; `[rows.<name>]` for several of a corpus."""

    layout: Literal["packed", "fields"] = "packed"
    """"packed" fills rows of one length with documents; "fields" makes a row of each record."""
    text: str = "text"
    """The field that packed rows are made of."""
    length: int = Field(default=128, ge=SHORTEST)
    """Tokens of a packed row."""
    too_long: Literal["split", "truncate", "reject"] = "split"
    """What becomes of a document that is longer than a packed row."""
    fields: dict[str, int] = Field(default={})
    """Text fields of a row with their limits in tokens; longer texts are cut and counted."""
    numbers: tuple[str, ...] = ()
    """Integer fields of a row, such as a label."""

    @model_validator(mode="after")
    def _consistent(self) -> RowLayout:
        if self.layout == "packed" and (self.fields or self.numbers):
            raise ValueError("'fields' and 'numbers' are no part of packed rows")
        if self.layout == "fields" and not self.fields:
            raise ValueError("layout 'fields' needs fields, such as {summary = 32}")
        for name, limit in self.fields.items():
            if limit < SHORTEST:
                raise ValueError(f"the limit of '{name}' is below {SHORTEST} tokens")
        for name in self.numbers:
            if name in self.fields:
                raise ValueError(f"'{name}' is both a text and a number")
        return self

    def texts(self) -> tuple[str, ...]:
        """Return the names of the text fields that rows are made of."""
        return tuple(self.fields) if self.layout == "fields" else (self.text,)

    def limits(self) -> dict[str, int]:
        """Return the largest length in tokens of every text field."""
        return dict(self.fields) if self.layout == "fields" else {self.text: self.length}


def _by_name(value: Any) -> Any:
    """Return a table of layouts: the given one, or one that stands alone under its name."""
    tables = isinstance(value, dict) and all(
        isinstance(item, dict | RowLayout) for item in value.values()
    )
    return value if tables and value and "fields" not in value else {ALONE: value}


def _named(layouts: dict[str, RowLayout]) -> dict[str, RowLayout]:
    for name in layouts:
        if name != ALONE and not _NAME.fullmatch(name):
            raise ValueError(f"'{name}' cannot name rows: use small letters, digits, '-' and '_'")
    return layouts


def unwrapped(by_name: dict[str, T]) -> dict[str, T] | T:
    """Return what belongs to the layouts by name, or by itself where one stands alone."""
    return by_name.get(ALONE, by_name)


Layouts = Annotated[
    dict[str, RowLayout],
    BeforeValidator(_by_name),
    AfterValidator(_named),
    WrapSerializer(lambda value, handler: unwrapped(handler(value))),
]
"""One layout or several by name; none of them is named "fields", which is a key of one."""


class Split(Settings):
    """Which records are held out: whole clusters of near-duplicates, by a keyed hash."""

    heldout_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the clusters that goes to the split "heldout"."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Another seed holds out other clusters."""
    similarity: float = Field(default=0.7, gt=0.0, le=1.0)
    """Estimated Jaccard similarity of word shingles from which two records are near-duplicates."""
    repeats: Literal["keep", "drop"] = "keep"
    """"drop" leaves the first record of every cluster of near-duplicates, in train and held out."""
