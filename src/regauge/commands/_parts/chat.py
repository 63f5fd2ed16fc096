"""A terminal chat: reads prompts, and shows answers while they are generated."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.inference.export.model import load
from regauge.system import log, stop_signals
from regauge.system.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from regauge.inference.export.model import LoadedModel
    from regauge.models.settings import Generation

PROMPT = "> "
RESET, EXIT = "/reset", "/exit"
HELP = f"Ctrl-C ends an answer. {RESET} starts a new conversation. Ctrl-D or {EXIT} ends the chat."
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with a control function on terminals."""


@dataclass
class Chat:
    """A conversation with a model; without a chat template each prompt is continued alone."""

    model: LoadedModel
    options: dict[str, Any]
    """`generation` table options."""
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def load(cls, path: str, generation: Generation, system: str | None) -> Chat:
        """Load a model; raises SettingsError if it cannot chat with these options."""
        model = load(path, batch_invariant=False)
        if model.program.output_kind != "text":
            problem = f"{path} returns {model.program.output_kind}, not generated text"
            raise SettingsError(problem, "name a causal language model")
        chat = cls(model, dump(generation), system)
        if system is not None and not chat.has_template:
            problem = f"{path} has no chat template, so it cannot read a system message"
            raise SettingsError(problem, "remove --system")
        return chat

    @property
    def has_template(self) -> bool:
        """Whether the model reads conversations."""
        tokenization = self.model.program.tokenization
        return tokenization is not None and tokenization.input_format == "chat"

    def run(self) -> int:
        """Answer terminal prompts until the input ends; return the number of answers."""
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` then has a history and keys to edit a line
        log.stderr.print(HELP, markup=False)
        count = 0
        with stop_signals.raise_interrupts():
            while (text := self._read_prompt()) is not None:
                if text.strip() == RESET:
                    self.messages.clear()
                elif text.strip():
                    count += self._answer_safely(text)
        return count

    def answer(self, text: str, *, is_shown: bool = True) -> str:
        """Answer a prompt, show the answer while it is generated, and return it."""
        parts: list[str] = []

        def receive(part: str) -> None:
            parts.append(part)
            if is_shown:
                _show(part)

        turn, answer = {"role": "user", "content": text}, None
        try:
            prompt = self._build_prompt(turn)
            answer = self.model.generate(prompt, **self.options, on_text=receive)
        finally:
            if is_shown:
                _show("\n")
            content = "".join(parts) if answer is None else answer
            if content:
                self.messages += [turn, {"role": "assistant", "content": content}]
        return str(answer)

    def _build_prompt(self, turn: dict[str, str]) -> Any:
        if not self.has_template:
            return turn["content"]
        if self.system is None and not self.messages:
            return turn["content"]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages, turn]

    def _answer_safely(self, text: str) -> bool:
        """Answer a prompt; return whether there is an answer, even after Ctrl-C."""
        try:
            self.answer(text)
        except KeyboardInterrupt:
            return True
        except RegaugeError as error:
            log.stderr.print(str(error), style="red", markup=False)
            return False
        return True

    @staticmethod
    def _read_prompt() -> str | None:
        """Return the next prompt; None at the end of the chat."""
        while True:
            try:
                text = input(PROMPT)
            except KeyboardInterrupt:
                log.stderr.print(f"\nCtrl-D or {EXIT} ends the chat.", markup=False)
                continue
            except EOFError:
                _show("\n")
                return None
            stop_signals.check_stop()
            return None if text.strip() == EXIT else text


def _show(text: str) -> None:
    is_terminal = sys.stdout.isatty()
    sys.stdout.write(CONTROL_CHARACTERS.sub("\ufffd", text) if is_terminal else text)
    sys.stdout.flush()
