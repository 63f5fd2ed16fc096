"""Documents of saved runs, for tests that need no run."""

from __future__ import annotations

from typing import Any

from regauge.config import FORMAT


def build_saved_run(**tables: Any) -> dict[str, Any]:
    """Return the document of a `run.json` with the tables that its readers need."""
    identity = {"format": FORMAT, "run_id": "a", "data_fingerprint": "b"}
    batch = {"rows": 8, "microbatch_rows": 4}
    empty: dict[str, Any] = {
        name: {} for name in ("task", "model", "optimizer", "data", "execution")
    }
    return {"run": identity, "seed": 0, "batch": batch, **empty, **tables}
