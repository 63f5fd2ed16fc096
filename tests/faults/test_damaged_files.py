"""Any damage to any file leads to the same result, or to one line with a documented exit code.

A sample of all pairs of a file and a damage runs by default; `make test-faults` runs all of them.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from end_to_end.predicting import read_output_files, write_records
from faults.conftest import FULL
from faults.damage import DAMAGES, OUTSIDE, copy_folder
from regauge.cli import main
from regauge.commands._parts.train_plan import check_before_start
from regauge.config import build, dump, read
from regauge.run_folders.cost_meter import read_last_seen, read_paid, write_last_seen
from regauge.run_folders.goodput import read_goodput
from regauge.supervision.nodes.interface import LocalLauncher
from regauge.supervision.signals import SupervisorSignals
from regauge.system.errors import INTERRUPTED, SHOW_TRACEBACK, RegaugeError, describe_error
from regauge.system.processes import World
from regauge.training.model_card import README as CARD
from regauge.training.run import attempt
from regauge.training.settings import TrainSettings

Pair = tuple[str, str]
"""The path of a file in a folder, and the name of a damage."""
Run = Callable[..., tuple[int, str]]
End = tuple[int, str, bool]
"""The exit code and error of a command, and whether its result is the expected one."""
EXIT_CODES = {0, INTERRUPTED, *(kind.exit_code for kind in RegaugeError.__subclasses__())} - {1}
PARTS = ["sample", *(pytest.param(damage, marks=FULL) for damage in DAMAGES)]
"""The pairs of a test: a sample, or all files with one damage."""
SEED = 28
MODEL = "model/model.safetensors"
SHARD_RECORDS = "predict.shard_records=20"
PREPARE = """
[data]
path = "{folder}/data"
[source]
kind = "jsonl"
files = ["{folder}/texts.jsonl"]
[tokenizer]
vocab_size = 400
[rows]
layout = "packed"
length = 32
[split]
heldout_fraction = 0.2
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command; it returns the exit code and standard error."""

    def call(*arguments: str | Path) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, capsys.readouterr().err

    return call


def select(files: list[str], part: str, count: int) -> Iterator[Pair]:
    """Yield all files with one damage, or a sample of `count` pairs with every damage in turn."""
    if part != "sample":
        yield from product(files, [part])
        return
    draw = random.Random(f"{SEED} {files}")  # noqa: S311
    names = draw.sample(list(DAMAGES), len(DAMAGES))
    for number in range(count):
        yield draw.choice(files), names[number % len(names)]


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def find_problem(code: int, error: str) -> str | None:
    """Return why the end of a command is not clear, or None."""
    is_unclear = "Traceback" in error or SHOW_TRACEBACK in error
    if code not in EXIT_CODES or is_unclear or (code and "; " not in error):
        return f"exit code {code}: {error.strip()[-400:]}"
    return None


def damage_copy(source: Path, target: Path, pair: Pair | None) -> Path:
    """Copy a folder and damage a file of the copy; return the copy."""
    shutil.rmtree(target.parent, ignore_errors=True)
    folder = copy_folder(source, target)
    if pair is None:
        return folder
    name, damage = pair
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    DAMAGES[damage](folder / name, random.Random(f"{SEED} {pair}"))  # noqa: S311
    return folder


def check_outside(folder: Path) -> str | None:
    """Return a problem if the file of another user was changed."""
    text = (folder.parent / OUTSIDE).read_text()
    return None if text == "of another user\n" else f"the file of another user is {text[:80]!r}"


def check_damages(
    source: Path, target: Path, pairs: Iterable[Pair], use: Callable[[Path], End]
) -> None:
    """Damage copies of a folder, and use each; the result is the expected one, or a clear error.

    `use` returns the exit code, the error, and whether the result is the expected one.
    """
    problems = []
    for pair in pairs:
        folder = damage_copy(source, target, pair)
        code, error, is_expected = use(folder)
        problem = find_problem(code, error) or check_outside(folder)
        if code == 0 and not is_expected:
            problem = "another result"
        problems += [f"{pair}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture(scope="module")
def half_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a supervised run of four steps, with two checkpoints."""
    folder = tmp_path_factory.mktemp("half") / "run"
    assert main(["train", str(write_run_file(folder, data, steps=4))]) == 0
    return folder


def write_run_file(folder: Path, data: Path, steps: int) -> Path:
    """Write the run file of a run in a folder; return its path."""
    tables = settings(
        folder,
        data,
        stop={"steps": steps},
        output={"checkpoint": {"every_steps": 2, "keep_last": 2}},
        optimizer={"schedule": {"kind": "constant"}},
        execution={"supervision": {"preflight": "brief", "max_attempts_per_step": 1}},
    )
    path = folder.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dump(tables)))
    return path


RUN_FILES = (".lock", ".token", ".seen", "ranks/0.log", "faults.jsonl", "failures")
"""Files and folders that a run writes at times."""


def resume(file: Path) -> None:
    """Resume a run in this process, with the steps of a supervisor around it."""
    run_settings = build(TrainSettings, read(file))
    folder = Path(run_settings.output.folder)
    launcher, signals = LocalLauncher(folder), SupervisorSignals()
    with launcher.open():
        read_paid(folder, time.time(), read_last_seen(folder))
        with launcher.begin_attempt(1, signals, needs_preflight=False):
            attempt(run_settings, World())
        write_last_seen(folder)
    read_goodput(folder)


def describe_end(call: Callable[[], object]) -> tuple[int, str]:
    """Return the exit code and the last line of a call, as the command line prints them."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the command line catches all as well
        line, code = describe_error(error)
        return code, line
    return 0, ""


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_run_is_resumed_or_refused(
    half_run: Path, data: Path, tmp_path: Path, part: str
) -> None:
    resume(write_run_file(tmp_path / "whole" / "run", data, steps=8))
    expected = (tmp_path / "whole" / "run" / MODEL).read_bytes()

    def use(folder: Path) -> End:
        code, error = describe_end(partial(resume, write_run_file(folder, data, steps=8)))
        return code, error, code == 0 and (folder / MODEL).read_bytes() == expected

    pairs = select(sorted({*list_files(half_run), *RUN_FILES}), part, 26)
    check_damages(half_run, tmp_path / "damaged" / "run", pairs, use)


@pytest.mark.parametrize(
    "pair",
    [
        ("run.json", "deep list"),
        ("metrics.jsonl", "line list"),
        *(
            pytest.param(pair, marks=FULL)
            for pair in (
                (".lock", "link"),
                (".token", "full folder"),
                ("attempts.jsonl", "line null"),
                ("ledger.jsonl", "folder"),
                ("ranks", "link to nothing"),
                ("result.json", "null"),
            )
        ),
    ],
)
def test_a_command_resumes_a_damaged_run_or_refuses_it(
    half_run: Path, data: Path, tmp_path: Path, run: Run, pair: Pair
) -> None:
    folder = damage_copy(half_run, tmp_path / "damaged" / "run", pair)
    code, error = run("train", write_run_file(folder, data, steps=8))
    assert not find_problem(code, error)
    assert not check_outside(folder)


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_run_is_reported_and_exported_or_refused(
    half_run: Path, tmp_path: Path, run: Run, part: str
) -> None:
    target, problems = tmp_path / "damaged" / "weights", []
    for pair in (None, *select(list_files(half_run), part, 26)):
        folder = damage_copy(half_run, tmp_path / "damaged" / "run", pair)
        commands = (
            ("report", folder),
            ("compare", half_run, folder, "comparison.on_difference=warn"),
            ("export", folder, "--to", target, "--format", "hf"),
        )
        for command in commands:
            code, error = run(*command)
            assert pair is not None or code == 0, error
            problem = find_problem(code, error) or check_outside(folder)
            problems += [f"{command[0]} {pair}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def prepared_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset that `prepare` wrote."""
    folder = tmp_path_factory.mktemp("prepared_dataset")
    write_records(folder / "texts.jsonl", 200)
    (folder / "prepare.toml").write_text(PREPARE.format(folder=folder))
    assert main(["prepare", str(folder / "prepare.toml")]) == 0
    return folder / "data"


def train_on(data: Path, folder: Path) -> tuple[int, str, dict[str, bytes]]:
    """Train for one step; return the exit code, the last line, and the final model's files.

    The model card is left out: it contains the path of the dataset and the time of the run.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run_settings = settings(folder, data, stop={"steps": 1})

    def train() -> None:
        check_before_start(run_settings)
        attempt(run_settings, World())

    code, line = describe_end(train)
    model = folder / "model"
    names = set(list_files(model)) - {CARD}
    return code, line, {name: (model / name).read_bytes() for name in names}


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_dataset_trains_the_same_model_or_is_refused(
    prepared_dataset: Path, tmp_path: Path, part: str
) -> None:
    code, line, expected = train_on(prepared_dataset, tmp_path / "run")
    assert code == 0, line

    def use(folder: Path) -> End:
        code, line, model = train_on(folder, tmp_path / "run")
        return code, line, model == expected

    pairs = select(list_files(prepared_dataset), part, 26)
    check_damages(prepared_dataset, tmp_path / "damaged" / "data", pairs, use)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of records, two of which are rejected."""
    path = write_records(tmp_path_factory.mktemp("records") / "texts.jsonl", 50)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], "{", *lines[10:30], '{"id": 1}', *lines[30:]]) + "\n")
    return path


def predict(run: Run, artifact: Path, records: Path, folder: Path) -> tuple[int, str]:
    options = ["--source", records, "--to", folder, "execution.executor=inline", SHARD_RECORDS]
    return run("predict", artifact, *options)


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_job_is_finished_with_the_same_answers_or_refused(
    artifact: Path, records: Path, tmp_path: Path, run: Run, part: str
) -> None:
    whole = tmp_path / "whole"
    assert predict(run, artifact, records, whole)[0] == 0
    expected = read_output_files(whole)

    def use(folder: Path) -> End:
        code, error = predict(run, artifact, records, folder)
        return code, error, code == 0 and read_output_files(folder) == expected

    files = sorted({*list_files(whole), "jobs/0-of-1/.seen", "jobs/0-of-1/.lock"})
    check_damages(whole, tmp_path / "damaged" / "out", select(files, part, 26), use)


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_artifact_computes_the_same_answers_or_is_refused(
    artifact: Path, records: Path, tmp_path: Path, run: Run, part: str
) -> None:
    assert predict(run, artifact, records, tmp_path / "whole")[0] == 0
    expected = read_output_files(tmp_path / "whole")

    def use(folder: Path) -> End:
        output = tmp_path / "damaged" / "out"
        code, error = predict(run, folder, records, output)
        return code, error, code == 0 and read_output_files(output) == expected

    pairs = select(list_files(artifact), part, 26)
    check_damages(artifact, tmp_path / "damaged" / "artifact", pairs, use)
