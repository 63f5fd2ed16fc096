"""Imports point down only; verbs and choices never import each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from architecture.tree import CHOICES, Source, imports, sources

FOUNDATION = (
    "config",
    "choices",
    "log",
    "errors",
    "files",
    "hooks",
    "processes",
    "jsonl",
    "object_store",
    "safetensors_io",
    "scratch",
    "slurm",
    "timing",
    "units",
    "worker",
)
PARTS = ("data", "models")
MACHINERY = (
    "artifacts",
    "benchmarking",
    "checkpoint",
    "comparison",
    "evaluation",
    "health",
    "planning",
    "prediction",
    "preparation",
    "reporting",
    "results",
    "supervision",
    "testing",
    "training",
)
TOP = ("cli", "__main__", "__init__")
LAYERS = ("foundation", "accelerators' interface", "parts", "choices", "machinery", "verbs", "cli")


def layer(module: str) -> int:
    """Return the height of a module in the house, 0 for the foundation."""
    parts = module.split(".")[1:]
    room = parts[0] if parts else "__init__"
    if room in FOUNDATION:
        return 0
    if room in CHOICES and len(parts) == 1:  # the interface: the folder's __init__
        return 1 if room == "accelerators" else 2
    for rooms, height in ((PARTS, 2), (CHOICES, 3), (MACHINERY, 4), (("verbs",), 5), (TOP, 6)):
        if room in rooms:
            return height
    raise AssertionError(f"{module} lies in no layer: name its room in {__file__}")


def violations(source: Source) -> list[str]:
    """Return every import of a file that points up or sideways."""
    found = []
    for line, target in imports(source):
        if target == "regauge":  # __version__
            continue
        reason = _reason(source.module, target)
        if reason:
            found.append(f"{source.path}:{line} imports {target}: {reason}")
    return found


def _reason(module: str, target: str) -> str:
    folder, _, own = module.rpartition(".")
    other_folder, _, other = target.rpartition(".")
    if layer(target) > layer(module):
        return f"{LAYERS[layer(module)]} must not know {LAYERS[layer(target)]}"
    part = own.startswith("_") and not own.startswith("__")
    if part and folder == other_folder and not other.startswith("_"):
        return "a part of a folder must not know the options beside it"
    if folder != other_folder or other.startswith("_") or target == folder:
        sideways = layer(module) == layer(target) and module.split(".")[1] != target.split(".")[1]
        return "choices never import each other" if sideways and layer(module) == 3 else ""
    if folder == "regauge.verbs":
        return "verbs never import each other"
    options = {f"regauge.{name}" for name in CHOICES} | {
        "regauge.data.sources",
        "regauge.data.layouts",
        "regauge.prediction.executors",
    }
    return "choices never import each other" if folder in options else ""


def test_imports_point_down() -> None:
    found = [problem for source in sources() for problem in violations(source)]
    assert not found, "\n".join(found)


def test_the_report_says_how_large_each_room_is(report: Callable[[str], None]) -> None:
    rooms: dict[str, int] = {}
    for source in sources():
        rooms[source.room] = rooms.get(source.room, 0) + source.lines
    report("lines per room: " + " · ".join(f"{room} {rooms[room]}" for room in sorted(rooms)))
    assert sum(rooms.values()) > 0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("regauge/config.py", "from regauge import verbs"),
        ("regauge/data/row_order.py", "import regauge.tasks.clm"),
        ("regauge/strategies/ddp.py", "from regauge.training import trainer"),
        ("regauge/strategies/ddp.py", "from regauge.strategies import fsdp"),
        ("regauge/strategies/ddp.py", "from regauge.tasks.clm import Clm"),
        ("regauge/strategies/_sharded.py", "from regauge.strategies import fsdp"),
        ("regauge/data/sources/text.py", "def read():\n    from regauge.data.sources import jsonl"),
        ("regauge/data/layouts/packed.py", "from regauge.data.layouts import fields"),
        ("regauge/training/trainer.py", "from regauge.cli import main"),
        ("regauge/verbs/train.py", "import regauge.verbs.pipeline"),
        ("regauge/models/modules.py", "from regauge.accelerators.cpu import Cpu"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str) -> None:
    assert violations(Source(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("regauge/strategies/fsdp.py", "from regauge.strategies import _sharded, Strategy"),
        ("regauge/training/trainer.py", "from regauge.strategies import Prepared"),
        ("regauge/models/modules.py", "from regauge.accelerators import Accelerator"),
        ("regauge/verbs/pipeline.py", "from regauge.verbs import _stages, show"),
        ("regauge/checkpoint/commit.py", "from regauge import __version__, config"),
    ],
)
def test_a_right_import_is_not(path: str, text: str) -> None:
    assert not violations(Source(path, text))
