"""Trained models as artifacts: what they say of themselves, and that they answer as before."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

import regauge
from distributed import datasets
from distributed.jobs import lines
from distributed.runs import TASKS, settings
from end_to_end.predicting import EAGER, QUICK, exported, texts, trained
from regauge.accelerators.cpu import Cpu
from regauge.artifacts.artifact import opened
from regauge.cli import main
from regauge.config import choose, merge
from regauge.errors import DataError, SettingsError
from regauge.evaluation.artifact_metrics import answering, metrics
from regauge.processes import World
from regauge.training.run import attempt

FP32 = (*EAGER, 'candidates.precisions=["fp32"]')


@dataclass(frozen=True)
class Case:
    """A run with the artifact of its model, and what is known of them."""

    run: Path
    artifact: Path
    task: dict[str, Any]
    fields: dict[str, Any]
    tokens: int
    inputs: tuple[str, ...]
    answers: str
    width: int

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.artifact / "manifest.json").read_text())
        return found

    @property
    def measured(self) -> dict[str, float]:
        """The last held-out metrics of the run."""
        last = [line for line in lines(self.run) if "heldout/loss" in line][-1]
        return {name: last[name] for name in last if name.startswith("heldout/")}


def made(folder: Path, name: str) -> Case:
    """Return the case of a name, trained and exported."""
    kind = "contrastive" if name == "contrastive" else "classify"
    own = {"texts_of": ("query",)} if name == "one text" else {}
    run, data = folder / "run", datasets.pairs(folder / "data")
    attempt(settings(run, data, kind, task=own, stop={"steps": 4}), World())
    artifact = exported(run, folder / "artifact", *FP32)
    texts_of = {"contrastive": [], "one text": ["query"], "two texts": ["query", "document"]}
    limits = {"contrastive": [32], "one text": [12], "two texts": [12, 32]}
    joined = name == "two texts"
    return Case(
        run,
        artifact,
        merge(TASKS[kind]["task"], own),
        {"texts": texts_of[name], "limits": limits[name], "joined": joined},
        sum(limits[name]),
        ("tokens", "lengths", "starts") if joined else ("tokens", "lengths"),
        "vectors" if kind == "contrastive" else "classes",
        32 if kind == "contrastive" else 3,
    )


@pytest.fixture(scope="module", params=["contrastive", "one text", "two texts"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(tmp_path_factory.mktemp(request.param.replace(" ", "-")), request.param)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a text encoder."""
    return trained(tmp_path_factory.mktemp("encoder"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_manifest_says_what_is_computed_and_what_it_is_of(case: Case) -> None:
    manifest = case.manifest
    program = manifest["program"]
    assert (program["answers"], program["width"]) == (case.answers, case.width)
    assert {name: program["fields"][name] for name in case.fields} == case.fields
    assert tuple(each["name"] for each in program["inputs"]) == case.inputs
    assert program["reads"] == {
        "tokens": case.tokens,
        "prompts": {},
        "lowercase": False,
        "ends": "closed",
        "manner": "regauge",
    }
    pooling = {"modes": ["mean"], "dense": [], "normalized": True}
    assert program.get("pooling") == (pooling if case.answers == "vectors" else None)
    shapes = [each["length"] for each in manifest["shapes"]]
    assert shapes == sorted(set(shapes))
    assert shapes[-1] == case.tokens
    compiled = manifest["compiled"]
    assert compiled["backend"]["kind"] == "eager"
    assert (compiled["precision"], compiled["quantized"]) == ("fp32", "no")
    assert compiled["versions"].keys() == {"torch", "transformers"}
    assert manifest["target"]["accelerator"] == "cpu"
    assert manifest["target"]["threads"] == 1
    weights = case.run / "model" / "model.safetensors"
    assert manifest["origin"] == {
        "path": str(case.run),
        "step": "final",
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    for name, facts in manifest["files"].items():
        content = (case.artifact / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {*manifest["files"], "manifest.json"} == set(contents(case.artifact))
    tokenizer = case.artifact / "tokenizer" / "tokenizer.json"
    assert tokenizer.read_bytes() == (case.run / "model" / "tokenizer.json").read_bytes()


def test_the_evidence_has_the_metrics_that_the_run_itself_measured(case: Case) -> None:
    parity = json.loads((case.artifact / "parity.json").read_text())
    found = {name: value for name, value in parity.items() if name.startswith("heldout/")}
    assert found == pytest.approx(case.measured, rel=1e-6)
    assert {"heldout/loss", "heldout/items"} < found.keys()
    assert parity["loss"] == pytest.approx(0.0, abs=1e-6)
    assert (parity["backend"], parity["precision"]) == ("eager", "fp32")
    (row,) = json.loads((case.artifact / "benchmark.json").read_text())["rows"]
    assert row.items() <= parity.items()
    assert row["texts_per_second"] > 0


def test_an_artifact_measures_as_the_run_that_it_was_made_of(case: Case) -> None:
    task = choose("tasks", case.task)
    module = answering(opened(case.artifact))
    found = metrics(module, task, case.run.parent / "data", rows=512)
    told = {f"heldout/{name}": value for name, value in found.items()}
    assert told == pytest.approx(case.measured, rel=1e-6)


def test_an_artifact_is_evaluated_as_the_checkpoint_that_it_was_made_of(
    case: Case, tmp_path: Path
) -> None:
    asked = {
        "output": {"folder": str(tmp_path / "out")},
        "seed": 7,
        "data": {"path": str(case.run.parent / "data")},
        "task": case.task,
        "subjects": {
            "models": {"artifact": str(case.artifact), "run": str(case.run)},
            "rivals": "no",
        },
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
    }
    (tmp_path / "run.json").write_text(json.dumps(asked))
    assert main(["evaluate", str(tmp_path / "run.json")]) == 0
    table = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    rows = {row.pop("name"): row for row in table["rows"]}
    assert rows["artifact"] == pytest.approx(rows["run"], rel=1e-6)
    told = {f"heldout/{name}": value for name, value in rows["artifact"].items()}
    assert told == pytest.approx(case.measured, rel=1e-6)


def ids(text: str, limit: int) -> list[int]:
    """Return what the small tokenizer makes of a text: its words, and the token of its end."""
    words = [int(word.removeprefix("w")) for word in text.split()]
    return [*words[: limit - 1], 3]


def test_classes_of_texts_are_those_of_the_model_itself(case: Case) -> None:
    loaded = regauge.load(case.artifact, threads=1)
    queries, documents = texts(20, seed=1), texts(20, seed=2)
    columns = (queries, documents) if case.fields["joined"] else (queries,)
    if case.answers == "vectors":
        with pytest.raises(SettingsError, match="reads 1 texts of a record, and 2 are given"):
            loaded.answer(queries, documents)
        assert np.array_equal(loaded.answer(queries)["vector"], loaded.encode(queries))
        return
    limits = case.fields["limits"]
    model = AutoModelForSequenceClassification.from_pretrained(case.run / "model").eval()
    wanted = []
    for each in zip(*columns, strict=True):
        parts = [ids(text, limit) for text, limit in zip(each, limits, strict=True)]
        tokens = [token for part in parts for token in part]
        types = [number for number, part in enumerate(parts) for _ in part]
        with torch.no_grad():
            given = {"input_ids": tokens, "token_type_ids": types}
            output = model(**{name: torch.tensor([row]) for name, row in given.items()})
        wanted.append(output.logits[0].softmax(0).numpy())
    found = loaded.answer(*columns)
    np.testing.assert_allclose(found["probabilities"], wanted, atol=2e-6)
    assert found["class"].tolist() == np.argmax(wanted, 1).tolist()
    assert np.ptp(found["probabilities"], axis=0).min() > 1e-3
    with pytest.raises(SettingsError, match="answers with classes, and not with vectors"):
        loaded.encode(queries)
    with pytest.raises(SettingsError, match=f"reads {len(columns)} texts of a record"):
        loaded.answer(*columns, documents)
    assert loaded.answer(*(column[0] for column in columns))["class"] == found["class"][:1]
    if len(columns) > 1:
        with pytest.raises(DataError, match="the columns have 20, 19 texts; give one of each"):
            loaded.answer(queries, documents[:-1])


def vectors_of(model: Path, some: list[str], limit: int = 32) -> np.ndarray:
    """Return what transformers makes of texts: the mean of the last states, of length 1."""
    encoder = AutoModel.from_pretrained(model, add_pooling_layer=False).eval()
    found = []
    for text in some:
        with torch.no_grad():
            states = encoder(torch.tensor([ids(text, limit)])).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(found)


def test_a_folder_is_exported_without_a_run(encoder: Path, tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    assert main(["export", "--model", str(encoder / "model"), "--to", str(target), *FP32]) == 0
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["origin"]["path"] == str(encoder / "model")
    assert manifest["program"]["fields"]["limits"] == []
    assert manifest["program"]["reads"]["tokens"] == 32
    parity = json.loads((target / "parity.json").read_text())
    assert not [name for name in parity if name.startswith("heldout/")]
    some = [*texts(30), " ".join(["w9"] * 50)]
    loaded = regauge.load(target, threads=1)
    found = loaded.encode(some)
    np.testing.assert_allclose(found, vectors_of(encoder / "model", some), atol=2e-6)
    assert np.array_equal(loaded.encode(some[3]), found[3])
    assert np.array_equal(loaded.answer(some[3])["vector"], found[3:4])
    assert loaded.encode([]).shape == (0, 32)
    wrong = {
        None: "text 1 is of type NoneType; give each as a str",
        b"w9": "text 1 is of type bytes",
        "w9 \ud800": "text 1 holds half a character",
    }
    for text, told in wrong.items():
        with pytest.raises(DataError, match=told):
            loaded.encode(["w9", text])  # type: ignore[list-item]


def test_what_is_asked_for_counts_more_than_what_a_folder_says(
    encoder: Path, tmp_path: Path
) -> None:
    more = [
        "text.prompts={query='w9 w10 ',plain='w11 '}",
        "text.prompt=query",
        "text.normalized=false",
        'text.pooling=["cls","mean"]',
        "text.tokens=8",
        "proof.invariant=false",
    ]
    target = tmp_path / "artifact"
    given = ["--model", str(encoder / "model"), "--to", str(target), *FP32, *more]
    assert main(["export", *given]) == 0
    manifest = json.loads((target / "manifest.json").read_text())
    assert "identity" not in manifest
    assert manifest["program"]["reads"]["tokens"] == manifest["shapes"][-1]["length"] == 8
    loaded = regauge.load(target, invariant=False, threads=1)
    usual = loaded.encode(["w5 w6", "w7 " * 20])
    assert usual.shape == (2, 64)
    assert not np.allclose(np.linalg.norm(usual, axis=1), 1, atol=0.05)
    means = usual[:, 32:] / np.linalg.norm(usual[:, 32:], axis=1, keepdims=True)
    cut = ["w9 w10 w5 w6", "w9 w10" + " w7" * 5]
    np.testing.assert_allclose(means, vectors_of(encoder / "model", cut), atol=2e-6)
    plain = loaded.encode(["w5 w6", "w7 " * 20], prompt="plain")
    assert not np.allclose(plain, usual, atol=1e-3)
    with pytest.raises(SettingsError, match="no prompt is called 'plan'; did you mean 'plain'"):
        loaded.encode(["w5"], prompt="plan")


def test_a_run_can_be_cut_shorter_than_its_rows_were(encoder: Path, tmp_path: Path) -> None:
    artifact = exported(encoder, tmp_path / "artifact", *FP32, "text.tokens=8", "proof.metrics=no")
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["shapes"][-1]["length"] == 8
    some = texts(30)
    found = regauge.load(artifact, threads=1).encode(some)
    np.testing.assert_allclose(found, vectors_of(encoder / "model", some, 8), atol=2e-6)
    assert max(len(text.split()) for text in some) > 8


def test_a_moment_of_a_run_is_exported_by_its_name(encoder: Path, tmp_path: Path) -> None:
    artifact = exported(encoder, tmp_path / "artifact", *FP32, "target.step=latest")
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert (manifest["origin"]["path"], manifest["origin"]["step"]) == (str(encoder), "latest")
    some = texts(10)
    found = regauge.load(artifact, threads=1).encode(some)
    np.testing.assert_allclose(found, vectors_of(encoder / "model", some), atol=2e-6)


@pytest.mark.parametrize("content", ["an artifact", "a file"])
def test_what_is_there_is_not_written_over(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    target = tmp_path / "artifact"
    if content == "a file":
        target.write_text("a thesis")
    else:
        target.mkdir()
        (target / "manifest.json").write_text("{}")
    before = contents(tmp_path)
    assert main(["export", str(encoder), "--to", str(target), *FP32]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert f"{target} exists; name another place with --to" in error[0]
    assert contents(tmp_path) == before


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(encoder)
    assert main(["export", str(encoder), "--dry-run", "--json", *FP32]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "run": str(encoder),
        "step": "final",
        "path": str(encoder / "artifact"),
        "format": "artifact",
    }
    given = ["--model", str(encoder / "model"), "--to", str(tmp_path / "out" / "artifact")]
    assert main(["export", *given, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["path"]) == (given[1], given[3])
    there = ["--model", str(encoder / "model"), "--to", str(encoder)]
    assert main(["export", *there, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"would refuse: {encoder} exists; name another place with --to"
    assert main(["export", *there, "candidates.seconds=-1", "--dry-run"]) == 2
    assert contents(encoder) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (['candidates.backends=["eagr"]'], 2, "'eagr'; did you mean 'eager'?"),
        (["candidates.backend=eager"], 2, "'candidates.backend'; did you mean 'backends'?"),
        (['candidates.backends=["neuron"]'], 2, "backend 'neuron' is not usable here"),
        (
            ['candidates.backends=["eager"]', 'candidates.quantized=["int8"]'],
            2,
            "no candidate has the precisions and quantized that are asked for; name some of eager:",
        ),
        (
            ['candidates.backends=["eager"]', "--portable", "x86-64-v3"],
            2,
            "what is tried cannot compile for an instruction set: eager; name other backends",
        ),
        (["candidates.portable=x86-64-v9"], 2, "'x86-64-v3' or 'x86-64-v4', got 'x86-64-v9'"),
        (["text.tokens=64"], 2, "text.tokens = 64, and the model has 32 positions; set at most 32"),
        (["text.prompt=query"], 2, "no prompt is called 'query'"),
        (["target.model=other"], 2, "an export has one origin"),
        (
            ['candidates.precisions=["bf16"]', "proof.bound=0"],
            64,
            "no candidate keeps the quality within 0: the least loss is",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    origin = [f"target.run={encoder}"] if "target.model=other" in arguments else [str(encoder)]
    given = ["export", *origin, "--to", str(tmp_path / "artifact"), *EAGER, *arguments]
    assert main(given) == code
    error = [line for line in capsys.readouterr().err.splitlines() if "texts/s" not in line]
    assert len(error) == 1
    assert told in error[0]
    assert not list(tmp_path.iterdir())


def test_integers_lose_no_more_than_the_bound(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    integers = ['candidates.backends=["openvino"]', 'candidates.quantized=["int8"]', *QUICK]
    given = [str(encoder), *integers, 'candidates.precisions=["fp32"]']
    assert main(["export", *given, "--to", str(tmp_path / "loose"), "proof.bound=0.1"]) == 0
    compiled = json.loads((tmp_path / "loose" / "manifest.json").read_text())["compiled"]
    assert compiled["quantized"] == "int8"
    capsys.readouterr()
    assert main(["export", *given, "--to", str(tmp_path / "strict"), "proof.bound=0"]) != 0
    assert "no linear layer is near enough to itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing is said to be exported; name a run's folder, or --model"),
        (["--model", "somewhere"], "nothing says where the artifact goes; name a folder with --to"),
        (
            ["--model", "somewhere", "--to", "out", "--format", "hf"],
            "format is of a run's model: a folder has a form already",
        ),
    ],
)
def test_what_is_not_said_is_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["export", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_a_final_model_is_not_exported(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes((encoder / "run.json").read_bytes())
    assert main(["export", str(tmp_path / "run"), *FP32]) == 2
    assert "has no final model; let the run finish first" in capsys.readouterr().err


def test_a_folder_answers_without_an_export(encoder: Path) -> None:
    some = [*texts(12), "", " ".join(["w9"] * 50)]
    loaded = regauge.load(encoder / "model", threads=1)
    wanted = vectors_of(encoder / "model", some)
    np.testing.assert_allclose(loaded.encode(some), wanted, atol=2e-6)
    assert loaded.program.answers == "vectors"
    same = regauge.load(encoder, threads=1)
    assert np.array_equal(same.encode(some), loaded.encode(some))
    with pytest.raises(SettingsError, match="no model at"):
        regauge.load(encoder / "checkpoints")
    with pytest.raises(SettingsError, match="named 'eagre'; did you mean 'eager'"):
        regauge.load(encoder, backend="eagre")


@pytest.mark.full
@pytest.mark.skipif(
    Cpu().obstacle_to_compiling() is not None,
    reason="not proved here: torch.compile needs a C++ compiler",
)
def test_a_folder_that_is_compiled_when_it_is_called_answers_the_same(
    encoder: Path, tmp_path: Path
) -> None:
    """In a process of its own: the compiler leaves threads behind."""
    some = texts(40)
    code = (
        "import json, sys, numpy, regauge\n"
        "model, texts, found = sys.argv[1:]\n"
        "loaded = regauge.load(model, threads=1, backend='lazy')\n"
        "numpy.save(found, loaded.encode(json.loads(texts)))\n"
    )
    given = [str(encoder / "model"), json.dumps(some), str(tmp_path / "found.npy")]
    subprocess.run([sys.executable, "-c", code, *given], check=True, capture_output=True)
    eager = regauge.load(encoder / "model", threads=1).encode(some)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), eager, atol=2e-6)
