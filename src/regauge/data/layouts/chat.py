"""Rows of one length, filled with conversations in a chat template; answer tokens are marked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from regauge.data import chat_templates, dataset
from regauge.data.columns import MARKS_TYPE, ColumnStats
from regauge.data.dataset import TOKENIZER
from regauge.data.layouts import UnusableRecord
from regauge.data.layouts._filled import FilledLayout
from regauge.data.tokenizer import LoadedTokenizer
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import EncodedRecord
    from regauge.data.settings import RowLayout, TokenizerSettings
    from regauge.data.sources import Value

LOSS_MASK = "loss_mask"
"""The column that marks the tokens of answers."""
REMEDY_VALUES = '"alpaca", "chatml" or a Jinja file'
"""Values of `rows.chat_template` in remedies."""


class ChatLayout(FilledLayout):
    """A conversation has exactly the tokens of its template; none is added."""

    kind: ClassVar[str] = "chat"
    setting_names: ClassVar[tuple[str, ...]] = ("length", "too_long", "chat_template")
    defaults: ClassVar[dict[str, Any]] = {"too_long": "truncate"}

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        if settings.too_long == "split":
            raise ValueError(
                'conversations cannot be split; set too_long to "truncate" or "reject"'
            )

    def text_fields(self) -> tuple[str, ...]:
        """Return nothing: the fields of a record depend on its format."""
        return ()

    def check_fields(self, field_names: tuple[str, ...]) -> None:
        if "messages" not in field_names and not {"instruction", "output"} <= set(field_names):
            raise SettingsError(
                "the source has neither 'messages' nor 'instruction' and 'output'",
                'if messages are lists, set source.columns = ["messages"]',
            )

    def check_inputs(self, tokenizer: TokenizerSettings) -> None:
        folder = Path(tokenizer.path) if tokenizer.path else None
        if self.settings.chat_template is None and not (
            folder and chat_templates.has_template(folder)
        ):
            name = f"the tokenizer '{folder}'" if folder else "a trained tokenizer"
            raise SettingsError(
                f"{name} has no chat template", f"set rows.chat_template to {REMEDY_VALUES}"
            )
        if folder and (folder / TOKENIZER).is_file():
            self.check_tokenizer(LoadedTokenizer(folder))

    def check_tokenizer(self, tokenizer: LoadedTokenizer) -> None:
        """Raise SettingsError for a template that loses answers or does not terminate them."""
        name = self.settings.chat_template or "of the tokenizer"
        try:
            rendered = self._load_template(tokenizer).render(chat_templates.TEST_MESSAGES)
        except chat_templates.TemplateError as error:
            problem = f"the chat template {name} cannot be used: {error}"
            raise SettingsError(problem, f"set rows.chat_template to {REMEDY_VALUES}") from None
        ids = self.encode_texts(_list_prefixes(rendered), tokenizer)
        if not np.isin(ids[0][_mark_answers(ids) > 0], tokenizer.info.special_token_ids).any():
            raise SettingsError(
                f"the chat template {name} ends no answer with a special token of the tokenizer;"
                " a model would not learn to stop",
                'end answers with {{ eos_token }}, or set rows.chat_template = "alpaca"',
            )

    def to_document(self) -> dict[str, Any]:
        if self.settings.chat_template is None:
            return super().to_document()
        content = chat_templates.find_template_file(self.settings.chat_template).read_bytes()
        return {**super().to_document(), "template_sha256": hashlib.sha256(content).hexdigest()}

    def write_tokenizer_files(self, folder: Path) -> None:
        """Write the template to the tokenizer of the dataset, and so of every model."""
        if self.settings.chat_template is not None:
            template = chat_templates.find_template_file(self.settings.chat_template)
            chat_templates.install_template(folder, template)

    def encoded_columns(self) -> list[pa.Field]:
        return [*super().encoded_columns(), pa.field(LOSS_MASK, MARKS_TYPE)]

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        loss_mask = dataset.ColumnInfo(max_length=self.settings.length, kind="loss_mask")
        return {**super().describe_columns(stats_by_split), LOSS_MASK: loss_mask}

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return a conversation, and its prefixes up to the start and the end of each answer."""
        messages = chat_templates.parse_conversation(record)
        if messages is None:
            detail = "needs 'messages' with role and content, or 'instruction' and 'output'"
            raise UnusableRecord("no conversation", detail)
        for message in messages:
            for token in tokenizer.special_tokens:
                if token in message["content"]:
                    raise UnusableRecord("a special token in a message", token)
        try:
            rendered = self._load_template(tokenizer).render(messages)
        except chat_templates.TemplateError as error:
            raise UnusableRecord("the chat template cannot render it", str(error)) from None
        if not rendered.answers:
            raise UnusableRecord("no answer", is_rejected=False)
        return _list_prefixes(rendered)

    def encode_texts(self, texts: list[str], tokenizer: LoadedTokenizer) -> list[np.ndarray]:
        return tokenizer.encode(texts, parse_special_tokens=True)

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        """Yield the one chunk of a conversation; a truncated one loses the tokenizer's side."""
        tokens, marks, length = encoded.ids[0], _mark_answers(encoded.ids), self.settings.length
        count = len(tokens)
        if count > length and self.settings.too_long == "reject":
            raise UnusableRecord(f"longer than {length} tokens", f"{count} tokens")
        tokens, marks = (encoded.tokenizer.truncate(cells, length) for cells in (tokens, marks))
        if not marks.any():
            raise UnusableRecord(f"no answer within {length} tokens", f"{count} tokens")
        if count > length:
            encoded.truncated["messages"] += 1
        yield [tokens, marks]

    def _load_template(self, tokenizer: LoadedTokenizer) -> chat_templates.ChatTemplate:
        return chat_templates.load_template(tokenizer.folder, self.settings.chat_template)


def _list_prefixes(rendered: chat_templates.RenderedConversation) -> list[str]:
    """Return the text, and its prefixes up to both ends of each answer."""
    return [
        rendered.text,
        *(rendered.text[:offset] for span in rendered.answers for offset in span),
    ]


def _mark_answers(ids: list[np.ndarray]) -> np.ndarray:
    """Return 1 for each token of an answer, else 0; `ids` encodes the texts of `_list_prefixes`.

    An answer starts at the first token that is not in its encoded prompt. The prompt then has the
    same tokens in training and in generation.
    """
    tokens, *prefixes = ids
    marks = np.zeros(len(tokens), np.uint8)
    for prompt, answered in zip(prefixes[::2], prefixes[1::2], strict=True):
        marks[_count_shared(prompt, tokens) : _count_shared(answered, tokens)] = 1
    return marks


def _count_shared(prefix: np.ndarray, tokens: np.ndarray) -> int:
    """Return the length of the common prefix of two token sequences."""
    size = min(len(prefix), len(tokens))
    differences = np.flatnonzero(prefix[:size] != tokens[:size])
    return int(differences[0]) if len(differences) else size
