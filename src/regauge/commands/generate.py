"""Generate text in the terminal: answer one prompt, or chat with a model.

For example:

    $ regauge generate out/answers --prompt "What is a rank?"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.models.settings import GenerationTable
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.models.settings import Generation

TABLE = "generation"


def main(
    model: Annotated[Path, Parameter(help="Artifact, run or model folder, hub name, or run file.")],
    *overrides: Annotated[str, Parameter(help="Options, such as generation.top_p=0.9.")],
    prompt: Annotated[str | None, Parameter(help="Prompt to answer; else standard input.")] = None,
    system: Annotated[str | None, Parameter(help="System message for the conversation.")] = None,
    temperature: Annotated[float | None, Parameter(help="0 is greedy (default).")] = None,
    max_new_tokens: Annotated[int | None, Parameter(help="Maximum tokens per answer.")] = None,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Answer a prompt, or chat without a prompt and piped input.

    In a chat Ctrl-C ends an answer, Ctrl-D ends the chat and /reset starts a new conversation.

    For example:

        >>> regauge.generate("out/answers", prompt="What is a rank?")
    """
    flags = [("temperature", temperature), ("max_new_tokens", max_new_tokens)]
    assignments = tuple(f"{TABLE}.{key}={value}" for key, value in flags if value is not None)
    name, tables = _read_model(model)
    generation = _build_generation(tables, (*overrides, *assignments))
    is_chat = prompt is None and sys.stdin.isatty()
    if is_chat and json:
        raise SettingsError("--json needs a prompt", "add --prompt, or pipe one in")
    text = None if is_chat else _read_prompt(prompt)
    from regauge.commands._parts.chat import Chat

    chat = Chat.load(name, generation, system)
    if text is None:
        return {"model": name, "answers": chat.run()}
    answer = chat.answer(text, is_shown=not json)
    result = {"model": name, "prompt": text, "answer": answer}
    if json:
        commands.show(result, as_json=True)
    return result


def _read_model(path: Path) -> tuple[str, config.Tables]:
    """Return the model name, and a run file's `generation` table if it has one.

    A run file's model is that of its `output.folder`.
    """
    if path.suffix not in commands.RUN_FILE_SUFFIXES or not path.is_file():
        return str(path), {}
    tables = config.read(path)
    output = tables.get("output")
    if not isinstance(output, dict) or "folder" not in output:
        raise SettingsError(f"{path} does not set output.folder", "name the folder of a model")
    return str(output["folder"]), {TABLE: tables[TABLE]} if TABLE in tables else {}


def _build_generation(tables: config.Tables, overrides: tuple[str, ...]) -> Generation:
    tables = config.apply_overrides(tables, overrides)
    for name in tables:
        if name != TABLE:
            raise SettingsError(f"'{name}' is not an option of generate", f"set keys of {TABLE}")
    return config.build(GenerationTable, tables).generation


def _read_prompt(prompt: str | None) -> str:
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise SettingsError("the prompt is empty", "add --prompt, or pipe a text in")
    return text.removesuffix("\n")
