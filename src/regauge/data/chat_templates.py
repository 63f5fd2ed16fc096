"""Chat templates: renders conversations as text, and locates their answers.

A template comes from the tokenizer, a file in `templates`, or the user's file. An assistant turn's
answer is the text that the template writes after the prompt for that turn.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.conversations import ASSISTANT, Conversation, is_blank
from regauge.data.tokenizer import MORE_TEMPLATES, LoadedTokenizer, hash_tokenizer
from regauge.data.tokenizer_config import CONFIG
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError, first_line
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.data.conversations import Message, PartPath

TEMPLATE_FILE = "chat_template.jinja"
"""Template file in a tokenizer folder; the template may also be in the tokenizer configuration."""
TEMPLATES_FOLDER = Path(__file__).parent / "templates"
TEST_CONVERSATIONS = tuple(
    Conversation(
        [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b", **keys}], {}
    )
    for keys in ({}, {"reasoning_content": "c"})
)
"""A usable template renders at least one of these conversations."""
UNSTABLE_NAMES = frozenset({"strftime_now", "lipsum", "random"})
"""transformers' clock for templates, and Jinja's random values."""
MAX_SHOWN_CHARACTERS = 24


class TemplateError(Exception):
    """A template cannot render a conversation, or its answers cannot be located."""


class RenderedConversation(NamedTuple):
    text: str
    answers: list[tuple[int, int]]
    """Start and end of each answer, in characters."""


class ChatTemplate:
    """A chat template and its tokenizer, which defines the special tokens."""

    def __init__(self, tokenizer: Path, text: str | None) -> None:
        """Open a template; None selects the tokenizer's own.

        Raises DataError if transformers cannot load the tokenizer.
        """
        import transformers

        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
        except Exception as error:  # noqa: BLE001 (it does not check the types of its files)
            problem = f"transformers cannot load the tokenizer {tokenizer}: {first_line(error)}"
            raise DataError(problem, "correct its tokenizer_config.json") from None
        self._text = text
        templates = self._tokenizer.chat_template if text is None else text
        texts = templates.values() if isinstance(templates, dict) else [templates or ""]
        symbols = [symbol for part in texts for symbol in _list_symbols(part)]
        self.literals = frozenset(value for kind, value in symbols if kind == "string")
        """The template's string constants, including the roles it names."""
        self.unstable_names = sorted({name for part in texts for name in find_unstable_names(part)})
        """Names in the template whose values differ between runs."""
        self._marks_answers = ("name", "generation") in symbols

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Render a conversation as text; raises TemplateError.

        If the template has `generation` blocks, an answer is the part in these blocks.
        """
        conversation, text = self._choose_form(conversation)
        numbers = filter(conversation.is_answer, range(len(conversation.messages)))
        spans = (self._locate_answer(conversation, number, text) for number in numbers)
        answers = [span for span in spans if span is not None]
        if self._marks_answers:
            answers = list(_intersect(answers, self._list_generation_spans(conversation)))
        return RenderedConversation(text, answers)

    def render_test(self) -> RenderedConversation:
        """Render the first test conversation the template can render; raises TemplateError."""
        problems = []
        for conversation in TEST_CONVERSATIONS:
            try:
                return self.render(conversation)
            except TemplateError as error:
                problems.append(error)
        raise problems[0]

    def list_ignored_parts(self, conversation: Conversation) -> list[PartPath]:
        """Return the conversation parts without effect on the text; raises TemplateError.

        A part is read if a marker in it reaches the text. The template may read other parts without
        writing them, so a part whose marker is missing counts only if the text is equal without it.
        """
        conversation, text = self._choose_form(conversation)
        paths = list(conversation.list_parts())
        markers = [f"\ue000{index}\ue001" for index in range(len(paths))]

        def add_marker(container: Any, key: str | int, index: int) -> None:
            container[key] = _append_text(container[key], markers[index])

        marked = self._try_render(conversation.edit_parts(paths, add_marker)) or ""
        hidden = [path for path, marker in zip(paths, markers, strict=True) if marker not in marked]
        if not hidden or self._try_render(conversation.edit_parts(hidden, _remove_part)) == text:
            return hidden
        return [
            path
            for path in hidden
            if self._try_render(conversation.edit_parts([path], _remove_part)) == text
        ]

    def render_prompt(self, text: str) -> str:
        """Return a request up to the start of its answer; raises TemplateError."""
        request = {"role": "user", "content": text, "instruction": text, "input": ""}
        return self._render(Conversation([request], {}), add_prompt=True)

    def render_request(self, conversation: Conversation) -> str:
        """Return a conversation up to the start of its answer; raises TemplateError."""
        form, _ = self._choose_form(conversation)
        return self._render(form, add_prompt=True)

    def _choose_form(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Return the first conversation form the template can write, and its text."""
        problems = []
        for form, literals in conversation.list_forms():
            try:
                text = self._render(form)
            except TemplateError as error:
                problems.append(error)
                continue
            if not any(literal in text for literal in _list_python_literals(literals)):
                return form, text
            problems.append(TemplateError("it writes lists or objects as Python literals"))
        raise problems[0]

    def _locate_answer(
        self, conversation: Conversation, number: int, text: str
    ) -> tuple[int, int] | None:
        """Return the span of a turn's answer in the text, or None if the turn writes nothing."""
        earlier, message = conversation.messages[:number], conversation.messages[number]
        prompt = self._render(conversation._replace(messages=earlier), add_prompt=True)
        is_last = number + 1 == len(conversation.messages)
        answered = (
            text if is_last else self._render(conversation._replace(messages=[*earlier, message]))
        )
        if not answered.startswith(prompt):
            end = prompt[-MAX_SHOWN_CHARACTERS:]
            raise TemplateError(
                f"a turn does not begin with its generation prompt, which ends in {end!r}"
            )
        if not text.startswith(answered):
            raise TemplateError("it renders a turn differently if other turns follow")
        if is_blank(message.get("content")):
            blank: Message = {"role": ASSISTANT, "content": ""}
            without_content = conversation._replace(messages=[*earlier, blank])
            if self._try_render(without_content) == answered:
                return None
        return len(prompt), len(answered)

    def _list_generation_spans(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Return the spans of `generation` blocks in a conversation's text."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = dict(conversation.variables)
        tools, documents = (variables.pop(name, None) for name in ("tools", "documents"))
        rendered: Any = render_jinja_template(
            [conversation.messages],
            tools,
            documents,
            self._tokenizer.get_chat_template(self._text, tools),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **variables},
        )
        return sorted(rendered[1][0])

    def _try_render(self, conversation: Conversation) -> str | None:
        """Render a conversation, or return None if the template cannot."""
        try:
            return self._render(conversation)
        except TemplateError:
            return None

    def _render(self, conversation: Conversation, *, add_prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation.messages,
                chat_template=self._text,
                tokenize=False,
                add_generation_prompt=add_prompt,
                **conversation.variables,
            )
        except Exception as error:  # noqa: BLE001 (a template is a program of the user)
            raise TemplateError(first_line(error)) from None
        return text


def load_template(tokenizer: Path, name: str | None) -> ChatTemplate:
    """Return the template with this name or path, or the tokenizer's template.

    It is reloaded only if its text or the tokenizer files have changed.
    """
    text = None if name is None else read_template(name)
    return _load_template(tokenizer, text, hash_tokenizer(tokenizer))


@cache
def _load_template(tokenizer: Path, text: str | None, content_hash: str) -> ChatTemplate:
    del content_hash
    return ChatTemplate(tokenizer, text)


def find_template_file(name: str) -> Path:
    """Return a template's file; raises SettingsError for an unknown name or path."""
    known = {path.stem: path for path in sorted(TEMPLATES_FOLDER.glob("*.jinja"))}
    path = known.get(name, Path(name))
    if not path.is_file():
        remedy = f"{did_you_mean(name, tuple(known))} (or name a file)"
        raise SettingsError(f"no chat template '{name}'", remedy)
    return path


def read_template(name: str) -> str:
    """Return a template's text; raises SettingsError if it is not UTF-8."""
    try:
        return find_template_file(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"the chat template {name} is not UTF-8: {error}"
        raise SettingsError(problem, "save it as UTF-8") from None


def has_template(tokenizer: Path) -> bool:
    if (tokenizer / TEMPLATE_FILE).is_file():
        return True
    config = find_json(tokenizer / CONFIG, "replace it") or {}
    return bool(config.get("chat_template"))


def find_end_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the token ids that end generated text, the most specific one first.

    These are the last special token in a chat template answer, the token at the end of dataset
    texts, and the declared end token. `folder` has the tokenizer.
    """
    tokenizer = LoadedTokenizer(folder)
    ends = [*_find_answer_end(folder, tokenizer), *tokenizer.suffix[-1:].tolist()]
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ends))


def _find_answer_end(folder: Path, tokenizer: LoadedTokenizer) -> list[int]:
    """Return the last special token in a chat template answer, if there is one."""
    if not has_template(folder):
        return []
    try:
        rendered = load_template(folder, None).render_test()
    except TemplateError:
        return []
    answers = [rendered.text[start:stop] for start, stop in rendered.answers[-1:]]
    return [
        token_id
        for ids in tokenizer.encode(answers, parse_special_tokens=True)
        for token_id in ids.tolist()
        if token_id in tokenizer.info.special_token_ids
    ][-1:]


def install_template(tokenizer: Path, template: Path) -> None:
    """Write a template to a tokenizer folder; the tokenizer then parses special tokens.

    Removes the tokenizer's other templates, because no conversation in the dataset has their form.
    """
    shutil.rmtree(tokenizer / MORE_TEMPLATES, ignore_errors=True)
    (tokenizer / TEMPLATE_FILE).write_bytes(template.read_bytes())
    path = tokenizer / CONFIG
    config = find_json(path, "replace it") or {}
    if config.pop("split_special_tokens", False):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_unstable_names(text: str) -> list[str]:
    """Return the template names whose values differ between runs: clock, random values."""
    symbols = [*_list_symbols(text), ("", "")]
    return sorted(
        {
            name
            for (kind, name), (_, following) in pairwise(symbols)
            if kind == "name" and name in UNSTABLE_NAMES and following != "is"
        }
    )


def _list_symbols(text: str) -> list[tuple[str, str]]:
    """Return a template's tokens with their kinds; empty for a malformed template."""
    import jinja2

    try:
        tokens = list(jinja2.Environment().lex(text))  # noqa: S701 (it renders nothing)
    except jinja2.TemplateSyntaxError:
        return []
    return [
        (kind, value[1:-1] if kind == "string" else value)
        for _, kind, value in tokens
        if kind != "whitespace"
    ]


def _list_python_literals(values: Iterable[Any]) -> Iterable[str]:
    """Yield the non-JSON Python literals for objects, and for list items."""
    for value in values:
        if isinstance(value, list):
            yield from _list_python_literals(value)
        elif (literal := str(value)) != json.dumps(value, ensure_ascii=False):
            yield literal


def _append_text(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _append_text(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_append_text(item, text) for item in value]
    return f"{value}{text}"


def _remove_part(container: Any, key: str | int, index: int) -> None:
    del index
    del container[key]


def _intersect(
    spans: list[tuple[int, int]], others: list[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    for start, end in spans:
        for other_start, other_end in others:
            first, last = max(start, other_start), min(end, other_end)
            if first < last:
                yield first, last
