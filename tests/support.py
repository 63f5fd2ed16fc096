"""The support table of the accelerators page: combinations that the tests ran, with dates."""

from __future__ import annotations

import datetime as dt
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from regauge.system import choices

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "reference" / "support.json"
PAGE = ROOT / "docs" / "reference" / "accelerators.md"
BEGIN, END = "<!-- support -->", "<!-- /support -->"
STRATEGIES = ("single", "ddp", "zero1", "fsdp", "hsdp")
SIMULATED = {"sim": "a simulated device"}
"""The device of tests/simulated, by its name in torch."""
Proofs = dict[str, dict[str, str]]
"""The chip, the date and the version of torch of each `accelerator/strategy/task` that ran."""


@cache
def chip(kind: str) -> str:
    """Return the name of the chip that an accelerator uses here."""
    accelerator = choices.load("accelerators", kind)()
    name: str = accelerator.chip_peak(accelerator.precisions()[0]).name
    return SIMULATED.get(name, name)


def proof(kind: str) -> dict[str, str]:
    """Return the evidence that a passed test gives: chip, date and version of torch."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return {"on": chip(kind), "date": today, "torch": version("torch").partition("+")[0]}


def merge(new: Proofs, path: Path = FILE) -> None:
    """Add new proofs to a file; they replace older ones of the same combination."""
    old: Proofs = json.loads(path.read_text())["proofs"] if path.exists() else {}
    document = {"format": 1, "proofs": dict(sorted({**old, **new}.items()))}
    path.write_text(json.dumps(document, indent=1) + "\n")


def build_table(proofs: Proofs) -> str:
    """Return the table as Markdown: the tasks that ran, by accelerator and strategy."""
    lines = [
        f"| accelerator | {' | '.join(f'`{name}`' for name in STRATEGIES)} | run on |",
        "| --- " * (len(STRATEGIES) + 2) + "|",
    ]
    for kind in choices.names("accelerators"):
        selected = {key: value for key, value in proofs.items() if key.startswith(f"{kind}/")}
        cells = [_list_tasks(selected, f"{kind}/{strategy}/") for strategy in STRATEGIES]
        lines.append(f"| `{kind}` | {' | '.join(cells)} | {_format_chips(selected)} |")
    return "\n".join(lines) + "\n"


def read_table(text: str) -> str:
    """Return the table that a page has between its markers."""
    return text.partition(BEGIN)[2].partition(END)[0].strip() + "\n"


def _list_tasks(proofs: Proofs, prefix: str) -> str:
    return ", ".join(key.removeprefix(prefix) for key in proofs if key.startswith(prefix))


def _format_chips(proofs: Proofs) -> str:
    if not proofs:
        return "not run; written from the vendor's documentation"
    chips = {f"{proof['on']}, torch {proof['torch']}" for proof in proofs.values()}
    latest = max(proof["date"] for proof in proofs.values())
    return f"{'; '.join(sorted(chips))} ({latest})"


def write_table(path: Path = PAGE) -> None:
    """Write the table of the proofs in FILE into a page."""
    proofs: Any = json.loads(FILE.read_text())["proofs"]
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{build_table(proofs)}{END}{after}", encoding="utf-8")
