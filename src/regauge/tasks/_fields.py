"""Base class of the tasks over record fields, with batches padded to bucket lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from regauge.data.batches import MicrobatchPlan, build_dropout_keys, pad_sequences
from regauge.data.buckets import (
    choose_bucket_lengths,
    count_batch_tokens,
    find_bucket_length,
    sum_histograms,
)
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.wording import format_count
from regauge.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.data.batches import Arrays, RandomKey
    from regauge.data.buckets import BatchForm
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig

Texts = list[np.ndarray | None]
"""Token ids of texts, each [length]; None for a text of a padding row."""


TEXT_TOKENS = 128
"""Default token limit of a text field, special tokens included."""


class FieldsTask(Task):
    """A task whose rows are records; a text has a row number and a text number in its row."""

    layout: ClassVar[str] = "fields"

    exports_prompts: ClassVar[bool] = False
    """Whether the folder of the trained model has the prompts of the texts."""

    max_buckets: int = Field(default=4, ge=1)
    """Maximum number of bucket lengths; batches are padded to one of them."""

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        names = [name for name, column in manifest.columns.items() if column.prompt]
        if names and not self.exports_prompts:
            problem = f"task '{self.kind}' cannot export the prompt of '{names[0]}'"
            raise SettingsError(problem, "prepare the dataset without rows.prompts")

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the number of model inputs of each length; entry i counts inputs of i tokens."""
        raise NotImplementedError

    def read_texts(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,  # [texts]
        text_numbers: np.ndarray,  # [texts] from 0 in each row
        special: tuple[int, ...] = (),
    ) -> Texts:
        """Return the tokens of texts; None if the row number is PADDING.

        `special` are the ids of the special tokens. Without them, a pair of texts may be one token
        too long.
        """
        raise NotImplementedError

    def bucket_lengths(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the lengths that cause the least padding over all texts."""
        return choose_bucket_lengths(self.length_histogram(manifest), self.max_buckets)

    @property
    def packs_texts(self) -> bool:
        """Whether batches of any shape have their texts in packed rows."""
        return True

    def text_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the number of texts of each length, also if `length_histogram` counts rows."""
        return self.length_histogram(manifest)

    def padded_length(self, manifest: DatasetManifest, form: BatchForm) -> float:
        histogram, lengths = self.length_histogram(manifest), self.bucket_lengths(manifest)
        form = form._replace(has_any_shape=form.has_any_shape and self.packs_texts)
        if not form.has_any_shape:
            return count_batch_tokens(histogram, lengths, form, self.slots_per_row())
        texts, rows = self.text_histogram(manifest), max(self._count_rows(manifest), 1)
        tokens = count_batch_tokens(texts, lengths, form, max(round(sum(texts) / rows), 1))
        return tokens * sum(texts) / (rows * self.sequences_per_row(manifest))

    def real_token_fraction(self, manifest: DatasetManifest, form: BatchForm) -> float:
        texts = self.text_histogram(manifest)
        tokens = sum(length * count for length, count in enumerate(texts))
        sequences = self._count_rows(manifest) * self.sequences_per_row(manifest)
        return tokens / max(self.padded_length(manifest, form) * sequences, 1)

    def _count_rows(self, manifest: DatasetManifest) -> float:
        """Return the number of rows of all splits."""
        return sum(self.length_histogram(manifest)) / self.slots_per_row()

    def split_batch(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,
        microbatch_rows: int,
        bucket_lengths: tuple[int, ...],
    ) -> list[MicrobatchPlan]:
        """Sort all texts of a global batch by length and split them into microbatches.

        Slots are numbered by text number first, then by row.
        """
        count = self.slots_per_row()
        repeated_numbers = np.resize(row_numbers, count * len(row_numbers))
        text_numbers = np.repeat(np.arange(count), len(row_numbers))
        lengths = _count_tokens(self.read_texts(rows, repeated_numbers, text_numbers))
        longest_first = np.argsort(-lengths, kind="stable")
        plans = []
        for slots in longest_first.reshape(-1, count * microbatch_rows):
            texts, indices = np.divmod(slots, len(row_numbers))
            length = find_bucket_length(int(lengths[slots].max()), bucket_lengths)
            plans.append(MicrobatchPlan(row_numbers[indices], texts, slots, length))
        return plans

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build the token arrays of texts, [batch, length], with their slots."""
        texts = self.read_texts(rows, plan.row_numbers, plan.text_numbers, config.special_ids)
        return build_slot_arrays(texts, plan, key, config)


def plan_sorted_rows(
    row_numbers: np.ndarray,  # [global batch]
    lengths: np.ndarray,  # [global batch]
    microbatch_rows: int,
    bucket_lengths: tuple[int, ...],
) -> list[MicrobatchPlan]:
    """Sort whole rows by the length of their longest text, and split them into microbatches."""
    longest_first = np.argsort(-lengths, kind="stable")
    plans = []
    for slots in longest_first.reshape(-1, microbatch_rows):
        length = find_bucket_length(int(lengths[slots].max()), bucket_lengths)
        numbers, texts = row_numbers[slots], np.zeros_like(slots)
        plans.append(MicrobatchPlan(numbers, texts, slots, length))
    return plans


def build_row_arrays(
    texts: Texts, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build the token arrays of rows with several texts, [rows x texts, length].

    The texts of a row are consecutive.
    """
    count = len(texts) // len(plan.row_numbers)
    row_numbers = np.repeat(plan.row_numbers, count)
    text_numbers = np.tile(np.arange(count), len(plan.row_numbers))
    text_plan = MicrobatchPlan(row_numbers, text_numbers, np.zeros_like(row_numbers), plan.length)
    return build_text_arrays(texts, text_plan, key, config)


def build_slot_arrays(
    texts: Texts, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build the token arrays of texts, with their `slots` and whether they are `real`, [batch]."""
    return {
        **build_text_arrays(texts, plan, key, config),
        "slots": plan.slots,
        "real": (plan.row_numbers >= 0).astype(np.float32),
    }


def build_text_arrays(
    texts: Texts, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build tokens, segments and positions, [batch, length] int32, and dropout keys, [batch]."""
    positions = np.arange(plan.length, dtype=np.int32)
    return {
        "tokens": pad_sequences(texts, plan.length, config.pad_id),
        "segments": (positions < _count_tokens(texts)[:, None]).astype(np.int32),
        "positions": np.broadcast_to(positions, (len(texts), plan.length)).copy(),
        "keys": build_dropout_keys(plan, key),
    }


def check_field(manifest: DatasetManifest, name: str, kinds: tuple[str, ...] = ("tokens",)) -> None:
    """Raise SettingsError if a dataset has no field of this name with one of these kinds."""
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
    """Return the smallest and the largest label of all splits; (0, 0) if there are no labels.

    Raises DataError if a record has no label.
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


def build_token_types(arrays: Arrays, starts: Sequence[int]) -> np.ndarray:
    """Return token types, [batch, length]: 1 from the start of a text's second half, else 0."""
    is_second = arrays["positions"] >= np.array(starts)[:, None]
    return (is_second & (arrays["segments"] > 0)).astype(np.int32)


def field_histogram(manifest: DatasetManifest, name: str) -> tuple[int, ...]:
    """Return the number of texts of a field by length in tokens, over all splits.

    Raises SettingsError if the dataset has no such text field.
    """
    check_field(manifest, name)
    return sum_histograms(manifest.columns[name].lengths.values())


def _count_tokens(texts: Texts) -> np.ndarray:
    """Return the length of each text, [texts]; 0 for a missing one."""
    return np.array([0 if text is None else len(text) for text in texts])
