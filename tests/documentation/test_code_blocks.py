"""Every code block of README.md and docs/ runs, is checked, or is marked as output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from documentation.blocks import (
    LANGUAGES,
    NEEDS,
    OUTPUT,
    PAGES,
    Block,
    find_missing_lines,
    parse_blocks,
    read_blocks,
)
from regauge import cli, commands
from regauge.commands.prepare import PrepareSettings
from regauge.system import choices
from regauge.system.errors import SettingsError

pytestmark = pytest.mark.timeout(1800)
"""A page trains and exports models."""

QUICKSTART = next(page for page in PAGES if page.name == "quickstart.md")
SELF_CONTAINED = (
    *("README.md", "index.md", "installation.md", "quickstart.md"),
    *(
        "launch.md",
        "slurm.md",
        "aws-batch.md",
        "kubernetes.md",
        "ray.md",
        "clusters.md",
        "images.md",
        "incremental-pipelines.md",
        "planning.md",
    ),
)
"""Pages that start in an empty folder; the others start with the files of the quickstart."""
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN_PAGES = sorted(
    (page for page in PAGES if any(block.is_run for block in BLOCKS if block.page == page)),
    key=lambda page: (page.name in SELF_CONTAINED, page != QUICKSTART),
)
"""Pages with code that runs; the others have only files, fragments and output.

The self-contained pages are last, so that a second process runs them during the quickstart.
"""


def run_page(blocks: list[Block], folder: Path) -> None:
    """Write the files of a page and run its code in a folder, in order.

    A block that starts a process in the background writes its id to a file `*.pid`. The process is
    killed at the end of the page if a later block did not end it.
    """
    try:
        _run_blocks(blocks, folder)
    finally:
        for path in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def _run_blocks(blocks: list[Block], folder: Path) -> None:
    output = ""
    for block in blocks:
        if block.is_file:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.is_run:
            output = run_block(block, folder)
        elif block.title == OUTPUT:
            missing = find_missing_lines(block.text, output)
            assert not missing, f"{block.location}: not in the output: {missing}\n{output}"


def run_block(block: Block, folder: Path) -> str:
    """Run a block and return its output; the test fails if the block does."""
    is_shell = block.language == "bash"
    command = ["bash", "-euo", "pipefail", "-c"] if is_shell else [sys.executable, "-c"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*command, block.text],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.location} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def find_problems(tables: dict[str, Any]) -> list[str]:
    """Return the problems of a part of a run file: unknown keys, and values of another type."""
    stages = tables.pop("stage", [])
    problems = [problem for stage in stages for problem in find_problems(without_header(stage))]
    if "validation" in tables:
        tables = PrepareSettings.complete_tables(convert_lists(tables))
    models = list(commands.settings_roots().values())
    for name, table in tables.items():
        readers = [model for model in models if name in model.model_fields]
        results = [check_table(model, name, table) for model in readers]
        if all(results):
            problems += results[0] if results else [f"unknown table '{name}'"]
    return problems


def without_header(stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stage of a pipeline without the keys of the stage itself."""
    return {name: table for name, table in stage.items() if name not in {"verb", "name"}}


def check_table(model: Any, name: str, table: Any) -> list[str]:
    """Return the problems of one table of a verb; missing keys are none."""
    try:
        model.model_validate({name: convert_lists(table)})
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return [f"{name}: {item['msg']}" for item in errors if item["type"] != "missing"]
    except SettingsError as error:
        return [str(error)]
    return []


def convert_lists(value: Any) -> Any:
    """Return a TOML value with tuples for lists, as run files are read."""
    if isinstance(value, dict):
        return {name: convert_lists(item) for name, item in value.items()}
    return tuple(map(convert_lists, value)) if isinstance(value, list) else value


def parse_commands(text: str) -> list[list[str]]:
    """Return the words of each `regauge` command of a shell block."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if "regauge" in line]
    return [line[line.index("regauge") + 1 :] for line in words if "regauge" in line]


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which every command of the quickstart has run.

    The processes of pytest-xdist share it: one of them runs the commands, and the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, finished = base / "quickstart", base / "quickstart-finished"
    with (base / "quickstart-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            folder.mkdir()
            run_page(read_blocks(QUICKSTART), folder)
            finished.touch()
    return folder


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if page == QUICKSTART:
        request.getfixturevalue("quickstart")
        return
    folder = tmp_path / "page"
    if page.name in SELF_CONTAINED:
        folder.mkdir()
    else:
        shutil.copytree(request.getfixturevalue("quickstart"), folder)
    run_page(read_blocks(page), folder)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.location)
def test_a_block_has_a_language_and_a_valid_content(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.location}: name the language, or `text`"
    if block.is_fragment:
        problems = find_problems(tomllib.loads(block.text))
        assert not problems, f"{block.location}: {problems}"
    if block.title.startswith(NEEDS):
        for words in parse_commands(block.text):
            check_command(words, block)


def check_command(words: list[str], block: Block) -> None:
    """Check the verb and the flags of a command that is not run."""
    assert words[0] in choices.names("verbs"), f"{block.location}: no verb {words[0]}"
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    unknown = flags - list_flags(words[0])
    assert not unknown, f"{block.location}: unknown flags {sorted(unknown)}"


def list_flags(verb: str) -> set[str]:
    """Return the flags of a verb."""
    arguments = cli.build_app()[verb].assemble_argument_collection()
    return {name for argument in arguments for name in argument.names}


def test_a_page_without_errors_passes(tmp_path: Path) -> None:
    text = '```python title="a.py"\nprint("1.5 s")\n```\n```bash\npython a.py\n```\n'
    output = '```text title="Output"\n2.25 s\n```\n'
    run_page(parse_blocks(Path("a.md"), text + output), tmp_path)


@pytest.mark.parametrize(
    ("markdown", "message"),
    [
        ("```bash\nfalse\n```", "ended with 1"),
        ("```python\nraise SystemExit(3)\n```", "ended with 3"),
        ('```bash\necho a\n```\n```text title="Output"\nb\n```', "not in the output"),
    ],
)
def test_a_failing_block_is_detected(
    markdown: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "location", "a.md:1")
    with pytest.raises(AssertionError, match=message):
        run_page(parse_blocks(Path("a.md"), markdown + "\n"), tmp_path)


@pytest.mark.parametrize(
    "text",
    ["optimizer.learning = 1e-3", "batch.rows = 'all'", "outptu.folder = 'x'"],
)
def test_a_wrong_fragment_is_detected(text: str) -> None:
    assert find_problems(tomllib.loads(text))


def test_a_right_fragment_is_accepted() -> None:
    assert not find_problems(tomllib.loads("optimizer.learning_rate = 1e-3\nbatch.rows = 8"))


@pytest.mark.parametrize("words", [["trian"], ["train", "--fast"]])
def test_a_wrong_command_is_detected(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "location", "a.md:1")
    with pytest.raises(AssertionError):
        check_command(words, Block(Path("a.md"), 1, "bash", NEEDS, ""))


def test_a_right_command_is_accepted() -> None:
    check_command(["train", "run.toml", "--dry-run"], Block(PAGES[0], 1, "bash", NEEDS, ""))
