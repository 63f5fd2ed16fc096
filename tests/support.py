"""The support table of the README: made of what tests ran, with dates, and of nothing else."""

from __future__ import annotations

import datetime as dt
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from regauge import choices

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "support.json"
BEGIN, END = "<!-- support -->", "<!-- /support -->"
STRATEGIES = ("single", "ddp", "zero1", "fsdp", "hsdp")
Proofs = dict[str, dict[str, str]]
"""`accelerator/strategy/task` to the chip, the date and the torch that it was run with."""


@cache
def chip(kind: str) -> str:
    """Return the name of the chip that an accelerator uses here."""
    accelerator = choices.load("accelerators", kind)()
    name: str = accelerator.chip_peak(accelerator.precisions()[0]).name
    return name


def proof(kind: str) -> dict[str, str]:
    """Return what a passed test is evidence of, here and today."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return {"on": chip(kind), "date": today, "torch": version("torch").partition("+")[0]}


def merge(found: Proofs, path: Path = FILE) -> None:
    """Lay new proofs over those that a file holds."""
    known: Proofs = json.loads(path.read_text())["proofs"] if path.exists() else {}
    document = {"format": 1, "proofs": dict(sorted({**known, **found}.items()))}
    path.write_text(json.dumps(document, indent=1) + "\n")


def table(proofs: Proofs) -> str:
    """Return the table as Markdown: the tasks that ran, by accelerator and strategy."""
    lines = [
        f"| accelerator | {' | '.join(f'`{name}`' for name in STRATEGIES)} | run on |",
        "| --- " * (len(STRATEGIES) + 2) + "|",
    ]
    for kind in choices.names("accelerators"):
        own = {key: value for key, value in proofs.items() if key.startswith(f"{kind}/")}
        cells = [_tasks(own, f"{kind}/{strategy}/") for strategy in STRATEGIES]
        lines.append(f"| `{kind}` | {' | '.join(cells)} | {_where(own)} |")
    return "\n".join(lines) + "\n"


def drawn(text: str) -> str:
    """Return the table that a page shows between its marks."""
    return text.partition(BEGIN)[2].partition(END)[0].strip() + "\n"


def _tasks(proofs: Proofs, prefix: str) -> str:
    return ", ".join(key.removeprefix(prefix) for key in proofs if key.startswith(prefix))


def _where(proofs: Proofs) -> str:
    if not proofs:
        return "written to the vendor's documents, not run"
    places = {f"{each['on']}, torch {each['torch']}" for each in proofs.values()}
    last = max(each["date"] for each in proofs.values())
    return f"{'; '.join(sorted(places))} ({last})"


def write(path: Path = ROOT / "README.md") -> None:
    """Draw the table of the file of proofs into a page."""
    proofs: Any = json.loads(FILE.read_text())["proofs"]
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{table(proofs)}{END}{after}", encoding="utf-8")
