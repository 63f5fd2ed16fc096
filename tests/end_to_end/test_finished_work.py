"""A finished command that is started again writes nothing, whatever its verb."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from end_to_end.predicting import EAGER, export_run, write_records
from regauge import cli

RUN = """\
source = { kind = "jsonl", files = ["texts.jsonl"] }
rows = { layout = "packed", length = 24 }
tokenizer.vocab_size = 300
data.path = "data"
split.heldout_fraction = 0.2
task = "clm"
batch = { rows = 8, microbatch_rows = 8 }
stop.steps = 3
accelerator = "cpu"
execution.precision = "fp32"
output.folder = "run"
[model]
architecture = "llama"
config = { hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, \
intermediate_size = 32, max_position_embeddings = 32 }
"""
EVALUATION = """\
models = { run = "run" }
data.path = "data"
task = "clm"
accelerator = "cpu"
output.folder = "evaluation"
"""


def hash_folder(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the hash and the time of the last change of every file and folder in a folder."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module", name="workplace")
def build_workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared dataset and a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    write_records(folder / "texts.jsonl", 120)
    (folder / "run.toml").write_text(RUN)
    (folder / "evaluation.toml").write_text(EVALUATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["prepare", "run.toml"]) == 0
        assert cli.main(["train", "run.toml"]) == 0
    return folder


@pytest.fixture(autouse=True)
def enter_folder(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each command in the folder of the run."""
    monkeypatch.chdir(workplace)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "run is finished at step 3; nothing is changed"),
        (["stop.steps=2"], "run is finished at step 3, after stop.steps = 2; nothing is changed"),
        (["execution.precision=auto", "output.log_every_steps=1"], "is finished at step 3"),
        (["execution.processes=2", "batch.microbatch_rows=4"], "is finished at step 3"),
    ],
)
def test_a_finished_run_is_not_changed(
    workplace: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    before = hash_folder(workplace)
    assert cli.main(["train", "run.toml", "--json", *overrides]) == 0
    assert hash_folder(workplace) == before
    output = capsys.readouterr()
    assert message in output.err
    result = json.loads((workplace / "run/result.json").read_text())
    answer = json.loads(output.out)
    assert {key: answer[key] for key in result} == result
    assert answer["model"] == "run/model"
    assert 0 < answer["goodput"] <= 1


@pytest.mark.full
def test_a_run_that_was_stopped_early_is_finished_until_its_patience_is_raised(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = ["stop.steps=9", "stop.min_delta=100", "evaluation.every_steps=1"]
    command = ["train", "run.toml", "output.folder=stopped", *stopping]
    assert cli.main([*command, "stop.patience=2"]) == 0
    result = json.loads((workplace / "stopped/result.json").read_text())
    assert result["stop_reason"] == "no better heldout/loss in 2 evaluations"
    before = hash_folder(workplace)
    for patience in ("2", "1"):
        capsys.readouterr()
        assert cli.main([*command, f"stop.patience={patience}"]) == 0
        assert "stopped is finished at step 3; nothing is changed" in capsys.readouterr().err
    assert cli.main([*command, "stop.patience=2", "--dry-run", "--json"]) == 0
    action = json.loads(capsys.readouterr().out)["action"]
    assert action == "nothing: stopped is finished at step 3; nothing is changed"
    assert hash_folder(workplace) == before
    assert cli.main([*command, "stop.patience=3"]) == 0
    assert json.loads((workplace / "stopped/result.json").read_text())["steps"] == 4
    assert cli.main(["train", "run.toml", "output.folder=stopped", "stop.steps=5"]) == 0
    assert json.loads((workplace / "stopped/result.json").read_text())["steps"] == 5


def test_the_dry_run_of_a_finished_run_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.toml", "--dry-run", "--json"]) == 0
    action = json.loads(capsys.readouterr().out)["action"]
    assert action == "nothing: run is finished at step 3; nothing is changed"


def test_another_run_is_still_refused(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hash_folder(workplace)
    assert cli.main(["train", "run.toml", "seed=5"]) == 2
    assert "belongs to another run: seed is 0, not 5" in capsys.readouterr().err
    assert hash_folder(workplace) == before


@pytest.mark.parametrize(("verb", "folder"), [("prepare", "data"), ("evaluate", "evaluation")])
def test_finished_work_of_a_verb_is_not_changed(
    workplace: Path, capsys: pytest.CaptureFixture[str], verb: str, folder: str
) -> None:
    run_file = {"prepare": "run.toml", "evaluate": "evaluation.toml"}[verb]
    assert cli.main([verb, run_file]) == 0
    before = hash_folder(workplace / folder)
    assert before
    capsys.readouterr()
    assert cli.main([verb, run_file]) == 0
    assert hash_folder(workplace / folder) == before
    assert f"{folder} is finished" in "".join(capsys.readouterr()) or verb == "prepare"


def test_an_evaluation_is_repeated_if_its_inputs_or_outputs_changed(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    to = tmp_path / "table"
    shutil.copytree(workplace / "run", tmp_path / "run")
    (tmp_path / "metrics.py").write_text("def one(arrays):\n    return 1.0\n")
    model, metrics = f"models.run={tmp_path / 'run'}", 'evaluation.metrics=["metrics.py:one"]'
    shutil.copy(workplace / "evaluation.toml", tmp_path / "evaluation.toml")
    command = ["evaluate", str(tmp_path / "evaluation.toml"), f"output.folder={to}", model, metrics]

    def evaluate(*arguments: str) -> bool:
        """Evaluate; return whether anything was written."""
        before = hash_folder(tmp_path)
        capsys.readouterr()
        assert cli.main([*command, "--json", *arguments]) == 0
        captured = capsys.readouterr()
        table = json.loads((to / "evaluation.json").read_text())
        answer = json.loads(captured.out)
        assert (answer["rows"], answer["classes"]) == (table["rows"], table["classes"])
        is_written = hash_folder(tmp_path) != before
        assert is_written == (f"{to} is finished; nothing is changed" not in captured.err)
        return is_written

    assert evaluate()
    assert not evaluate()
    assert evaluate("--overwrite")
    assert evaluate("evaluation.rows=3")
    assert not evaluate("evaluation.rows=3")
    assert evaluate()
    weights = tmp_path / "run" / "model" / "model.safetensors"
    shutil.copyfile(weights, tmp_path / "copy")
    shutil.copyfile(tmp_path / "copy", weights)
    assert evaluate()
    (tmp_path / "metrics.py").write_text("def one(arrays):\n    return 2.0\n\n")
    assert evaluate()
    table = to / "evaluation.json"
    table.write_text(table.read_text().replace("held-out rows", "other rows"))
    assert evaluate()
    samples = ("evaluation.samples.prompts=1", "evaluation.samples.max_new_tokens=2")
    assert evaluate(*samples)
    assert not evaluate(*samples)
    (to / "samples.jsonl").unlink()
    assert evaluate(*samples)
    dataset = f"data.path={tmp_path / 'data'}"
    tokenizer = f"tokenizer.path={workplace / 'data' / 'tokenizer'}"
    for seed in ("0", "1"):
        split = (f"split.seed={seed}", "--overwrite")
        assert cli.main(["prepare", "run.toml", dataset, tokenizer, *split]) == 0
        assert evaluate(dataset)
    assert not evaluate(dataset)
    assert cli.main([*command, dataset, "--dry-run", "--json"]) == 0
    action = json.loads(capsys.readouterr().out)["action"]
    assert action == f"nothing: {to} is finished; nothing is changed"
    assert cli.main([*command, dataset, "--dry-run", "--json", "--overwrite"]) == 0
    assert "action" not in json.loads(capsys.readouterr().out)


@pytest.mark.full
def test_a_finished_export_and_job_are_not_changed(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*EAGER, "text.max_new_tokens=4")
    artifact = export_run(workplace / "run", tmp_path / "artifact", *options)
    before = hash_folder(artifact)
    assert cli.main(["export", str(workplace / "run"), "--to", str(artifact)]) == 2
    assert f"{artifact} exists" in capsys.readouterr().err
    records = write_records(tmp_path / "records.jsonl", 5)
    job = ["predict", str(artifact), "--source", str(records), "--to", str(tmp_path / "job")]
    assert cli.main([*job, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    answers = hash_folder(tmp_path / "job")
    assert cli.main([*job, "--json"]) == 0
    assert hash_folder(tmp_path / "job") == answers
    assert hash_folder(artifact) == before
    output = capsys.readouterr()
    assert json.loads(output.out) == answer
    assert "job is finished; nothing is changed" in output.err


@pytest.mark.full
def test_a_run_without_its_model_is_completed(workplace: Path, tmp_path: Path) -> None:
    """A result without weights is no finished run; more steps continue the run."""
    import shutil

    shutil.copytree(workplace, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/run/model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "copy")
        assert cli.main(["train", "run.toml"]) == 0
        assert list((tmp_path / "copy/run/model").glob("*.safetensors"))
        assert cli.main(["train", "run.toml", "stop.steps=4"]) == 0
    assert json.loads((tmp_path / "copy/run/result.json").read_text())["steps"] == 4
