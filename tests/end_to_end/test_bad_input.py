"""Every invalid input ends with one line, a remedy and its exit code, and changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import datasets
from regauge.cli import main

RUN = """
[output]
folder = "{folder}"
[data]
path = "{data}"
[task]
kind = "mlm"
[model]
architecture = "bert"
[model.config]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 32
[batch]
rows = 8
microbatch_rows = 4
[stop]
steps = 2
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture
def run_file(tmp_path: Path, data: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path / "out", data=data))
    return path


def regauge(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regauge", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


CASES = [
    (("optimizer.learning_rte=1",), 2, "did you mean 'learning_rate'?"),
    (("optimzer.learning_rate=1",), 2, "did you mean 'optimizer'?"),
    (("task.kind=mlmm",), 2, "did you mean 'mlm'?"),
    (("task.mlm_probabilit=0.2",), 2, "did you mean 'mlm_probability'?"),
    (("strategy.kind=dpp",), 2, "did you mean 'ddp'?"),
    (("strategy={kind='fsdp', sharding='no-shard'}",), 2, 'set strategy.kind = "ddp"'),
    (("strategy={kind='fsdp', sharding='hybrid'}",), 2, 'set strategy.kind = "hsdp"'),
    (("batch.rows=9",), 2, "to a divisor, such as"),
    (("batch.rows=many",), 2, "correct batch.rows"),
    (("stop.epochs=1", "stop.steps=2"), 2, "set either stop.steps or stop.epochs"),
    (("stop.usd=1",), 2, "set execution.price.usd_per_hour, or execution.price.instance"),
    (("execution.price.instance=trn2.48large",), 2, "did you mean 'trn2.48xlarge'?"),
    (("execution.price.market=spot",), 2, "set its usd_per_hour"),
    (("data.path=nowhere",), 64, "create it with 'regauge prepare'"),
    (("execution.processes=5",), 2, "use at most 2 processes"),
    (("task.kind=contrastive",), 2, 'rows.layout = "fields"'),
    (("model.path=/nowhere",), 2, "name a folder with config.json and model.safetensors"),
    (
        ("model.path=/nowhere", "model.architecture=bert"),
        2,
        "exactly one of architecture and path; set one",
    ),
    (("=1",), 2, "write key.path=value"),
]


PROBE = """
import contextlib, io, json, sys
from regauge.cli import main
answers = []
for overrides in json.loads(sys.argv[2]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["train", sys.argv[1], *overrides])
    answers.append((code, errors.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def refusals(
    tmp_path_factory: pytest.TempPathFactory, data: Path
) -> dict[tuple[str, ...], tuple[int, str, bool]]:
    """Return each case's exit code, error output, and whether torch was imported."""
    folder = tmp_path_factory.mktemp("refused")
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder / "out", data=data))
    overrides = [case[0] for case in CASES]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(path), json.dumps(overrides)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "out").exists()
    return dict(zip(overrides, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("overrides", "code", "remedy"), CASES)
def test_settings_are_refused_before_torch(
    refusals: dict[tuple[str, ...], tuple[int, str, bool]],
    overrides: tuple[str, ...],
    code: int,
    remedy: str,
) -> None:
    actual_code, errors, has_torch = refusals[overrides]
    assert actual_code == code, errors
    assert not has_torch
    lines = errors.strip().splitlines()
    line, *more = (text for text in lines if not text.endswith(" of the run file"))
    assert not more, errors
    assert line.startswith("regauge: ")
    assert remedy in line


LATER = [
    (("model.config.hiden_size=1",), 2, "did you mean 'hidden_size'?"),
    (("model.architecture=bart_",), 2, "did you mean"),
    (("model.config.vocab_size=10",), 2, "the tokenizer has 300 entries"),
    (("model.config.max_position_embeddings=8",), 2, "do not fit the model's 8 positions"),
    (("execution.precision=tf32",), 2, "set execution.precision to one of"),
    (("execution.precision=fp16",), 2, "set execution.precision to one of"),
    (("strategy.kind=hsdp",), 2, "do not form two or more groups"),
    (("accelerator.kind=cuda",), 2, "use one of: cpu"),
]


@pytest.mark.full
@pytest.mark.parametrize("case", LATER)
def test_a_model_that_cannot_run_is_refused_in_one_line(
    run_file: Path, capsys: pytest.CaptureFixture[str], case: tuple[tuple[str, ...], int, str]
) -> None:
    overrides, code, remedy = case
    if "cuda" in overrides[0]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("not proved here: this machine has the device that should be missing")
    assert main(["train", str(run_file), "accelerator.kind=cpu", *overrides]) == code
    output = capsys.readouterr().err
    assert remedy in output.strip().splitlines()[-1]
    assert "Traceback" not in output


def test_a_dry_run_prints_json_and_writes_nothing(tmp_path: Path, run_file: Path) -> None:
    done = regauge("train", str(run_file), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["steps"] == 2
    assert plan["batch_shapes"] == ["4 x 32"]
    assert plan["parameters"] == plan["trained_parameters"] == 20_716
    assert plan["strategy"].startswith("single on 1 process, in ")
    assert plan["flops_formula"].endswith("S = 32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('{architecture="bert"}', "unknown: its vocabulary is that of the prepared data"),
        (
            '{path="out/not-yet"}',
            "unknown: there is no folder 'out/not-yet', and no copy from the hub",
        ),
        ('{path="/not/yet"}', "unknown: no model at '/not/yet': there is no config.json"),
    ],
)
def test_a_dry_run_names_the_reason_for_unknown_parameters(
    run_file: Path, capsys: pytest.CaptureFixture[str], model: str, message: str
) -> None:
    assert main(["train", str(run_file), "--dry-run", "data.path=/nowhere", f"model={model}"]) == 0
    output = capsys.readouterr().out
    assert message in output
    assert "flops" not in output


def test_a_dry_run_needs_no_data_if_the_vocabulary_is_set(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("data.path=/nowhere", "model.config.vocab_size=300")
    assert main(["train", str(run_file), "--dry-run", *overrides]) == 0
    assert "parameters: 20716" in capsys.readouterr().out
