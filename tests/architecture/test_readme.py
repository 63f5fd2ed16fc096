"""The README's first commands exist, and it lists every command."""

from __future__ import annotations

import inspect
import re

from architecture.tree import ROOT
from regauge import cli, commands
from regauge.system import choices


def list_targets(makefile: str) -> set[str]:
    """Return the targets of a Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))


def read_first_commands(readme: str) -> list[str]:
    """Return the first two commands in the code blocks of a README."""
    fences = r"^```(?:bash|sh|console)\n(.*?)^```"
    blocks = re.findall(fences, readme, flags=re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line][:2]


def read_commands(readme: str) -> dict[str, tuple[str, ...]]:
    """Return the commands of each table in the section `Commands`, by the title of the table."""
    section = readme.partition("\n## Commands\n")[2].partition("\n## ")[0]
    table = re.compile(r"^\| ([\w ,]+) \| \|\n(.*?)\n\n", re.DOTALL | re.MULTILINE)
    tables = table.findall(section)
    return {
        title: tuple(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) for title, rows in tables
    }


def test_the_first_two_commands_are_targets() -> None:
    first_commands = read_first_commands((ROOT / "README.md").read_text())
    assert first_commands == ["make demo", "make test"]
    assert {"demo", "test"} <= list_targets((ROOT / "Makefile").read_text())


def test_the_readme_and_the_help_have_every_command_in_the_same_groups() -> None:
    assert read_commands((ROOT / "README.md").read_text()) == cli.GROUPS
    listed = [command for group in cli.GROUPS.values() for command in group]
    assert sorted(listed) == list(choices.names("verbs"))


def test_the_page_of_the_command_line_lists_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    table = page.partition("\n## Verbs\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert sorted(listed) == list(choices.names("verbs"))


def test_the_page_of_the_command_line_knows_which_commands_have_a_dry_run() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `--dry-run` |"))
    excluded = re.findall(r"`(\w+)`", row.split("|")[2])
    names = choices.names("verbs")
    mains = {name: inspect.signature(commands.import_verb(name).main) for name in names}
    assert sorted(excluded) == [name for name in names if "dry_run" not in mains[name].parameters]


def test_other_commands_are_found() -> None:
    assert read_first_commands("```bash\npip install x  # once\nmake demo\n```") == [
        "pip install x",
        "make demo",
    ]
    page = "\n## Commands\n\n| A, b | |\n| --- | --- |\n| `b` | B |\n| `a` | `c` |\n\nEnd.\n"
    assert read_commands(page) == {"A, b": ("b", "a")}
