"""Export of trained models: the manifest is correct and the outputs do not change."""

from __future__ import annotations

import hashlib
import json
import re
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
from distributed.runs import FULL, TASKS, settings
from end_to_end.predicting import EAGER, QUICK, export_run, random_texts, train_model
from regauge.accelerators.cpu import Cpu
from regauge.cli import main
from regauge.commands.export import load_settings
from regauge.config import merge
from regauge.inference.backends import inductor
from regauge.inference.backends.eager import EagerBackend
from regauge.system import processes
from regauge.system.errors import DataError, SettingsError
from regauge.system.processes import World
from regauge.training.run import attempt

FP32 = (*EAGER, 'candidates.precisions=["fp32"]')
EMBEDDINGS = ("contrastive", "negatives", "triplet", "similarity", "distill")
"""Runs whose models return vectors."""


@dataclass(frozen=True)
class Case:
    """A run with the artifact of its model, and the expected content of its manifest."""

    run: Path
    artifact: Path
    task: dict[str, Any]
    fields: dict[str, Any]
    max_length: int
    inputs: tuple[str, ...]
    output_kind: str
    output_size: int

    @property
    def manifest(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.artifact / "manifest.json").read_text())
        return document

    def approximate(self, metrics: dict[str, float]) -> Any:
        """Return metrics for a comparison; a correlation near 0 has no relative precision."""
        is_near_zero = self.task["kind"] in {"similarity", "distill"}
        return pytest.approx(metrics, rel=1e-6, abs=1e-5 if is_near_zero else None)

    @property
    def heldout_metrics(self) -> dict[str, float]:
        """The last held-out metrics of the run."""
        last = [line for line in lines(self.run) if "heldout/loss" in line][-1]
        return {name: last[name] for name in last if name.startswith("heldout/")}


def build_case(folder: Path, name: str) -> Case:
    """Return the case of a name, trained and exported."""
    is_embedding = name in EMBEDDINGS
    kind = name if is_embedding else "classify"
    options = {"text_fields": ("query",)} if name == "one text" else {}
    run, data = folder / "run", datasets.write_pairs(folder / "data")
    attempt(settings(run, data, kind, task=options, stop={"steps": 4}), World())
    artifact = export_run(run, folder / "artifact", *FP32)
    text_fields = {"one text": ["query"], "two texts": ["query", "document"]}.get(name, [])
    max_lengths = {"one text": [12], "two texts": [12, 32]}.get(name, [32])
    is_pair = name == "two texts"
    return Case(
        run,
        artifact,
        merge(TASKS[kind]["task"], options),
        {"text_fields": text_fields, "max_lengths": max_lengths, "is_pair": is_pair},
        sum(max_lengths),
        ("tokens", "lengths", "starts") if is_pair else ("tokens", "lengths"),
        "vectors" if is_embedding else "classes",
        datasets.WIDTH if is_embedding else 3,
    )


@pytest.fixture(
    scope="module",
    params=[
        "contrastive",
        *(pytest.param(name, marks=FULL) for name in EMBEDDINGS[1:]),
        "one text",
        "two texts",
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build_case(tmp_path_factory.mktemp(request.param.replace(" ", "-")), request.param)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a text encoder."""
    return train_model(tmp_path_factory.mktemp("encoder"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_manifest_describes_the_program_and_its_origin(case: Case) -> None:
    manifest = case.manifest
    program = manifest["program"]
    assert (program["output_kind"], program["output_size"]) == (case.output_kind, case.output_size)
    assert {name: program["fields"][name] for name in case.fields} == case.fields
    assert tuple(spec["name"] for spec in program["inputs"]) == case.inputs
    assert program["tokenization"] == {
        "max_length": case.max_length,
        "prompts": {},
        "lowercase": False,
        "input_format": "text",
        "truncation_side": "right",
        "special_tokens": "read",
        "convention": "regauge",
    }
    pooling = {"modes": ["mean"], "dense": [], "normalize": True}
    assert program.get("pooling") == (pooling if case.output_kind == "vectors" else None)
    lengths = [bucket["length"] for bucket in manifest["buckets"]]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == case.max_length
    compiled = manifest["compiled"]
    assert compiled["backend"]["kind"] == "eager"
    assert (compiled["precision"], compiled["quantization"]) == ("fp32", "none")
    assert compiled["versions"].keys() == {"torch", "transformers"}
    assert manifest["target"]["accelerator"] == "cpu"
    assert manifest["target"]["threads"] == 1
    weights = case.run / "model" / "model.safetensors"
    assert manifest["origin"] == {
        "path": str(case.run),
        "step": "final",
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "run_id": json.loads((case.run / "run.json").read_text())["run"]["run_id"],
    }
    for name, facts in manifest["files"].items():
        content = (case.artifact / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {*manifest["files"], "manifest.json"} == set(contents(case.artifact))
    tokenizer = case.artifact / "tokenizer" / "tokenizer.json"
    assert tokenizer.read_bytes() == (case.run / "model" / "tokenizer.json").read_bytes()


def test_the_evidence_has_the_held_out_metrics_of_the_run(case: Case) -> None:
    parity = json.loads((case.artifact / "parity.json").read_text())
    metrics = {name: value for name, value in parity.items() if name.startswith("heldout/")}
    assert metrics == case.approximate(case.heldout_metrics)
    assert {"heldout/loss", "heldout/items"} < metrics.keys()
    assert parity["quality_loss"] == pytest.approx(0.0, abs=1e-6)
    assert (parity["backend"], parity["precision"]) == ("eager", "fp32")
    (row,) = json.loads((case.artifact / "benchmark.json").read_text())["candidates"]
    assert row.items() <= parity.items()
    assert row["texts_per_second"] > 0


def test_evaluate_gives_an_artifact_the_metrics_of_its_run(case: Case, tmp_path: Path) -> None:
    run_file = {
        "output": {"folder": str(tmp_path / "out")},
        "seed": 7,
        "data": {"path": str(case.run.parent / "data")},
        "task": case.task,
        "models": {"artifact": str(case.artifact), "run": str(case.run)},
        "evaluate": {"baselines": False},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
    }
    (tmp_path / "run.json").write_text(json.dumps(run_file))
    assert main(["evaluate", str(tmp_path / "run.json")]) == 0
    table = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    rows = {row.pop("name"): row for row in table["rows"]}
    assert rows["artifact"] == case.approximate(rows["run"])
    metrics = {f"heldout/{name}": value for name, value in rows["artifact"].items()}
    assert metrics == case.approximate(case.heldout_metrics)


def ids(text: str, limit: int) -> list[int]:
    """Return the ids of the small tokenizer: the words of a text, and the end token."""
    words = [int(word.removeprefix("w")) for word in text.split()]
    return [*words[: limit - 1], 3]


def test_classes_equal_the_classes_of_transformers(case: Case) -> None:
    loaded = regauge.load(case.artifact, threads=1)
    queries, documents = random_texts(20, seed=1), random_texts(20, seed=2)
    columns = (queries, documents) if case.fields["is_pair"] else (queries,)
    if case.output_kind == "vectors":
        with pytest.raises(SettingsError, match="reads 1 text per record, not 2"):
            loaded.predict(queries, documents)
        assert np.array_equal(loaded.predict(queries)["embedding"], loaded.encode(queries))
        return
    limits = case.fields["max_lengths"]
    model = AutoModelForSequenceClassification.from_pretrained(case.run / "model").eval()
    expected = []
    for texts in zip(*columns, strict=True):
        parts = [ids(text, limit) for text, limit in zip(texts, limits, strict=True)]
        tokens = [token for part in parts for token in part]
        types = [number for number, part in enumerate(parts) for _ in part]
        with torch.no_grad():
            inputs = {"input_ids": tokens, "token_type_ids": types}
            output = model(**{name: torch.tensor([row]) for name, row in inputs.items()})
        expected.append(output.logits[0].softmax(0).numpy())
    answers = loaded.predict(*columns)
    np.testing.assert_allclose(answers["probabilities"], expected, atol=2e-6)
    assert answers["predicted_label"].tolist() == np.argmax(expected, 1).tolist()
    assert np.ptp(answers["probabilities"], axis=0).min() > 1e-3
    with pytest.raises(SettingsError, match="returns classes, not vectors"):
        loaded.encode(queries)
    with pytest.raises(SettingsError, match=rf"reads {len(columns)} texts? per record"):
        loaded.predict(*columns, documents)
    assert (
        loaded.predict(*(column[0] for column in columns))["predicted_label"]
        == answers["predicted_label"][:1]
    )
    if len(columns) > 1:
        with pytest.raises(
            DataError, match="the columns have 20, 19 texts; pass one text per record"
        ):
            loaded.predict(queries, documents[:-1])


def reference_vectors(model: Path, some: list[str], limit: int = 32) -> np.ndarray:
    """Return the vectors of transformers: normalized means of the last hidden states."""
    encoder = AutoModel.from_pretrained(model, add_pooling_layer=False).eval()
    vectors = []
    for text in some:
        with torch.no_grad():
            states = encoder(torch.tensor([ids(text, limit)])).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(vectors)


def test_a_folder_is_exported_without_a_run(encoder: Path, tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    assert main(["export", "--model", str(encoder / "model"), "--to", str(target), *FP32]) == 0
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["origin"]["path"] == str(encoder / "model")
    assert manifest["program"]["fields"]["max_lengths"] == []
    assert manifest["program"]["tokenization"]["max_length"] == 32
    parity = json.loads((target / "parity.json").read_text())
    assert not [name for name in parity if name.startswith("heldout/")]
    some = [*random_texts(30), " ".join(["w9"] * 50)]
    loaded = regauge.load(target, threads=1)
    vectors = loaded.encode(some)
    np.testing.assert_allclose(vectors, reference_vectors(encoder / "model", some), atol=2e-6)
    assert np.array_equal(loaded.encode(some[3]), vectors[3])
    assert np.array_equal(loaded.predict(some[3])["embedding"], vectors[3:4])
    assert loaded.encode([]).shape == (0, 32)
    wrong = {
        None: "text 1 is of type NoneType; pass a str",
        b"w9": "text 1 is of type bytes",
        "w9 \ud800": r"text 1 is not valid Unicode \(lone surrogate\); re-decode it as UTF-8",
    }
    for text, message in wrong.items():
        with pytest.raises(DataError, match=message):
            loaded.encode(["w9", text])  # type: ignore[list-item]


def test_settings_override_the_files_of_a_folder(encoder: Path, tmp_path: Path) -> None:
    more = [
        "text.prompts={query='w9 w10 ',plain='w11 '}",
        "text.default_prompt=query",
        "text.normalize=false",
        'text.pooling=["cls","mean"]',
        "text.max_seq_length=8",
        "parity.batch_invariance=false",
    ]
    target = tmp_path / "artifact"
    options = ["--model", str(encoder / "model"), "--to", str(target), *FP32, *more]
    assert main(["export", *options]) == 0
    manifest = json.loads((target / "manifest.json").read_text())
    assert "batch_invariance" not in manifest
    assert (
        manifest["program"]["tokenization"]["max_length"] == manifest["buckets"][-1]["length"] == 8
    )
    loaded = regauge.load(target, batch_invariant=False, threads=1)
    usual = loaded.encode(["w5 w6", "w7 " * 20])
    assert usual.shape == (2, 64)
    assert not np.allclose(np.linalg.norm(usual, axis=1), 1, atol=0.05)
    means = usual[:, 32:] / np.linalg.norm(usual[:, 32:], axis=1, keepdims=True)
    cut = ["w9 w10 w5 w6", "w9 w10" + " w7" * 5]
    np.testing.assert_allclose(means, reference_vectors(encoder / "model", cut), atol=2e-6)
    plain = loaded.encode(["w5 w6", "w7 " * 20], prompt="plain")
    assert not np.allclose(plain, usual, atol=1e-3)
    with pytest.raises(SettingsError, match="no prompt is called 'plan'; did you mean 'plain'"):
        loaded.encode(["w5"], prompt="plan")


def test_texts_can_be_truncated_below_the_row_length_of_the_run(
    encoder: Path, tmp_path: Path
) -> None:
    artifact = export_run(
        encoder, tmp_path / "artifact", *FP32, "text.max_seq_length=8", "parity.metrics=false"
    )
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["buckets"][-1]["length"] == 8
    some = random_texts(30)
    vectors = regauge.load(artifact, threads=1).encode(some)
    np.testing.assert_allclose(vectors, reference_vectors(encoder / "model", some, 8), atol=2e-6)
    assert max(len(text.split()) for text in some) > 8


def test_a_checkpoint_of_a_run_is_exported(encoder: Path, tmp_path: Path) -> None:
    artifact = export_run(encoder, tmp_path / "artifact", *FP32, "export.step=latest")
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert (manifest["origin"]["path"], manifest["origin"]["step"]) == (str(encoder), "4")
    some = random_texts(10)
    vectors = regauge.load(artifact, threads=1).encode(some)
    np.testing.assert_allclose(vectors, reference_vectors(encoder / "model", some), atol=2e-6)


@pytest.mark.parametrize("content", ["an artifact", "a file"])
def test_an_existing_target_is_not_overwritten(
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
    assert f"{target} exists; choose another target with --to" in error[0]
    assert contents(tmp_path) == before


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(encoder)
    assert main(["export", str(encoder), "--dry-run", "--json", *FP32]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == {
        "run": str(encoder),
        "step": "final",
        "path": str(encoder / "artifact"),
        "format": "artifact",
    }
    options = ["--model", str(encoder / "model"), "--to", str(tmp_path / "out" / "artifact")]
    assert main(["export", *options, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["path"]) == (options[1], options[3])
    there = ["--model", str(encoder / "model"), "--to", str(encoder)]
    assert main(["export", *there, "--dry-run"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"error: {encoder} exists; choose another target with --to"
    assert main(["export", *there, "candidates.timing_seconds=-1", "--dry-run"]) == 2
    assert contents(encoder) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (['candidates.backends=["eagr"]'], 2, "'eagr'; did you mean 'eager'?"),
        (["candidates.backend=eager"], 2, "'candidates.backend'; did you mean 'backends'?"),
        (['candidates.backends=["neuron"]'], 2, "backend 'neuron' is not usable here"),
        (
            ['candidates.backends=["eager"]', 'candidates.quantization=["int8"]'],
            2,
            (
                "no backend supports these candidates.precisions and candidates.quantization;"
                " choose from eager:"
            ),
        ),
        (
            ['candidates.backends=["eager"]', "--portable", "x86-64-v3"],
            2,
            (
                "no candidate backend can compile for an instruction set: eager;"
                " name other candidates.backends"
            ),
        ),
        (["candidates.portable=x86-64-v9"], 2, "'x86-64-v3' or 'x86-64-v4', got 'x86-64-v9'"),
        (
            ["text.max_seq_length=64"],
            2,
            "text.max_seq_length = 64, but the model has 32 positions; set at most 32",
        ),
        (["text.default_prompt=query"], 2, "no prompt is called 'query'"),
        (["export.model=other"], 2, "an export has one origin"),
        (
            ['candidates.precisions=["bf16"]', "parity.max_loss=0"],
            64,
            "no candidate has a quality loss within 0: the smallest is",
        ),
    ],
)
def test_an_invalid_export_is_refused_and_writes_nothing(
    encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    origin = [f"export.run={encoder}"] if "export.model=other" in arguments else [str(encoder)]
    options = ["export", *origin, "--to", str(tmp_path / "artifact"), *EAGER, *arguments]
    assert main(options) == code
    error = capsys.readouterr().err.splitlines()
    is_progress = re.compile("load: |reference: |compile |measure |.*texts/s").match
    error = [line for line in error if not is_progress(line)]
    assert len(error) == 1
    assert message in error[0]
    assert not list(tmp_path.iterdir())


def read_documents(artifact: Path) -> tuple[dict[str, Any], ...]:
    """Return the manifest, the evidence and the measurements of an artifact."""
    names = ("manifest.json", "parity.json", "benchmark.json")
    manifest, parity, benchmark = (json.loads((artifact / name).read_text()) for name in names)
    return manifest, parity, benchmark


def test_the_phases_of_an_export_are_logged(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(encoder, tmp_path / "artifact", *EAGER, 'candidates.precisions=["fp32","bf16"]')
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"load: {encoder}/model"
    phases = (line.split(":")[0] for line in lines if "texts/s" not in line)
    assert list(dict.fromkeys(phases)) == [  # a phase that lasts has several lines
        "load",
        "reference",
        *(
            f"{phase} {number} of 2, eager {precision} 1 thread"
            for number, precision in enumerate(read_precisions(lines), start=1)
            for phase in ("compile", "measure")
        ),
        *(["re-time"] if any("Re-timed" in line for line in lines) else []),
        "write",
        "verify",
        "measure",
    ]


def read_precisions(lines: list[str]) -> list[str]:
    """Return the precisions of the candidates in the order of their trials."""
    compiled = (line.split() for line in lines if line.startswith("compile "))
    return [words[5] for words in compiled]


@pytest.mark.full
def test_the_reason_against_each_other_candidate_is_recorded(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(Cpu, "precisions", lambda _: ("bf16", "fp32"))
    loose, strict = tmp_path / "loose", tmp_path / "strict"
    export_run(encoder, loose, *EAGER, "parity.max_loss=0.9")
    _, parity, benchmark = read_documents(loose)
    losers = {row["precision"]: row["lost"] for row in benchmark["candidates"] if "lost" in row}
    [(loser, reason)] = losers.items()
    assert {loser, parity["precision"]} == {"bf16", "fp32"}
    assert re.fullmatch(r"\d+\.\d+ x slower", reason)
    assert f"eager {loser}: {reason}" in capsys.readouterr().out
    export_run(encoder, strict, *EAGER, "parity.max_loss=1e-9")
    manifest, parity, benchmark = read_documents(strict)
    assert [row["precision"] for row in benchmark["candidates"]] == ["bf16", "fp32"]
    assert re.fullmatch(r"quality loss .* > 1e-09", benchmark["candidates"][0]["lost"])
    assert (parity["precision"], parity["quality_loss"]) == ("fp32", 0)
    assert manifest["compiled"]["precision"] == "fp32"


def test_a_shared_payload_that_fails_has_the_same_error_for_each_precision(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def fail(*arguments: Any) -> None:
        (arguments[-1] / "unfinished").touch()
        raise ValueError("no layer is accurate enough")

    monkeypatch.setattr(EagerBackend, "shares_payload", True)
    monkeypatch.setattr(EagerBackend, "export", fail)
    options = [*EAGER, 'candidates.precisions=["fp32","bf16"]']
    assert main(["export", str(encoder), "--to", str(tmp_path / "artifact"), *options]) == 64
    failures = [line for line in capsys.readouterr().err.splitlines() if "failed: " in line]
    assert len(failures) == 2
    assert all(line.endswith("failed: no layer is accurate enough") for line in failures)


@pytest.mark.full
def test_a_package_that_kills_the_process_that_loads_it_is_a_failed_candidate(
    encoder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(inductor, "LOAD_CODE", crash)
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # no worker processes
    backends = 'candidates.backends=["inductor","eager"]'
    export_run(encoder, tmp_path / "it", *QUICK, backends, 'candidates.precisions=["fp32"]')
    manifest, _, benchmark = read_documents(tmp_path / "it")
    [failed] = [row["error"] for row in benchmark["candidates"] if row["backend"] == "inductor"]
    assert failed == "the compiled package cannot be loaded: killed by signal 11"
    assert manifest["compiled"]["backend"]["kind"] == "eager"


def test_a_fast_export_has_one_candidate_with_its_evidence(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = export_run(encoder, tmp_path / "artifact", "--fast", *QUICK)
    assert "eager: not tried, the export is fast" in capsys.readouterr().out
    manifest, parity, benchmark = read_documents(artifact)
    kind = manifest["compiled"]["backend"]["kind"]
    assert kind != "eager"
    assert {row["backend"] for row in benchmark["candidates"]} == {kind}
    lengths = [bucket["length"] for bucket in manifest["buckets"]]
    assert lengths == [8, 16, 32]
    assert (parity["num_records"], parity["backend"]) == (32, kind)
    assert parity["quality_loss"] <= parity["max_loss"] == 0.001
    assert manifest["batch_invariance"]["num_texts"] == sum(
        bucket["batch_sizes"][0] for bucket in manifest["buckets"]
    )
    some = random_texts(30)
    vectors = regauge.load(artifact, threads=1).encode(some)
    reference = reference_vectors(encoder / "model", some)
    cosines = (vectors * reference).sum(1) / np.linalg.norm(vectors, axis=1)
    assert (cosines / np.linalg.norm(reference, axis=1)).min() > 0.999


@pytest.mark.parametrize(
    ("overrides", "threads"), [((), (3,)), (("candidates.threads=[2]",), (2,))]
)
def test_the_threads_of_a_run_file_are_the_default(
    tmp_path: Path, overrides: tuple[str, ...], threads: tuple[int, ...]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('output.folder = "out"\nexecution.threads = 3\n')
    settings = load_settings(run_file, overrides)
    assert settings.candidates.threads == threads
    saved = run_file.with_name("run.json")
    saved.write_text('{"output": {"folder": "out"}, "execution": {"threads": 3}}')
    assert load_settings(saved, ()).candidates.threads == ()


def test_the_threads_of_an_export_follow_the_environment(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "INHERITED_ENVIRONMENT", {"OMP_NUM_THREADS": "1"})
    options = ["parity.num_texts=32", "candidates.timing_seconds=0.02", "parity.metrics=false"]
    artifact = export_run(encoder, tmp_path / "artifact", 'candidates.backends=["eager"]', *options)
    manifest, _, benchmark = read_documents(artifact)
    assert manifest["target"]["threads"] == 1
    assert {row["threads"] for row in benchmark["candidates"]} == {1}


ENCODE_WITHOUT_TORCH = """
import sys, regauge
vectors = regauge.load(sys.argv[1], threads=1).encode(["some text", "another text"])
print(vectors.tobytes().hex(), "torch" in sys.modules)
"""


@pytest.mark.parametrize("backend", ["openvino", pytest.param("onnx", marks=pytest.mark.full)])
def test_backends_without_torch_compute_without_importing_it(
    encoder: Path, tmp_path: Path, backend: str
) -> None:
    choice = [f'candidates.backends=["{backend}"]', 'candidates.quantization=["none"]']
    artifact = export_run(encoder, tmp_path / "artifact", *choice, *QUICK)
    command = [sys.executable, "-c", ENCODE_WITHOUT_TORCH, str(artifact)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    vectors = regauge.load(artifact, threads=1).encode(["some text", "another text"])
    assert output.split() == [vectors.tobytes().hex(), "False"]


def test_int8_candidates_respect_the_quality_loss(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    integers = ['candidates.backends=["openvino"]', 'candidates.quantization=["int8"]', *QUICK]
    options = [str(encoder), *integers, 'candidates.precisions=["fp32"]']
    assert main(["export", *options, "--to", str(tmp_path / "loose"), "parity.max_loss=0.1"]) == 0
    compiled = json.loads((tmp_path / "loose" / "manifest.json").read_text())["compiled"]
    assert compiled["quantization"] == "int8"
    capsys.readouterr()
    assert main(["export", *options, "--to", str(tmp_path / "strict"), "parity.max_loss=0"]) != 0
    assert "no linear layer is accurate enough with 8-bit integers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model to export; name a run's folder, or add --model"),
        (["--model", "somewhere"], "the artifact needs a folder; name it with --to"),
        (
            ["--model", "somewhere", "--to", "out", "--format", "hf"],
            "only the model of a run has other formats; set export.run",
        ),
    ],
)
def test_missing_options_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_final_model_is_not_exported(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes((encoder / "run.json").read_bytes())
    assert main(["export", str(tmp_path / "run"), *FP32]) == 2
    assert "has no final model; let the run finish first" in capsys.readouterr().err


def test_the_encoder_of_a_masked_language_model_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An artifact returns vectors, from which no token metric can be computed."""
    run = train_model(tmp_path, "mlm", datasets.write_packed)
    artifact = export_run(run, tmp_path / "artifact", *FP32)
    some = random_texts(5)
    vectors = regauge.load(artifact, threads=1).encode(some)
    np.testing.assert_allclose(vectors, reference_vectors(run / "model", some), atol=2e-6)
    assert "heldout" not in (artifact / "parity.json").read_text(encoding="utf-8")
    run_file = {
        "output": {"folder": str(tmp_path / "out")},
        "data": {"path": str(tmp_path / "data")},
        "task": {"kind": "mlm"},
        "models": {"artifact": str(artifact)},
    }
    (tmp_path / "run.json").write_text(json.dumps(run_file), encoding="utf-8")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run.json")]) == 2
    assert "is an artifact without the token outputs of task 'mlm'" in capsys.readouterr().err


def test_a_model_folder_is_loaded_without_an_export(encoder: Path) -> None:
    some = [*random_texts(12), "", " ".join(["w9"] * 50)]
    loaded = regauge.load(encoder / "model", threads=1)
    expected = reference_vectors(encoder / "model", some)
    np.testing.assert_allclose(loaded.encode(some), expected, atol=2e-6)
    assert loaded.program.output_kind == "vectors"
    same = regauge.load(encoder, threads=1)
    assert np.array_equal(same.encode(some), loaded.encode(some))
    with pytest.raises(SettingsError, match="no model at"):
        regauge.load(encoder / "checkpoints")
    with pytest.raises(SettingsError, match="named 'eagre'; did you mean 'eager'"):
        regauge.load(encoder, backend="eagre")


@pytest.mark.full
@pytest.mark.skipif(
    Cpu().compile_obstacle() is not None,
    reason="not proved here: torch.compile needs a C++ compiler",
)
def test_torch_compile_gives_the_same_vectors(encoder: Path, tmp_path: Path) -> None:
    """Runs in a separate process, because the compiler leaves threads behind."""
    some = random_texts(40)
    code = (
        "import json, sys, numpy, regauge\n"
        "model, texts, path = sys.argv[1:]\n"
        "loaded = regauge.load(model, threads=1, backend='torch-compile')\n"
        "numpy.save(path, loaded.encode(json.loads(texts)))\n"
    )
    options = [str(encoder / "model"), json.dumps(some), str(tmp_path / "vectors.npy")]
    subprocess.run([sys.executable, "-c", code, *options], check=True, capture_output=True)
    eager = regauge.load(encoder / "model", threads=1).encode(some)
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), eager, atol=2e-6)


def test_a_run_with_next_sentence_prediction_is_exported(tmp_path: Path) -> None:
    run = train_model(tmp_path, "next-sentence", datasets.write_halves)
    config = json.loads((run / "model" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["model_max_length"] == datasets.LENGTH
    options = [*EAGER, 'candidates.precisions=["fp32"]']
    artifact = export_run(run, tmp_path / "artifact", *options)
    assert regauge.load(artifact).encode(["w7 w8", "w9"]).shape == (2, 32)
