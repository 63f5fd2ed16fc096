"""Builds the Prometheus rule files: alerts and recording rules.

`alerts.yaml` has the alerts, with the keys of `AlertThresholds` as thresholds. `devices.yaml` maps
metrics from vendors' exporters to one vocabulary.

A recorded series has the labels `vendor`, `node`, `device` and `slice`. Exporters name the node and
the device differently, and only sometimes add labels such as `pod`. The rules therefore build these
labels from a candidate list and drop all others.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regauge.monitoring.prometheus_settings import AlertThresholds

FOLDER = Path(__file__).parent
GROUP = "regauge-vocabulary"
LABELS = "vendor, node, device, slice"
OWN_VENDOR = "regauge"
"""Vendor for device metrics exported by a run, which vendors' exporters replace."""
COUNT_RULE = {
    "record": "regauge:device_metrics:count",
    "expr": (
        f'count by ({LABELS}) ({{__name__=~"regauge:device_.+:(ratio|bytes|hertz|celsius|watts)"}})'
    ),
}
"""Metric count per device, without error codes: exporters omit those until an error."""


def build_recording_rules() -> dict[str, Any]:
    """Return the vocabulary's rule file, as a JSON-ready document."""
    document = load_vocabulary()
    rules = [
        rule for metric in document["metrics"] for rule in _build_rules(metric, document["labels"])
    ]
    return {"groups": [{"name": GROUP, "rules": [*rules, COUNT_RULE]}]}


@cache
def load_vocabulary() -> Mapping[str, Any]:
    return load_yaml(FOLDER / "devices.yaml")


def load_yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    document: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def _build_rules(
    metric: Mapping[str, Any], labels: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """Yield a metric's rules, one per vendor; Regauge's own comes last."""
    for vendor, source in metric["sources"].items():
        expression = _rename_labels(source, labels)
        if vendor == OWN_VENDOR and len(metric["sources"]) > 1:
            others = f'{metric["record"]}{{vendor!="{OWN_VENDOR}"}}'
            expression = f"{expression} unless on (node) {others}"
        yield {"record": metric["record"], "expr": expression, "labels": {"vendor": vendor}}


def _rename_labels(source: str, labels: Mapping[str, list[str]]) -> str:
    """Return an expression whose series only have the labels `node`, `device` and `slice`.

    The first nonempty candidate becomes the label. An address loses its port.
    """
    expression = source
    for name, candidates in labels.items():
        listed = ", ".join(f'"{candidate}"' for candidate in candidates)
        end = "(:[0-9]+)?(;.*)?" if name == "node" else "(;.*)?"
        value = "([^;]*?)" if name == "node" else "([^;]*)"
        joined = f'label_join({expression}, "{name}", ";", {listed})'
        expression = f'label_replace({joined}, "{name}", "$1", "{name}", ";*{value}{end}")'
    return f"max by (node, device, slice) ({expression})"


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
