"""The dashboards have the types that Grafana publishes, and a layout without overlaps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitor.node_packages import require_packages, run_node
from regauge.monitoring.dashboard_files import build_dashboards

DASHBOARDS = build_dashboards()
PROOF = "that Grafana's types accept the dashboards"
PRELUDE = """
import type { Dashboard, DataQuery, GraphFieldConfig, OptionsWithLegend, OptionsWithTooltip,
  SingleStatBaseOptions } from "@grafana/schema";
// JSON has no enumerations: their values stand for them.
type Plain<T> = T extends string ? `${T}`
  : T extends number ? (`${T}` extends `${infer N extends number}` ? N : T)
  : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Query = Plain<DataQuery>
  & { expr: string; legendFormat: string; editorMode: "code"; range: boolean };
type Series = Plain<OptionsWithLegend & OptionsWithTooltip>;
type Stat = Plain<Pick<SingleStatBaseOptions, "reduceOptions">>
  & { colorMode: string; graphMode: string };
"""


def build_statements(dashboard: dict[str, Any]) -> Iterator[str]:
    """Yield the statements that a compiler checks: the dashboard, and the parts of each panel."""
    yield f"const dashboard: Plain<Dashboard> = {json.dumps(dashboard)};"
    for panel in dashboard["panels"]:
        number = panel["id"]
        is_series = panel["type"] == "timeseries"
        options = "Series" if is_series else "Stat"
        yield f"const options{number}: {options} = {json.dumps(panel['options'])};"
        yield f"const targets{number}: Query[] = {json.dumps(panel['targets'])};"
        if is_series:
            custom = panel["fieldConfig"]["defaults"]["custom"]
            yield f"const custom{number}: Plain<GraphFieldConfig> = {json.dumps(custom)};"


def find_type_errors(dashboard: dict[str, Any], folder: Path) -> str:
    """Return the messages of the compiler; empty if the types accept the dashboard."""
    packages = require_packages("@grafana/schema", "typescript", proof=PROOF)
    source = packages / f"{folder.name}.ts"
    source.write_text("\n".join([PRELUDE, *build_statements(dashboard)]))
    compiler = packages / "node_modules" / "typescript" / "bin" / "tsc"
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"]
    modules = ["--module", "nodenext", "--moduleResolution", "nodenext"]
    try:
        return run_node("node", compiler, *options, *modules, source)
    finally:
        source.unlink()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_types_of_grafana_accept_a_dashboard(name: str, tmp_path: Path) -> None:
    assert find_type_errors(DASHBOARDS[name], tmp_path) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("graphTooltip",), 7),
        (("panels", 0, "gridPos", "w"), "wide"),
        (("panels", 1, "fieldConfig", "defaults", "custom", "drawStyle"), "dots"),
        (("panels", 1, "targets", 0, "expression"), "up"),
        (("templating", "list", 1, "refresh"), 9),
    ],
)
def test_a_wrong_type_is_refused(
    path: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    dashboard = json.loads(json.dumps(DASHBOARDS["regauge-training"]))
    parent = dashboard
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    assert "error TS" in find_type_errors(dashboard, tmp_path)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_format_is_that_of_current_versions_of_grafana(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["schemaVersion"] >= 39
    assert {panel["type"] for panel in dashboard["panels"]} <= {"timeseries", "stat"}
    assert len({panel["title"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fill_the_grid_without_overlaps(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        grid = panel["gridPos"]
        columns = range(grid["x"], grid["x"] + grid["w"])
        panel_cells = {(column, grid["y"]) for column in columns}
        assert columns.stop <= 24
        assert not cells & panel_cells
        cells |= panel_cells


def test_the_dashboard_of_nvidia_devices_has_the_six_panels_of_the_public_one() -> None:
    panels = DASHBOARDS["regauge-dcgm"]["panels"]
    units = ["celsius", "watt", "hertz", "percentunit", "bytes", "percentunit"]
    assert [panel["fieldConfig"]["defaults"]["unit"] for panel in panels] == units
