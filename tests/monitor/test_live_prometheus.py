"""A real Prometheus and Alertmanager: every expression has data; alerts fire and resolve.

The tests of this file run in order, because each one changes the state of the system.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from monitor.conftest import THRESHOLDS, MonitorSystem
from monitor.prometheus_queries import wait_for
from regauge.monitoring.dashboard_files import build_dashboards, list_expressions
from regauge.monitoring.prometheus_settings import AlertThresholds
from regauge.monitoring.rule_files import build_alert_rules, build_recording_rules

ALERTS = {
    rule["alert"]: rule["expr"]
    for group in build_alert_rules(AlertThresholds(**THRESHOLDS))["groups"]
    for rule in group["rules"]
}
ABSENT = {"RegaugeNoMetrics", "RegaugeXidMissing"}
"""Alerts on metrics that no target exports."""
VANISHED = {"RegaugeDeviceMetricsVanished", "RegaugeDeviceGone"}
"""Alerts on metrics that existed before."""
SUBSTITUTES = {"$__rate_interval": "20s", r"$run": ".*", "$node": ".*", "$device": ".*"}


def list_missing(system: MonitorSystem, expressions: dict[str, str]) -> list[str]:
    """Return the expressions without data."""
    return [name for name, expression in expressions.items() if not system.query(expression)]


def find_remaining(system: MonitorSystem, expressions: dict[str, str]) -> list[str]:
    """Return the expressions without data after some time."""
    wait_for(lambda: not list_missing(system, expressions), 90)
    return list_missing(system, expressions)


def substitute(expression: str) -> str:
    """Return an expression of a dashboard with values for its variables."""
    for name, value in SUBSTITUTES.items():
        expression = expression.replace(name, value)
    return expression.replace("$model", ".*")


def test_metrics_that_are_absent_fire(system: MonitorSystem) -> None:
    expressions = {name: ALERTS[name] for name in ABSENT}
    assert find_remaining(system, expressions) == []
    assert wait_for(lambda: system.list_firing() >= ABSENT)


def test_every_recorded_metric_has_data(system: MonitorSystem) -> None:
    system.announce("a", system.pages["run"].address)
    system.announce("pipeline/2-train", system.pages["incomplete"].address)
    system.dcgm.xid = 0
    rules = build_recording_rules()["groups"][0]["rules"]
    selectors = {
        f"{rule['record']} {vendor}": f'{rule["record"]}{{vendor=~"{vendor or ".+"}"}}'
        for rule in rules
        for vendor in [rule.get("labels", {}).get("vendor", "")]
    }
    assert len(selectors) == len(rules)
    assert find_remaining(system, selectors) == []


def test_both_versions_of_the_exporter_have_the_same_labels(system: MonitorSystem) -> None:
    series = system.query('regauge:device_temperature:celsius{vendor="nvidia"}')
    labels = sorted((item["metric"]["node"], item["metric"]["device"]) for item in series)
    assert labels == [("127.0.0.1", "0"), ("gpu-node", "0")]
    assert all(set(item["metric"]) == {"__name__", "node", "device", "vendor"} for item in series)
    used = system.query('regauge:device_memory_used:bytes{vendor="nvidia"}')
    assert {item["value"][1] for item in used} == {str(60000 * 2**20)}
    share = system.query('regauge:device_utilization:ratio{vendor="gaudi"}')
    assert float(share[0]["value"][1]) == pytest.approx(0.7)


def test_devices_of_a_run_are_joined_by_node(system: MonitorSystem) -> None:
    (item,) = system.query(
        'regauge:device_utilization:ratio and on (node) regauge_run_info{run="a"}'
    )
    assert item["metric"]["node"] == socket.gethostname()


def test_every_condition_of_an_alert_has_data(system: MonitorSystem) -> None:
    system.dcgm.xid = 79
    expressions = {name: ALERTS[name] for name in ALERTS if name not in ABSENT | VANISHED}
    assert find_remaining(system, expressions) == []


def test_every_expression_of_every_dashboard_has_data(system: MonitorSystem) -> None:
    expressions = {
        f"{name}: {expression}": substitute(expression)
        for name, dashboard in build_dashboards().items()
        for expression in list_expressions(dashboard)
    }
    assert not [text for text in expressions.values() if re.search(r"\$[a-z_]", text)]
    assert find_remaining(system, expressions) == []


def test_a_metric_that_vanishes_fires(system: MonitorSystem) -> None:
    system.dcgm.drop = ("DCGM_FI_DEV_GPU_TEMP",)
    alert = "RegaugeDeviceMetricsVanished"
    assert wait_for(lambda: alert in system.list_firing())
    system.dcgm.drop = ()
    assert wait_for(lambda: alert not in system.list_firing())


def test_an_alert_is_sent_when_it_fires_and_when_it_resolves(system: MonitorSystem) -> None:
    alert = "RegaugeNoProgress"
    assert wait_for(lambda: system.webhook.find_state(alert) == "firing")
    system.vocabulary.is_bad = False
    assert wait_for(lambda: alert not in system.list_firing())
    assert wait_for(lambda: system.webhook.find_state(alert) == "resolved")
    others = {"RegaugeRankDead", "RegaugeServeNoWorker", "RegaugeRankStopped"}
    assert wait_for(lambda: not others & system.list_firing())


def test_a_run_that_ends_is_no_target_any_more(system: MonitorSystem) -> None:
    path = system.announce("b", system.pages["run"].address.replace("127.0.0.1", "localhost"))
    assert wait_for(lambda: system.query('up{instance=~"localhost:.+"}'))
    path.unlink()
    assert wait_for(lambda: not system.query('up{instance=~"localhost:.+"}'))


def test_a_second_monitor_needs_another_port(system: MonitorSystem) -> None:
    port = system.url.rpartition(":")[2]
    command = [sys.executable, "-m", "regauge", "monitor", "up", str(system.root)]
    done = subprocess.run(
        [*command, f"prometheus.port={port}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    problem = f"port {port} is in use; set another one: prometheus.port={int(port) + 1}"
    assert problem in " ".join(done.stderr.split())


def test_prometheus_ends_with_the_verb(system: MonitorSystem) -> None:
    system.process.terminate()
    assert system.process.wait(30) == 143
    with pytest.raises(httpx.ConnectError):
        system.query("up")


def test_a_missing_program_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "regauge", "monitor", "up", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 76
    assert "'prometheus' is not installed here; install it: apt-get install" in done.stderr
