"""Monitoring files: rules, dashboards, and Kubernetes manifests.

`rules/` has the recording rules and alerts, `dashboards/` one Grafana document each. `kubernetes/`
has exporters, htop and nvtop as DaemonSets, and Prometheus operator objects.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.monitoring.dashboard_files import build_dashboards
from regauge.monitoring.rule_files import build_alert_rules, build_recording_rules
from regauge.system.children import run_tool
from regauge.system.errors import DataError, PreflightError, SettingsError
from regauge.system.files import check_absent, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.monitoring.prometheus_settings import Prometheus

MANIFESTS = Path(__file__).parent / "manifests"
TARGETS_FILE = "targets.json"
"""Run addresses, which `monitor up` rewrites when runs start and end."""
PROMETHEUS_FILE, ALERTMANAGER_FILE = "prometheus.yml", "alertmanager.yml"
JOB = "regauge"


def render_monitoring_files(settings: Prometheus) -> dict[str, str]:
    """Return path in the folder -> file text."""
    dashboards = {
        f"dashboards/{name}.json": json.dumps(document, indent=1) + "\n"
        for name, document in build_dashboards().items()
    }
    manifests = {f"kubernetes/{name}": text for name, text in build_manifests(settings).items()}
    return {**render_server_files(settings), **dashboards, **manifests}


def render_server_files(settings: Prometheus) -> dict[str, str]:
    """Return path in the folder -> file read by Prometheus or Alertmanager."""
    return {
        PROMETHEUS_FILE: _dump(_build_prometheus(settings)),
        ALERTMANAGER_FILE: _dump(_build_alertmanager(settings)),
        "rules/recording.yaml": _dump(build_recording_rules()),
        "rules/alerts.yaml": _dump(build_alert_rules(settings.alerts)),
    }


def write_monitoring_files(folder: Path, files: Mapping[str, str], *, overwrite: bool) -> None:
    """Write files; raises SettingsError if one exists and may not be overwritten."""
    check_absent((folder / name for name in files), overwrite=overwrite)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, text, durable=False)


def build_manifests(settings: Prometheus) -> dict[str, str]:
    manifests = {path.name: read_manifest(path.name) for path in sorted(MANIFESTS.glob("*.yaml"))}
    monitors = manifests["pod-monitors.yaml"]
    for name in ("scrape_seconds", "run_port"):
        monitors = monitors.replace(f"{{{name}}}", str(getattr(settings, name)))
    manifests["pod-monitors.yaml"] = monitors
    manifests["prometheus-rules.yaml"] = _dump(_build_rule_object(settings))
    return manifests


def read_manifest(name: str) -> str:
    return (MANIFESTS / name).read_text(encoding="utf-8")


def list_exporters(plugin: str) -> list[str]:
    """Return manifests for the nodes selected by a device plugin's file `<vendor>.yaml`.

    They use the same label `regauge/vendor` as node selector.
    """
    selector = f"regauge/vendor: {plugin.removesuffix('.yaml')}\n"
    return [
        path.name
        for path in sorted(MANIFESTS.glob("*.yaml"))
        if selector in read_manifest(path.name)
    ]


def _build_rule_object(settings: Prometheus) -> dict[str, Any]:
    """Return the rules as a Prometheus operator object."""
    rules = build_recording_rules()["groups"] + build_alert_rules(settings.alerts)["groups"]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "regauge", "namespace": "kube-system"},
        "spec": {"groups": rules},
    }


def _build_prometheus(settings: Prometheus) -> dict[str, Any]:
    """Return the Prometheus configuration; paths are relative to its file.

    A target's `node` label joins run metrics with device metrics.
    """
    interval = f"{settings.scrape_seconds}s"
    jobs: list[dict[str, Any]] = [
        {
            "job_name": f"{JOB}-runs",
            "file_sd_configs": [{"files": [TARGETS_FILE], "refresh_interval": interval}],
        }
    ]
    for name, targets in (("targets", settings.targets), ("servers", settings.servers)):
        if targets:
            static = {"static_configs": [{"targets": list(targets)}]}
            jobs.append({"job_name": f"{JOB}-{name}", **static})
    if settings.servers and settings.server_key_file is not None:
        path = Path(settings.server_key_file).expanduser().absolute()
        jobs[-1]["authorization"] = {"credentials_file": str(path)}
    alertmanager = {"targets": [f"127.0.0.1:{settings.alertmanager_port}"]}
    return {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": f"{min(10, settings.scrape_seconds)}s",
            "evaluation_interval": interval,
        },
        "rule_files": ["rules/recording.yaml", "rules/alerts.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [alertmanager]}]},
        "scrape_configs": jobs,
    }


def _build_alertmanager(settings: Prometheus) -> dict[str, Any]:
    """Return the Alertmanager configuration: alerts from one run or server form a group."""
    receiver: dict[str, Any] = {"name": "default"}
    if settings.webhook is not None:
        receiver["webhook_configs"] = [{"url": settings.webhook, "send_resolved": True}]
    return {
        "route": {
            "receiver": "default",
            "group_by": ["alertname", "run", "run_id", "instance"],
            "group_wait": f"{min(10, settings.scrape_seconds)}s",
            "group_interval": f"{settings.scrape_seconds}s",
            "repeat_interval": "4h",
        },
        "receivers": [receiver],
    }


def _dump(document: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, width=100))


TOOL_SECONDS = 60.0
_RULES = re.compile(r"(\d+) rules found")


def check_monitoring_files(folder: Path) -> dict[str, Any]:
    """Check the configuration and rules in a folder; return the rule count.

    Raises SettingsError if the folder does not contain a configuration, PreflightError without
    promtool, and DataError with the first finding. Alertmanager's file is checked if amtool is
    installed.
    """
    configuration = folder / PROMETHEUS_FILE
    if not configuration.is_file():
        remedy = f"write it with: regauge monitor write {folder}"
        raise SettingsError(f"{configuration} is missing", remedy)
    promtool = shutil.which("promtool")
    if promtool is None:
        raise PreflightError("'promtool' is not installed here", "apt-get install prometheus")
    output = _run_tool([promtool, "check", "config", str(configuration)])
    answer = {"rules": sum(map(int, _RULES.findall(output))), "checked": [str(configuration)]}
    amtool = shutil.which("amtool")
    if amtool is not None:
        path = folder / ALERTMANAGER_FILE
        _run_tool([amtool, "check-config", str(path)])
        answer["checked"] = [str(configuration), str(path)]
    return answer


def _run_tool(command: list[str]) -> str:
    """Return a tool's output; raises DataError with its finding."""
    done = run_tool(command, TOOL_SECONDS)
    output = done.stdout + done.stderr
    if done.returncode:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        problem = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise DataError(problem, "write the files again with --overwrite")
    return output
