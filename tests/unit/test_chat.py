"""The chat of `regauge generate`: history, streaming, interruption and the end of a chat."""

from __future__ import annotations

import builtins
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from regauge.commands._parts.chat import Chat
from regauge.inference.export.generator import TextStream
from regauge.inference.export.text_stream import AnswerText
from regauge.models.settings import Generation
from regauge.system import stop_signals


class EchoModel:
    """Answers with the number of messages in three parts; "stop" interrupts the second part."""

    def __init__(self, input_format: str = "chat") -> None:
        self.prompts: list[Any] = []
        tokenization = SimpleNamespace(input_format=input_format)
        self.program = SimpleNamespace(output_kind="text", tokenization=tokenization)

    def generate(self, prompt: Any, *, on_text: Callable[[str], None], **options: Any) -> str:
        assert options == {"seed": 3}
        self.prompts.append(prompt)
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        on_text("one ")
        if text == "stop":
            raise KeyboardInterrupt
        on_text("two")
        return "one two"


def build_chat(model: EchoModel, system: str | None = None) -> Chat:
    loaded: Any = model
    return Chat(loaded, {"seed": 3}, system)


def run_chat(chat: Chat, monkeypatch: pytest.MonkeyPatch, *lines: str | type[Exception]) -> int:
    """Run a chat whose user types these lines, or keys that raise."""
    remaining = list(lines)

    def read_line(_prompt: str) -> str:
        line = remaining.pop(0) if remaining else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read_line)
    return chat.run()


def test_a_chat_sends_the_system_message_and_all_earlier_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = EchoModel()
    assert run_chat(build_chat(model, "Be brief."), monkeypatch, "hi", "", "bye") == 2
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": "hi"}
    answer = {"role": "assistant", "content": "one two"}
    last = {"role": "user", "content": "bye"}
    assert model.prompts == [[system, first], [system, first, answer, last]]
    assert capsys.readouterr().out == "one two\none two\n\n"


def test_ctrl_c_ends_an_answer_and_the_chat_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = EchoModel()
    keys: Any = KeyboardInterrupt
    assert run_chat(build_chat(model), monkeypatch, "stop", keys, "again", "/exit", "no") == 2
    assert [message["content"] for message in model.prompts[1]] == ["stop", "one ", "again"]
    captured = capsys.readouterr()
    assert captured.out == "one \none two\n"
    assert "/exit ends the chat" in captured.err


def test_reset_starts_a_new_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EchoModel()
    run_chat(build_chat(model), monkeypatch, "hi", "/reset", "bye")
    assert model.prompts == ["hi", "bye"]


def test_a_model_without_a_template_continues_each_prompt_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = EchoModel("completion")
    run_chat(build_chat(model), monkeypatch, "hi", "bye")
    assert model.prompts == ["hi", "bye"]


def test_interrupts_are_no_stop_signals_in_a_chat() -> None:
    with stop_signals.record_signals():
        with stop_signals.raise_interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop_signals.find_signal() is None
        handler = signal.getsignal(signal.SIGINT)
        assert handler is not signal.default_int_handler


class CharacterPreprocessor:
    """Decodes tokens as the bytes of UTF-8."""

    def build_answer(self, generation: Generation) -> AnswerText:
        return AnswerText(lambda tokens: bytes(tokens).decode(errors="replace"), generation)


@pytest.mark.parametrize(
    ("text", "stops", "parts"),
    [
        ("abé", (), ["a", "b", "é"]),
        ("ab##c", ("##",), ["a", "b"]),
        ("ab#c", ("##",), ["a", "b", "#c"]),
        ("ab#", ("##",), ["a", "b", "#"]),
    ],
)
def test_a_stream_reports_only_final_characters(
    text: str, stops: tuple[str, ...], parts: list[str]
) -> None:
    received: list[str] = []
    preprocessor: Any = CharacterPreprocessor()
    generation = Generation(stop=stops)
    stream = TextStream(preprocessor, generation, received.append)
    tokens = list(text.encode())
    for count in range(1, len(tokens) + 1):
        stream.add(tokens[:count])
    stream.finish(generation.cut_text(text))
    assert received == parts
