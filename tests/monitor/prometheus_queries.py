"""Queries of a running Prometheus and Alertmanager."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
DEADLINE_SECONDS = 60.0


def read_json(url: str) -> Any:
    """Return the JSON document at an address."""
    answer = httpx.get(url, timeout=10)
    answer.raise_for_status()
    return answer.json()


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Return the result of an expression now: series with their labels and value."""
    words = urllib.parse.urlencode({"query": expression})
    result: list[dict[str, Any]] = read_json(f"{url}/api/v1/query?{words}")["data"]["result"]
    return result


def list_firing(url: str) -> set[str]:
    """Return the names of the alerts that fire."""
    alerts = read_json(f"{url}/api/v1/alerts")["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def wait_for(find: Callable[[], T], seconds: float = DEADLINE_SECONDS) -> T:
    """Return the first true result of a function; the last one after a deadline."""
    deadline = time.monotonic() + seconds
    while not (result := find()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result
