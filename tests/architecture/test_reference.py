"""`docs/reference/settings.md` is what `regauge explain --markdown` prints."""

from __future__ import annotations

from architecture.tree import ROOT
from regauge.commands._reference import build_page

PAGE = ROOT / "docs" / "reference" / "settings.md"
REMEDY = "it is out of date: run 'regauge explain --markdown > docs/reference/settings.md'"


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == build_page(), REMEDY
