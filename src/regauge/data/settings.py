"""The tables of a run file that say where rows are and how they are made."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WrapSerializer, model_validator

from regauge import choices
from regauge.config import Settings

LAYOUTS = "data/layouts"
"""The folder of the kinds of rows, which say what of a table of rows is theirs."""
SHORTEST = 4
"""The least tokens a row or a field of one may hold: two special ones and some text."""
TEXT = "text"
"""The field that is meant where none is named."""
ALONE = ""
"""The name of a layout that has no other beside it; as a path it is the dataset's own folder."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
T = TypeVar("T")


class Part(Settings):
    """Another dataset whose rows are mixed in, of the same layout and tokenizer."""

    path: str
    """Folder of the dataset."""
    share: float = Field(gt=0, lt=1)
    """Its share of the rows of every stretch of steps, kept exactly."""
    name: str = ""
    """Word for it in the names of held-out metrics; by default that of its folder."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_folder(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return {"name": Path(value["path"]).name, **value}
        return value

    @model_validator(mode="after")
    def _named(self) -> Part:
        if not self.name:
            raise ValueError("a part of data.mix has no name: set its name")
        return self


class Data(Settings):
    """A prepared dataset: `prepare` writes it, every other verb reads it."""

    path: str
    """Folder of the dataset."""
    mix: tuple[Part, ...] = ()
    """Datasets that are mixed in, such as older ones: `[[data.mix]]`; the rest is of `path`."""
    workers: int = Field(default=1, ge=0)
    """Threads that build batches ahead of the device; 0 builds them in the loop."""
    prefetch_steps: int = Field(default=2, ge=1)
    """Steps whose batches are built before they are asked for."""

    @model_validator(mode="after")
    def _shares_leave_room(self) -> Data:
        total = sum(Fraction(str(part.share)) for part in self.mix)
        if total >= 1:
            raise ValueError(
                f"the shares of data.mix are {float(total):g}: leave some for data.path"
            )
        names = [part.name for part in self.mix]
        if len(set(names)) < len(names):
            raise ValueError("two parts of data.mix have one name: set their name")
        return self


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
    """What a row is; `[rows.<name>]` for several kinds of rows of one corpus."""

    layout: str = "packed"
    """"packed" and "chat" fill rows with documents or conversations; "fields" makes a row of each
    record, "groups" of all that share a value, "halves" of two pieces that follow one another."""
    text: str = TEXT
    """The field that packed rows and halves are made of."""
    length: int = Field(default=128, ge=SHORTEST)
    """Tokens of a row that is filled or has two halves."""
    too_long: Literal["split", "truncate", "reject"] = "split"
    """What becomes of what is longer than a row; conversations are cut ("truncate") by default."""
    template: str | None = None
    """Chat template: "alpaca", "chatml" or a file (Jinja); by default the tokenizer's own."""
    fields: dict[str, int] = Field(default={})
    """Text fields of a row with their limits in tokens; longer texts are cut and counted."""
    numbers: tuple[str, ...] = ()
    """Integer fields of a row, such as a label: every record has them."""
    reals: tuple[str, ...] = ()
    """Fields with real numbers, such as a price; they may be missing."""
    categories: tuple[str, ...] = ()
    """Fields with texts or integers that name a kind; they may be missing."""
    group: str | None = None
    """Field whose value the records of a row have in common (layout "groups")."""
    shared: tuple[str, ...] = ()
    """Text fields that a group has once, such as its query; the others are of each record."""
    members: int = Field(default=16, ge=1)
    """Most records of a group; those beyond are left out and counted."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, table: Any) -> Any:
        if isinstance(table, dict) and isinstance(name := table.get("layout", "packed"), str):
            return {**choices.load(LAYOUTS, name).defaults, **table}
        return table

    @model_validator(mode="after")
    def _consistent(self) -> RowLayout:
        layout = choices.load(LAYOUTS, self.layout)
        for name, field in type(self).model_fields.items():
            default = layout.defaults.get(name, field.default)
            if name not in ("layout", *layout.keys) and getattr(self, name) != default:
                raise ValueError(f"'{name}' is no part of rows of layout '{self.layout}'")
        layout.check(self)
        return self


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


class Limits(Settings):
    """How long a text may be; another leaves its record out, which is counted by reason."""

    fewest_characters: int = Field(default=0, ge=0)
    """Characters that a text must have."""
    most_characters: int | None = Field(default=None, ge=1)
    """Characters that a text may have."""
    fewest_words: int = Field(default=0, ge=0)
    """Words that a text must have: what blanks separate."""
    most_words: int | None = Field(default=None, ge=1)
    """Words that a text may have."""

    @model_validator(mode="after")
    def _consistent(self) -> Limits:
        for what in ("characters", "words"):
            fewest, most = getattr(self, f"fewest_{what}"), getattr(self, f"most_{what}")
            if most is not None and fewest > most:
                raise ValueError(f"no text has {fewest} {what} or more, and {most} or fewer")
        return self


def _by_field(value: Any) -> Any:
    """Return tables of limits; those that name no field are of the field "text"."""
    if not isinstance(value, dict):
        return value
    tables: dict[str, Any] = {
        name: item for name, item in value.items() if isinstance(item, dict | Limits)
    }
    alone = {name: item for name, item in value.items() if name not in tables}
    return tables if not alone else {**tables, TEXT: {**alone, **tables.get(TEXT, {})}}


Filter = Annotated[dict[str, Limits], BeforeValidator(_by_field)]
"""Limits of texts by the names of their fields."""


class Split(Settings):
    """Which records are held out, by a keyed hash: clusters of near-duplicates, or groups."""

    heldout_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the clusters that goes to the split "heldout"."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Another seed holds out other clusters."""
    similarity: float = Field(default=0.7, gt=0.0, le=1.0)
    """Estimated Jaccard similarity of word shingles from which two records are near-duplicates; at
    1 only equal records are, and reading is faster."""
    by: str | None = None
    """Field whose value decides instead: records that share it stay together."""
    repeats: Literal["keep", "drop"] = "keep"
    """"drop" leaves the first record of every cluster of near-duplicates, in train and held out."""

    @property
    def compares_words(self) -> bool:
        """Whether anything depends on which records are near-duplicates and not equal."""
        used = self.repeats == "drop" or (self.by is None and self.heldout_share > 0)
        return used and self.similarity < 1
