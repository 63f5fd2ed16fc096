"""The accelerators page lists only tested combinations; `pytest --support` writes it."""

from __future__ import annotations

import json
from pathlib import Path

import support


def test_the_page_has_the_proofs() -> None:
    proofs = json.loads(support.FILE.read_text())["proofs"]
    page = support.PAGE.read_text(encoding="utf-8")
    assert support.read_table(page) == support.build_table(proofs), "run the tests with --support"


def test_a_new_proof_replaces_an_older_one(tmp_path: Path) -> None:
    file, old = tmp_path / "support.json", {"on": "a", "date": "2026-01-01", "torch": "2.9.0"}
    support.merge({"cpu/single/mlm": old, "cuda/ddp/mlm": old}, file)
    new = {"on": "b", "date": "2026-02-02", "torch": "2.13.0"}
    support.merge({"cpu/single/mlm": new}, file)
    proofs = json.loads(file.read_text())["proofs"]
    assert proofs == {"cpu/single/mlm": new, "cuda/ddp/mlm": old}
    rows = support.build_table(proofs).splitlines()
    assert next(row for row in rows if "`cpu`" in row).endswith("| b, torch 2.13.0 (2026-02-02) |")
    cuda = next(row for row in rows if "`cuda`" in row)
    assert cuda.startswith("| `cuda` |  | mlm |  |")
    assert "not run" in next(row for row in rows if "`gaudi`" in row)


def test_the_table_is_written_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{support.BEGIN}\nold\n{support.END}\nafter\n", encoding="utf-8")
    support.write_table(page)
    text = page.read_text(encoding="utf-8")
    proofs = json.loads(support.FILE.read_text())["proofs"]
    assert support.read_table(text) == support.build_table(proofs)
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
