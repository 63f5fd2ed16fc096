"""Code of a user's own, named by its import path: found, refused, run to the end, resumed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from architecture.tree import ROOT
from regauge import choices, config, processes, verbs
from regauge.cli import main
from regauge.config import dump, parse_choice
from regauge.errors import DataError, RegaugeError, SettingsError
from regauge.models.custom import CustomModule
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.settings import Model
from regauge.tasks import Task
from regauge.training.settings import TrainSettings
from regauge.verbs import compare

EXAMPLES = ROOT / "examples"
Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import its modules anew, and leave none behind."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(choices, "_allowed_paths", set())
    monkeypatch.setattr(choices, "_module_folders", [])
    choices.load.cache_clear()
    yield
    choices.load.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file beside a run file."""

    def written(name: str, text: str) -> Path:
        path = tmp_path / "code" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return written


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the example's run file, in a folder that is not the working directory."""
    shutil.copytree(EXAMPLES, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    lines = [f"# {n}\n\n{n} and {n + 1} make {2 * n + 1}.\n" for n in range(200)]
    for part in range(4):
        (tmp_path / "docs" / f"{part}.md").write_text("".join(lines[part::4]))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "code" / "own.toml"


def loaded(folder: str, path: str, beside: Path) -> type[Any]:
    choices.allow_imports({"kind": path}, beside)
    return choices.load(folder, path)


@pytest.mark.full
def test_the_example_runs_to_its_end_and_goes_on_elsewhere(
    example: Path,
) -> None:
    """In workers of prepare, a trial, a supervised process, then two of them; resumed between."""
    small = ("tokenizer.vocab_size=300", "rows.length=16", "task.width=16", "evaluation.rows=8")
    steps = ("batch.microbatch_rows=auto", "optimizer.schedule.kind=constant")
    brief = "execution.supervision.preflight=brief"
    assert main(["prepare", str(example), "prepare.processes=2", *small]) == 0
    train = ["train", str(example), *small, *steps, brief]
    assert main([*train, "stop.steps=4"]) == 0
    saved = config.read(Path("out/own/run.json"))
    assert saved["task"]["kind"] == "own_task:Gaps"
    choices.allow_imports(saved)
    assert dump(config.build(TrainSettings, saved)) == json.loads(json.dumps(saved))
    two = ("execution.processes=2", "strategy.kind=zero1")
    assert main([*train, "stop.steps=8", *two]) == 0
    lines = [json.loads(line) for line in Path("out/own/metrics.jsonl").read_text().splitlines()]
    assert {line["attempt"] for line in lines} == {1, 2}
    assert {line["step"] for line in lines if line["attempt"] == 2} == {8}
    result = json.loads(Path("out/own/result.json").read_text())
    assert result["steps"] == 8
    assert result["metrics"]["heldout/loss"] < result["before"]["heldout/loss"]
    whole = ('models={own="out/own"}', "evaluate.task_settings=run", "output.folder=out/beside")
    assert main(["evaluate", str(example), *small, *whole]) == 0
    measured = json.loads(Path("out/beside/evaluation.json").read_text())["rows"][0]
    assert measured["loss"] == pytest.approx(result["metrics"]["heldout/loss"], rel=1e-5)


def test_the_example_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    prepare = verbs.load_settings(verbs.import_verb("prepare").ROOT, EXAMPLES / "own.toml", ())
    assert prepare.source.kind == "own_source:Sections"
    assert len(prepare.source.list_pieces()) == len(list((ROOT / "docs").glob("*.md")))


TRACKER = """
from regauge.trackers import Tracker
class Quiet(Tracker):
    "Says nothing."
    loud: int = 0
    "How loud."
    def start(self, run): pass
    def log(self, step, values): pass
"""
STRATEGY = """
from regauge.strategies.single import Single
class Mine(Single):
    "As single."
"""


def test_any_choice_may_be_ones_own(write: Write) -> None:
    folder = write("own_tracker.py", TRACKER).parent
    write("own_strategy.py", STRATEGY)
    choices.allow_imports({"a": ["own_tracker:Quiet", {"kind": "own_strategy:Mine"}]}, folder)
    tracker = parse_choice("trackers", {"kind": "own_tracker:Quiet", "loud": 2})
    assert dump(tracker) == {"kind": "own_tracker:Quiet", "loud": 2}
    assert parse_choice("trackers", dump(tracker)) == tracker
    assert dump(parse_choice("strategies", "own_strategy:Mine")) == {"kind": "own_strategy:Mine"}
    with pytest.raises(SettingsError, match="'lod'; did you mean 'loud'"):
        parse_choice("trackers", {"kind": "own_tracker:Quiet", "lod": 2})


def test_a_choice_of_the_house_keeps_its_name(tmp_path: Path) -> None:
    assert loaded("tasks", "regauge.tasks.clm:Clm", tmp_path).kind == "clm"


def test_what_only_an_earlier_run_names_is_not_imported(write: Write) -> None:
    write("own_trap.py", "raise SystemExit('it ran')")
    saved = {"kind": "own_trap:Task"}
    with pytest.raises(SettingsError, match="the run file of this command does not name it"):
        parse_choice("tasks", saved)
    assert "own_trap" not in sys.modules


def test_a_module_beside_a_saved_run_is_not_found(write: Write) -> None:
    write("own_trap.py", "raise SystemExit('it ran')")
    run = write("run.json", json.dumps({"task": {"kind": "own_trap:Task"}}))
    with pytest.raises(SettingsError, match="no module 'own_trap'"):
        verbs.load_settings(TrainSettings, run, ())


@pytest.mark.parametrize(
    ("path", "problem", "remedy", "code"),
    [
        ("own_trackr:Quiet", "no module 'own_trackr' in ", "did you mean 'own_tracker'?", 2),
        ("nothing_like_it:Quiet", "no module 'nothing_like_it'", "folder of the run file", 2),
        ("own_tracker:Quite", "has no class 'Quite'", "did you mean 'Quiet'?", 2),
        (
            "own_task:Neighbours",
            "is not a subclass of Tracker",
            "inherit from regauge.trackers.Tracker",
            2,
        ),
        (
            "own_task:Gaps",
            "is not a subclass of Tracker",
            "inherit from regauge.trackers.Tracker",
            2,
        ),
        ("own_tracker:Tracker", "is not a subclass of Tracker", "inherit from", 2),
        ("own_broken:Quiet", "ZeroDivisionError in ", "correct that file", 64),
        ("own_needy:Quiet", "No module named 'own_absent'", "correct that file", 64),
        ("own_unread:Quiet", "JSONDecodeError in ", "correct that file", 64),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    path: str, problem: str, remedy: str, code: int, write: Write
) -> None:
    folder = write("own_tracker.py", TRACKER).parent
    write("own_broken.py", "x = 1\n1 / 0\n")
    write("own_needy.py", "import own_absent")
    write("own_unread.py", "import json\njson.loads('{')\n")
    shutil.copy(EXAMPLES / "own_task.py", folder)
    with pytest.raises(RegaugeError) as caught:
        loaded("trackers", path, folder)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    if code == 64:
        assert f"{folder}/{path.partition(':')[0]}.py:" in caught.value.problem


def test_a_misspelt_name_without_a_colon_is_one_of_the_house() -> None:
    with pytest.raises(SettingsError, match="no tasks named 'mlmm'; did you mean 'mlm'"):
        parse_choice("tasks", "mlmm")


def test_one_s_own_choice_is_explained(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write("own_tracker.py", TRACKER).parent)
    assert main(["explain", "trackers/own_tracker:Quiet"]) == 0
    told = capsys.readouterr().out
    assert "Says nothing." in told
    assert "How loud." in told


def test_processes_that_are_started_look_in_the_same_places(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write("own_tracker.py", TRACKER).parent
    assert choices.module_folders_environment() == {}
    choices.allow_imports("own_tracker:Quiet", folder)
    code = (
        "import sys, regauge.choices as r;"
        "print(r.module_folders_environment(), file=open(sys.argv[1], 'w'))"
    )
    said = tmp_path / "said"
    assert (
        processes.run_processes([sys.executable, "-c", code, str(said)], 1, tmp_path / "logs") == 0
    )
    assert said.read_text() == f"{choices.module_folders_environment()}\n"
    assert choices.module_folders_environment() == {
        choices.MODULE_FOLDERS_VARIABLE: f"{folder}{os.pathsep}{tmp_path}"
    }


class Drawn(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.say = nn.Linear(4, 10)
        self.say.weight = self.words.weight


def test_the_weights_of_a_module_of_ones_own_are_drawn_by_the_seed() -> None:
    made = []
    for seed in (0, 0, 1):
        with META:
            module = CustomModule(Drawn())
        materialize(module, build_initial_weights(module, Model(architecture="own"), seed))
        assert module.model.module.say.weight is module.model.module.words.weight
        made.append(dict(module.named_parameters()))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(*(each["model.module.words.weight"] for each in made[1:]))


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


def test_a_class_is_a_task_of_its_own_name(example: Path) -> None:
    found = loaded("tasks", "own_task:Gaps", example.parent)
    assert issubclass(found, Task)
    assert choices.summary("tasks", "own_task:Gaps").startswith("Masked tokens, weighted by")


def test_a_repetition_of_a_run_does_not_import_what_it_names(write: Write) -> None:
    write("own_trap.py", "raise SystemExit('it ran')")
    run = write("run.json", json.dumps({"task": {"kind": "own_trap:Task"}}))
    with pytest.raises(SettingsError, match="the run file of this command does not name it"):
        compare.build_repeat(run.parent)
