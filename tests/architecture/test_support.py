"""The README claims what tests ran: `pytest --support` writes the proofs and draws the table."""

from __future__ import annotations

import json
from pathlib import Path

import support


def test_the_readme_shows_the_proofs() -> None:
    proofs = json.loads(support.FILE.read_text())["proofs"]
    page = (support.ROOT / "README.md").read_text(encoding="utf-8")
    assert support.drawn(page) == support.table(proofs), "run the tests with --support"


def test_a_proof_is_laid_over_an_older_one(tmp_path: Path) -> None:
    file, old = tmp_path / "support.json", {"on": "a", "date": "2026-01-01", "torch": "2.9.0"}
    support.merge({"cpu/single/mlm": old, "cuda/ddp/mlm": old}, file)
    new = {"on": "b", "date": "2026-02-02", "torch": "2.13.0"}
    support.merge({"cpu/single/mlm": new}, file)
    proofs = json.loads(file.read_text())["proofs"]
    assert proofs == {"cpu/single/mlm": new, "cuda/ddp/mlm": old}
    rows = support.table(proofs).splitlines()
    assert next(row for row in rows if "`cpu`" in row).endswith("| b, torch 2.13.0 (2026-02-02) |")
    cuda = next(row for row in rows if "`cuda`" in row)
    assert cuda.startswith("| `cuda` |  | mlm |  |")
    assert "not run" in next(row for row in rows if "`gaudi`" in row)
