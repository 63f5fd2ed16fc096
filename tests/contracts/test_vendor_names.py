"""Every name of a vendor's library that Regauge uses is in the list of that library's names.

The lists come from the vendors' wheels, or from their documentation if there is no wheel. A renamed
function is noticed without the device when a list is written again:
`PYTHONPATH=tests:src python -m vendor_api.extract WHEEL`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from architecture.tree import Source
from vendor_api.extract import ANY_KEYWORD, NAMES, Library, find_modules
from vendor_api.usage import ROOTS, Usage, collect_usage

PACKAGES = tuple(ROOTS.values())
USAGE = collect_usage()


def read_list(package: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((NAMES / f"{package}.json").read_text("utf-8"))
    return document


def find_missing(usage: Usage, names: Mapping[str, list[str] | None]) -> list[str]:
    """Return the used names that a list lacks, and the keywords that its functions lack."""
    missing = [name for name in usage if name not in names]
    for name, keywords in usage.items():
        parameters = names.get(name)
        if parameters is not None and ANY_KEYWORD not in parameters:
            missing += [f"{name}({keyword}=)" for keyword in keywords - set(parameters)]
    return sorted(missing)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_used_name_is_in_the_list_of_its_library(package: str) -> None:
    document = read_list(package)
    assert find_missing(USAGE[package], document["names"]) == [], (
        f"{document['package']} {document['version']} has no such names ({document['source']})"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_removed_name_or_keyword_is_noticed(package: str) -> None:
    names = read_list(package)["names"]
    for name, keywords in USAGE[package].items():
        others = {other: how for other, how in names.items() if other != name}
        assert find_missing(USAGE[package], others) == [name]
        if keywords and ANY_KEYWORD not in (names[name] or [ANY_KEYWORD]):
            renamed = {**names, name: [f"{parameter}_new" for parameter in names[name]]}
            expected = sorted(f"{name}({keyword}=)" for keyword in keywords)
            assert find_missing(USAGE[package], renamed) == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_the_list_states_its_source(package: str) -> None:
    document = read_list(package)
    is_from_wheel = document["source"].startswith("wheel ")
    assert is_from_wheel == bool(document["version"])
    assert is_from_wheel != bool(document.get("why_no_wheel"))
    assert document["date"]


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_library_has_the_names(package: str) -> None:
    document = read_list(package)
    try:
        installed = distribution(document["package"])
    except PackageNotFoundError:
        pytest.skip(f"not proved here: {document['package']} is not installed")
    paths = [str(path) for path in installed.files or ()]
    library = Library.from_folder(Path(str(installed.locate_file(""))), paths)
    names = library.list_names(find_modules(library, USAGE[package]))
    assert find_missing(USAGE[package], names) == []
    if installed.version == document["version"]:
        assert names == document["names"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch_xla\ntorch_xla.sync(wait=True)", {"torch_xla.sync": {"wait"}}),
        ("from torch_xla import runtime as r\nr.x()", {"torch_xla.runtime.x": set()}),
        ("m: Any = import_module('torch_neuronx')\nm.trace(a)", {"torch_neuronx.trace": set()}),
        ("def read(pynvml, h): return pynvml.f(h).gpu", {"pynvml.f": set()}),
        ("CODE = '''\nimport torch\ntorch.tpu.a.b(n=1)\n'''", {"torch.tpu.a.b": {"n"}}),
        ("getattr(torch.get_device_module('tpu'), '_stats')", {"torch.tpu._stats": set()}),
        ("import torch_xla\nx = torch_xla.Loader(1)\nx.close()", {"torch_xla.Loader.close": set()}),
        ("def f():\n import torch_xla.a as x\n def g(): x.b", {"torch_xla.a.b": set()}),
    ],
)
def test_a_use_is_detected(text: str, expected: Usage) -> None:
    (usage,) = collect_usage([Source("regauge/a.py", text)]).values()
    assert {name: usage.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "text", ["torch.cuda.x()", "def f():\n torch_xla = '1'\n torch_xla.split()"]
)
def test_other_names_are_no_use(text: str) -> None:
    assert collect_usage([Source("regauge/a.py", text)]) == {}


def test_names_are_read_without_an_import() -> None:
    library = Library(
        {
            "vendor": "from .core import *\nfrom .core import run as start\nfrom . import tools\n",
            "vendor.core": (
                "import missing\n"
                "def run(a, *, b=1): ...\n"
                "def _hidden(): ...\n"
                "class Base:\n def stop(self, now): ...\n"
                "class Loader(Base):\n def __init__(self, rows, **kwargs): ...\n"
                "if missing:\n LIMIT = 3\n"
            ),
            "vendor.tools": "",
        }
    )
    assert library.list_names({"vendor"}) == {
        "vendor": None,
        "vendor.Base": [],
        "vendor.Base.stop": ["now"],
        "vendor.LIMIT": None,
        "vendor.Loader": ["rows", "**"],
        "vendor.Loader.stop": ["now"],
        "vendor.run": ["a", "b"],
        "vendor.start": ["a", "b"],
        "vendor.tools": None,
    }
