"""The JSON of `doctor` has numbers with their units, and truth values."""

from __future__ import annotations

import json

import pytest

from regauge import cli

UNITS = ("bytes", "per_second", "seconds", "_error", "_of_peak", "_us", "_gbs", "size", "count")
COUNTS = ("wrong",)


def test_numbers_have_units_in_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--quick", "--processes", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(isinstance(row["available"], bool) for row in document["accelerators"])
    assert all(isinstance(row["precisions"], list) for row in document["accelerators"])
    checks = {row["check"]: row for row in document["checks"]}
    assert all(row["ok"] is True for row in checks.values())
    assert checks["storage"]["bytes_per_second"] > 0
    assert checks["free space"]["bytes"] > 0
    assert checks["speed in fp32"]["flops_per_second"] > 0
    assert 0 < checks["speed in fp32"]["fraction_of_peak"] <= 1
    assert checks["products in fp32"]["relative_error"] < 1e-3
    for row in [*document["checks"], *document.get("bandwidth", ())]:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert name.endswith(UNITS) or name in COUNTS, name
