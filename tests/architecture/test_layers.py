"""Imports point down only; commands and choices never import each other; no package cycles."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

from architecture.layers import (
    GROUND,
    INNER,
    PARTS,
    ROOMS,
    height_of,
    is_settings,
    package_of,
    room_of,
)
from architecture.tree import OPTION_PACKAGES, SOURCE, Source, imports, sources

MAX_MODULES = 30
"""Modules in one folder, without its `__init__.py`."""
FOLDER_BUDGETS = {"regauge/commands": 31}
"""Folders with more modules: a command is a file of `commands`."""
MIN_ENTRIES = 2
"""Modules and subfolders of a folder; a folder of one module is a file."""
MAX_IMPORTS = 12
"""Modules of other packages and of its own that a file imports, without those of the ground."""
IMPORT_BUDGETS = {
    "regauge/training/run_setup.py": 27,  # puts the parts of a run together, and does nothing else
    "regauge/evaluation/offline.py": 17,
    "regauge/supervision/supervisor.py": 16,
    "regauge/tasks/rank.py": 15,
    "regauge/inference/export/model.py": 14,
    "regauge/training/batch_finder/memory.py": 14,
    "regauge/training/run.py": 15,
    "regauge/commands/train.py": 13,
    "regauge/inference/export/programs.py": 14,
    "regauge/serving/model_version.py": 13,
    "regauge/training/dry_run.py": 13,
}
"""Files that import more; their numbers only fall."""
COMMANDS = "regauge.commands"


def violations(source: Source) -> list[str]:
    """Return every import of a file that points up or sideways."""
    problems = []
    for line, target in imports(source):
        if target == "regauge":  # __version__
            continue
        reason = _reason(source.module, target)
        if reason:
            problems.append(f"{source.path}:{line} imports {target}: {reason}")
    return problems


def _reason(module: str, target: str) -> str:
    """Return why a module must not import another; empty if it may."""
    if height_of(target) > height_of(module) and not is_settings(target):
        return f"{room_of(module)} is below {room_of(target)}"
    folder, option = _option(module)
    target_folder, target_option = _option(target)
    is_option = target_folder in OPTION_PACKAGES and not target_option.startswith("_")
    if is_option and room_of(module) in PARTS and room_of(target) == "accelerators":
        return "parts use the interface of accelerators"
    if folder != target_folder or target == folder or target_option.startswith("_"):
        return ""
    if folder == COMMANDS:
        return "commands never import each other"
    if folder not in OPTION_PACKAGES:
        return ""
    if option.startswith("_") and not option.startswith("__"):
        return "a shared part must not import the options that use it"
    return "choices never import each other"


def _option(module: str) -> tuple[str, str]:
    """Return the folder of options of a module, and the option or shared part there."""
    for folder in sorted({*OPTION_PACKAGES, COMMANDS}, key=len, reverse=True):
        if module.startswith(f"{folder}."):
            return folder, module.removeprefix(f"{folder}.").partition(".")[0]
    folder, _, name = module.rpartition(".")
    return folder, name


def package_graph(files: tuple[Source, ...]) -> dict[str, set[str]]:
    """Return the packages that each package imports, type annotations included.

    Settings modules are schemas of the run file and count as a package of their own.
    """
    graph: dict[str, set[str]] = {}
    for source in files:
        node = _package(source.module)
        targets = {_package(target) for _, target in imports(source) if target != "regauge"}
        graph.setdefault(node, set()).update(targets - {node, node.removesuffix(".settings")})
    return graph


def _package(module: str) -> str:
    return f"{package_of(module)}.settings" if is_settings(module) else package_of(module)


def imported_modules(source: Source) -> set[str]:
    """Return the modules that a file imports at run time, without those of the ground."""
    return {
        target
        for _, target in imports(source, typing=False)
        if target != "regauge" and room_of(target) not in GROUND
    }


def test_the_rooms_are_the_folders() -> None:
    folders = {path.name for path in (SOURCE / "regauge").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(ROOMS)
    assert len(ROOMS) <= 18
    files = {path.name for path in (SOURCE / "regauge").iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "cli.py", "py.typed"}
    for package in INNER:
        assert (SOURCE / "regauge" / package.replace(".", "/") / "__init__.py").is_file()


def test_imports_point_down() -> None:
    problems = [problem for source in sources() for problem in violations(source)]
    assert not problems, "\n".join(problems)


def test_packages_form_no_cycle() -> None:
    try:
        TopologicalSorter(package_graph(sources())).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_file_imports_few_modules(report: Callable[[str], None]) -> None:
    counts = {source.path: len(imported_modules(source)) for source in sources()}
    largest = sorted(counts, key=counts.__getitem__, reverse=True)[:3]
    report("most imports: " + ", ".join(f"{path} {counts[path]}" for path in largest))
    problems = [
        f"{path} imports {count} modules, more than {IMPORT_BUDGETS.get(path, MAX_IMPORTS)}"
        for path, count in counts.items()
        if count > IMPORT_BUDGETS.get(path, MAX_IMPORTS)
    ]
    assert not problems, "\n".join(problems)


def test_a_folder_holds_several_modules_but_not_many() -> None:
    modules: dict[str, int] = {}
    subfolders: dict[str, int] = {}
    for source in sources():
        folder, _, name = source.path.rpartition("/")
        modules[folder] = modules.get(folder, 0) + (name != "__init__.py")
        if name == "__init__.py":
            parent = folder.rpartition("/")[0]
            subfolders[parent] = subfolders.get(parent, 0) + 1
    problems = [
        f"{folder}: {count} modules"
        for folder, count in modules.items()
        if count > FOLDER_BUDGETS.get(folder, MAX_MODULES)
        or count + subfolders.get(folder, 0) < MIN_ENTRIES
    ]
    assert not problems, "\n".join(problems)


def test_the_report_shows_the_size_of_each_package(report: Callable[[str], None]) -> None:
    packages: dict[str, int] = {}
    for source in sources():
        room = room_of(source.module)
        packages[room] = packages.get(room, 0) + source.lines
    report("lines: " + " · ".join(f"{name} {packages[name]}" for name in sorted(packages)))
    assert sum(packages.values()) > 0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("regauge/config/__init__.py", "from regauge import commands"),
        ("regauge/data/row_order.py", "import regauge.tasks.clm"),
        ("regauge/training/strategies/ddp.py", "from regauge.training.strategies import fsdp"),
        ("regauge/training/strategies/_sharded.py", "import regauge.training.strategies.fsdp"),
        ("regauge/inference/backends/_int8/a.py", "import regauge.inference.backends.onnx"),
        ("regauge/data/sources/text.py", "def read():\n    from regauge.data.sources import jsonl"),
        ("regauge/data/layouts/packed.py", "from regauge.data.layouts import fields"),
        ("regauge/training/trainer.py", "from regauge.cli import main"),
        ("regauge/supervision/attempt.py", "from regauge.training.trainer import train"),
        ("regauge/commands/train.py", "import regauge.commands.pipeline"),
        ("regauge/models/modules.py", "from regauge.accelerators.cpu import Cpu"),
        ("regauge/tasks/mlm.py", "from regauge.accelerators.cpu import Cpu"),
    ],
)
def test_a_wrong_import_is_detected(path: str, text: str) -> None:
    assert violations(Source(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("regauge/training/strategies/fsdp.py", "import regauge.training.strategies._sharded"),
        ("regauge/inference/backends/onnx.py", "import regauge.inference.backends._int8.linear"),
        ("regauge/training/trainer.py", "from regauge.training.strategies import ShardedModel"),
        ("regauge/supervision/attempt.py", "from regauge.training.settings import Training"),
        ("regauge/models/modules.py", "from regauge.accelerators import Accelerator"),
        ("regauge/commands/pipeline.py", "from regauge.commands import _stages, show"),
        ("regauge/training/checkpoint/saver.py", "from regauge import __version__, config"),
    ],
)
def test_a_right_import_is_not(path: str, text: str) -> None:
    assert not violations(Source(path, text))


def test_a_cycle_is_detected() -> None:
    files = (
        Source("regauge/training/a.py", "from regauge.training.strategies import b"),
        Source("regauge/training/strategies/b.py", "from regauge.training import a"),
    )
    with pytest.raises(CycleError):
        TopologicalSorter(package_graph(files)).prepare()
