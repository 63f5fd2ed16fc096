"""Dashboards for Grafana, as code.

`dashboards.yaml` has the panels with their queries. `build` makes the JSON documents of Grafana.
"""
