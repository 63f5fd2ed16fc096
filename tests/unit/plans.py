"""Plans of the command line, and the imports of a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from architecture.test_start import list_imported
from regauge import cli

HEAVY = ("torch", "numpy", "pyarrow", "tokenizers", "transformers")


def read_plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON document of a plan."""
    assert cli.main(["plan", *arguments, "--json"]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def list_heavy_imports(*arguments: str) -> list[str]:
    """Return the heavy packages that a plan imports in a fresh interpreter."""
    command = ["plan", *arguments]
    return list_imported(f"from regauge import cli; assert cli.main({command!r}) == 0", HEAVY)
