"""No load path can run code.

One file opens third-party pickles, in a separate process. It uses `torch.load` with weights only,
and an unpickler with a list of permitted callables.
"""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, sources

UNPICKLE = "regauge/training/checkpoint/unpickle.py"
"""Opens third-party pickles, in a separate process."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def find_unsafe_loads(source: Source) -> list[str]:
    """Return the statements of a file that could run loaded code."""
    problems = []
    for node in ast.walk(source.tree):
        location = f"{source.path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            allowed = {"pickle"} if source.path == UNPICKLE else set()
            problems += [f"{location} imports {name}" for name in sorted(names & PICKLES - allowed)]
        elif isinstance(node, ast.ImportFrom):
            package = (node.module or "").split(".")[0]
            if package in PICKLES or (
                package == "torch" and "load" in {a.name for a in node.names}
            ):
                problems.append(f"{location} imports from {node.module}")
        elif isinstance(node, ast.Call):
            problems += [f"{location} {problem}" for problem in _describe_unsafe_call(node)]
    return problems


def find_torch_loads(source: Source) -> list[ast.Call]:
    """Return the calls of `torch.load`."""
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "torch.hub.load"}
    ]


def _describe_unsafe_call(node: ast.Call) -> list[str]:
    keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
    called = ast.unparse(node.func)
    problems = []
    if called == "torch.load" and keywords.get("weights_only") != "True":
        problems.append("calls torch.load without weights_only=True")
    if called in {"pickle.load", "pickle.loads", "pickle.Unpickler"}:
        problems.append(f"calls {called}, which runs code of the file")
    if called == "torch.hub.load":
        problems.append("calls torch.hub.load")
    if keywords.get("allow_pickle", "False") != "False":
        problems.append("allows pickle")
    if keywords.get("trust_remote_code", "False") != "False":
        problems.append("trusts remote code")
    return problems


def test_no_load_path_runs_code() -> None:
    problems = [line for source in sources() for line in find_unsafe_loads(source)]
    assert not problems, "\n".join(problems)


def test_one_file_calls_torch_load() -> None:
    assert [source.path for source in sources() if find_torch_loads(source)] == [UNPICKLE]


def test_an_unpickler_restricts_its_classes() -> None:
    [tree] = [source.tree for source in sources() if source.path == UNPICKLE]
    kinds = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    assert kinds
    for kind in kinds:
        methods = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
        assert "find_class" in methods, kind.name


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
def test_an_unsafe_load_is_detected(text: str) -> None:
    assert find_unsafe_loads(Source("regauge/a.py", text))


@pytest.mark.parametrize("text", ["pickle.load(f)", "pickle.Unpickler(f).load()", "import dill"])
def test_an_unsafe_load_is_detected_there(text: str) -> None:
    assert find_unsafe_loads(Source(UNPICKLE, text))


def test_a_safe_load_is_accepted() -> None:
    assert not find_unsafe_loads(Source(UNPICKLE, "import pickle\nclass A(pickle.Unpickler): ..."))
    assert not find_unsafe_loads(Source("regauge/a.py", "torch.load(path, weights_only=True)"))
