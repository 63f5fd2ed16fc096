"""Base class for tasks over record fields, with batches padded to bucket lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.data.buckets import (
    choose_bucket_lengths,
    sum_histograms,
)
from regauge.models.io_spec import InputSpec
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.wording import format_count
from regauge.tasks import Task

if TYPE_CHECKING:
    import numpy as np

    from regauge.data.batches import Arrays, MicrobatchPlan, OptionalRows, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.tasks._arrays import Texts


TEXT_TOKENS = 128
"""Default token limit per text field, special tokens included."""


class FieldsTask(Task):
    """A task whose rows are records; row number and text number identify a text."""

    layout: ClassVar[str] = "fields"

    exports_prompts: ClassVar[bool] = False
    """Whether the trained model's folder contains the text prompts."""

    max_buckets: int = Field(default=4, ge=1)
    """Maximum number of bucket lengths; batches are padded to one of them."""

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        names = [name for name, column in manifest.columns.items() if column.prompt]
        if names and not self.exports_prompts:
            problem = f"task '{self.kind}' cannot export the prompt of '{names[0]}'"
            raise SettingsError(problem, "prepare the dataset without rows.prompts")
        for name in self.text_columns():
            check_field(manifest, name)

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Count model inputs by length; entry i counts inputs with i tokens.

        By default each text is one input.
        """
        return sum_histograms(field_histogram(manifest, name) for name in self.text_columns())

    def read_texts(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,  # [texts]
        text_numbers: np.ndarray,  # [texts] from 0 in each row
        special: tuple[int, ...] = (),
    ) -> Texts:
        """Read the tokens of texts; None if the row number is PADDING."""
        from regauge.data.batches import take_rows

        return self.select_texts(take_rows(rows, row_numbers), text_numbers, special)

    def select_texts(
        self, records: OptionalRows, text_numbers: np.ndarray, special: tuple[int, ...]
    ) -> Texts:
        """Return the tokens of one text of each row, numbered as in `text_columns`.

        `special` are the special token ids. Without them, a text pair may be one token too long.
        """
        del special
        names = self.text_columns()
        pairs = zip(records, text_numbers, strict=True)
        return [None if row is None else row[names[number]] for row, number in pairs]

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        """Read one text per record, from any field."""
        limits = (manifest.columns[name].max_length for name in self.text_columns())
        return InputSpec(max_lengths=(max(limits),))

    def bucket_lengths(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the lengths that cause the least padding over all texts."""
        return choose_bucket_lengths(self.length_histogram(manifest), self.max_buckets)

    @property
    def packs_texts(self) -> bool:
        return True

    def split_batch(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,
        microbatch_rows: int,
        bucket_lengths: tuple[int, ...],
    ) -> list[MicrobatchPlan]:
        """Sort a global batch's texts by length and split them into microbatches.

        Slots are numbered by text number first, then by row.
        """
        from regauge.tasks import _arrays

        lengths = self.slot_lengths(rows, row_numbers)
        batch_slots = self.slots_per_row() * microbatch_rows
        return _arrays.plan_sorted_slots(row_numbers, lengths, batch_slots, bucket_lengths)

    def slot_lengths(self, rows: DatasetRows, row_numbers: np.ndarray) -> list[int]:
        """Return the tokens in each slot of a global batch; 0 for padding."""
        import numpy as np

        from regauge.tasks import _arrays

        numbers = np.arange(self.slots_per_row())
        repeated_rows = np.resize(row_numbers, len(numbers) * len(row_numbers))
        text_numbers = np.repeat(numbers, len(row_numbers))
        return _arrays.count_tokens(self.read_texts(rows, repeated_rows, text_numbers))

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays, [batch, length], with their slots."""
        from regauge.tasks import _arrays

        texts = self.read_texts(rows, plan.row_numbers, plan.text_numbers, config.special_ids)
        return _arrays.build_slot_arrays(texts, plan, key, config)


def check_field(manifest: DatasetManifest, name: str, kinds: tuple[str, ...] = ("tokens",)) -> None:
    """Raise SettingsError unless the dataset has this field with one of these kinds."""
    if name not in manifest.columns:
        remedy = did_you_mean(name, tuple(manifest.columns))
        raise SettingsError(f"the dataset has no field '{name}'", remedy)
    if manifest.columns[name].kind not in kinds:
        fitting = [other for other, field in manifest.columns.items() if field.kind in kinds]
        expected = " or ".join("text" if kind == "tokens" else kind for kind in kinds)
        remedy = (
            f"choose from: {', '.join(fitting)}"
            if fitting
            else "prepare the data with such a field"
        )
        raise SettingsError(f"field '{name}' is not of type {expected}", remedy)


def label_range(manifest: DatasetManifest, name: str) -> tuple[float, float]:
    """Return the smallest and largest label in all splits; (0, 0) without labels.

    Raises DataError if a record does not have a label.
    """
    field = manifest.columns[name]
    if missing := sum(field.num_missing.values()):
        raise DataError(
            f"label '{name}' is missing in {format_count(missing, 'record')}",
            "remove these records",
        )
    from regauge.data.columns import value_ranges  # it imports pyarrow

    ranges = list(value_ranges(field).values()) or [(0.0, 0.0)]
    return min(lowest for lowest, _ in ranges), max(highest for _, highest in ranges)


def field_histogram(manifest: DatasetManifest, name: str) -> tuple[int, ...]:
    """Count a field's texts by length in tokens, over all splits.

    Raises SettingsError if the dataset does not have such a text field.
    """
    check_field(manifest, name)
    return sum_histograms(manifest.columns[name].lengths.values())
