"""Tests of rules with `promtool test rules`: series over time, and the alerts that they cause."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from regauge.monitoring.bundle import render_server_files, write_monitoring_files
from regauge.monitoring.prometheus_settings import Prometheus

RULES = {f"rules/{name}.yaml" for name in ("recording", "alerts")}
INTERVAL = "15s"
UNRECORDED = re.compile("up|regauge_(?!device_)")
"""Names of series that alerts use without a recording rule."""


def require_promtool() -> str:
    """Return the path of promtool; skip without it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: the rules are not proved")
    return promtool


def write_rules(folder: Path) -> list[str]:
    """Write the rules with the default thresholds; return their paths."""
    files = render_server_files(Prometheus())
    write_monitoring_files(folder, {name: files[name] for name in RULES}, overwrite=True)
    return [str(folder / name) for name in sorted(RULES)]


def run_rule_test(folder: Path, case: dict[str, Any]) -> str:
    """Return the findings of promtool for one test; empty if it passes."""
    rules = write_rules(folder)
    is_recorded = any(not UNRECORDED.match(name) for name in names(case))
    document = {
        "rule_files": rules if is_recorded else [name for name in rules if "alerts" in name],
        "evaluation_interval": INTERVAL,
        "tests": [{"interval": INTERVAL, **case}],
    }
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [require_promtool(), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def names(case: dict[str, Any]) -> list[str]:
    """Return the names of the series of a test; those of devices need the recording rules."""
    return [item["series"] for item in case["input_series"]]


def build_series(series: dict[str, str]) -> list[dict[str, str]]:
    """Return series in the format of promtool: the values of each, by its name and labels."""
    return [{"series": name, "values": values} for name, values in series.items()]


def find_alerts(folder: Path, alert: str, series: dict[str, str], at: str) -> str:
    """Return what promtool finds if no alert of a name is expected; it lists those that fire."""
    expected = {"eval_time": at, "alertname": alert, "exp_alerts": []}
    return run_rule_test(
        folder, {"input_series": build_series(series), "alert_rule_test": [expected]}
    )


def find_values(folder: Path, expression: str, series: dict[str, str], at: str) -> str:
    """Return what promtool finds if an expression is expected to have no result."""
    expected = {"expr": expression, "eval_time": at, "exp_samples": []}
    return run_rule_test(
        folder, {"input_series": build_series(series), "promql_expr_test": [expected]}
    )
