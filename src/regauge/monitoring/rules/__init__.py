"""Prometheus recording and alert rules.

`devices.yaml` maps metrics from vendors' exporters to one vocabulary. `alerts.yaml` has the alerts,
with `AlertThresholds` keys as thresholds.
"""
