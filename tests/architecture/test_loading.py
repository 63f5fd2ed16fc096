"""Nothing that is loaded can run code.

What others pickled is opened in one file, by `torch.load` with weights only and by an unpickler
that lists what it may call; that file has a process of its own.
"""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, sources

UNPICKLE = "regauge/checkpoint/unpickle.py"
"""Opens what others pickled, in a process of its own."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def unsafe(source: Source) -> list[str]:
    """Return every way in which a file could run what it loads."""
    found = []
    for node in ast.walk(source.tree):
        where = f"{source.path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            allowed = {"pickle"} if source.path == UNPICKLE else set()
            found += [f"{where} imports {name}" for name in sorted(names & PICKLES - allowed)]
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
    if called in {"pickle.load", "pickle.loads", "pickle.Unpickler"}:
        problems.append(f"calls {called}, which calls what it reads")
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
    assert [source.path for source in sources() if torch_loads(source)] == [UNPICKLE]


def test_an_unpickler_says_what_it_finds() -> None:
    [tree] = [source.tree for source in sources() if source.path == UNPICKLE]
    kinds = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    assert kinds
    for kind in kinds:
        own = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
        assert "find_class" in own, kind.name


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


@pytest.mark.parametrize("text", ["pickle.load(f)", "pickle.Unpickler(f).load()", "import dill"])
def test_an_unsafe_load_is_found_there(text: str) -> None:
    assert unsafe(Source(UNPICKLE, text))


def test_a_safe_one_is_not() -> None:
    assert not unsafe(Source(UNPICKLE, "import pickle\nclass A(pickle.Unpickler): ..."))
    assert not unsafe(Source("regauge/a.py", "torch.load(path, weights_only=True)"))
