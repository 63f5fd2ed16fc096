"""One row per preference: a prompt with a chosen answer, and the same prompt with a rejected one.

A record has the fields of TRL's preference datasets. `chosen` and `rejected` are texts or message
lists. `prompt` is a text or a message list. Without it, the prompt consists of the messages at the
start of both lists.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from regauge.data import dataset
from regauge.data.columns import MARKS_TYPE, ColumnStats
from regauge.data.conversations import (
    ANSWERS,
    ASSISTANT,
    CHOSEN,
    MASKS,
    PROMPT,
    REJECTED,
    Conversation,
    ConversationError,
    Message,
    is_blank,
    parse_conversation,
)
from regauge.data.layouts import UnusableRecord
from regauge.data.layouts._templated import TemplateLayout, list_prefixes
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from regauge.data.layouts import EncodedRecord
    from regauge.data.tokenizer import LoadedTokenizer
    from regauge.data.values import Value


class PreferencesLayout(TemplateLayout):
    """Token and mark columns for both answers, with the template's tokens."""

    kind: ClassVar[str] = "preferences"

    def check_fields(self, field_names: tuple[str, ...]) -> None:
        for name in ANSWERS:
            if name not in field_names:
                remedy = did_you_mean(name, field_names) if field_names else "use another source"
                raise SettingsError(f"the source has no field '{name}' with a value", remedy)

    def list_conversation_fields(self, record: dict[str, Value]) -> tuple[str, ...]:
        del record
        return (PROMPT, *ANSWERS)

    def token_limits(self) -> dict[str, int]:
        return dict.fromkeys(ANSWERS, self.settings.length)

    def encoded_columns(self) -> list[pa.Field]:
        return [*super().encoded_columns(), *(pa.field(name, MARKS_TYPE) for name in MASKS)]

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        mask = dataset.ColumnInfo(max_length=self.settings.length, kind="loss_mask")
        return {**super().describe_columns(stats_by_split), **dict.fromkeys(MASKS, mask)}

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return each conversation, and the prefixes up to both ends of its answers."""
        conversations = self._parse(record, tokenizer)
        return [
            text
            for conversation in conversations
            for text in list_prefixes(self.render(conversation, tokenizer))
        ]

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        """Yield a record's row; long conversations lose the tokenizer's side."""
        tokenizer, ids = encoded.tokenizer, list(encoded.ids)
        tokens, masks, warnings, truncated = [], [], set[str](), []
        for name, conversation in zip(ANSWERS, self._parse(encoded.record, tokenizer), strict=True):
            count = len(list_prefixes(self.render(conversation, tokenizer)))
            texts, ids = ids[:count], ids[count:]
            cells, mask, is_truncated = self.truncate(texts, tokenizer)
            tokens.append(cells)
            masks.append(mask)
            truncated += [name] * is_truncated
            warnings |= self.list_warnings(conversation, texts, tokenizer)
        if np.array_equal(tokens[0], tokens[1]):
            suffix = f" within {self.settings.length} tokens" if truncated else ""
            raise UnusableRecord(f"'{CHOSEN}' equals '{REJECTED}'{suffix}")
        encoded.truncated.update(truncated)
        encoded.warnings.update(warnings)
        yield [*tokens, *masks]

    def _parse(
        self, record: dict[str, Value], tokenizer: LoadedTokenizer
    ) -> tuple[Conversation, Conversation]:
        try:
            return parse_preference(record, self.load_template(tokenizer.folder).literals)
        except ConversationError as error:
            raise UnusableRecord(error.reason, error.detail) from None


def parse_preference(
    record: Mapping[str, Value], extra_roles: Collection[str] = ()
) -> tuple[Conversation, Conversation]:
    """Return the prompt with the chosen answer, and with the rejected one.

    `extra_roles` are permitted besides the usual roles. Raises ConversationError.
    """
    chosen, rejected = (_read_messages(record.get(name), name, ASSISTANT) for name in ANSWERS)
    if chosen[0].get("role") == ASSISTANT:
        prompt = _read_messages(record.get(PROMPT), PROMPT, "user")
    else:
        prompt = _find_shared_messages(chosen, rejected)
        _check_same_prompt(record.get(PROMPT), prompt)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    conversations = []
    for name, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not answer:
            raise ConversationError(f"'{name}' has no answer after the prompt", "no answer")
        document: dict[str, Value] = {**record, "messages": [*prompt, *answer]}
        conversation = parse_conversation(document, extra_roles)
        conversations.append(conversation._replace(num_prompt_messages=len(prompt)))
    return conversations[0], conversations[1]


def _read_messages(value: Value | None, name: str, role: str) -> list[Message]:
    """Return a field's messages; a text is one message with the given role."""
    if is_blank(value):
        detail = f"'{name}' is missing"
        raise ConversationError(detail, "no prompt" if name == PROMPT else "no answer")
    messages = _parse_text(value, role) if isinstance(value, str) else value
    items: list[Any] = messages if isinstance(messages, list) else [messages]
    if not all(isinstance(item, dict) for item in items):
        raise ConversationError(f"'{name}' is neither a text nor a list of messages")
    return items


def _parse_text(text: str, role: str) -> Any:
    """Return the messages in a JSON text, or the text as one message."""
    try:
        items = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        items = None
    if items and all(isinstance(item, dict) and "role" in item for item in items):
        return items
    return {"role": role, "content": text}


def _find_shared_messages(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Return the messages at the start of both lists; raises ConversationError if none."""
    pairs = zip(chosen, rejected, strict=False)
    count = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    shared = chosen[: min(len(chosen), len(rejected)) if count is None else count]
    if not shared:
        raise ConversationError(f"'{CHOSEN}' and '{REJECTED}' share no message", "no prompt")
    return shared


def _check_same_prompt(value: Value | None, messages: list[Message]) -> None:
    """Raise ConversationError if a `prompt` is not among the messages shared by the answers."""
    if is_blank(value):
        return
    if isinstance(value, str):
        contents = [message.get("content") for message in messages]
        texts = [content.strip() for content in contents if isinstance(content, str)]
        is_same = value.strip() in texts or _parse_text(value, "user") == messages
    else:
        is_same = value == messages[: len(value)] if isinstance(value, list) else False
    if not is_same:
        raise ConversationError(f"'{PROMPT}' is not in the messages of '{CHOSEN}'")
