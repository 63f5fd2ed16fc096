"""Exported folders behave in transformers and sentence-transformers as `predict` does.

The tests train tiny models on the tokenizers of every family, and compare vectors, classes and the
ends of generated texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import regauge
from distributed import datasets
from distributed.runs import BERT, FULL, LLAMA
from libraries import import_sentence_transformers, record_warnings
from regauge import commands, config
from regauge.commands import prepare
from regauge.config import build, merge
from regauge.data.dataset import Dataset, read_manifest
from regauge.data.loader import CollatorConfig
from regauge.data.tokenizer import LoadedTokenizer
from regauge.inference.export.buckets import BucketBatch
from regauge.inference.export.export_settings import TextSettings
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.export.programs import build_folder_spec
from regauge.models.weights import read_weights
from regauge.system import processes
from regauge.training.checkpoint.export_weights import export_model
from regauge.training.run import attempt
from regauge.training.settings import TrainSettings
from tokenizer_families import FAMILIES, draw_texts, write_tokenizer

LENGTH = 24
MAX_NEW_TOKENS = 12
MIN_COSINE = 0.9999
SIZES = {"config": {"max_position_embeddings": 160, "initializer_range": 0.2}}
"""Weights so large that the outputs of two texts differ."""
MODELS = {"bert": merge(BERT, SIZES), "llama": merge(LLAMA, SIZES)}
TASKS: dict[str, dict[str, Any]] = {
    "contrastive": {"kind": "contrastive", "query": "first", "document": "second"},
    "classify": {"kind": "classify", "text_fields": ("first",), "label": "label", "classes": 2},
    "pairs": {
        "kind": "classify",
        "text_fields": ("first", "second"),
        "label": "label",
        "classes": 2,
    },
    "clm": {"kind": "clm"},
    "sft": {"kind": "sft"},
}
ROWS: dict[str, dict[str, Any]] = {
    "contrastive": {
        "layout": "fields",
        "fields": {"first": LENGTH, "second": LENGTH},
        "integers": ("label",),
    },
    "clm": {"layout": "packed", "text": "first", "length": 64},
    "sft": {"layout": "chat", "length": 128, "chat_template": "alpaca"},
}
ROWS |= {"classify": ROWS["contrastive"], "pairs": ROWS["contrastive"]}
NO_MARKUP = {"word level", "bert", "t5", "no unknown"}
"""Families whose vocabulary lacks the letters of `</s>`."""


def write_records(path: Path, count: int = 60) -> None:
    """Write records with two texts, a class, and a question with its answer."""
    firsts, seconds = draw_texts(count, seed=5, max_words=3), draw_texts(count, seed=6)
    lines = (
        {
            "first": first,
            "second": f"{first} {second}",
            "label": number % 2,
            "instruction": first,
            "output": first.split()[0],
        }
        for number, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def train(folder: Path, family: str, task: str, model: dict[str, Any], /, **changes: Any) -> Path:
    """Prepare a dataset with the tokenizer of a family, and train a model for a few steps."""
    tokenizer = changes.pop("tokenizer", None) or write_tokenizer(family, folder / "tokenizer")
    write_records(folder / "records.jsonl")
    tables = {
        "data": {"path": str(folder / "data")},
        "source": {"kind": "jsonl", "files": [str(folder / "records.jsonl")]},
        "tokenizer": {"path": str(tokenizer)},
        "rows": ROWS[task],
        "split": {"heldout_fraction": 0.1, "similarity": 1.0},
        "prepare": {"processes": 1},
    }
    prepare.run(build(prepare.PrepareSettings, tables))
    run = {
        "data": {"path": str(folder / "data"), "workers": 0},
        "task": TASKS[task],
        "model": model,
        "output": {"folder": str(folder / "run"), "trackers": ()},
        "batch": {"rows": 8, "microbatch_rows": 8},
        "optimizer": {"learning_rate": 0.01},
        "execution": {"precision": "fp32", "threads": 1},
        "accelerator": "cpu",
        "stop": {"steps": 3},
    }
    attempt(build(TrainSettings, merge(run, changes)), processes.World())
    return folder / "run"


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of vectors, [texts]."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(1) / lengths)


def compute_outputs(run: Path, *columns: list[str]) -> list[torch.Tensor]:
    """Return the outputs of the exported program for each record alone."""
    settings = build(TrainSettings, config.read(run / "run.json"), commands.table_names())
    ((_, _, task, data, _),) = settings.task_configs
    fields = task.input_spec(read_manifest(Path(data.path)))
    options = TextSettings(max_new_tokens=MAX_NEW_TOKENS)
    spec = build_folder_spec(run / "model", options, fields)
    preprocessor = Preprocessor(run / "model", spec.entry.required_tokenization, spec.entry.fields)
    records = preprocessor.encode_records(columns).records
    program: Any = spec.program
    with torch.no_grad():
        return [
            program(*map(torch.from_numpy, records.build_inputs(batch)))[0]
            for batch in (
                BucketBatch(int(length), 1, np.array([number]))
                for number, length in enumerate(records.lengths)
            )
        ]


@pytest.mark.parametrize(
    ("architecture", "pooling"), [("llama", "lasttoken"), pytest.param("bert", "cls", marks=FULL)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_sentence_transformers_gives_the_vectors_of_predict(
    family: str, architecture: str, pooling: str, tmp_path: Path
) -> None:
    library = import_sentence_transformers()
    task = {**TASKS["contrastive"], "pooling": (pooling,)}
    run = train(tmp_path, family, "contrastive", MODELS[architecture], task=task)
    target = export_model(run / "model", tmp_path / "exported", "sentence-transformers")
    texts = draw_texts(20, seed=8, max_words=40)
    if family not in NO_MARKUP:
        texts += ["", "river </s> [SEP] <s> stone"]
    with record_warnings() as messages:
        encoder = library.SentenceTransformer(str(target), device="cpu")
    assert messages == []
    vectors = encoder.encode(texts, batch_size=7, show_progress_bar=False)
    expected = regauge.load(run / "model", threads=1).encode(texts)
    assert cosines(vectors, expected).min() > MIN_COSINE
    assert np.median(cosines(vectors, np.roll(vectors, 1, 0))) < MIN_COSINE
    assert encoder.max_seq_length == LENGTH


@pytest.mark.parametrize("architecture", ["bert", pytest.param("llama", marks=FULL)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_classes_of_predict(
    family: str, architecture: str, tmp_path: Path
) -> None:
    run = train(tmp_path, family, "pairs", MODELS[architecture])
    target = export_model(run / "model", tmp_path / "exported", "hf")
    firsts, seconds = draw_texts(20, seed=8, max_words=3), draw_texts(20, seed=9, max_words=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    with record_warnings() as messages:
        loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(target).eval()
        inputs = tokenizer(firsts, seconds, truncation=True, padding=True, return_tensors="pt")
    assert messages == []
    with torch.no_grad():
        logits = loaded(**inputs).logits
    expected = torch.stack(compute_outputs(run, firsts, seconds))
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert expected.std(0).min() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "no pad", "bos only"])
def test_training_scores_the_token_that_transformers_scores(family: str, tmp_path: Path) -> None:
    run = train(tmp_path, family, "classify", MODELS["llama"])
    settings = build(TrainSettings, config.read(run / "run.json"), commands.table_names())
    data = Dataset(tmp_path / "data")
    task: Any = settings.task_configs[0].task
    module = task.build_module(settings.model, data.manifest, 0).eval()
    weights = read_weights(run / "model")
    module.model.load_state_dict(weights, strict=True)
    loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model")
    pad_id = data.manifest.tokenizer.pad_token_id
    facts = CollatorConfig(data.manifest.tokenizer.vocab_size, pad_id, None, ())
    batch = datasets.read_first_batch(task, data, facts)
    with torch.no_grad():
        mask = (batch["segments"] > 0).long()
        expected = loaded.eval()(input_ids=batch["tokens"].long(), attention_mask=mask).logits
        scores = module(batch)["scores"]
    count = int(batch["real"].sum())
    torch.testing.assert_close(scores[:count], expected[:count], rtol=0, atol=2e-5)


@pytest.mark.parametrize("task", [pytest.param("clm", marks=FULL), "sft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_generates_the_texts_of_predict(
    family: str, task: str, tmp_path: Path
) -> None:
    if task == "sft" and family == "bos only":
        pytest.skip("nothing can end an answer")
    run = train(tmp_path, family, task, MODELS["llama"], stop={"steps": 40})
    target = export_model(run / "model", tmp_path / "exported", "hf")
    end = LoadedTokenizer(tmp_path / "data" / "tokenizer").suffix[-1:].tolist()
    check_token_ids(target, end)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    with record_warnings() as messages:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    assert messages == []
    prompts = draw_texts(8, seed=9, max_words=3)
    if task == "sft":
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": text}] for text in prompts],
            add_generation_prompt=True,
            return_dict=True,
            padding=True,
            return_tensors="pt",
        )
    else:
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    rows = loaded.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    answers = rows[:, inputs["input_ids"].shape[1] :].tolist()
    for answer, output in zip(answers, compute_outputs(run, prompts), strict=True):
        expected = [token for token in output.tolist() if token >= 0]
        assert answer[: len(expected)] == expected
        assert answer[len(expected) :][:1] == (end if len(expected) < MAX_NEW_TOKENS else [])
    if task == "sft":
        assert any(set(answer) & set(end) for answer in answers), "no answer ends"


def check_token_ids(folder: Path, end: list[int]) -> None:
    """Check that every file of a causal model's folder names the same tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    documents = [
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("config.json", "generation_config.json")
    ]
    for document in documents:
        assert document["eos_token_id"] == (end[0] if end else None)
        assert document["pad_token_id"] == tokenizer.pad_token_id
        bos = tokenizer.bos_token_id
        assert document["bos_token_id"] == (tokenizer.cls_token_id if bos is None else bos)
    vocab_size = documents[0]["vocab_size"]
    assert all(token_id < vocab_size for token_id in tokenizer.get_vocab().values())
