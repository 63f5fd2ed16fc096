"""ARCHITECTURE.md is short; it lists every room, and short ways through the code that exist."""

from __future__ import annotations

import re

import pytest

from architecture.layers import ROOMS
from architecture.tree import ROOT

FLOWS = {
    "One training step": 20,
    "One shard of batch inference": 16,
    "One export": 18,
    "One restart": 12,
    "One launched job": 15,
}
"""Headings of the flows, and the maximum number of files to open."""
PATH = re.compile(r"`([\w/]+\.py)`")
PAGE = ROOT / "ARCHITECTURE.md"
MAX_LINES = 300


def read_flow(page: str, heading: str) -> list[str]:
    """Return the files in the table of a flow."""
    section = page.partition(f"### {heading}\n")[2]
    rows = re.split(r"\n#+ ", section, maxsplit=1)[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    return [path for cell in cells for path in PATH.findall(cell)]


def test_the_page_is_short_and_lists_every_room_from_the_ground_up() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    rows = [match[1] for line in lines if (match := re.match(r"\| `(\w+)/` \|", line))]
    assert tuple(rows) == ROOMS


@pytest.mark.parametrize("heading", FLOWS)
def test_a_flow_opens_few_files(heading: str) -> None:
    paths = read_flow(PAGE.read_text(encoding="utf-8"), heading)
    missing = [path for path in paths if not (ROOT / "src" / "regauge" / path).is_file()]
    assert not missing
    assert 5 < len(paths) <= FLOWS[heading]
    assert len(set(paths)) == len(paths)


def test_a_flow_is_read_from_its_table() -> None:
    page = "### A\n\n| File | Role |\n| --- | --- |\n| `a/b.py`, `c.py` | x `d.py` |\n\n### B\n"
    assert read_flow(page, "A") == ["a/b.py", "c.py"]
