"""Alert rules with a run file's thresholds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge.monitoring.rules.recording import FOLDER, load_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.monitoring.prometheus_settings import AlertThresholds

_THRESHOLD = re.compile(r"<([a-z_]+)>")


def build_alert_rules(thresholds: AlertThresholds) -> dict[str, Any]:
    """Return the alert rule file, as a JSON-ready document."""
    values = thresholds.model_dump()
    return {
        "groups": [
            {
                "name": group["name"],
                "rules": [_build_alert(alert, values) for alert in group["alerts"]],
            }
            for group in load_yaml(FOLDER / "alerts.yaml")["groups"]
        ]
    }


def _build_alert(alert: Mapping[str, str], values: Mapping[str, float]) -> dict[str, Any]:
    def insert(text: str) -> str:
        return _THRESHOLD.sub(lambda match: f"{values[match[1]]:g}", text)

    rule: dict[str, Any] = {"alert": alert["alert"], "expr": insert(alert["expr"])}
    if "for" in alert:
        rule["for"] = insert(alert["for"])
    rule["labels"] = {"severity": alert["severity"]}
    rule["annotations"] = {name: insert(alert[name]) for name in ("summary", "remedy")}
    return rule
