"""Chat templates: reads the messages of a record and renders them as text.

A template belongs to the tokenizer, is a file of `templates`, or is a file of the user. The answer
of an assistant's turn is the text that the template writes after the prompt for that turn.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.choices import did_you_mean
from regauge.data.tokenizer import CONFIG, LoadedTokenizer
from regauge.errors import SettingsError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.data.sources import Value

TEMPLATE_FILE = "chat_template.jinja"
"""The template file in a tokenizer's folder; the template may also be part of its configuration."""
TEMPLATES_FOLDER = Path(__file__).parent / "templates"
ASSISTANT = "assistant"
TEST_MESSAGES = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
Messages = list[dict[str, str]]


class TemplateError(Exception):
    """A template that cannot render a conversation, or whose answers cannot be located."""


class RenderedConversation(NamedTuple):
    """A conversation as one text."""

    text: str
    answers: list[tuple[int, int]]
    """Start and end of each answer, in characters."""


class ChatTemplate:
    """A chat template with the tokenizer that defines its special tokens."""

    def __init__(self, tokenizer: Path, text: str | None) -> None:
        """Open a template; None is the tokenizer's template."""
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
        self._text = text

    def render(self, messages: Messages) -> RenderedConversation:
        """Return a conversation as a text; raises TemplateError.

        A first message is no answer, and neither is a blank one.
        """
        text = self._render(messages)
        answers = []
        for number, message in enumerate(messages):
            if number and message["role"] == ASSISTANT and message["content"].strip():
                prompt = self._render(messages[:number], add_prompt=True)
                answered = self._render(messages[: number + 1])
                if not (text.startswith(answered) and answered.startswith(prompt)):
                    raise TemplateError("it renders a turn differently if other turns follow")
                answers.append((len(prompt), len(answered)))
        return RenderedConversation(text, answers)

    def render_prompt(self, text: str) -> str:
        """Return a request up to the start of its answer; raises TemplateError."""
        request = {"role": "user", "content": text, "instruction": text, "input": ""}
        return self._render([request], add_prompt=True)

    def _render(self, messages: Messages, *, add_prompt: bool = False) -> str:
        import jinja2

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._text,
                tokenize=False,
                add_generation_prompt=add_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(first_line(error)) from None
        return text


@cache
def load_template(tokenizer: Path, name: str | None) -> ChatTemplate:
    """Return the template with this name or path, or the tokenizer's template; cached."""
    return ChatTemplate(
        tokenizer, None if name is None else find_template_file(name).read_text(encoding="utf-8")
    )


def find_template_file(name: str) -> Path:
    """Return the file of a template; raises SettingsError for an unknown name or path."""
    known = {path.stem: path for path in sorted(TEMPLATES_FOLDER.glob("*.jinja"))}
    path = known.get(name, Path(name))
    if not path.is_file():
        remedy = f"{did_you_mean(name, tuple(known))} (or name a file)"
        raise SettingsError(f"no chat template '{name}'", remedy)
    return path


def has_template(tokenizer: Path) -> bool:
    """Return whether a tokenizer's folder has a chat template."""
    if (tokenizer / TEMPLATE_FILE).is_file():
        return True
    path = tokenizer / CONFIG
    return path.is_file() and bool(
        json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    )


def find_end_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end generated text, the most specific one first.

    These are the last special token of an answer in the chat template, the token that ends a text
    in the rows of a dataset, and the declared end token. `folder` has the tokenizer.
    """
    tokenizer = LoadedTokenizer(folder)
    ends = [*_find_answer_end(folder, tokenizer), *tokenizer.suffix[-1:].tolist()]
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ends))


def _find_answer_end(folder: Path, tokenizer: LoadedTokenizer) -> list[int]:
    """Return the last special token of an answer in the chat template, if there is one."""
    if not has_template(folder):
        return []
    try:
        rendered = load_template(folder, None).render(TEST_MESSAGES)
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
    """Write a template to a tokenizer's folder; the tokenizer then parses special tokens."""
    (tokenizer / TEMPLATE_FILE).write_bytes(template.read_bytes())
    path = tokenizer / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.pop("split_special_tokens", False):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse_conversation(record: Mapping[str, Value]) -> Messages | None:
    """Return the messages of a record; None if it has none, or if they are malformed.

    A record has `messages` as JSON, or an `instruction` with its `output` and perhaps an `input`.
    """
    if "messages" in record:
        return _parse_messages(str(record["messages"]))
    instruction, output = record.get("instruction"), record.get("output")
    if not (isinstance(instruction, str) and isinstance(output, str)):
        return None
    value = record.get("input")
    context = value if isinstance(value, str) and value.strip() else ""
    content = f"{instruction}\n\n{context}" if context else instruction
    # A template with a separate section for the input reads `instruction` and `input`.
    request = {"role": "user", "content": content, "instruction": instruction, "input": context}
    return [request, {"role": ASSISTANT, "content": output}]


def _parse_messages(text: str) -> Messages | None:
    try:
        messages = json.loads(text)
    except ValueError:
        return None
    if not isinstance(messages, list) or not messages:
        return None
    keys = ("role", "content")
    for message in messages:
        if not isinstance(message, dict):
            return None
        if not all(isinstance(message.get(name), str) for name in keys):
            return None
    return [{name: message[name] for name in keys} for message in messages]
