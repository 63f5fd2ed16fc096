"""Files are UTF-8 in every locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = """\
{% for message in messages %}<«{{ message.role }}»>{{ message.content }}\
{% if message.role == "assistant" %}[SEP]{% endif %}{% endfor %}\
{% if add_generation_prompt %}<«assistant»>{% endif %}"""
RUN_FILE = """\
source = { kind = "jsonl", files = ["chat.jsonl"], columns = ["messages"] }
tokenizer.vocab_size = 400
rows = { layout = "chat", length = 128, chat_template = "template.jinja" }
"""
LOCALES = {
    "UTF-8": {"PYTHONUTF8": "1"},
    "C": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
}


def prepare(folder: Path, variables: dict[str, str]) -> dict[str, object]:
    """Prepare the conversations in a locale; return the result."""
    command = [sys.executable, "-m", "regauge", "prepare", "run.toml", f"data.path={folder}"]
    done = subprocess.run(
        [*command, "--json"],
        cwd=folder.parent,
        env={**os.environ, **variables},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.full
def test_a_chat_template_is_read_as_utf_8(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    conversations = (
        [{"role": "user", "content": f"¿{number}?"}, {"role": "assistant", "content": str(number)}]
        for number in range(40)
    )
    lines = [json.dumps({"messages": messages}) for messages in conversations]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines), encoding="utf-8")
    results = [prepare(tmp_path / name, variables) for name, variables in LOCALES.items()]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    tokenizer = (tmp_path / "C" / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8")
    assert json.loads(tokenizer)["model"]["vocab"]
