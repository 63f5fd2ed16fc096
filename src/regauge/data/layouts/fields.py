"""One row per record: its texts, each truncated at its limit, and its values."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from regauge.data.columns import TEXT_TYPE
from regauge.data.layouts._of_records import RECORD_SETTINGS, RecordLayout


class FieldsLayout(RecordLayout):
    """Columns of texts and values; the texts of held-out rows are also stored before truncation."""

    kind: ClassVar[str] = "fields"
    setting_names: ClassVar[tuple[str, ...]] = RECORD_SETTINGS

    def record_text_columns(self) -> list[pa.Field]:
        return [pa.field(name, TEXT_TYPE) for name in self.settings.fields]
