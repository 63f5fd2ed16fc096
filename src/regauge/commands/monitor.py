"""Watch runs with a local Prometheus, or write its rules, dashboards and manifests.

For example:

    $ regauge monitor up out
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands, config
from regauge.monitoring.bundle import (
    check_monitoring_files,
    render_monitoring_files,
    write_monitoring_files,
)
from regauge.monitoring.prometheus_settings import MonitorSettings
from regauge.system import stop_signals
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.monitoring.prometheus_settings import Prometheus

FLAG_ROOTS = {"up": MonitorSettings, "write": MonitorSettings}
DEFAULT_NAME = "monitoring"
"""Subfolder for the files of `up`."""

Action = Literal["up", "write", "check"]
Answer = dict[str, Any]


def main(
    action: Annotated[
        Action, Parameter(help="Run Prometheus, write files, or check written files.")
    ],
    folder: Annotated[
        Path, Parameter(help="With up: the runs' folder; otherwise the files' folder.")
    ],
    *overrides: commands.Override,
    run_file: Annotated[
        Path | None, Parameter(help="Run file with the table [prometheus].")
    ] = None,
    to: Annotated[
        Path | None, Parameter(help="With up: folder for the servers' files and data.")
    ] = None,
    overwrite: commands.Overwrite = False,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> Answer:
    """Run Prometheus and Alertmanager for the runs below a folder, until a stop signal.

    `write` writes rules, Grafana dashboards, and Kubernetes manifests. `check` runs promtool and
    amtool on written files.

    For example:

        >>> regauge.monitor("up", "out")
    """
    settings = load(overrides, run_file)
    if action == "check":
        return commands.show(check(folder), as_json=json)
    if action == "write":
        answer = write(folder, settings, overwrite=overwrite, dry_run=dry_run)
        return commands.show(answer, as_json=json)
    return run_servers(folder, to, settings, dry_run=dry_run, as_json=json)


def load(overrides: tuple[str, ...], run_file: Path | None) -> Prometheus:
    """Build the settings from overrides and an optional run file."""
    if run_file is not None:
        return commands.load_settings(MonitorSettings, run_file, overrides).prometheus
    tables = config.apply_overrides({}, overrides, MonitorSettings)
    return config.build(MonitorSettings, tables, (), "the command line").prometheus


def write(folder: Path, settings: Prometheus, *, overwrite: bool, dry_run: bool) -> Answer:
    """Write the monitoring files; return their paths."""
    files = render_monitoring_files(settings)
    if not dry_run:
        write_monitoring_files(folder, files, overwrite=overwrite)
    return {"files": [str(folder / name) for name in files]}


def check(folder: Path) -> Answer:
    """Check written files with the Prometheus tools; return the rule and file counts."""
    return check_monitoring_files(folder)


def run_servers(
    root: Path, to: Path | None, settings: Prometheus, *, dry_run: bool, as_json: bool
) -> Answer:
    """Run the servers until a stop signal; print their addresses first."""
    from regauge.monitoring import local_prometheus as local

    if not root.is_dir():
        raise SettingsError(f"no folder {root}", "name the folder of the runs")
    target = to or root / DEFAULT_NAME
    addresses = [group["targets"][0] for group in local.find_scrape_targets(root)]
    answer: Answer = {
        "folder": str(target),
        "targets": [*addresses, *settings.targets, *settings.servers],
    }
    local.find_programs()
    if dry_run:
        return commands.show(answer, as_json=as_json)
    with stop_signals.record_signals(), local.run_monitoring_servers(target, settings) as servers:
        answer["prometheus"] = servers.prometheus_url
        if servers.alertmanager_url is not None:
            answer["alertmanager"] = servers.alertmanager_url
        commands.show(answer, as_json=as_json)
        local.watch_runs(root, servers)
    return answer
