"""Phase seconds of a server of Regauge, from its Prometheus counters."""

from __future__ import annotations

import urllib.error
import urllib.request

PHASES = "regauge_serve_phase_seconds"
METRICS_SECONDS = 5.0


def read_phase_seconds(url: str) -> dict[str, float]:
    """Return the seconds of each phase since the start of a server; empty if it has no counters."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return {}
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=METRICS_SECONDS) as answer:  # noqa: S310
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, urllib.error.URLError, ValueError):
        return {}
    seconds: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == f"{PHASES}_total" and "phase" in sample.labels:
                phase = sample.labels["phase"]
                seconds[phase] = seconds.get(phase, 0.0) + sample.value
    return seconds


def subtract_phases(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase between two readings."""
    return {phase: value - before.get(phase, 0.0) for phase, value in after.items()}
