"""Imports point down only; verbs and choices never import each other; packages form no cycle."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

from architecture.layers import (
    CHOICE_LAYER,
    FOUNDATION,
    LAYERS,
    MACHINERY,
    MACHINERY_LAYER,
    is_settings,
    layer_of,
)
from architecture.tree import OPTION_PACKAGES, Source, imports, sources

MAX_MODULES = 25
"""Modules in one folder, without its `__init__.py`."""
FOLDER_BUDGETS = {"regauge/verbs": 32}
"""Folders with more modules: a command is a file of `verbs`."""
MAX_IMPORTS = 12
"""Modules of other packages and of its own that a file imports, without those of the foundation."""
IMPORT_BUDGETS = {
    "regauge/training/run_setup.py": 27,  # puts the parts of a run together, and does nothing else
    "regauge/evaluation/offline.py": 17,
    "regauge/supervision/supervisor.py": 16,
    "regauge/tasks/rank.py": 15,
    "regauge/artifacts/model.py": 14,
    "regauge/training/batch_finder/memory.py": 14,
    "regauge/training/run.py": 14,
    "regauge/artifacts/programs.py": 13,
}
"""Files that import more; their numbers only fall."""


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
    layer, target_layer = layer_of(module), layer_of(target)
    if target_layer > layer:
        return f"{LAYERS[layer]} must not import {LAYERS[target_layer]}"
    package, target_package = module.split(".")[1], target.split(".")[1]
    is_machinery = layer == target_layer == MACHINERY_LAYER and not is_settings(target)
    if is_machinery and MACHINERY.index(target_package) > MACHINERY.index(package):
        return f"{package} is below {target_package} in the order of the machinery"
    if layer == target_layer == CHOICE_LAYER and package != target_package:
        return "choices never import each other"
    folder, option = _option(module)
    target_folder, target_option = _option(target)
    if folder != target_folder or target == folder or target_option.startswith("_"):
        return ""
    if folder == "regauge.verbs":
        return "verbs never import each other"
    if folder not in OPTION_PACKAGES:
        return ""
    if option.startswith("_") and not option.startswith("__"):
        return "a shared part must not import the options that use it"
    return "choices never import each other"


def _option(module: str) -> tuple[str, str]:
    """Return the folder of options of a module, and the option or shared part there."""
    for folder in sorted({*OPTION_PACKAGES, "regauge.verbs"}, key=len, reverse=True):
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
    package = [*module.split("."), "__init__"][1]
    return f"{package}.settings" if is_settings(module) else package


def imported_modules(source: Source) -> set[str]:
    """Return the modules that a file imports at run time, without those of the foundation."""
    return {
        target
        for _, target in imports(source, typing=False)
        if target != "regauge" and target.split(".")[1] not in FOUNDATION
    }


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


def test_a_folder_holds_few_modules() -> None:
    folders: dict[str, int] = {}
    for source in sources():
        folder, _, name = source.path.rpartition("/")
        folders[folder] = folders.get(folder, 0) + (name != "__init__.py")
    problems = [
        f"{folder}: {count}"
        for folder, count in folders.items()
        if count > FOLDER_BUDGETS.get(folder, MAX_MODULES)
    ]
    assert not problems, "\n".join(problems)


def test_the_report_shows_the_size_of_each_package(report: Callable[[str], None]) -> None:
    packages: dict[str, int] = {}
    for source in sources():
        packages[source.package] = packages.get(source.package, 0) + source.lines
    report("lines: " + " · ".join(f"{name} {packages[name]}" for name in sorted(packages)))
    assert sum(packages.values()) > 0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("regauge/config.py", "from regauge import verbs"),
        ("regauge/data/row_order.py", "import regauge.tasks.clm"),
        ("regauge/strategies/ddp.py", "from regauge.training import trainer"),
        ("regauge/strategies/ddp.py", "from regauge.strategies import fsdp"),
        ("regauge/strategies/ddp.py", "from regauge.tasks.clm import Clm"),
        ("regauge/strategies/_sharded.py", "from regauge.strategies import fsdp"),
        ("regauge/backends/_int8/linear.py", "from regauge.backends.onnx import Onnx"),
        ("regauge/data/sources/text.py", "def read():\n    from regauge.data.sources import jsonl"),
        ("regauge/data/layouts/packed.py", "from regauge.data.layouts import fields"),
        ("regauge/training/trainer.py", "from regauge.cli import main"),
        ("regauge/supervision/attempt.py", "from regauge.training.trainer import train"),
        ("regauge/verbs/train.py", "import regauge.verbs.pipeline"),
        ("regauge/models/modules.py", "from regauge.accelerators.cpu import Cpu"),
    ],
)
def test_a_wrong_import_is_detected(path: str, text: str) -> None:
    assert violations(Source(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("regauge/strategies/fsdp.py", "from regauge.strategies import _sharded, Strategy"),
        ("regauge/backends/onnx.py", "from regauge.backends._int8.linear import Int8Linear"),
        ("regauge/training/trainer.py", "from regauge.strategies import ShardedModel"),
        ("regauge/supervision/attempt.py", "from regauge.training.settings import Training"),
        ("regauge/models/modules.py", "from regauge.accelerators import Accelerator"),
        ("regauge/verbs/pipeline.py", "from regauge.verbs import _stages, show"),
        ("regauge/checkpoint/layout.py", "from regauge import __version__, config"),
    ],
)
def test_a_right_import_is_not(path: str, text: str) -> None:
    assert not violations(Source(path, text))


def test_a_cycle_is_detected() -> None:
    files = (
        Source("regauge/data/a.py", "from regauge.models import b"),
        Source("regauge/models/b.py", "from regauge.data import a"),
    )
    with pytest.raises(CycleError):
        TopologicalSorter(package_graph(files)).prepare()
