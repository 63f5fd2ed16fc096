"""Nothing that is loaded can run code: no pickle, and `torch.load` in one file, weights only."""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, sources

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def unsafe(source: Source) -> list[str]:
    """Return every way in which a file could run what it loads."""
    found = []
    for node in ast.walk(source.tree):
        where = f"{source.path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            found += [f"{where} imports {name}" for name in sorted(names & PICKLES)]
        elif isinstance(node, ast.ImportFrom):
            room = (node.module or "").split(".")[0]
            if room in PICKLES or (room == "torch" and "load" in {a.name for a in node.names}):
                found.append(f"{where} imports from {node.module}")
        elif isinstance(node, ast.Call):
            found += [f"{where} {problem}" for problem in _unsafe_call(node)]
    return found


def torch_loads(source: Source) -> list[ast.Call]:
    """Return the calls of `torch.load`."""
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "torch.hub.load"}
    ]


def _unsafe_call(node: ast.Call) -> list[str]:
    keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
    called = ast.unparse(node.func)
    problems = []
    if called == "torch.load" and keywords.get("weights_only") != "True":
        problems.append("calls torch.load without weights_only=True")
    if called == "torch.hub.load":
        problems.append("calls torch.hub.load")
    if keywords.get("allow_pickle", "False") != "False":
        problems.append("allows pickle")
    if keywords.get("trust_remote_code", "False") != "False":
        problems.append("trusts remote code")
    return problems


def test_nothing_loaded_runs() -> None:
    found = [line for source in sources() for line in unsafe(source)]
    assert not found, "\n".join(found)


def test_torch_load_has_one_place() -> None:
    places = [source.path for source in sources() if torch_loads(source)]
    assert len(places) <= 1, places


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import joblib.parallel",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_an_unsafe_load_is_found(text: str) -> None:
    assert unsafe(Source("regauge/a.py", text))


def test_a_safe_one_is_not() -> None:
    assert not unsafe(Source("regauge/a.py", "torch.load(path, weights_only=True)"))
