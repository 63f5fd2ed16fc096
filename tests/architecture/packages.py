"""The package tables of ARCHITECTURE.md, generated from the docstrings of the modules.

PYTHONPATH=tests python -m architecture.packages     rewrites the tables
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from architecture.tree import ROOT, Source, sources

PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- packages -->", "<!-- /packages -->"


def build_tables() -> str:
    """Return one table per package: its modules with the first line of its docstring."""
    packages: dict[str, list[Source]] = defaultdict(list)
    for source in sources():
        packages[str(Path(source.path).parent)].append(source)
    parts = []
    for package, modules in sorted(packages.items()):
        title = package.replace("regauge", "src/regauge", 1)
        parts += [f"### `{title}`", ""]
        init = next(module for module in modules if module.path.endswith("__init__.py"))
        parts += [first_line(init), "", "| File | Content |", "| --- | --- |"]
        parts += [
            f"| `{Path(module.path).name}` | {first_line(module)} |"
            for module in sorted(modules, key=lambda module: module.path)
            if module is not init
        ]
        parts.append("")
    return "\n".join(parts)


def first_line(module: Source) -> str:
    """Return the first line of a module's docstring, safe in a table."""
    return (ast.get_docstring(module.tree) or "").partition("\n")[0].replace("|", "\\|")


def read_tables(page: str) -> str:
    """Return the tables that a page contains."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def write_tables() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{build_tables()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
