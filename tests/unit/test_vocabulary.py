"""The vocabulary follows the conventions of Prometheus, and the documentation lists all of it."""

from __future__ import annotations

import re
from pathlib import Path

from regauge.monitoring import vocabulary

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "monitoring.md"
UNBOUNDED_LABELS = {"step", "text", "request", "path", "url"}


def test_names_are_unique_and_valid() -> None:
    names = [metric.name for metric in vocabulary.METRICS]
    assert len(names) == len(set(names)) > 50
    assert all(re.fullmatch(r"regauge_[a-z0-9_]+", name) for name in names)


def test_suffixes_follow_the_type() -> None:
    for metric in vocabulary.METRICS:
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert metric.name.endswith("_info") == (metric.type == "info"), metric.name


def test_no_label_has_many_values() -> None:
    labels = {label for metric in vocabulary.METRICS for label in metric.labels}
    assert not labels & UNBOUNDED_LABELS


def test_the_page_lists_every_metric() -> None:
    table = PAGE.read_text().partition("<!-- metrics -->\n")[2].partition("<!-- /metrics -->")[0]
    assert table == vocabulary.build_table()
