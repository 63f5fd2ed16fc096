"""A module is named after what it is about."""

from __future__ import annotations

import pytest

from architecture.tree import ROOT, sources

EMPTY = {"util", "utils", "common", "core", "helper", "helpers", "manager", "managers", "misc"}


def says_nothing(path: str) -> bool:
    """Return whether some part of a path is a word for anything at all."""
    words = path.removesuffix(".py").replace("/", "_").replace("-", "_").split("_")
    return bool(EMPTY & set(words))


def test_no_name_says_nothing() -> None:
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    paths = [source.path for source in sources()] + tests
    assert not [path for path in paths if says_nothing(path)]


@pytest.mark.parametrize("path", ["regauge/utils.py", "regauge/core/a.py", "regauge/a_helpers.py"])
def test_a_name_that_says_nothing_is_found(path: str) -> None:
    assert says_nothing(path)
