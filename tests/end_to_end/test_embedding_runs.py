"""Runs of the embedding tasks from their run files: trained, evaluated, exported and used."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regauge
from distributed.runs import FULL
from end_to_end.predicting import EAGER, read_table, vector_column
from libraries import import_sentence_transformers
from regauge.cli import main
from regauge.config import merge

FP32 = (*EAGER, 'candidates.precisions=["fp32"]')
WIDTH = 32
PROMPTS = {"query": "find: ", "document": "text:"}
"""The second one has no blank at its end, so that its last token depends on the text."""
TOPICS = ("river", "engine", "winter", "doctor")
BASE: dict[str, Any] = {
    "tokenizer": {"vocab_size": 400},
    "rows": {"layout": "fields"},
    "split": {"heldout_fraction": 0.3, "similarity": 1},
    "batch": {"rows": 16, "microbatch_rows": 8},
    "optimizer": {"learning_rate": 3e-3},
    "execution": {"precision": "fp32", "threads": 1},
    "accelerator": "cpu",
    "stop": {"steps": 12},
    "model": {
        "architecture": "bert",
        "config": {
            "hidden_size": WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    },
}
CONTRASTIVE = {
    "rows": {
        "fields": {"query": 16, "body": 24, "title": 16, "wrong": 24},
        "prompts": {"query": "find: ", "body": "text:", "title": "text:", "wrong": "text:"},
    },
    "task": {
        "kind": "contrastive",
        "document": ["body", "title"],
        "negatives": ["wrong"],
        "matryoshka_dims": [WIDTH, 8],
        "prompts": PROMPTS,
    },
}
TRIPLET = {
    "rows": {"fields": {"query": 16, "body": 24, "wrong": 24}},
    "task": {"kind": "triplet", "anchor": "query", "positive": "body", "negative": "wrong"},
}
SIMILARITY = {
    "rows": {"fields": {"query": 16, "other": 24}, "floats": ["score"]},
    "task": {"kind": "similarity", "text_fields": ["query", "other"]},
}
TASKS = {"contrastive": CONTRASTIVE, "triplet": TRIPLET, "similarity": SIMILARITY}
KINDS = ["contrastive", *(pytest.param(kind, marks=FULL) for kind in ("triplet", "similarity"))]
METRICS = {
    "contrastive": {"loss", "items"}
    | {f"{name}{end}" for name in ("recall@1", "recall@10", "mrr") for end in ("", "_dim8")},
    "triplet": {"loss", "accuracy", "items"},
    "similarity": {"loss", "pearson", "spearman", "items"},
    "distill": {"loss", "cosine_similarity", "items"},
}


def draw_text(topic: str, length: int, draw: np.random.Generator) -> str:
    return " ".join(f"{topic}{number}" for number in draw.integers(0, 20, length))


def write_records(path: Path, count: int = 160) -> Path:
    draw = np.random.default_rng(0)
    lines = []
    for number in range(count):
        topic, other = draw.permutation(TOPICS)[:2].tolist()
        is_similar = number % 2 == 0
        record = {
            "id": number,
            "query": draw_text(topic, 3, draw),
            "body": draw_text(topic, 8, draw),
            "title": draw_text(topic, 2, draw),
            "wrong": draw_text(other, 8, draw),
            "other": draw_text(topic if is_similar else other, 6, draw),
            "score": 3.5 if is_similar else 0.5,
        }
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return path


def train(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """Prepare and train the run file of a task; return the run file."""
    paths = {
        "source": {"kind": "jsonl", "files": [str(write_records(folder / "records.jsonl"))]},
        "data": {"path": str(folder / f"{kind}-data")},
        "output": {"folder": str(folder / kind), "trackers": ["jsonl"]},
    }
    run_file = folder / f"{kind}.json"
    run_file.write_text(json.dumps(merge(merge(BASE, paths), changes)))
    assert main(["prepare", str(run_file)]) == 0
    assert main(["train", str(run_file)]) == 0
    return run_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run of the contrastive task."""
    folder = tmp_path_factory.mktemp("embeddings")
    train_once(folder, "contrastive")
    return folder


def train_once(folder: Path, kind: str) -> Path:
    """Train a task, unless an earlier test did; return the output folder of the run."""
    run = folder / kind
    if not run.exists():
        train(folder, kind, TASKS[kind])
    return run


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Path:
    """Return the artifact of the contrastive run."""
    target = folder / "teacher"
    assert main(["export", str(folder / "contrastive"), "--to", str(target), *FP32]) == 0
    return target


@pytest.fixture(scope="module")
def student(folder: Path, teacher: Path) -> Path:
    """Return the run file of a student of the vectors that `predict` wrote."""
    vectors = folder / "vectors"
    command = ["predict", str(teacher), "--source", str(folder / "records.jsonl"), "--to"]
    fields = ['predict.text_fields=["body"]', 'output.keep_fields=["body"]']
    assert main([*command, str(vectors), *fields, "predict.prompt_name=document"]) == 0
    changes = {
        "source": {"kind": "parquet", "files": [str(vectors / "shards" / "*.parquet")]},
        "tokenizer": {"path": str(folder / "contrastive-data" / "tokenizer"), "vocab_size": 8192},
        "rows": {"fields": {"body": 24}, "vectors": ["embedding"]},
        "task": {"kind": "distill", "text_fields": ["body"]},
    }
    return train(folder, "distill", changes)


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Return the held-out metrics of a run, before and after training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name.removeprefix("heldout/"): line[name] for name in line if name.startswith("heldout/")}
        for line in lines
        if "heldout/loss" in line
    ]


def check_evaluation(folder: Path, kind: str, *models: str) -> None:
    """Evaluate models, and assert that all have the metrics of the run."""
    output = folder / f"{kind}-evaluation"
    table = {str(number): str(path) for number, path in enumerate(models)}
    models_setting = "models=" + json.dumps(table).replace(": ", "=")
    run_file = str(folder / f"{kind}.json")
    assert main(["evaluate", run_file, models_setting, f"output.folder={output}"]) == 0
    rows = {
        row.pop("name"): row for row in json.loads((output / "evaluation.json").read_text())["rows"]
    }
    expected = read_metrics(folder / kind)[-1]
    assert expected.keys() == METRICS[kind]
    for name in table:
        assert rows[name] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    baselines = {
        "contrastive": {"BM25", "reciprocal rank fusion"},
        "similarity": {"tf-idf cosine"},
    }
    assert rows.keys() - table.keys() == baselines.get(kind, set())


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_training_improves_the_held_out_metrics(folder: Path, kind: str) -> None:
    before, after = read_metrics(train_once(folder, kind))
    assert after["loss"] < before["loss"]
    better = {"contrastive": "mrr", "triplet": "accuracy", "similarity": "spearman"}[kind]
    assert after[better] >= before[better]


@pytest.mark.parametrize("kind", KINDS)
def test_an_artifact_has_the_vectors_and_metrics_of_its_run(
    folder: Path, teacher: Path, kind: str
) -> None:
    run = train_once(folder, kind)
    artifact = teacher if kind == "contrastive" else folder / f"{kind}-artifact"
    if artifact != teacher:
        assert main(["export", str(run), "--to", str(artifact), *FP32]) == 0
    texts = [draw_text(topic, 5, np.random.default_rng(3)) for topic in TOPICS]
    vectors = regauge.load(run, threads=1).encode(texts)
    np.testing.assert_allclose(
        regauge.load(artifact, threads=1).encode(texts), vectors, rtol=0, atol=1e-5
    )
    check_evaluation(folder, kind, str(run), str(artifact))


def test_prompts_have_the_vectors_of_sentence_transformers(folder: Path, teacher: Path) -> None:
    library = import_sentence_transformers()
    encoder = library.SentenceTransformer(str(folder / "contrastive" / "model"), device="cpu")
    texts = [draw_text(topic, 9, np.random.default_rng(4)) for topic in TOPICS]
    encoders = {"query": encoder.encode_query, "document": encoder.encode_document}
    for source in (folder / "contrastive", teacher):
        model = regauge.load(source, threads=1)
        for name, encode in encoders.items():
            expected = encode(texts)
            vectors = model.encode(texts, prompt=name)
            np.testing.assert_allclose(vectors, expected, rtol=0, atol=2e-5)
            plain = model.encode([PROMPTS[name] + text for text in texts])
            np.testing.assert_array_equal(vectors, plain)
            assert np.abs(vectors - model.encode(texts)).max() > 1e-3


def test_a_search_benchmark_has_the_metrics_of_sentence_transformers(folder: Path) -> None:
    library = import_sentence_transformers()
    run, draw = train_once(folder, "contrastive"), np.random.default_rng(6)
    corpus = {f"d{n}": draw_text(TOPICS[n % 4], 9, draw) for n in range(80)}
    queries = {f"q{n}": draw_text(TOPICS[n % 4], 5, draw) for n in range(20)}
    relevant = {f"q{n}": {f"d{m}" for m in draw.choice(80, 5).tolist()} for n in range(20)}
    collection = folder / "collection"
    (collection / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", corpus), ("queries", queries)):
        lines = (json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items())
        (collection / f"{name}.jsonl").write_text("".join(lines))
    judgments = [f"{query}\t{name}\t1" for query, names in relevant.items() for name in names]
    text = "\n".join(["query\tdocument\tscore", *judgments])
    (collection / "qrels" / "test.tsv").write_text(text)
    output = folder / "search-evaluation"
    assert main(["evaluate", str(run), "--source", str(collection), "--to", str(output)]) == 0
    table = json.loads((output / "evaluation.json").read_text())
    assert table["notes"] == [f"20 queries over 80 documents of {collection}"]
    trained, baseline = table["rows"]
    assert (trained.pop("name"), baseline["name"]) == ("contrastive", "BM25")
    encoder = library.SentenceTransformer(str(run / "model"), device="cpu")
    module = importlib.import_module("sentence_transformers.sentence_transformer.evaluation")
    evaluator = module.InformationRetrievalEvaluator(
        queries,
        corpus,
        relevant,
        precision_recall_at_k=[1, 10, 100],
        score_functions={"dot": library.util.dot_score},
    )
    values = evaluator(encoder).items()
    expected = {name.rpartition("dot_")[2]: float(value) for name, value in values}
    assert trained == pytest.approx({name: expected[name] for name in trained}, abs=1e-6)


@pytest.mark.full
def test_a_student_learns_the_vectors_that_predict_wrote(student: Path, folder: Path) -> None:
    before, after = read_metrics(folder / "distill")
    assert after["cosine_similarity"] > before["cosine_similarity"] + 0.1
    assert after["loss"] < before["loss"]
    check_evaluation(folder, "distill", str(folder / "distill"))
    table = read_table(folder / "vectors")
    vectors = regauge.load(folder / "distill", threads=1).encode(table["body"].to_pylist())
    cosines = (vectors * vector_column(table)).sum(1)
    assert cosines.mean() == pytest.approx(after["cosine_similarity"], abs=0.05)
    manifest = json.loads((folder / "distill-data" / "manifest.json").read_text())
    assert manifest["columns"]["embedding"]["max_length"] == WIDTH
    assert student.exists()


@pytest.mark.full
@pytest.mark.parametrize("kind", TASKS)
def test_a_run_with_other_microbatches_compares_equal(folder: Path, kind: str) -> None:
    run, other = train_once(folder, kind), folder / f"{kind}-other"
    changes = (f"output.folder={other}", "batch.microbatch_rows=4")
    assert main(["train", str(folder / f"{kind}.json"), *changes]) == 0
    report = f"output.folder={folder / kind}-comparison"
    assert main(["compare", str(run), str(other), report]) == 0
