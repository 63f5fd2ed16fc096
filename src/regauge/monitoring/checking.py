"""Checks written files with promtool and amtool, the Prometheus and Alertmanager tools."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

from regauge.monitoring.bundle import ALERTMANAGER_FILE, PROMETHEUS_FILE
from regauge.system.children import run_tool
from regauge.system.errors import DataError, PreflightError, SettingsError

if TYPE_CHECKING:
    from pathlib import Path

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
