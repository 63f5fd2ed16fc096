"""Every file, choice, verb and settings field is documented."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from architecture.settings_classes import fields, settings_classes
from architecture.tree import CHOICES, ROOT, Source, sources

TODO = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\s*\(#\d+\))")
FOLDERS = {f"regauge/{folder}" for folder in (*CHOICES, "commands", "data/sources")}


def find_undocumented(files: tuple[Source, ...]) -> list[str]:
    """Return the files and settings without documentation."""
    problems = [f"{source.path} has no docstring" for source in files if not _summary(source)]
    classes = settings_classes(files)
    tables = {node.name for node in classes.values() if ast.get_docstring(node)}
    for name, node in classes.items():
        if not ast.get_docstring(node):
            problems.append(f"{name} has no docstring")
        for field, (statement, text) in fields(node).items():
            if not text and ast.unparse(statement.annotation) not in tables:
                problems.append(f"{name}.{field} has no docstring")
    return problems


def find_poor_summaries(files: tuple[Source, ...]) -> list[str]:
    """Return the choices and verbs whose one-line help is no sentence."""
    return [
        f"{source.path}: its first line must be a sentence: {_summary(source)!r}"
        for source in files
        if source.path.rpartition("/")[0] in FOLDERS
        and not re.fullmatch(r"[A-Z`].{10,99}\.", _summary(source))
    ]


def find_todos(source: Source) -> list[str]:
    """Return the lines that postpone something without an issue, as in TODO (#12)."""
    lines = enumerate(source.text.splitlines(), start=1)
    return [f"{source.path}:{number}: {line}" for number, line in lines if TODO.search(line)]


def _summary(source: Source) -> str:
    return (ast.get_docstring(source.tree) or "").partition("\n")[0]


def test_files_and_settings_are_documented() -> None:
    problems = find_undocumented(sources())
    assert not problems, "\n".join(problems)


def test_choices_and_verbs_have_a_summary() -> None:
    problems = find_poor_summaries(sources())
    assert not problems, "\n".join(problems)


def test_the_index_reaches_every_page() -> None:
    folder = ROOT / "docs"
    pages = {str(path.relative_to(folder)) for path in folder.rglob("*.md")} - {"index.md"}
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert pages - set(re.findall(r"\]\(([\w/-]+\.md)\)", index)) == set()


def test_the_installation_page_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "guides" / "installation.md").read_text(encoding="utf-8")
    table = page.partition("\n| Extra |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = {extra for cell in cells for extra in re.findall(r"`([\w-]+)`", cell)}
    assert listed == project["optional-dependencies"].keys() - {"dev", "docs", "bench"}


def test_nothing_is_postponed_without_an_issue() -> None:
    problems = [line for source in sources() for line in find_todos(source)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text",
    [
        "class A(Settings):\n    'A.'\n",
        "'A.'\nclass A(Settings):\n    x: int",
        "'A.'\nclass A(Settings):\n    'A.'\n    x: int\n    y: int\n    'Y.'",
        "'A.'\nclass A(config.Choice):\n    'A.'\nclass B(A):\n    'B.'\n    x: int = 1",
    ],
)
def test_a_missing_docstring_is_detected(text: str) -> None:
    assert find_undocumented((Source("regauge/a.py", text),))


def test_a_a_documented_table_needs_no_field_docstring() -> None:
    text = "'A.'\nclass A(Settings):\n    'A.'\nclass B(Settings):\n    'B.'\n    a: A = A()"
    assert not find_undocumented((Source("regauge/a.py", text),))


def test_a_poor_summary_is_detected() -> None:
    assert find_poor_summaries((Source("regauge/tasks/clm.py", '"""clm"""'),))


@pytest.mark.parametrize("text", ["x = 1  # TODO later", "# FIXME", "# TODO: (#)"])
def test_a_todo_is_detected(text: str) -> None:
    assert find_todos(Source("regauge/a.py", text))


def test_one_with_an_issue_is_not() -> None:
    assert not find_todos(Source("regauge/a.py", "# TODO (#12): as said there"))


def read_palette(path: str) -> list[tuple[str, str]]:
    """Return the colors and fonts of a stylesheet, light ones first."""
    names = "paper|raised|ink|muted|rule|accent|sans|mono"
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(rf"^ *--({names}): (.*);$", text, re.MULTILINE)


def test_reports_search_pages_and_documentation_have_the_same_colors() -> None:
    expected = read_palette("src/regauge/evaluation/report/report.css")
    assert len(expected) == 2 * 6 + 2
    assert read_palette("src/regauge/serving/search/search_page/search.css") == expected
    assert read_palette("docs/extra.css") == expected


def test_the_documentation_searches_from_disk_without_another_host() -> None:
    """The plugin `offline` loads its worker from another host unless the site has one."""
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\n  - offline\n" in site
    assert "polyfills: [iframe-worker.js]" in site
    assert "IFrameWorker" in (ROOT / "docs/iframe-worker.js").read_text(encoding="utf-8")
