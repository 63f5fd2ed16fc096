"""Builds the dashboards' JSON documents."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from regauge.monitoring.rule_files import FOLDER, load_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SCHEMA_VERSION = 39
"""Dashboard format version: Grafana 10.4's, which later versions migrate."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_WIDTH, DEFAULT_WIDTH, PANEL_HEIGHT = 24, 12, 8
VARIABLE_QUERIES = {
    "run": "label_values(regauge_run_info, run)",
    "node": "label_values(regauge:device_utilization:ratio, node)",
    "device": 'label_values(regauge:device_utilization:ratio{node=~"$node"}, device)',
    "model": "label_values(regauge_serve_queue_records, model)",
}


def build_dashboards() -> dict[str, dict[str, Any]]:
    """Return dashboard identifier -> JSON-ready Grafana document."""
    return {item["uid"]: _build_dashboard(item) for item in _load_dashboards()}


def list_expressions(dashboard: Mapping[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@cache
def _load_dashboards() -> Sequence[Mapping[str, Any]]:
    dashboards: Sequence[Mapping[str, Any]] = load_yaml(FOLDER / "dashboards.yaml")["dashboards"]
    return dashboards


def _build_dashboard(item: Mapping[str, Any]) -> dict[str, Any]:
    variables = [_build_source_variable(), *map(_build_variable, item["variables"])]
    return {
        "uid": item["uid"],
        "title": item["title"],
        "tags": ["regauge"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "panels": list(_build_panels(item["panels"])),
    }


def _build_source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _build_variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": VARIABLE_QUERIES[name],
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _build_panels(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a dashboard's panels from left to right, in rows as wide as the grid."""
    x = y = 0
    for number, item in enumerate(items, start=1):
        width = item.get("width", DEFAULT_WIDTH)
        if x + width > GRID_WIDTH:
            x, y = 0, y + PANEL_HEIGHT
        position = {"h": PANEL_HEIGHT, "w": width, "x": x, "y": y}
        yield _build_panel(item, number, position)
        x += width


def _build_panel(
    item: Mapping[str, Any], number: int, position: Mapping[str, int]
) -> dict[str, Any]:
    kind = item.get("type", "timeseries")
    defaults: dict[str, Any] = {"unit": item["unit"]}
    if item["unit"] == "percentunit":
        defaults |= {"min": 0, "max": 1}
    if kind == "timeseries":
        defaults["custom"] = {"drawStyle": "line", "fillOpacity": 10, "showPoints": "never"}
    panel = {
        "id": number,
        "type": kind,
        "title": item["title"],
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": list(_build_overrides(item))},
        "options": _build_options(kind),
        "targets": [_build_target(index, query) for index, query in enumerate(item["queries"])],
    }
    return panel | ({"description": item["description"]} if "description" in item else {})


def _build_options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"colorMode": "value", "graphMode": "area", "reduceOptions": reduce}
    legend = {
        "calcs": ["mean", "lastNotNull", "max"],
        "displayMode": "table",
        "placement": "bottom",
        "showLegend": True,
    }
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _build_target(index: int, query: Sequence[str]) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query[0],
        "legendFormat": query[1],
        "editorMode": "code",
        "range": True,
    }


def _build_overrides(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield unit and axis for queries with a different unit than the panel."""
    for index, (_, _, *unit) in enumerate(item["queries"]):
        if unit:
            yield {
                "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + index)},
                "properties": [
                    {"id": "unit", "value": unit[0]},
                    {"id": "max", "value": 1},
                    {"id": "custom.axisPlacement", "value": "right"},
                ],
            }
