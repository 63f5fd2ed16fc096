"""Modules, classes, functions and locals have names that a reader can search for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from architecture.tree import CHOICES, ROOT, Source, functions, sources

EMPTY = {"util", "utils", "common", "core", "helper", "helpers", "manager", "managers", "misc"}
"""Words for anything at all."""
VAGUE = {"found", "told", "each", "own", "asked", "wanted", "place"}
"""Locals that do not name their content."""
IRREGULAR = frozenset(
    (
        "begun",
        "bought",
        "bound",
        "brought",
        "built",
        "caught",
        "chosen",
        "done",
        "drawn",
        "fed",
        "felt",
        "forgotten",
        "found",
        "given",
        "gone",
        "heard",
        "held",
        "hidden",
        "kept",
        "known",
        "laid",
        "left",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "said",
        "seen",
        "sent",
        "shown",
        "sold",
        "spent",
        "stood",
        "taken",
        "taught",
        "thought",
        "thrown",
        "told",
        "understood",
        "written",
    )
)
REGULAR_NOUNS = {"bed", "embed", "exceed", "feed", "need", "seed", "shed", "speed", "proceed"}
"""Words that end in `ed` and are no participles."""


def is_meaningless(path: str) -> bool:
    """Return whether some part of a path is a word for anything at all."""
    words = path.removesuffix(".py").replace("/", "_").replace("-", "_").split("_")
    return bool(EMPTY & set(words))


def is_participle(name: str) -> bool:
    """Return whether a function's name is one participle, such as `made` or `_settled`."""
    word = name.lstrip("_")
    return word in IRREGULAR or (
        word.endswith("ed") and "_" not in word and word not in REGULAR_NOUNS
    )


def participles(source: Source) -> list[str]:
    """Return the functions of a file that are named by one participle."""
    return [
        f"{source.path}:{node.lineno} {node.name}"
        for node in functions(source)
        if is_participle(node.name)
    ]


def local_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every local and parameter of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def vague_locals(source: Source) -> list[str]:
    """Return the locals of a file that do not name their content."""
    return [
        f"{source.path}:{line} {name}"
        for line, name in local_names(source)
        if name.lstrip("_") in VAGUE
    ]


def public_classes(source: Source) -> list[str]:
    """Return the names of a file's public classes."""
    return [
        node.name
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def reused_classes(files: tuple[Source, ...]) -> list[str]:
    """Return the public class names that several files define.

    A choice may repeat the name of its vendor in another folder of choices.
    """
    places: dict[str, list[Source]] = {}
    for source in files:
        for name in public_classes(source):
            places.setdefault(name, []).append(source)
    return [
        f"class {name}: {', '.join(source.path for source in where)}"
        for name, where in places.items()
        if len(where) > 1 and not all(source.is_in(*CHOICES) for source in where)
    ]


def test_no_name_is_meaningless() -> None:
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    paths = [source.path for source in sources()] + tests
    assert not [path for path in paths if is_meaningless(path)]


def all_sources() -> Iterator[Source]:
    """Yield every Python file of the repository: the package, tests, benchmarks and examples."""
    yield from sources()
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def test_no_function_is_named_by_a_participle() -> None:
    problems = [line for source in all_sources() for line in participles(source)]
    assert not problems, "\n".join(problems)


def test_locals_name_their_content() -> None:
    problems = [line for source in all_sources() for line in vague_locals(source)]
    assert not problems, "\n".join(problems)


def test_a_public_class_name_exists_once() -> None:
    problems = reused_classes(sources())
    assert not problems, "\n".join(problems)


def test_the_report_counts_names(report: Callable[[str], None]) -> None:
    nodes = [node for source in sources() for node in functions(source)]
    participle_count = sum(is_participle(node.name) for node in nodes)
    classes = Counter(name for source in sources() for name in public_classes(source))
    names = [name for source in sources() for _, name in local_names(source)]
    vague_count = sum(name.lstrip("_") in VAGUE for name in names)
    reused_count = sum(count > 1 for count in classes.values())
    report(
        f"{participle_count} of {len(nodes)} functions are one participle "
        f"(torchtitan and starlette 0, levanter 13); "
        f"{reused_count} of {len(classes)} public class names are reused "
        f"(torchtitan 4, levanter 2, starlette 0); "
        f"{vague_count / len(names):.1%} of {len(names)} locals are vague (all three 0 %)"
    )
    assert nodes
    assert names


@pytest.mark.parametrize("path", ["regauge/utils.py", "regauge/core/a.py", "regauge/a_helpers.py"])
def test_a_meaningless_name_is_detected(path: str) -> None:
    assert is_meaningless(path)


@pytest.mark.parametrize("name", ["made", "_told", "opened", "_settled", "chosen"])
def test_a_participle_is_detected(name: str) -> None:
    assert participles(Source("regauge/a.py", f"def {name}():\n    pass\n"))


@pytest.mark.parametrize("name", ["open_dataset", "_embed", "is_closed", "seed", "speed"])
def test_a_verb_or_noun_is_not(name: str) -> None:
    assert not participles(Source("regauge/a.py", f"def {name}():\n    pass\n"))


@pytest.mark.parametrize("text", ["found = 1", "def f(own): ...", "for each in (): ..."])
def test_a_vague_local_is_detected(text: str) -> None:
    assert vague_locals(Source("regauge/a.py", text))


def test_a_reused_class_name_is_detected() -> None:
    text = "class Place:\n    pass\n"
    files = Source("regauge/data/a.py", text), Source("regauge/models/b.py", text)
    assert reused_classes(files)
    vendors = (
        Source("regauge/inference/backends/gaudi.py", text),
        Source("regauge/accelerators/gaudi.py", text),
    )
    assert not reused_classes(vendors)
