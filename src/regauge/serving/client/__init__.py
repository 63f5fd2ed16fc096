"""Python clients for a server: `regauge.Client` and `regauge.AsyncClient`."""
