"""Conversations as texts: the messages of a record, and a template that writes them down.

A template is that of a tokenizer, one of the files in `templates`, or the user's own. What it
writes for a turn of the assistant, beyond the prompt that asks for that turn, is the answer.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.choices import did_you_mean
from regauge.data.tokenizer import CONFIG
from regauge.errors import SettingsError, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.data.sources import Value

OWN = "chat_template.jinja"
"""Where a tokenizer's folder has its template, unless it is a part of its configuration."""
NAMED = Path(__file__).parent / "templates"
ASSISTANT = "assistant"
PROBE = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
Messages = list[dict[str, str]]


class TemplateError(Exception):
    """A template that cannot write a conversation, or writes it so that its answers are lost."""


class Written(NamedTuple):
    """A conversation as one text."""

    text: str
    answers: list[tuple[int, int]]
    """Where each answer begins and ends, in characters."""


class Template:
    """A chat template together with the tokenizer whose special tokens it names."""

    def __init__(self, tokenizer: Path, text: str | None) -> None:
        """Open the template of this text, or without one the tokenizer's own."""
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
        self._text = text

    def written(self, messages: Messages) -> Written:
        """Return a conversation as a text; raises TemplateError.

        A first message answers nothing, and a blank one is no answer.
        """
        text = self._render(messages)
        answers = []
        for number, message in enumerate(messages):
            if number and message["role"] == ASSISTANT and message["content"].strip():
                before = self._render(messages[:number], prompted=True)
                with_it = self._render(messages[: number + 1])
                if not (text.startswith(with_it) and with_it.startswith(before)):
                    raise TemplateError("it writes a turn in another way when others follow")
                answers.append((len(before), len(with_it)))
        return Written(text, answers)

    def prompt(self, text: str) -> str:
        """Return a request up to where its answer begins; raises TemplateError."""
        request = {"role": "user", "content": text, "instruction": text, "input": ""}
        return self._render([request], prompted=True)

    def _render(self, messages: Messages, *, prompted: bool = False) -> str:
        import jinja2

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._text,
                tokenize=False,
                add_generation_prompt=prompted,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(plain(error)) from None
        return text


@cache
def template(tokenizer: Path, name: str | None) -> Template:
    """Return the template of this name or path, or the tokenizer's own; opened once."""
    return Template(tokenizer, None if name is None else template_file(name).read_text())


def template_file(name: str) -> Path:
    """Return the file of a template; raises SettingsError for a name or path without one."""
    known = {path.stem: path for path in sorted(NAMED.glob("*.jinja"))}
    found = known.get(name, Path(name))
    if not found.is_file():
        remedy = f"{did_you_mean(name, tuple(known))} (or name a file)"
        raise SettingsError(f"no chat template '{name}'", remedy)
    return found


def has_template(tokenizer: Path) -> bool:
    """Return whether a tokenizer's folder has a chat template of its own."""
    if (tokenizer / OWN).is_file():
        return True
    path = tokenizer / CONFIG
    return path.is_file() and bool(json.loads(path.read_text()).get("chat_template"))


def adopt(tokenizer: Path, template: Path) -> None:
    """Give a tokenizer's folder a template; special tokens that it writes are read as such."""
    (tokenizer / OWN).write_bytes(template.read_bytes())
    path = tokenizer / CONFIG
    config = json.loads(path.read_text()) if path.is_file() else {}
    if config.pop("split_special_tokens", False):
        path.write_text(json.dumps(config, indent=2) + "\n")


def conversation(record: Mapping[str, Value]) -> Messages | None:
    """Return the messages of a record; None where they are malformed, or it has none.

    A record has `messages`, as JSON, or an `instruction` with its `output`, and perhaps an `input`.
    """
    if "messages" in record:
        return _messages(str(record["messages"]))
    asked, answered = record.get("instruction"), record.get("output")
    if not (isinstance(asked, str) and isinstance(answered, str)):
        return None
    given = record.get("input")
    given = given if isinstance(given, str) and given.strip() else ""
    content = f"{asked}\n\n{given}" if given else asked
    # A template that has a place of its own for the input finds both apart.
    request = {"role": "user", "content": content, "instruction": asked, "input": given}
    return [request, {"role": ASSISTANT, "content": answered}]


def _messages(text: str) -> Messages | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, list) or not found:
        return None
    wanted = ("role", "content")
    for message in found:
        if not isinstance(message, dict):
            return None
        if not all(isinstance(message.get(name), str) for name in wanted):
            return None
    return [{name: message[name] for name in wanted} for message in found]
