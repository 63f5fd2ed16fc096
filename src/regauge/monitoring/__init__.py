"""Metrics of runs and servers for Prometheus, with their alert rules and dashboards.

`vocabulary` defines every metric with its unit and labels. This package imports no torch.
"""
