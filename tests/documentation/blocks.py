"""Code blocks of Markdown pages, and how a page runs them.

| fence | meaning |
| --- | --- |
| a language and a title that is a file name | a file, written before the next block |
| `toml` | part of a run file: its keys and values are checked |
| `bash`, `python` | run in the folder of the page, in order |
| `bash title="Needs …"` | not run, for lack of what the title names; its flags are checked |
| `bash` with `make` and `pip` only | set-up, not run: it has run before the test |
| `text title="Output"` | output of the block before it, compared without its numbers |
| `text` | other output, a folder or a formula |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from architecture.tree import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?: (?P<options>[^\n]*))?\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
TITLE = re.compile(r'title="([^"]*)"')
FILE = re.compile(r"[\w./-]+\.(toml|json|jsonl|yaml|py|csv|txt|md)")
LANGUAGES = ("bash", "python", "toml", "json", "yaml", "text")
NEEDS = "Needs "
OUTPUT = "Output"
SETUP = ("make ", "pip install ", "git clone ", "cd ", "#")
NUMBER = re.compile(r"[-+]?\d[\d,.:]*(e[-+]?\d+)?")
DRAWING = re.compile(r"[\u2500-\u257f]+")


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def location(self) -> str:
        """The page and the line of the fence."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_file(self) -> bool:
        """Whether the block is the content of a file that its title names."""
        return FILE.fullmatch(self.title) is not None

    @property
    def is_run(self) -> bool:
        """Whether the block is executed."""
        is_code = self.language in {"bash", "python"} and not self.is_file
        return is_code and not self.is_setup and not self.title.startswith(NEEDS)

    @property
    def is_setup(self) -> bool:
        """Whether the block installs Regauge."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return self.language == "bash" and all(line.startswith(SETUP) for line in lines)

    @property
    def is_fragment(self) -> bool:
        """Whether the block is a part of a run file."""
        return self.language == "toml" and not self.is_file


def parse_blocks(page: Path, markdown: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    blocks = []
    for match in FENCE.finditer(markdown):
        title = TITLE.search(match["options"] or "")
        indent = match["indent"]
        text = re.sub(rf"^{indent}", "", match["text"], flags=re.MULTILINE)
        line = markdown.count("\n", 0, match.start()) + 1
        blocks.append(Block(page, line, match["language"], title[1] if title else "", text))
    return blocks


def read_blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page of the repository."""
    return parse_blocks(page, page.read_text(encoding="utf-8"))


def mask_numbers(line: str) -> str:
    """Return a line without numbers, table borders and repeated spaces."""
    return " ".join(DRAWING.sub(" ", NUMBER.sub("#", line)).split())


def find_missing_lines(documented: str, output: str) -> list[str]:
    """Return the documented lines that the output lacks; a line `…` stands for any lines."""
    printed = {mask_numbers(line) for line in output.splitlines()}
    lines = [line for line in documented.splitlines() if line.strip() not in {"", "…"}]
    return [line for line in lines if mask_numbers(line) not in printed]
