"""One model has the same metrics in the run, from its checkpoints, its exports and its outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import pearsonr, spearmanr
from seqeval import metrics as entity_metrics
from sklearn import metrics

from contracts import text_oracles
from distributed.runs import BERT, LLAMA
from end_to_end.predicting import EAGER, read_table
from regauge.cli import main
from regauge.commands import prepare
from regauge.config import build, merge
from regauge.system.processes import World
from regauge.training.run import attempt
from regauge.training.settings import TrainSettings

Records = list[dict[str, Any]]
Metrics = dict[str, float]
STEPS = 3
EXECUTION = ("execution.precision=fp32", "execution.threads=1", "accelerator=cpu")
WORDS = ("goal", "Team", "bank", "loan", "hotel", "train", "naïve", "e\u0301t", "x", "--", "7")
NAMES, TAGS = ("sport", "money", "travel"), ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TOPICS = ("late", "long", "odd")
TEXT_TASKS = ("mlm", "clm", "sft", "dpo")
WIDTH = 16
SPREAD = {"initializer_range": 0.3}
"""Initial weights whose outputs differ, so that correlations are well conditioned."""
SEED, LENGTH = 3, 24
SMALL = {"config": {"hidden_size": WIDTH, "num_hidden_layers": 1, **SPREAD}}
MODEL = merge(BERT, SMALL)
DECODER = merge(LLAMA, {"config": {**SMALL["config"], "max_position_embeddings": 64}})
BASE: dict[str, Any] = {
    "tokenizer": {"vocab_size": 300},
    "rows": {"layout": "fields"},
    "prepare": {"processes": 1},
    "split": {"heldout_fraction": 0.0, "similarity": 1.0},
    "data": {"workers": 0},
    "output": {
        "trackers": ["jsonl"],
        "checkpoint": {"every_steps": 1, "keep_last": STEPS, "async_save": False},
    },
    "batch": {"rows": 8, "microbatch_rows": 4},
    "evaluation": {"every_steps": 1},
    "optimizer": {"learning_rate": 0.01},
    "execution": {"precision": "fp32", "threads": 1},
    "accelerator": "cpu",
    "stop": {"steps": STEPS},
    "seed": SEED,
}


def draw_records(count: int, seed: int) -> Records:
    """Draw records with texts of all lengths, duplicates and odd white space."""
    draw, records = np.random.default_rng(seed), Records()
    for number in range(count):

        def text(most: int) -> str:
            words = draw.choice(WORDS, draw.integers(1, most)).tolist()
            return str(draw.choice([" ", "  ", "\t"])).join(words)

        words = draw.choice(WORDS, draw.integers(1, 8)).tolist()
        records.append(
            {
                "id": number,
                "text": f"{text(24)}{' ' * int(draw.integers(0, 2))}",
                "other": text(9),
                "wrong": text(9),
                "label": NAMES[int(draw.integers(0, 3)) if number else 2],
                "topics": [name for name in TOPICS if draw.random() < 0.4],
                "score": round(float(draw.normal()), 3),
                "grade": int(draw.integers(0, 3)),
                "query": f"q{number // 4} {WORDS[number // 4 % 7]}",
                "price": float(draw.normal()) if draw.random() < 0.8 else None,
                "brand": str(draw.choice(WORDS[:3])) if draw.random() < 0.8 else None,
                "tokens": words,
                "tags": [TAGS[index] for index in draw.integers(0, len(TAGS), len(words))],
                "vector": draw.normal(size=WIDTH).round(4).tolist(),
            }
        )
        first = records[-1]
        first |= {"instruction": first["query"], "output": first["other"]}
        first |= {"prompt": first["query"], "chosen": first["other"], "rejected": f"{text(9)} x"}
        if number % 5 == 4:  # a text of an earlier record with another label
            earlier = records[int(draw.integers(0, number))]
            records[-1] |= {name: earlier[name] for name in ("text", "other")}
    return records


@dataclass(frozen=True)
class Case:
    """A task, and an oracle for its metrics from the outputs of `predict`."""

    rows: dict[str, Any]
    task: dict[str, Any]
    oracle: Callable[[Trained], Metrics]
    has_artifact_metrics: bool = True
    model: dict[str, Any] = field(default_factory=lambda: MODEL)
    processes: int = 1

    @property
    def has_outputs(self) -> bool:
        """Whether the oracle reads the outputs of an artifact, not the exported model."""
        return self.task["kind"] not in TEXT_TASKS


def measure_classes(run: Trained) -> Metrics:
    table = run.predict()
    labels = [record["label"] for record in run.records]
    guesses = table["predicted_label"].to_pylist()
    shares = np.array(table["probabilities"].to_pylist(), np.float64)
    numbers = [NAMES.index(label) for label in labels]
    return {
        "loss": -float(np.log(shares[range(len(labels)), numbers]).mean()),
        "accuracy": metrics.accuracy_score(labels, guesses),
        "f1": metrics.f1_score(labels, guesses, average="macro", zero_division=0),
        "matthews_correlation": metrics.matthews_corrcoef(labels, guesses),
        "items": len(labels),
    }


def measure_topics(run: Trained) -> Metrics:
    table = run.predict()
    shares = np.array(table["probabilities"].to_pylist(), np.float64)
    actual, guesses = (
        np.array([[name in topics for name in TOPICS] for topics in lists])
        for lists in (
            [record["topics"] for record in run.records],
            table["predicted_labels"].to_pylist(),
        )
    )
    losses = -np.log(np.where(actual, shares, 1 - shares))
    return {
        "loss": float(losses.mean()),
        "accuracy": metrics.accuracy_score(actual, guesses),
        "f1_micro": metrics.f1_score(actual, guesses, average="micro", zero_division=0),
        "f1_macro": metrics.f1_score(actual, guesses, average="macro", zero_division=0),
    }


def measure_values(run: Trained) -> Metrics:
    guesses = run.predict()["value"].to_numpy()
    values = np.array([record["score"] for record in run.records])
    loss = metrics.mean_squared_error(values, guesses)
    return {"loss": loss, "pearson": pearsonr(values, guesses).statistic}


def measure_entities(run: Trained) -> Metrics:
    """Convert the entities, which have characters, to tags of words."""
    table = run.predict('predict.text_fields=["tokens"]')
    guesses = []
    for record, entities in zip(run.records, table["entities"].to_pylist(), strict=True):
        starts = np.cumsum([0, *(len(word) + 1 for word in record["tokens"])]).tolist()
        tags = ["O"] * len(record["tokens"])
        for entity in entities:
            first = starts.index(entity["start"])
            last = starts.index(entity["end"] + 1)
            tags[first:last] = [f"{'BI'[n > 0]}-{entity['label']}" for n in range(last - first)]
        guesses.append(tags)
    actual = [record["tags"] for record in run.records]
    return {
        "f1": entity_metrics.f1_score(actual, guesses, zero_division=0),
        "precision": entity_metrics.precision_score(actual, guesses, zero_division=0),
        "recall": entity_metrics.recall_score(actual, guesses, zero_division=0),
        "items": sum(map(len, actual)),
    }


def read_vectors(run: Trained, *fields: str) -> list[np.ndarray]:
    """Return the vectors of the fields, [records, width] each, in float64."""
    options = ["output.dtype=float32"]
    tables = [run.predict(*options, f'predict.text_fields=["{name}"]') for name in fields]
    return [np.array(table["embedding"].to_pylist(), np.float64) for table in tables]


def measure_similarity(run: Trained) -> Metrics:
    first, second = read_vectors(run, "text", "other")
    cosines = np.einsum("rw,rw->r", first, second)
    scores = np.array([record["score"] for record in run.records])
    differences = (cosines[:, None] - cosines) / 0.05
    terms = differences[scores[:, None] < scores]
    return {
        "loss": float(np.log1p(np.exp(terms).sum())),
        "pearson": pearsonr(cosines, scores).statistic,
        "spearman": spearmanr(cosines, scores).statistic,
    }


def measure_triplets(run: Trained) -> Metrics:
    anchors, positives, negatives = read_vectors(run, "text", "other", "wrong")
    near, far = (1 - (anchors * texts).sum(1) for texts in (positives, negatives))
    loss = np.maximum(near - far + 0.5, 0).mean()
    return {"loss": float(loss), "accuracy": float((near < far).mean())}


def measure_teacher(run: Trained) -> Metrics:
    (vectors,) = read_vectors(run, "text")
    teacher = np.array([record["vector"] for record in run.records])
    cosines = (vectors * teacher).sum(1) / np.linalg.norm(teacher, axis=1)
    return {"loss": 1 - cosines.mean(), "cosine_similarity": cosines.mean()}


def measure_retrieval(run: Trained) -> Metrics:
    """Rank each different document once; documents of equal queries are relevant."""
    queries, documents = read_vectors(run, "text", "other")
    texts = [record["other"].strip() for record in run.records]
    first = [texts.index(text) for text in texts]
    names = [record["text"].strip() for record in run.records]
    ranks = []
    for number, scores in enumerate(queries @ documents.T):
        relevant = {first[row] for row, name in enumerate(names) if name == names[number]}
        others = [scores[row] for row in set(first) - relevant]
        target = scores[first[number]]
        ranks.append(1 + np.sum(np.array(others) > target + 1e-12))
    ranked = np.array(ranks)
    return {
        "recall@1": float((ranked <= 1).mean()),
        "recall@10": float((ranked <= 10).mean()),
        "mrr": float((1 / ranked).mean()),
    }


def measure_ranking(run: Trained) -> Metrics:
    scores = run.predict()["score"].to_numpy()
    groups: dict[str, list[int]] = {}
    for number, record in enumerate(run.records):
        groups.setdefault(record["query"], []).append(number)
    grades = np.array([record["grade"] for record in run.records])
    gains, ranks = [], []
    for members in groups.values():
        if not grades[members].any():
            continue
        relevance = 2.0 ** grades[members] - 1
        gains.append(metrics.ndcg_score([relevance], [scores[members]], k=10))
        order = sorted(members, key=lambda number: -scores[number])
        ranks.append(1 + next(at for at, number in enumerate(order) if grades[number]))
    return {
        "ndcg@10": float(np.mean(gains)),
        "mrr": float(np.mean(1 / np.array(ranks))),
        "auc": metrics.roc_auc_score(grades > 0, scores),
    }


def measure_documents(run: Trained) -> Metrics:
    texts = text_oracles.split_documents(run.model, run.records, LENGTH)
    return text_oracles.measure_next_tokens(run.model, texts)


def measure_answers(run: Trained) -> Metrics:
    texts = text_oracles.build_answers(run.model, run.records, "instruction", "output")
    return text_oracles.measure_next_tokens(run.model, texts)


def measure_preferences(run: Trained) -> Metrics:
    return text_oracles.measure_preferences(run.model, run.folder / "start", run.records)


def measure_masks(run: Trained) -> Metrics:
    data = run.folder / "data"
    return text_oracles.measure_masked_tokens(run.model, data, run.case.task, SEED)


PAIR = {"fields": {"text": 16, "other": 16}}
CASES = {
    "classify": Case(
        {"fields": {"text": 16}, "labels": {"label": NAMES}}, {"kind": "classify"}, measure_classes
    ),
    "pairs": Case(
        {**PAIR, "labels": {"label": NAMES}},
        {"kind": "classify", "text_fields": ["text", "other"]},
        measure_classes,
    ),
    "multi-label": Case(
        {"fields": {"text": 16}, "labels": {"topics": TOPICS}},
        {"kind": "classify", "label": "topics", "problem_type": "multi-label"},
        measure_topics,
    ),
    "regression": Case(
        {"fields": {"text": 16}, "floats": ["score"]},
        {"kind": "classify", "label": "score", "problem_type": "regression"},
        measure_values,
    ),
    "tokens": Case(
        {"layout": "tagged", "fields": {"tokens": 30}, "labels": {"tags": TAGS}},
        {"kind": "tokens"},
        measure_entities,
        has_artifact_metrics=False,
    ),
    "similarity": Case(
        {**PAIR, "floats": ["score"]},
        {"kind": "similarity", "text_fields": ["text", "other"]},
        measure_similarity,
    ),
    "triplet": Case(
        {"fields": {"text": 16, "other": 16, "wrong": 16}},
        {"kind": "triplet", "anchor": "text", "positive": "other", "negative": "wrong"},
        measure_triplets,
    ),
    "contrastive": Case(
        PAIR, {"kind": "contrastive", "query": "text", "document": "other"}, measure_retrieval
    ),
    "distill": Case(
        {"fields": {"text": 16}, "vectors": ["vector"]},
        {"kind": "distill", "vector": "vector", "objective": "cosine"},
        measure_teacher,
    ),
    "rank": Case(
        {
            "layout": "groups",
            "group_by": "query",
            "fields": {"query": 8, "other": 12},
            "shared": ["query"],
            "floats": ["grade", "price"],
            "categories": ["brand"],
        },
        {
            "kind": "rank",
            "document": ["other"],
            "label": "grade",
            "numeric_features": ["price"],
            "categorical_features": ["brand"],
            "interactions": {"hidden": [8], "width": 4, "buckets": 20},
        },
        measure_ranking,
    ),
    "mlm": Case(
        {"layout": "packed", "length": LENGTH},
        {"kind": "mlm"},
        measure_masks,
        has_artifact_metrics=False,
    ),
    "clm": Case(
        {"layout": "packed", "length": LENGTH},
        {"kind": "clm"},
        measure_documents,
        has_artifact_metrics=False,
        model=DECODER,
    ),
    "sft": Case(
        {"layout": "chat", "length": 64},
        {"kind": "sft"},
        measure_answers,
        has_artifact_metrics=False,
        model=DECODER,
    ),
    "dpo": Case(
        {"layout": "preferences", "length": 64},
        {
            "kind": "dpo",
            "beta": text_oracles.BETA,
            "label_smoothing": text_oracles.SMOOTHING,
        },
        measure_preferences,
        has_artifact_metrics=False,
        model=DECODER,
    ),
}
CASES |= {
    f"{name}, two processes": replace(CASES[name], processes=2) for name in ("classify", "dpo")
}


@dataclass(frozen=True)
class Trained:
    """A run, the records that it holds out, and a folder for results."""

    case: Case
    records: Records
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def model(self) -> Path:
        return self.folder / "model-3"

    def read_steps(self) -> dict[int, Metrics]:
        """Return the metrics that the run logged, by step."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return {
            line["step"]: {
                name.removeprefix("heldout/"): line[name] for name in line if "heldout/" in name
            }
            for line in lines
            if "heldout/loss" in line
        }

    def evaluate(self, path: Path, *arguments: str) -> Metrics:
        """Return the metrics of the first model."""
        folder = self.folder / f"evaluation-{len(list(self.folder.iterdir()))}"
        options = [*arguments, *EXECUTION, "evaluate.baselines=false", "--to", str(folder)]
        options.append(f"execution.processes={self.case.processes}")
        assert main(["evaluate", str(path), *options]) == 0
        row, *_ = json.loads((folder / "evaluation.json").read_text())["rows"]
        del row["name"]
        metrics: Metrics = row
        return metrics

    def evaluate_export(self, step: int) -> Metrics:
        """Export the model of a step, and evaluate it outside of its run.

        Only a run has the start weights that rewards refer to.
        """
        folder = self.folder / f"model-{step}"
        if not folder.exists():
            options = ["--format", "hf", f"export.step={step}", "--to", str(folder)]
            assert main(["export", str(self.run), *options]) == 0
        models = {"exported": str(folder)}
        if self.case.task["kind"] == "dpo":
            models["run"] = str(self.run)
        run_file = self.folder / f"evaluation-{step}.json"
        tables = {"models": models, "data": {"path": str(self.folder / "data")}, "seed": SEED}
        run_file.write_text(json.dumps({**tables, "task": self.case.task}))
        return self.evaluate(run_file)

    def export_artifact(self) -> Path:
        """Return the folder of the artifact, which is written once."""
        folder = self.folder / "artifact"
        if not folder.exists():
            fp32 = (*EAGER, 'candidates.precisions=["fp32"]')
            assert main(["export", str(self.run), "--to", str(folder), *fp32]) == 0
        return folder

    def predict(self, *options: str) -> pa.Table:
        """Return the outputs for the held-out records."""
        folder = self.folder / f"outputs-{len(list(self.folder.iterdir()))}"
        paths = ["--source", str(self.folder / "valid.jsonl"), "--to", str(folder)]
        given = ["execution.executor=inline", "predict.batch_invariant=false"]
        given += ['output.keep_fields=["id"]', *options]
        assert main(["predict", str(self.folder / "artifact"), *paths, *given]) == 0
        table = read_table(folder)
        assert table["id"].to_pylist() == [record["id"] for record in self.records]
        return table


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.full) if case.processes > 1 else name
        for name, case in CASES.items()
    ],
    scope="module",
)
def run_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, case = tmp_path_factory.mktemp("agreement"), CASES[request.param]
    heldout = draw_records(23, 1)
    for name, records in (("train", draw_records(60, 0)), ("valid", heldout)):
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "template.jinja").write_text(text_oracles.TEMPLATE)
    is_chat = case.rows.get("layout") in ("chat", "preferences")
    template = {"chat_template": str(folder / "template.jinja")} if is_chat else {}
    sources = [{"kind": "jsonl", "files": [str(folder / f"{n}.jsonl")]} for n in ("train", "valid")]
    tables = merge(
        BASE,
        {
            "source": sources[0],
            "validation": {"source": sources[1], "near_duplicates": "keep"},
            "data": {"path": str(folder / "data")},
            "output": {"folder": str(folder / "run")},
            "rows": {**case.rows, **template},
            "task": case.task,
            "model": case.model,
            "execution": {"processes": case.processes},
        },
    )
    prepare_tables, train_tables = (
        {name: table for name, table in tables.items() if name in kind.model_fields}
        for kind in (prepare.PrepareSettings, TrainSettings)
    )
    prepare.run(build(prepare.PrepareSettings, prepare_tables))
    if case.task["kind"] == "dpo":
        text_oracles.save_start(folder / "start", folder / "data", case.model["config"])
        train_tables["model"] = {"path": str(folder / "start")}
    if case.processes > 1:
        (folder / "train.json").write_text(json.dumps(train_tables))
        assert main(["train", str(folder / "train.json")]) == 0
    else:
        attempt(build(TrainSettings, train_tables), World())
    return Trained(case, heldout, folder)


def check(actual: Metrics, expected: Metrics) -> None:
    assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_every_evaluation_of_a_model_has_the_metrics_of_its_step(run_case: Trained) -> None:
    steps = run_case.read_steps()
    assert list(steps) == list(range(STEPS + 1))
    last = steps[STEPS]
    result = json.loads((run_case.run / "result.json").read_text())
    check({f"heldout/{name}": value for name, value in last.items()}, result["metrics"])
    check(run_case.evaluate(run_case.run), last)
    check(run_case.evaluate(run_case.run, "--source", str(run_case.folder / "valid.jsonl")), last)
    for step in (STEPS - 1, STEPS):
        check(run_case.evaluate_export(step), steps[step])
    if run_case.case.has_artifact_metrics:
        check(run_case.evaluate(run_case.export_artifact()), last)


def test_the_metrics_of_the_outputs_equal_those_of_the_run(run_case: Trained) -> None:
    if run_case.case.has_outputs:
        run_case.export_artifact()
    else:
        run_case.evaluate_export(STEPS)
    expected = run_case.case.oracle(run_case)
    last = run_case.read_steps()[STEPS]
    assert len(expected) > 1
    check({name: last[name] for name in expected}, expected)
    assert all(map(math.isfinite, last.values()))
