"""A row of each record: its named texts, each cut at its limit, and its values."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from regauge.data.columns import WHOLE
from regauge.data.layouts._of_records import KEYS, OfRecords


class Fields(OfRecords):
    """Texts and values side by side; of a held-out row the whole texts are kept as well."""

    kind: ClassVar[str] = "fields"
    keys: ClassVar[tuple[str, ...]] = KEYS

    def kept(self) -> list[pa.Field]:
        return [pa.field(name, WHOLE) for name in self.settings.fields]
