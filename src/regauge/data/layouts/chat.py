"""Rows of one length, filled with chat template conversations; answer tokens are marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from regauge.data import dataset
from regauge.data.columns import MARKS_TYPE, ColumnStats
from regauge.data.conversations import ConversationError, parse_conversation
from regauge.data.layouts import UnusableRecord
from regauge.data.layouts._filled import FilledLayout
from regauge.data.layouts._templated import TemplateLayout, list_prefixes
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.conversations import Conversation
    from regauge.data.layouts import EncodedRecord
    from regauge.data.tokenizer import LoadedTokenizer
    from regauge.data.values import Value

LOSS_MASK = "loss_mask"
"""Answer token column."""


class ChatLayout(TemplateLayout, FilledLayout):
    """Conversations are packed into rows; each is a segment."""

    kind: ClassVar[str] = "chat"

    def check_fields(self, field_names: tuple[str, ...]) -> None:
        if "messages" not in field_names and not {"instruction", "output"} <= set(field_names):
            raise SettingsError(
                "the source has neither 'messages' nor 'instruction' and 'output'",
                "rename a field, or use another source",
            )

    def list_conversation_fields(self, record: dict[str, Value]) -> tuple[str, ...]:
        return ("messages",) if "messages" in record else ("instruction", "input", "output")

    def encoded_columns(self) -> list[pa.Field]:
        return [*super().encoded_columns(), pa.field(LOSS_MASK, MARKS_TYPE)]

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        loss_mask = dataset.ColumnInfo(max_length=self.settings.length, kind="loss_mask")
        return {**super().describe_columns(stats_by_split), LOSS_MASK: loss_mask}

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return a conversation, and the prefixes up to the start and end of each answer."""
        conversation = self._parse(record, tokenizer)
        return list_prefixes(self.render(conversation, tokenizer))

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        """Yield a conversation's only chunk; a truncated one loses the tokenizer's side."""
        tokens, marks, is_truncated = self.truncate(encoded.ids, encoded.tokenizer)
        if is_truncated:
            encoded.truncated["messages"] += 1
        conversation = self._parse(encoded.record, encoded.tokenizer)
        encoded.warnings.update(self.list_warnings(conversation, encoded.ids, encoded.tokenizer))
        yield [tokens, marks]

    def _parse(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> Conversation:
        try:
            return parse_conversation(record, self.load_template(tokenizer.folder).literals)
        except ConversationError as error:
            raise UnusableRecord(error.reason, error.detail) from None
