"""Say what this machine can run on, and what is missing for the rest."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from regauge import accelerators, registry, verbs


def main(*, json: verbs.AsJson = False) -> dict[str, Any]:
    """Look at every accelerator without using one, and at what torch.compile needs."""
    found = accelerators.survey()
    rows = [
        {
            "name": kind,
            "usable": "yes" if availability.fitness else "no",
            "why": availability.reason,
            "precisions": _precisions(kind) if availability.fitness else "",
        }
        for kind, availability in found.items()
    ]
    answer = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "accelerators": rows,
        "chosen": max(found, key=lambda kind: found[kind].fitness),
        "cpp_compiler": accelerators.cpp_compiler() or "none: torch.compile is not possible",
    }
    return verbs.show(answer, as_json=json)


def _precisions(kind: str) -> str:
    return ", ".join(registry.load("accelerators", kind)().precisions())
