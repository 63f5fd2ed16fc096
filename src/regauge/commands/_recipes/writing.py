"""Formats recipes as run files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from regauge.commands._recipes.data_file import DataFile, FieldSummary, read_data_file
from regauge.commands._recipes.settings import BUILDERS, DESCRIPTIONS, Job, Recipe
from regauge.config.toml_format import format_key, format_toml

MAX_LINE = 100
EXAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lm": ("text", "texts.txt", {"text": "A text."}),
    "classify": ("csv", "train.csv", {"text": "A text.", "label": "positive"}),
    "embed": ("jsonl", "pairs.jsonl", {"query": "A question?", "document": "Its answer."}),
    "sft": ("jsonl", "chats.jsonl", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "rank": ("jsonl", "results.jsonl", {"query": "words", "document": "A text.", "label": 1.0}),
    "increment": ("jsonl", "new.jsonl", {"text": "A text."}),
}
"""Recipe -> source kind, file and record assumed if no data file is named."""


def write_recipe(name: str, run_file: str, data: Path | None, model: str | None) -> str:
    """Return a recipe's run file.

    `run_file` is its path; the output folders share its name. `data` is a record file; without one,
    the fields have common names. `model` is a folder or a name on the Hugging Face Hub.
    """
    if data is None:
        kind, file, record = EXAMPLES[name]
        fields = {field: FieldSummary([value]) for field, value in record.items()}
        contents = DataFile({"kind": kind, "files": (file,)}, 1, is_complete=False, fields=fields)
        note = f"# Its data is {file}, with the fields: {', '.join(record)}."
    else:
        contents, note = read_data_file(data), ""
    recipe = BUILDERS[name](Job(Path(run_file).stem, contents, model))
    return "\n".join([*_format_header(name, run_file, recipe, note), *format_tables(recipe.tables)])


def _format_header(name: str, run_file: str, recipe: Recipe, note: str) -> list[str]:
    return [
        f"# {DESCRIPTIONS[name]}.",
        *([note] if note else []),
        "#",
        *(f"#   regauge {verb} {shlex.quote(run_file)}" for verb in ("prepare", "train")),
        f"#   {recipe.use}",
        "",
    ]


def format_tables(tables: dict[str, Any]) -> list[str]:
    """Return TOML lines; a table is one line if it is short enough."""
    lines = []
    for name, value in tables.items():
        line = f"{name} = {format_toml(value)}"
        if isinstance(value, dict) and (len(value) == 1 or len(line) > MAX_LINE):
            lines += [
                f"{name}.{format_key(key)} = {format_toml(item)}" for key, item in value.items()
            ]
        else:
            lines.append(line)
    return [*lines, ""]
