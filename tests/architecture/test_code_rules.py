"""Rules for the code of single files, each with examples that it detects and accepts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from architecture.tree import Source, calls, docstrings, sources
from regauge.config import output_files

DEVICE_WORDS = {"cuda", "nccl", "rocm", "hip", "mps", "xpu", "hpu", "hccl", "habana", "gaudi"} | {
    "xla",
    "tpu",
    "neuron",
    "trainium",
    "inferentia",
}
DEVICE_FOLDERS = ("accelerators", "inference/backends")
TEXT_METHODS = {"read_text", "write_text"}
READERS = {"regauge/system/json_files.py", "regauge/system/jsonl.py"}
"""Modules that decode the content of JSON files, after they checked it."""
LOADS = {"json.load", "json.loads"}
READS = {"read_text", "read_bytes", "read", "open"}
OPENER = "open_in_place"
STARTERS = {
    "regauge/system/children.py": {"subprocess.Popen"},
    "regauge/supervision/forkserver.py": {"os.fork"},  # a forked process skips the imports
    "regauge/jobs/targets/_local_scheduler.py": {"os.fork"},  # the scheduler outlives its command
    "regauge/jobs/targets/_kubernetes/kubectl.py": {"subprocess.Popen"},  # a stream of lines
    "regauge/monitoring/notify/delivery.py": {"subprocess.Popen"},  # started by a thread
}
"""Files that start processes without waiting for their end, and how."""
START_CALLS = {"subprocess.Popen", "os.fork", "multiprocessing.Process", "multiprocessing.Pool"}
INTERVALS = "regauge/system/timing.py"
NAMES_MODULE = "regauge/config/output_files.py"
NAMES = {
    name
    for key, name in vars(output_files).items()
    if key.isupper() and isinstance(name, str) and "." in name
}
OTHER_FOLDERS = {
    ("regauge/jobs/targets/_local_job.py", output_files.JOB),
    ("regauge/jobs/targets/ray.py", output_files.JOB),
}
"""Files of the same name in the folder of a launched job."""
UNPICKLE = "regauge/training/checkpoint/unpickle.py"
"""Opens third-party pickles, in a separate process: with weights only, or permitted callables."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def find_device_words(source: Source) -> Iterator[str]:
    """Yield every device word in code outside of the packages that may name devices."""
    documentation = docstrings(source.tree)
    for node in [] if source.is_in(*DEVICE_FOLDERS) else ast.walk(source.tree):
        for text in _texts(node) if id(node) not in documentation else ():
            words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
            if DEVICE_WORDS & set(words):
                yield f"{getattr(node, 'lineno', '?')} contains {text!r}"


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers and strings that a node holds."""
    for name in ("id", "attr", "name", "arg", "asname", "module", "value"):
        text = getattr(node, name, None)
        if isinstance(text, str):
            yield text


def find_locale_dependence(source: Source) -> Iterator[str]:
    """Yield the calls that read or write text in the encoding of the locale: name UTF-8."""
    for node in calls(source):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_method = isinstance(node.func, ast.Attribute)
        name = _name(node)
        mode = keywords.get("mode") or next(map(ast.unparse, filter(_is_mode, node.args)), None)
        is_text = (is_method and name in TEXT_METHODS) or keywords.get("text") == "True"
        opens_text = name == "open" and ("b" not in mode if mode else not is_method)
        if "encoding" not in keywords and (is_text or opens_text):
            yield f"{node.lineno} {ast.unparse(node.func)}"


def _name(node: ast.Call) -> str:
    """Return the function or method that a call names."""
    return ast.unparse(node.func).rpartition(".")[2]


def _is_mode(argument: ast.expr) -> bool:
    value = argument.value if isinstance(argument, ast.Constant) else None
    return isinstance(value, str) and bool(value) and set(value) <= set("rwaxbt+")


def find_bare_json_reads(source: Source) -> Iterator[str]:
    """Yield the calls that decode a file without a check of its shape: use `json_files`."""
    for node in calls(source):
        function = ast.unparse(node.func)
        reads_file = function == "json.load" or any(map(_reads_file, node.args))
        if function in LOADS and reads_file and source.path not in READERS:
            yield f"{node.lineno} {ast.unparse(node)}"


def _reads_file(argument: ast.expr) -> bool:
    """Return whether an expression reads a file, as `read_text(path)` or `path.read_text()`."""
    return any(isinstance(node, ast.Call) and _name(node) in READS for node in ast.walk(argument))


def find_appends_through_links(source: Source) -> Iterator[str]:
    """Yield the calls that open a file for appending and follow a link: use `open_in_place`."""
    for node in calls(source):
        values = (*node.args, *(word.value for word in node.keywords if word.arg == "mode"))
        appends = any(_is_mode(value) and "a" in ast.unparse(value) for value in values)
        openers = [ast.unparse(word.value) for word in node.keywords if word.arg == "opener"]
        has_opener = any(opener.rpartition(".")[2] == OPENER for opener in openers)
        if _name(node) == "open" and appends and not has_opener:
            yield f"{node.lineno} {ast.unparse(node)}"


def find_starts(source: Source) -> Iterator[str]:
    """Yield the calls that start a process and are not permitted: use `system.children`."""
    for call in calls(source):
        if ast.unparse(call.func) in START_CALLS - STARTERS.get(source.path, set()):
            yield f"{call.lineno} calls {ast.unparse(call.func)}"


def find_intervals(source: Source) -> Iterator[str]:
    """Yield the definitions of a polling interval outside of `system.timing`."""
    for node in ast.walk(source.tree):
        is_definition = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_definition and node.id.endswith("POLL_SECONDS") and source.path != INTERVALS:
            yield f"{node.lineno} defines {node.id}"


def find_file_names(source: Source) -> Iterator[str]:
    """Yield the names of a run's files outside of the module that lists them."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rpartition("/")[2]
            is_listed = source.path == NAMES_MODULE or (source.path, name) in OTHER_FOLDERS
            if name in NAMES and not is_listed:
                yield f"{node.lineno} {node.value!r}"


def find_unsafe_loads(source: Source) -> Iterator[str]:
    """Yield the statements that could run loaded code."""
    for node in ast.walk(source.tree):
        location = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            allowed = {"pickle"} if source.path == UNPICKLE else set()
            yield from (f"{location} imports {name}" for name in sorted(names & PICKLES - allowed))
        elif isinstance(node, ast.ImportFrom):
            package = (node.module or "").split(".")[0]
            is_torch_load = package == "torch" and "load" in {alias.name for alias in node.names}
            if package in PICKLES or is_torch_load:
                yield f"{location} imports from {node.module}"
        elif isinstance(node, ast.Call):
            yield from (f"{location} {problem}" for problem in _describe_unsafe_call(node))


def _describe_unsafe_call(node: ast.Call) -> Iterator[str]:
    keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
    called = ast.unparse(node.func)
    if called == "torch.load" and keywords.get("weights_only") != "True":
        yield "calls torch.load without weights_only=True"
    if called in {"pickle.load", "pickle.loads", "pickle.Unpickler"}:
        yield f"calls {called}, which runs code of the file"
    if called == "torch.hub.load":
        yield "calls torch.hub.load"
    if keywords.get("allow_pickle", "False") != "False":
        yield "allows pickle"
    if keywords.get("trust_remote_code", "False") != "False":
        yield "trusts remote code"


class Rule(NamedTuple):
    """A rule: a function that yields problems, and code that violates or keeps it."""

    find: Callable[[Source], Iterator[str]]
    bad: tuple[str, ...]
    good: tuple[str, ...] = ()
    path: str = "regauge/training/trainer.py"


RULES = (
    Rule(
        find_device_words,
        (
            "x.cuda()",
            "device = 'cuda:0'",
            "import torch_xla",
            "from torch_xla.core import xla_model",
            "def on_tpu(): ...",
            "call(hpu=True)",
            "message = f'{n} neuron cores'",
            "class CudaLoop: ...",
        ),
        ('"""As on cuda."""', "x = 1  # tpu", "relax = barracuda"),
    ),
    Rule(
        find_locale_dependence,
        (
            "path.read_text()",
            "path.write_text(text)",
            "path.open('w')",
            "open(path, 'a')",
            "open(path)",
            "subprocess.run(command, text=True)",
        ),
        (
            "path.read_text(encoding='utf-8')",
            "path.open('rb')",
            "open(path, 'w', encoding='utf-8')",
        ),
    ),
    Rule(
        find_bare_json_reads,
        (
            "json.loads(path.read_text(encoding='utf-8'))",
            "json.loads((folder / 'run.json').read_bytes())['run']",
            "json.loads(read_text(path))",
            "json.load(file)",
            "json.loads(path.open().read())",
        ),
        ("json.loads(text)", "json.loads(store.get('plan'))"),
    ),
    Rule(
        find_appends_through_links,
        ("path.open('ab')", "open(path, 'a+b', buffering=0)"),
        ("open(path, 'ab', opener=open_in_place)", "path.open('rb')"),
    ),
    Rule(find_starts, ("subprocess.Popen(['true'])", "def f():\n    return os.fork()")),
    Rule(find_intervals, ("LOCK_POLL_SECONDS = 0.1", "START_SECONDS, POLL_SECONDS = 1.0, 0.1")),
    Rule(find_file_names, ("x = 'metrics.jsonl'", "f'{folder}/ledger.jsonl'", "x / '.seen'")),
    Rule(
        find_unsafe_loads,
        (
            "import pickle",
            "from pickle import loads",
            "def f():\n    import joblib.parallel",
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "from torch import load",
            "numpy.load(path, allow_pickle=True)",
            "AutoModel.from_pretrained(path, trust_remote_code=True)",
        ),
        ("torch.load(path, weights_only=True)",),
    ),
    Rule(
        find_unsafe_loads,
        ("pickle.load(f)", "pickle.Unpickler(f).load()", "import dill"),
        ("import pickle\nclass A(pickle.Unpickler): ...",),
        UNPICKLE,
    ),
)


@pytest.mark.parametrize("find", dict.fromkeys(rule.find for rule in RULES))
def test_the_package_keeps_the_rule(find: Callable[[Source], Iterator[str]]) -> None:
    problems = [f"{source.path}:{problem}" for source in sources() for problem in find(source)]
    assert not problems, "\n".join([str(find.__doc__), *problems])


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in RULES for text in rule.bad])
def test_a_violation_is_detected(rule: Rule, text: str) -> None:
    assert list(rule.find(Source(rule.path, text)))


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in RULES for text in rule.good])
def test_other_code_is_accepted(rule: Rule, text: str) -> None:
    assert not list(rule.find(Source(rule.path, text)))


def test_the_names_of_run_files_are_known() -> None:
    assert {output_files.METRICS, output_files.LEDGER, output_files.LAST_SEEN} <= NAMES


def test_one_file_calls_torch_load_and_restricts_its_unpickler() -> None:
    loads = {"torch.load", "torch.hub.load"}
    callers = {
        source.path
        for source in sources()
        for node in calls(source)
        if ast.unparse(node.func) in loads
    }
    assert callers == {UNPICKLE}
    [tree] = [source.tree for source in sources() if source.path == UNPICKLE]
    unpicklers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    assert unpicklers
    for node in unpicklers:
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        assert "find_class" in methods, node.name
