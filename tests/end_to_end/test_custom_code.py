"""Custom code, named by its import path: it is imported, refused, trained and resumed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import regauge
from architecture.tree import ROOT
from distributed import datasets
from regauge import commands, config
from regauge.cli import main
from regauge.commands import compare
from regauge.commands._python.results import PredictResult
from regauge.config import dump, parse_choice
from regauge.data.dataset import read_manifest
from regauge.inference.export.export_settings import TextSettings
from regauge.inference.export.trained_programs import build_custom_spec
from regauge.models.custom import CustomModule
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.settings import Model
from regauge.supervision.failures import classify_error
from regauge.system import children, choices
from regauge.system.errors import DataError, RegaugeError, SettingsError
from regauge.system.json_files import write_sealed
from regauge.tasks import Task
from regauge.training.settings import TrainSettings
from saved_runs import build_saved_run

EXAMPLES = ROOT / "examples"
Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test without custom modules, and remove them after it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(choices, "_allowed_paths", set())
    monkeypatch.setattr(choices, "_module_folders", [])
    monkeypatch.setattr(choices, "_custom_modules", set())
    choices.load.cache_clear()
    yield
    choices.load.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("custom_"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file next to a run file."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / "code" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the example's run file, in a folder that is not the working directory."""
    shutil.copytree(EXAMPLES, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    lines = [f"# {n}\n\n{n} and {n + 1} make {2 * n + 1}.\n" for n in range(200)]
    for part in range(4):
        (tmp_path / "docs" / f"{part}.md").write_text("".join(lines[part::4]))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "code" / "custom.toml"


def load_custom(folder: str, path: str, module_folder: Path) -> type[Any]:
    choices.allow_imports({"kind": path}, module_folder)
    return choices.load(folder, path)


@pytest.mark.full
def test_the_example_trains_and_resumes_on_two_processes(
    example: Path,
) -> None:
    """The code runs in workers of prepare, in the batch size trial and in supervised processes."""
    small = ("tokenizer.vocab_size=300", "rows.length=16", "task.width=16", "evaluation.rows=8")
    steps = ("batch.microbatch_rows=auto", "optimizer.schedule.kind=constant")
    brief = "execution.supervision.preflight=brief"
    assert main(["prepare", str(example), "prepare.processes=2", *small]) == 0
    train = ["train", str(example), *small, *steps, brief]
    assert main([*train, "stop.steps=4"]) == 0
    document = config.read(Path("out/custom/run.json"))
    assert document["task"]["kind"] == "custom_task:Gaps"
    choices.allow_imports(document)
    assert dump(config.build(TrainSettings, document)) == json.loads(json.dumps(document))
    two_processes = ("execution.processes=2", "strategy.kind=zero1")
    assert main([*train, "stop.steps=8", *two_processes]) == 0
    lines = [json.loads(line) for line in Path("out/custom/metrics.jsonl").read_text().splitlines()]
    assert {line["attempt"] for line in lines} == {1, 2}
    assert {line["step"] for line in lines if line["attempt"] == 2} == {8}
    result = json.loads(Path("out/custom/result.json").read_text())
    assert result["steps"] == 8
    assert result["metrics"]["heldout/loss"] < result["initial_metrics"]["heldout/loss"]
    evaluation = (
        'models={custom="out/custom"}',
        "evaluate.task_settings=run",
        "output.folder=out/beside",
    )
    assert main(["evaluate", str(example), *small, *evaluation]) == 0
    measured = json.loads(Path("out/beside/evaluation.json").read_text())["rows"][0]
    assert measured["loss"] == pytest.approx(result["metrics"]["heldout/loss"], rel=1e-5)


def test_the_example_reads_every_page_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    prepare = commands.load_settings(
        commands.import_verb("prepare").ROOT, EXAMPLES / "custom.toml", ()
    )
    assert prepare.source.kind == "custom_source:Sections"
    assert len(prepare.source.list_pieces()) == len(list((ROOT / "docs").rglob("*.md")))


TRACKER = """
from regauge.monitoring.trackers import Tracker
class Quiet(Tracker):
    "Says nothing."
    loud: int = 0
    "How loud."
    def start(self, run): pass
    def log(self, step, values): pass
"""
STRATEGY = """
from regauge.training.strategies.single import Single
class Mine(Single):
    "As single."
"""


def test_any_choice_can_be_custom(write: Write) -> None:
    folder = write("custom_tracker.py", TRACKER).parent
    write("custom_strategy.py", STRATEGY)
    choices.allow_imports({"a": ["custom_tracker:Quiet", {"kind": "custom_strategy:Mine"}]}, folder)
    tracker = parse_choice("trackers", {"kind": "custom_tracker:Quiet", "loud": 2})
    assert dump(tracker) == {"kind": "custom_tracker:Quiet", "loud": 2}
    assert parse_choice("trackers", dump(tracker)) == tracker
    strategy = parse_choice("strategies", "custom_strategy:Mine")
    assert dump(strategy) == {"kind": "custom_strategy:Mine"}
    with pytest.raises(SettingsError, match="'lod'; did you mean 'loud'"):
        parse_choice("trackers", {"kind": "custom_tracker:Quiet", "lod": 2})


def test_a_built_in_choice_keeps_its_name(tmp_path: Path) -> None:
    assert load_custom("tasks", "regauge.tasks.clm:Clm", tmp_path).kind == "clm"


def test_a_module_named_only_by_an_earlier_run_is_not_imported(write: Write) -> None:
    write("custom_trap.py", "raise SystemExit('it ran')")
    saved = {"kind": "custom_trap:Task"}
    with pytest.raises(SettingsError, match="the run file of this command does not name it"):
        parse_choice("tasks", saved)
    assert "custom_trap" not in sys.modules


def test_a_module_next_to_a_saved_run_is_not_imported(write: Write) -> None:
    write("custom_trap.py", "raise SystemExit('it ran')")
    run = write("run.json", json.dumps(build_saved_run(task={"kind": "custom_trap:Task"})))
    with pytest.raises(SettingsError, match="no module 'custom_trap'"):
        commands.load_settings(TrainSettings, run, ())


@pytest.mark.parametrize(
    ("path", "problem", "remedy", "code"),
    [
        (
            "custom_trackr:Quiet",
            "no module 'custom_trackr' in ",
            "did you mean 'custom_tracker'?",
            2,
        ),
        ("nothing_like_it:Quiet", "no module 'nothing_like_it'", "folder of the run file", 2),
        ("custom_tracker:Quite", "does not define the class 'Quite'", "did you mean 'Quiet'?", 2),
        (
            "custom_task:Neighbours",
            "is not a subclass of Tracker",
            "inherit from regauge.monitoring.trackers.Tracker",
            2,
        ),
        (
            "custom_task:Gaps",
            "is not a subclass of Tracker",
            "inherit from regauge.monitoring.trackers.Tracker",
            2,
        ),
        ("custom_tracker:Tracker", "is not a subclass of Tracker", "inherit from", 2),
        ("custom_broken:Quiet", "ZeroDivisionError in ", "correct that file", 64),
        ("custom_needy:Quiet", "No module named 'custom_absent'", "correct that file", 64),
        ("custom_unread:Quiet", "JSONDecodeError in ", "correct that file", 64),
    ],
)
def test_unusable_code_is_refused_in_one_line(
    path: str, problem: str, remedy: str, code: int, write: Write
) -> None:
    folder = write("custom_tracker.py", TRACKER).parent
    write("custom_broken.py", "x = 1\n1 / 0\n")
    write("custom_needy.py", "import custom_absent")
    write("custom_unread.py", "import json\njson.loads('{')\n")
    shutil.copy(EXAMPLES / "custom_task.py", folder)
    with pytest.raises(RegaugeError) as caught:
        load_custom("trackers", path, folder)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    if code == 64:
        assert f"{folder}/{path.partition(':')[0]}.py:" in caught.value.problem


def test_a_misspelt_name_without_a_colon_suggests_a_built_in_choice() -> None:
    with pytest.raises(SettingsError, match="no task named 'mlmm'; did you mean 'mlm'"):
        parse_choice("tasks", "mlmm")


def test_a_custom_choice_is_explained(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write("custom_tracker.py", TRACKER).parent)
    assert main(["explain", "trackers/custom_tracker:Quiet"]) == 0
    output = capsys.readouterr().out
    assert "Says nothing." in output
    assert "How loud." in output


def test_child_processes_import_from_the_same_folders(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write("custom_tracker.py", TRACKER).parent
    assert choices.module_folders_environment() == {}
    choices.allow_imports("custom_tracker:Quiet", folder)
    code = (
        "import sys, regauge.system.choices as r;"
        "print(r.module_folders_environment(), file=open(sys.argv[1], 'w'))"
    )
    output = tmp_path / "environment"
    assert (
        children.run_processes([sys.executable, "-c", code, str(output)], 1, tmp_path / "logs") == 0
    )
    assert output.read_text() == f"{choices.module_folders_environment()}\n"
    assert choices.module_folders_environment() == {
        choices.MODULE_FOLDERS_VARIABLE: f"{folder}{os.pathsep}{tmp_path}"
    }


class TiedTable(nn.Module):
    """An embedding table and a layer that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.output = nn.Linear(4, 10)
        self.output.weight = self.words.weight


def test_the_seed_determines_the_weights_of_a_custom_module() -> None:
    weights_by_run = []
    for seed in (0, 0, 1):
        with META:
            module = CustomModule(TiedTable())
        materialize(module, build_initial_weights(module, Model(architecture="own"), seed))
        assert module.model.module.output.weight is module.model.module.words.weight
        weights_by_run.append(dict(module.named_parameters()))
    first, second, _ = weights_by_run
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        *(weights["model.module.words.weight"] for weights in weights_by_run[1:])
    )


class Bare(nn.Module):
    """A weight that its constructor fills."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Buffered(nn.Linear):
    """A buffer that its constructor fills."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))


class Scaled(nn.Linear):
    """A weight that is a number."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Bare, "has weights but no initializer"),
        (Buffered, "a buffer without values"),
        (Scaled, "a weight without dimensions; give it the shape"),
    ],
)
def test_a_module_whose_values_would_be_lost_is_refused(
    kind: type[nn.Module], problem: str
) -> None:
    with META, pytest.raises(DataError, match=problem):
        CustomModule(nn.Sequential(nn.ReLU(), kind()))


def test_a_custom_class_is_a_task(example: Path) -> None:
    kind = load_custom("tasks", "custom_task:Gaps", example.parent)
    assert issubclass(kind, Task)
    assert choices.summary("tasks", "custom_task:Gaps").startswith("Masked tokens, weighted by")


def test_repeating_a_run_does_not_import_its_modules(write: Write) -> None:
    write("custom_trap.py", "raise SystemExit('it ran')")
    run = write("run.json", json.dumps(build_saved_run(task={"kind": "custom_trap:Task"})))
    with pytest.raises(SettingsError, match="the run file of this command does not name it"):
        compare.build_repeat(run.parent)


BAG = """
import torch
from torch import nn
from regauge.models.custom import CustomModule
from regauge.tasks.classify import Classify

class Bag(nn.Module):
    "Classes of the mean of word vectors."
    def __init__(self, vocab_size, width, classes):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, classes)

    def forward(self, batch):
        real = (batch["segments"] > 0).float()[..., None]
        vectors = self.words(batch["tokens"]) * real
        return {"scores": self.head(vectors.sum(1) / real.sum(1).clamp(min=1))}

class Words(Classify):
    "Classify with a bag of words."
    width: int = 16
    "Width of a word."
    mistake: bool = False
    "Return scores of the wrong shape."

    def build_module(self, model, manifest, seed):
        return CustomModule(Bag(manifest.tokenizer.vocab_size, self.width, self.classes))

    def loss(self, output, batch):
        if self.mistake:
            output = {"scores": output["scores"][:, 0]}
        return super().loss(output, batch)
"""
RUN_FILE = """
data.path = "{data}"
output.folder = "run"
accelerator = "cpu"
batch.rows = 8
stop.steps = 40
optimizer.learning_rate = 0.05
execution = {{ precision = "fp32", threads = 1, compile = "off", supervision.preflight = "brief" }}
model.architecture = "custom"

[task]
kind = "custom_words:Words"
text_fields = ["query"]
label = "label"
class_names = ["sport", "money", "art"]
"""


@pytest.fixture
def words_run(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run file of a custom task with a custom module, next to its code."""
    write("custom_words.py", BAG)
    data = datasets.write_pairs(tmp_path / "data")
    write_sealed(data / "manifest.json", json.loads((data / "manifest.json").read_text()))
    monkeypatch.chdir(tmp_path)
    return write("run.toml", RUN_FILE.format(data=data))


@pytest.mark.full
def test_a_trained_custom_module_is_evaluated_exported_and_used(
    words_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(words_run)]) == 0
    metrics = json.loads(Path("run/result.json").read_text())["metrics"]
    models = ("models={ words = 'run' }", "output.folder=table")
    assert main(["evaluate", str(words_run), *models]) == 0
    row = json.loads(Path("table/evaluation.json").read_text())["rows"][0]
    assert row["accuracy"] == pytest.approx(metrics["heldout/accuracy"])
    candidates = ('candidates.backends=["eager"]', 'candidates.precisions=["fp32"]')
    quick = ("candidates.timing_seconds=0.01", "export.to=artifact")
    assert main(["export", str(words_run), *candidates, *quick]) == 0
    artifact = str(Path("artifact").resolve())
    model = regauge.load(artifact, module="custom_words:Words")
    text = "w12 w13"
    answer = model.predict([text])
    assert answer["predicted_label"][0] in ("sport", "money", "art")
    Path("texts.jsonl").write_text(json.dumps({"query": text}) + "\n")
    arguments = ("artifact='artifact'", "source={ kind = 'jsonl', files = ['texts.jsonl'] }")
    assert (
        main(["predict", str(words_run), *arguments, "output.folder=answers", "execution={}"]) == 0
    )
    table = PredictResult({"output": "answers"}).read_table()
    assert table.column("predicted_label").to_pylist() == answer["predicted_label"]
    assert main(["export", "run", "--format", "hf"]) == 2
    assert "a custom module, which transformers cannot load; export" in capsys.readouterr().err
    assert main(["export", "run", "--format", "torch"]) == 0
    assert Path("run/model.pt").is_file()
    loaded = regauge.load("run", module="custom_words:Words").predict([text])
    assert loaded["predicted_label"] == answer["predicted_label"]


def test_a_custom_module_returns_a_dictionary() -> None:
    module, inputs = CustomModule(nn.Linear(2, 2)), cast("Any", torch.zeros(1, 2))
    with pytest.raises(SettingsError, match=r"Linear\.forward returns an object of type Tensor; r"):
        module(inputs)


def test_the_outputs_of_a_custom_module_must_fit_its_task(words_run: Path) -> None:
    file = words_run.with_name("custom_words.py")
    file.write_text(BAG.replace('return {"scores": ', 'return {"score": '))
    choices.allow_imports({"kind": "custom_words:Words"}, words_run.parent)
    tables = config.read(words_run)
    task = parse_choice("tasks", tables["task"])
    manifest = read_manifest(Path(tables["data"]["path"]))
    folder = words_run.parent / "model"
    with META:
        module = task.build_module(Model(architecture="custom"), manifest, 0)
    materialize(module, build_initial_weights(module, Model(architecture="custom"), 0))
    inner: Any = module.model
    inner.save_pretrained(folder)
    with pytest.raises(DataError, match=r"does not return 'scores' for texts: KeyError"):
        build_custom_spec(folder, task, manifest, TextSettings())


@pytest.mark.full
def test_a_bug_in_custom_code_is_not_retried(
    words_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(words_run), "task.mistake=true"]) == 64
    attempts = [json.loads(line) for line in Path("run/attempts.jsonl").read_text().splitlines()]
    assert {line["attempt"] for line in attempts} == {1}
    assert attempts[-1]["outcome"] == "code"
    assert f"in {words_run.with_name('custom_words.py')}:" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "is_custom", "kind"),
    [
        (IndexError("too many indices"), True, "code"),
        (IndexError("too many indices"), False, "user"),
        (RuntimeError("no reason"), True, "user"),
        (RuntimeError("connection reset"), True, "network"),
        (MemoryError(), True, "memory"),
    ],
)
def test_errors_of_the_types_of_bugs_count_as_bugs_with_custom_code(
    write: Write, error: Exception, *, is_custom: bool, kind: str
) -> None:
    if is_custom:
        load_custom("trackers", "custom_tracker:Quiet", write("custom_tracker.py", TRACKER).parent)
    assert classify_error(error) == kind


def test_an_error_with_a_frame_in_custom_code_is_a_bug(write: Write) -> None:
    folder = write("custom_tracker.py", TRACKER.replace("values): pass", "values): 1 / 0")).parent
    tracker = load_custom("trackers", "custom_tracker:Quiet", folder)()
    with pytest.raises(ZeroDivisionError) as caught:
        tracker.log(1, {})
    assert classify_error(caught.value) == "code"
