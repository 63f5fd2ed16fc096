"""The tables of the page for users of other libraries agree with messages and `explain`."""

from __future__ import annotations

import re

import pytest

from architecture.tree import ROOT
from regauge.config.peer_names import find_settings

PAGE = (ROOT / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")


def read_rows() -> list[tuple[str, str, str]]:
    """Return the library, its settings and the settings of Regauge in each row of a table."""
    rows, library = [], ""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1:] == ["Regauge", "Difference"]:
            library = cells[0]
        elif not line.startswith("|"):
            library = ""
        elif library and CODE.search(line):
            rows.append((library, cells[0], cells[1]))
    return rows


ROWS = read_rows()


def test_every_library_has_a_table() -> None:
    libraries = {library for library, _, _ in ROWS}
    assert libraries == {"Trainer", "sentence-transformers", "axolotl", "litgpt"}


@pytest.mark.parametrize(("library", "names", "settings"), ROWS, ids=lambda value: value)
def test_explain_knows_a_setting_of_the_page(library: str, names: str, settings: str) -> None:
    documented = set(CODE.findall(settings))
    for name in CODE.findall(names):
        assert documented <= set(find_settings(name)), f"{library}: {name}"
