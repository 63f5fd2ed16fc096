"""Dataset settings: the tables `data`, `tokenizer`, `rows`, `filter` and `split` in a run file."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WrapSerializer, model_validator

from regauge.config import Settings
from regauge.system import choices

LAYOUTS = "data/layouts"
"""Row layout folder. A layout names the keys of `rows` it reads."""
MIN_TOKENS = 4
"""Minimum token limit for a row or one of its fields: two special tokens and some text."""
DEFAULT_TEXT_FIELD = "text"
"""Field to use if none is named."""
UNNAMED = ""
"""Name of a corpus's only layout; as a path it is the dataset folder itself."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_LAYOUT_TABLES = {"fields", "labels", "prompts"}
"""Layout keys that are tables."""
T = TypeVar("T")


class MixEntry(Settings):
    """A dataset to mix in, with the same layout and tokenizer as `data.path`."""

    path: str
    """Dataset folder."""
    fraction: float = Field(gt=0, lt=1)
    """Share of rows from this dataset, exact over any number of steps."""
    name: str = ""
    """Name in the held-out metrics; by default the folder name."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return {"name": Path(value["path"]).name, **value}
        return value

    @model_validator(mode="after")
    def _check_name(self) -> MixEntry:
        if not self.name:
            raise ValueError("an entry of data.mix has no name; set its name")
        return self


class DataSettings(Settings):
    """A prepared dataset: `prepare` writes it, and every other verb reads it."""

    path: str
    """Dataset folder."""
    mix: tuple[MixEntry, ...] = ()
    """Datasets to mix in, such as older ones (`[[data.mix]]`); the remaining rows come from
    `path`."""
    workers: int = Field(default=1, ge=0)
    """Threads that build batches in advance; 0 builds them in the training loop."""
    prefetch_steps: int = Field(default=2, ge=1)
    """How many steps ahead to build batches."""
    verify_shards: bool = True
    """Whether `train` hashes the shards before it starts, in about a second per gigabyte."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *(entry.path for entry in self.mix))

    def relocate(self, base: Path) -> DataSettings:
        """Return the settings with paths relative to another folder."""
        mix = tuple(entry.model_copy(update={"path": str(base / entry.path)}) for entry in self.mix)
        return self.model_copy(update={"path": str(base / self.path), "mix": mix})

    @model_validator(mode="after")
    def _check_mix(self) -> DataSettings:
        total = sum(Fraction(str(entry.fraction)) for entry in self.mix)
        if total >= 1:
            raise ValueError(
                f"the fractions of data.mix sum to {float(total):g}; reduce them to less than 1"
            )
        names = [entry.name for entry in self.mix]
        if len(set(names)) < len(names):
            raise ValueError("two entries of data.mix have the same name; set their name")
        return self


class TokenizerSettings(Settings):
    """A dataset's tokenizer: trained on its training records, or loaded."""

    path: str | None = None
    """A tokenizer to use unchanged: a folder, a run, or a Hugging Face Hub name. By default the one
    at `model.path`; without a model path, a byte-level BPE is trained."""
    vocab_size: int = Field(default=8192, ge=300)
    """Vocabulary size to train, including special tokens and the 256 bytes."""
    min_frequency: int = Field(default=2, ge=1)
    """Minimum frequency for merging a token pair into a vocabulary entry."""
    normalize: Literal["nfc", "lowercase", "none"] = "nfc"
    """Unicode normalization; "lowercase" is NFKC and lower case."""
    sample_mib: int = Field(default=256, ge=1)
    """Text to train on in MiB; a larger corpus is sampled, record by record."""


def _index_labels(value: Any) -> Any:
    """Return field -> class names; a list of fields declares no names."""
    if not isinstance(value, list | tuple):
        return value
    repeated = [name for name in value if list(value).count(name) > 1]
    if repeated:
        raise ValueError(f"'{repeated[0]}' is listed twice; remove one")
    return dict.fromkeys(value, ())


def _check_class_names(labels: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    for field, names in labels.items():
        if "" in names or len(set(names)) < len(names):
            problem = "an empty class name" if "" in names else "a class name twice"
            raise ValueError(f"'{field}' has {problem}; remove it")
    return labels


Labels = Annotated[
    dict[str, tuple[str, ...]], BeforeValidator(_index_labels), AfterValidator(_check_class_names)
]
"""Field -> class names; empty for names found in the data."""


class TextRows(Settings):
    """Row layout name, and keys for layouts that fill rows with text."""

    layout: str = "packed"
    """"packed" fills rows with documents, "chat" with conversations. "fields" makes one row per
    record, "groups" one row for all records that share a value. "sentence-pairs" makes rows of
    two consecutive document pieces, "preferences" of a chosen and a rejected answer."""
    text: str = DEFAULT_TEXT_FIELD
    """Text field for packed rows and sentence pairs."""
    length: int = Field(default=128, ge=MIN_TOKENS)
    """Length in tokens of a packed row, chat row, sentence pair, or prompt with its answer."""
    too_long: Literal["split", "truncate", "reject"] = "split"
    """How to treat documents longer than a row; conversations are truncated by default."""
    chat_template: str | None = None
    """Chat template: "alpaca", "chatml" or a Jinja file; by default the tokenizer's template."""


class RowLayout(TextRows):
    """How rows are made from records; `[rows.<name>]` defines several layouts for one corpus."""

    fields: dict[str, int] = Field(default={})
    """Text fields and their token limits; longer texts are truncated and counted."""
    labels: Labels = {}
    """Fields with a record's class, or a list of classes: texts, integers from 0 or truth values.
    `{label = ["ham", "spam"]}` fixes the names and their order."""
    label_spelling: Literal["strip", "fold"] | None = None
    """Spellings that are one class: "strip" ignores white space around and between words, "fold"
    also case. A class has its most frequent spelling, or that in `labels`."""
    integers: tuple[str, ...] = ()
    """Integer fields; every record must have them."""
    floats: tuple[str, ...] = ()
    """Fields with real numbers, such as a price; they may be missing."""
    categories: tuple[str, ...] = ()
    """Categorical fields with texts or integers; they may be missing."""
    vectors: tuple[str, ...] = ()
    """Fields with a list of real numbers, such as a teacher's embedding; every record must have
    one, and all have the same size."""
    prompts: dict[str, str] = {}
    """Texts prepended to text fields before encoding, such as `{ query = "query: " }`; they count
    toward the token limit."""
    group_by: str | None = None
    """Group field: records in a row share its value (layout "groups")."""
    shared: tuple[str, ...] = ()
    """Text fields stored once per group, such as the query; the others are stored per record."""
    max_group_size: int = Field(default=16, ge=1)
    """Maximum records per group; further records are left out and counted."""

    @model_validator(mode="before")
    @classmethod
    def _set_layout_defaults(cls, table: Any) -> Any:
        if isinstance(table, dict) and isinstance(name := table.get("layout", "packed"), str):
            return {**choices.load(LAYOUTS, name).defaults, **table}
        return table

    @model_validator(mode="after")
    def _check_layout(self) -> RowLayout:
        layout = choices.load(LAYOUTS, self.layout)
        for name, field in type(self).model_fields.items():
            default = layout.defaults.get(name, field.default)
            if name not in ("layout", *layout.setting_names) and getattr(self, name) != default:
                raise ValueError(f"layout '{self.layout}' does not use '{name}'; remove it")
        layout.check_settings(self)
        return self


def is_table_of_layouts(value: Any) -> bool:
    """Return whether a `rows` table has layouts by name, and is not a single layout."""
    if not isinstance(value, dict) or not value or _LAYOUT_TABLES & set(value):
        return False
    return all(isinstance(item, dict | RowLayout) for item in value.values())


def _wrap_single(value: Any) -> Any:
    """Return name -> layout table; a single layout is stored under UNNAMED."""
    return value if is_table_of_layouts(value) else {UNNAMED: value}


def _check_names(layouts: dict[str, RowLayout]) -> dict[str, RowLayout]:
    for name in layouts:
        if name != UNNAMED and not _NAME.fullmatch(name):
            raise ValueError(
                f"invalid name '{name}' of a layout; use lower-case letters, digits, '-' and '_'"
            )
    return layouts


def unwrap_single(by_name: dict[str, T]) -> dict[str, T] | T:
    """Return the only layout's value if unnamed, else the whole dictionary."""
    return by_name.get(UNNAMED, by_name)


Layouts = Annotated[
    dict[str, RowLayout],
    BeforeValidator(_wrap_single),
    AfterValidator(_check_names),
    WrapSerializer(lambda value, handler: unwrap_single(handler(value))),
]
"""One layout, or several by name. A layout cannot be named "fields" or "labels", because these are
layout keys."""


class TextLimits(Settings):
    """Text length limits; a record with a text outside them is skipped and counted."""

    min_characters: int = Field(default=0, ge=0)
    """Minimum characters per text."""
    max_characters: int | None = Field(default=None, ge=1)
    """Maximum characters per text."""
    min_words: int = Field(default=0, ge=0)
    """Minimum words per text; words are separated by white space."""
    max_words: int | None = Field(default=None, ge=1)
    """Maximum words per text."""

    @model_validator(mode="after")
    def _check_order(self) -> TextLimits:
        for unit in ("characters", "words"):
            minimum, maximum = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if maximum is not None and minimum > maximum:
                raise ValueError(
                    f"min_{unit} = {minimum} exceeds max_{unit} = {maximum}; lower min_{unit}"
                )
        return self


def _wrap_default_field(value: Any) -> Any:
    """Return field -> limits; limits without a field apply to the field "text"."""
    if not isinstance(value, dict):
        return value
    tables: dict[str, Any] = {
        name: item for name, item in value.items() if isinstance(item, dict | TextLimits)
    }
    limits = {name: item for name, item in value.items() if name not in tables}
    if not limits:
        return tables
    return {**tables, DEFAULT_TEXT_FIELD: {**limits, **tables.get(DEFAULT_TEXT_FIELD, {})}}


Filter = Annotated[dict[str, TextLimits], BeforeValidator(_wrap_default_field)]
"""Text field -> length limits."""


class SplitSettings(Settings):
    """The held-out split: a hash selects whole clusters of near-duplicates, or whole groups."""

    heldout_fraction: float = Field(default=0.05, ge=0.0, le=1.0)
    """Held-out fraction of clusters or groups; 1 makes a dataset for evaluations only."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Hash seed; another seed holds out other clusters."""
    similarity: float = Field(default=0.7, gt=0.0, le=1.0)
    """Estimated Jaccard similarity of word shingles from which the texts of two records are
    near-duplicates; at 1 only equal texts are, and reading is faster."""
    group_by: str | None = None
    """Group field: records with the same value stay in the same split."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """"drop" keeps only the first record of each near-duplicate cluster, in both splits."""

    @property
    def needs_signatures(self) -> bool:
        """Whether records need MinHash signatures to find near-duplicates."""
        needs_clusters = self.near_duplicates == "drop" or (
            self.group_by is None and self.heldout_fraction > 0
        )
        return needs_clusters and self.similarity < 1
