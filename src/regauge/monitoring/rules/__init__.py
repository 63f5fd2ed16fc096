"""Recording rules and alert rules for Prometheus.

`devices.yaml` maps the metrics of vendors' exporters to one vocabulary. `alerts.yaml` has the
alerts. Their thresholds are the keys of `AlertThresholds`.
"""
