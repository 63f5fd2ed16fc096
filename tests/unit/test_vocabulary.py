"""The vocabulary follows the conventions of Prometheus, and the documentation lists all of it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from regauge.monitoring import vocabulary
from regauge.serving.model_slot import ModelSlot
from regauge.serving.server_metrics import ServerMetrics
from regauge.serving.settings import Serve

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


def test_a_model_that_is_not_loaded_has_no_number_of_workers() -> None:
    settings, metrics = Serve(artifacts={"m": "model"}), ServerMetrics()
    with ThreadPoolExecutor(1) as executor:
        metrics.watch({"m": ModelSlot("m", settings, metrics, executor)}, lambda: False)
        text = metrics.render().decode()
    assert 'regauge_serve_queue_records{model="m"} 0.0' in text
    assert "regauge_serve_workers" not in text
