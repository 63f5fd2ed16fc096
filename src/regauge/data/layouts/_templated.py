"""Base for layouts with conversations in a chat template; answers are marked."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regauge.data import chat_templates
from regauge.data.conversations import (
    KWARGS_FIELD,
    LIST_FIELDS,
    Conversation,
    ConversationError,
    check_strings,
    format_part,
)
from regauge.data.dataset import TOKENIZER
from regauge.data.layouts import Layout, UnusableRecord
from regauge.data.tokenizer import LoadedTokenizer
from regauge.system.errors import SettingsError
from regauge.system.log import logger

if TYPE_CHECKING:
    from regauge.data.settings import RowLayout, TokenizerSettings
    from regauge.data.values import Value

REMEDY_VALUES = '"alpaca", "chatml" or a Jinja file'
"""Values of `rows.chat_template`, for remedies."""
REMEDY_IGNORED = "set rows.chat_template to one that writes it, or remove it from the source"
PROBLEM_PROMPT = "the generation prompt of the chat template has other tokens when answers follow"
REMEDY_PROMPT = "end it in a special token or a line break, not in a blank"
TEST_ANSWERS = ("a", "the", "The", "I", "It", "1")
"""First answer words that may merge into one token with the end of a generation prompt."""


class TemplateLayout(Layout, ABC):
    """A conversation has exactly the template's tokens; none is added."""

    setting_names: ClassVar[tuple[str, ...]] = ("length", "too_long", "chat_template")
    defaults: ClassVar[dict[str, Any]] = {"too_long": "truncate"}

    def __init__(self, settings: RowLayout) -> None:
        super().__init__(settings)
        self._templates: dict[Path, chat_templates.ChatTemplate] = {}
        self._changes_prompt: bool | None = None
        """Whether test answers change the generation prompt's tokens; None if not tested."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle; each process loads the template itself."""
        return {**self.__dict__, "_templates": {}}

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        if settings.too_long == "split":
            raise ValueError(
                'conversations cannot be split; set too_long to "truncate" or "reject"'
            )

    def text_fields(self) -> tuple[str, ...]:
        """Return nothing: a record's fields depend on its format."""
        return ()

    def select_text_fields(self, record: dict[str, Value]) -> dict[str, Value]:
        """Return the fields of a conversation, with the template's variables."""
        names = (*self.list_conversation_fields(record), *LIST_FIELDS, KWARGS_FIELD)
        return {name: record[name] for name in names if name in record}

    @abstractmethod
    def list_conversation_fields(self, record: dict[str, Value]) -> tuple[str, ...]:
        """Return the fields with a record's messages."""

    def check_inputs(self, tokenizer: TokenizerSettings) -> None:
        folder = Path(tokenizer.path) if tokenizer.path else None
        if self.settings.chat_template is None and not (
            folder and chat_templates.has_template(folder)
        ):
            name = f"the tokenizer '{folder}'" if folder else "a trained tokenizer"
            raise SettingsError(
                f"{name} has no chat template", f"set rows.chat_template to {REMEDY_VALUES}"
            )
        self._warn_if_unstable(folder)
        if folder and (folder / TOKENIZER).is_file():
            self.check_tokenizer(LoadedTokenizer(folder))

    def check_tokenizer(self, tokenizer: LoadedTokenizer) -> None:
        """Raise SettingsError for a template that loses answers or does not terminate them."""
        try:
            rendered = self.load_template(tokenizer.folder).render_test()
        except chat_templates.TemplateError as error:
            problem = f"the chat template {self._name} cannot be used: {error}"
            raise SettingsError(problem, f"set rows.chat_template to {REMEDY_VALUES}") from None
        ids = self.encode_texts(list_prefixes(rendered), tokenizer)
        if not np.isin(ids[0][mark_answers(ids) > 0], tokenizer.info.special_token_ids).any():
            name, folder = self.settings.chat_template, chat_templates.TEMPLATES_FOLDER
            is_file = name and chat_templates.find_template_file(name).parent != folder
            alternative = ", or end answers with {{ eos_token }}" if is_file else ""
            raise SettingsError(
                f"the chat template {self._name} does not end answers with a special token of the"
                " tokenizer; a model would not learn to stop",
                f'set rows.chat_template = "alpaca"{alternative}',
            )

    def to_document(self) -> dict[str, Any]:
        if self.settings.chat_template is None:
            return super().to_document()
        content = chat_templates.find_template_file(self.settings.chat_template).read_bytes()
        return {**super().to_document(), "template_sha256": hashlib.sha256(content).hexdigest()}

    def write_tokenizer_files(self, folder: Path) -> None:
        """Write the template to the dataset's tokenizer, and so to every model's."""
        if self.settings.chat_template is not None:
            template = chat_templates.find_template_file(self.settings.chat_template)
            chat_templates.install_template(folder, template)

    def encode_texts(self, texts: list[str], tokenizer: LoadedTokenizer) -> list[np.ndarray]:
        return tokenizer.encode(texts, parse_special_tokens=True)

    def render(
        self, conversation: Conversation, tokenizer: LoadedTokenizer
    ) -> chat_templates.RenderedConversation:
        """Render a conversation with its answers as text; raises UnusableRecord."""
        try:
            check_strings(conversation, tokenizer.special_tokens)
            rendered = self.load_template(tokenizer.folder).render(conversation)
        except ConversationError as error:
            raise UnusableRecord(error.reason, error.detail) from None
        except chat_templates.TemplateError as error:
            raise UnusableRecord("the chat template cannot render it", str(error)) from None
        if not rendered.answers:
            raise UnusableRecord("no answer", is_rejected=False)
        return rendered

    def truncate(
        self, ids: list[np.ndarray], tokenizer: LoadedTokenizer
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return a conversation's tokens and marks, and whether they were truncated.

        `ids` encodes the texts from `list_prefixes`. Raises UnusableRecord if no answer is left.
        """
        tokens, marks, length = ids[0], mark_answers(ids), self.settings.length
        count = len(tokens)
        if count > length and self.settings.too_long == "reject":
            raise UnusableRecord(f"longer than {length} tokens", f"{count} tokens")
        tokens, marks = (tokenizer.truncate(cells, length) for cells in (tokens, marks))
        if not marks.any():
            raise UnusableRecord(f"no answer within {length} tokens", f"{count} tokens")
        return tokens, marks, count > length

    def list_warnings(
        self, conversation: Conversation, ids: list[np.ndarray], tokenizer: LoadedTokenizer
    ) -> set[str]:
        """Return warnings about a conversation: ignored parts, prompts with other tokens.

        `ids` encodes the texts from `list_prefixes`.
        """
        paths = self.load_template(tokenizer.folder).list_ignored_parts(conversation)
        names = {format_part(path) for path in paths}
        warnings = {f"the chat template ignores '{name}'; {REMEDY_IGNORED}" for name in names}
        tokens, *prefixes = ids
        if self._changes_prompt is None:
            self._changes_prompt = self._test_prompt(tokenizer)
        if self._changes_prompt or not all(_is_prefix(prompt, tokens) for prompt in prefixes[::2]):
            warnings.add(f"{PROBLEM_PROMPT}; {REMEDY_PROMPT}")
        return warnings

    def load_template(self, tokenizer: Path) -> chat_templates.ChatTemplate:
        """Load the template with a tokenizer folder; cached for the layout's lifetime."""
        if tokenizer not in self._templates:
            template = chat_templates.load_template(tokenizer, self.settings.chat_template)
            self._templates[tokenizer] = template
        return self._templates[tokenizer]

    @property
    def _name(self) -> str:
        return self.settings.chat_template or "of the tokenizer"

    def _warn_if_unstable(self, folder: Path | None) -> None:
        if self.settings.chat_template is not None:
            text = chat_templates.read_template(self.settings.chat_template)
            names = chat_templates.find_unstable_names(text)
        else:
            names = self.load_template(folder).unstable_names if folder else []
        if names:
            logger.warning(
                f"the chat template {self._name} uses {' and '.join(names)}: rows differ between"
                " days or runs; set rows.chat_template to a copy that writes constants"
            )

    def _test_prompt(self, tokenizer: LoadedTokenizer) -> bool:
        """Return whether the generation prompt has other tokens when a test answer follows."""
        rendered = self.load_template(tokenizer.folder).render_test()
        prompt = rendered.text[: rendered.answers[0][0]]
        texts = [prompt, *(prompt + answer for answer in TEST_ANSWERS)]
        ids, *answered = self.encode_texts(texts, tokenizer)
        return not all(_is_prefix(ids, tokens) for tokens in answered)


def list_prefixes(rendered: chat_templates.RenderedConversation) -> list[str]:
    """Return the text, and the prefixes up to both ends of each answer."""
    return [
        rendered.text,
        *(rendered.text[:offset] for span in rendered.answers for offset in span),
    ]


def mark_answers(ids: list[np.ndarray]) -> np.ndarray:
    """Return 1 for each answer token, else 0; `ids` encodes the texts from `list_prefixes`.

    An answer starts at the first token outside its encoded prompt. The prompt then has the same
    tokens in training and in generation.
    """
    tokens, *prefixes = ids
    marks = np.zeros(len(tokens), np.uint8)
    for prompt, answered in zip(prefixes[::2], prefixes[1::2], strict=True):
        marks[_count_shared(prompt, tokens) : _count_shared(answered, tokens)] = 1
    return marks


def _is_prefix(prompt: np.ndarray, tokens: np.ndarray) -> bool:
    return _count_shared(prompt, tokens) == len(prompt)


def _count_shared(prefix: np.ndarray, tokens: np.ndarray) -> int:
    """Return the common prefix length of two token sequences."""
    size = min(len(prefix), len(tokens))
    differences = np.flatnonzero(prefix[:size] != tokens[:size])
    return int(differences[0]) if len(differences) else size
