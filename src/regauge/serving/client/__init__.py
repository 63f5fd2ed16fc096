"""The Python clients of a server: `regauge.Client` and `regauge.AsyncClient`."""
