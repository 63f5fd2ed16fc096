"""A path of the wrong type is one line with its documented exit code, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge import cli
from regauge.training.compile import cache

RUN = """\
source = { kind = "jsonl", files = ["texts.jsonl"] }
data.path = "data"
task = "clm"
batch = { rows = 8, microbatch_rows = 8 }
stop.steps = 3
accelerator = "cpu"
output.folder = "run"
model = { architecture = "llama", config = { hidden_size = 32, num_attention_heads = 2 } }
models = { a = "run" }
"""
CASES = [
    (["train", "output.folder=file"], 2, "file is a file; set output.folder to a folder"),
    (["train", "output.folder=file/a"], 2, "file is a file; set output.folder to a folder"),
    (["train", "--dry-run", "output.folder=file"], 2, "file is a file"),
    (["train", "data.path=file"], 64, "file has no prepared dataset"),
    (["train", "model.path=file"], 2, "no model at 'file'"),
    (["train", "model.init_from.path=file"], 2, "no model at 'file'"),
    (["prepare", "data.path=file"], 64, "is a file; choose another data.path"),
    (["prepare", "data.path=file/a"], 2, "cannot be created: Not a directory; choose another"),
    (["prepare", "data.path=a", "tokenizer.path=file"], 64, "correct tokenizer.path"),
    (["prepare", "data.path=a", 'source.files=["folder"]'], 64, "set source.files to folder/**/*"),
    (["compile", "execution.compile_cache=file"], 2, "set execution.compile_cache to a folder"),
    (["compile", "--list", "execution.compile_cache=file"], 2, "file is a file"),
    (["evaluate", "output.folder=file"], 2, "file is a file; set output.folder to a folder"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared dataset, a file, and an empty folder."""
    folder = tmp_path_factory.mktemp("paths")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(200)))
    (folder / "run.toml").write_text(RUN)
    (folder / "file").write_text("not a folder")
    (folder / "folder").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["prepare", "run.toml"]) == 0
    return folder


@pytest.mark.parametrize(("arguments", "code", "message"), CASES)
def test_a_path_of_the_wrong_type_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    verb, *rest = arguments
    assert cli.main([verb, "run.toml", *rest]) == code
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("regauge: ")
    assert message in line
    assert "Errno" not in line
    assert "Error" not in line
    assert (folder / "file").read_text() == "not a folder"
    assert [path for path in sorted(folder.rglob("*")) if path.name != "a.partial"] == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.yaml", "run.yaml is YAML, but run files are TOML or JSON; write it as TOML"),
        ("run.yml", "run.yml is YAML"),
        ("train.py", "train.py is Python"),
    ],
)
def test_another_format_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / name).write_text("a: 1\n")
    assert cli.main(["train", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("num_attention_heads=3", "(32) is not a multiple of the number of attention heads (3)"),
        ("hidden_size=no", "'hidden_size' expected int, got str"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused_with_the_reason(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    reason: str,
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["train", "run.toml", "--dry-run", f"model.config.{override}"]) == 2
    line = capsys.readouterr().err
    assert reason in line
    assert line.endswith("; correct model.config\n")
    assert "validator" not in line


def test_the_compile_cache_has_a_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    assert cli.main(["compile", "--list"]) == 0
    assert f"cache: {folder}/cache/regauge/graphs" in capsys.readouterr().out
    assert cli.main(["compile", "run.toml", "--dry-run"]) == 0
    assert f"cache: {folder}/cache/regauge/graphs" in capsys.readouterr().out
    assert cli.main(["compile"]) == 2
    assert "name a run file, or add --list" in capsys.readouterr().err
    assert not (folder / "cache").exists()


def test_a_compiled_run_uses_the_default_cache_once_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = datasets.write_packed(tmp_path / "data")
    compiled = settings(tmp_path / "run", data, execution={"compile": "blocks"})
    eager = settings(tmp_path / "run", data, execution={"compile": "off"})
    assert cache.find_root(compiled) is None
    cache.default_root().mkdir(parents=True)
    assert cache.find_root(compiled) == tmp_path / "regauge/graphs"
    assert cache.find_root(eager) is None
    execution = {"compile": "blocks", "compile_cache": str(tmp_path / "graphs")}
    named = settings(tmp_path / "run", data, execution=execution)
    assert cache.find_root(named) == tmp_path / "graphs"
