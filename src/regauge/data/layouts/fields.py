"""One row per record: texts, each truncated at a limit, and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from regauge.data.columns import TEXT_TYPE, ColumnStats
from regauge.data.layouts._of_records import RECORD_SETTINGS, RecordLayout
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.data.dataset import ColumnInfo
    from regauge.data.settings import RowLayout
    from regauge.data.tokenizer import LoadedTokenizer
    from regauge.data.values import Value


class FieldsLayout(RecordLayout):
    """Columns for texts, values and vectors; a text may have a prompt.

    Held-out texts are also stored before truncation, without prompts.
    """

    kind: ClassVar[str] = "fields"
    setting_names: ClassVar[tuple[str, ...]] = (*RECORD_SETTINGS, "vectors", "prompts")

    def __init__(self, settings: RowLayout) -> None:
        super().__init__(settings)
        self._vector_sizes: dict[str, int] = {}

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        super().check_settings(settings)
        for name in settings.prompts:
            if name not in settings.fields:
                raise ValueError(f"'{name}' has a prompt and no limit in fields")

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return the texts with their prompts: both are encoded as one text."""
        texts = super().select_texts(record, tokenizer)
        prompts = self.settings.prompts
        return [
            prompts.get(name, "") + text
            for name, text in zip(self.text_fields(), texts, strict=True)
        ]

    def record_text_columns(self) -> list[pa.Field]:
        return [pa.field(name, TEXT_TYPE) for name in self.settings.fields]

    def build_rows(self, encoded: Iterable[pa.RecordBatch], pad_id: int) -> Iterator[pa.Table]:
        """Yield one row per record; raises DataError if a field's vectors differ in size."""
        for rows in super().build_rows(encoded, pad_id):
            for name in self.settings.vectors:
                for size in pc.list_value_length(rows.column(name)).unique().to_pylist():
                    expected = self._vector_sizes.setdefault(name, size)
                    if size != expected:
                        problem = f"the vectors of '{name}' have {expected} and {size} numbers"
                        raise DataError(problem, "compute all of them with one model")
            yield rows

    def describe_columns(self, stats_by_split: dict[str, ColumnStats]) -> dict[str, ColumnInfo]:
        columns = super().describe_columns(stats_by_split)
        updates: dict[str, dict[str, Any]] = {
            **{name: {"prompt": prompt} for name, prompt in self.settings.prompts.items()},
            **{
                name: {"max_length": self._vector_sizes.get(name, 0)}
                for name in self.settings.vectors
            },
        }
        return {
            name: column.model_copy(update=updates.get(name, {}))
            for name, column in columns.items()
        }
