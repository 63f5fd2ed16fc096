"""Prometheus metrics for runs and servers, with alert rules and dashboards.

`vocabulary` defines every metric with unit and labels. This package does not import torch.
"""
