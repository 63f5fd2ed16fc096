"""The README's first commands exist, and its annotated tree is the real one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from architecture.tree import ROOT

HIDDEN = re.compile(r"^\.|^__pycache__$|^(out|dist|build)$|^py\.typed$|^__\w+__\.py$")
DRAWING = re.compile(r"^((?:[│ ]   )*)[├└]── (.*)$")


def list_targets(makefile: str) -> set[str]:
    """Return the targets of a Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))


def read_first_commands(readme: str) -> list[str]:
    """Return the first two commands in the code blocks of a README."""
    fences = r"^```(?:bash|sh|console)\n(.*?)^```"
    blocks = re.findall(fences, readme, flags=re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line][:2]


def read_tree(readme: str) -> set[str]:
    """Return the paths in the annotated tree: names, two spaces, description."""
    paths: set[str] = set()
    folders: list[str] = []
    for line in readme.splitlines():
        match = DRAWING.match(line)
        if not match:
            continue
        depth = len(match[1]) // 4
        names = re.split(r"\s{2,}", match[2])[0].split(" ")
        paths |= {"/".join([*folders[:depth], name.rstrip("/")]) for name in names if name != "·"}
        folders[depth:] = [names[0].rstrip("/")]
    return paths


def list_files(root: Path) -> set[str]:
    """Return the files that git tracks, or all files without git."""
    git = shutil.which("git")
    command = [git or "false", "ls-files"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    known = {name for name in listed.stdout.splitlines() if (root / name).exists()}
    shown = [entry for entry in root.iterdir() if not HIDDEN.search(entry.name)]
    everything = (path for entry in shown for path in [entry, *entry.rglob("*")] if path.is_file())
    return known or {str(path.relative_to(root)) for path in everything}


def find_differences(paths: set[str], existing: set[str]) -> list[str]:
    """Return listed paths that do not exist, and missing entries of listed folders.

    The entries of a folder are required if at least one of them is listed.
    """
    entries = existing | {str(parent) for name in existing for parent in Path(name).parents}
    problems = [f"{path} is listed, but does not exist" for path in sorted(paths - entries)]
    opened = {str(Path(path).parent) for path in paths} | {"."}
    for entry in sorted(entries - {"."}):
        shown = any(path == entry or path.startswith(f"{entry}/") for path in paths)
        parent, name = str(Path(entry).parent), Path(entry).name
        if parent in opened and not shown and not HIDDEN.search(name):
            problems.append(f"{entry} exists, but is not listed")
    return problems


def test_the_first_two_commands_are_targets() -> None:
    commands = read_first_commands((ROOT / "README.md").read_text())
    assert commands == ["make demo", "make test"]
    assert {"demo", "test"} <= list_targets((ROOT / "Makefile").read_text())


def test_the_annotated_tree_is_the_real_one() -> None:
    paths = read_tree((ROOT / "README.md").read_text())
    assert paths
    problems = find_differences(paths, list_files(ROOT))
    assert not problems, "\n".join(problems)


TREE = """\
├── a.txt b.txt     two files
├── src/inner/      a folder
│   ├── one.py      first
│   └── two.py      second
└── last/           the end
"""


FILES = {"a.txt", "b.txt", "src/inner/one.py", "src/inner/two.py", "last/x", ".git/config"}


def test_a_true_tree_has_no_differences() -> None:
    assert find_differences(read_tree(TREE), FILES) == []


@pytest.mark.parametrize("missing", ["b.txt", "src/inner/two.py"])
def test_a_listed_file_that_is_missing_is_detected(missing: str) -> None:
    expected = [f"{missing} is listed, but does not exist"]
    assert find_differences(read_tree(TREE), FILES - {missing}) == expected


@pytest.mark.parametrize("new", ["c.txt", "src/inner/three.py", "src/more"])
def test_a_file_that_is_not_listed_is_detected(new: str) -> None:
    assert find_differences(read_tree(TREE), FILES | {new}) == [f"{new} exists, but is not listed"]


def test_other_commands_are_found() -> None:
    assert read_first_commands("```bash\npip install x  # once\nmake demo\n```") == [
        "pip install x",
        "make demo",
    ]
