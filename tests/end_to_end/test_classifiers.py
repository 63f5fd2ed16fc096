"""Published classifiers of texts and pairs: outputs equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import regauge
from distributed.runs import cases
from end_to_end.predicting import EAGER, random_texts, read_table, train_model
from regauge.cli import main
from regauge.commands import import_
from regauge.inference.export.export_settings import TextSettings
from regauge.inference.export.programs import build_folder_spec

VOCABULARY, LONGEST = 200, 24
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
WORDS = {word: at for at, word in enumerate([*SPECIAL, *(f"w{at}" for at in range(4, VOCABULARY))])}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 64}


def bert() -> PreTrainedModel:
    config = BertConfig(**SIZES, **HEADS, max_position_embeddings=LONGEST, num_labels=1)
    return BertForSequenceClassification(config)


def roberta() -> PreTrainedModel:
    more = {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1}
    names = {0: "apart", 1: "neutral", 2: "follows"}
    return RobertaForSequenceClassification(RobertaConfig(**SIZES, **HEADS, **more, id2label=names))


def distilbert() -> PreTrainedModel:
    sizes: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    more = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "pad_token_id": 1}
    return DistilBertForSequenceClassification(DistilBertConfig(**sizes, **more))


def llama(pad: int | None = 1) -> PreTrainedModel:
    sizes = {**SIZES, **HEADS, "pad_token_id": pad, "num_labels": 3}
    return LlamaForSequenceClassification(LlamaConfig(**sizes, max_position_embeddings=LONGEST))


def llama_without_padding() -> PreTrainedModel:
    return llama(None)


def folder_of(model: PreTrainedModel, forms: tuple[str, str], folder: Path) -> Path:
    """Write a model with random weights and a word tokenizer in transformers format.

    `forms` are the templates of a text and of a pair.
    """
    words = Tokenizer(models.WordLevel(WORDS, unk_token=SPECIAL[-1]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        *forms, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    roles = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>"}
    tokens = {f"{role}_token": token for role, token in roles.items()}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=LONGEST, model_input_names=names, **tokens
    )
    for value in model.parameters():
        if value.dim() > 1:
            torch.nn.init.normal_(value, std=0.2)  # so that outputs differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores(folder: Path, *columns: list[str]) -> np.ndarray:
    """Return the logits of transformers for each text or pair alone, [records, labels]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    typed = getattr(model.config, "type_vocab_size", 0) > 1
    logits = []
    for record in zip(*columns, strict=True):
        rows = ([text] for text in record)  # an empty second text in one row would be ignored
        inputs = tokenizer(*rows, truncation=True, max_length=LONGEST, return_tensors="pt")
        if not typed:
            inputs.pop("token_type_ids")
        with torch.no_grad():
            logits.append(model(**inputs).logits[0].numpy())
    return np.stack(logits)


CLOSED, OPEN = "<s> $A </s>", "<s> $A"
KINDS = {
    "bert": (bert, (CLOSED, "<s> $A </s> $B:1 </s>:1")),
    "roberta": (roberta, (CLOSED, "<s> $A </s> </s> $B </s>")),
    "distilbert": (distilbert, (CLOSED, "<s> $A </s> $B </s>")),
    "llama": (llama, (OPEN, "<s> $A <s> $B")),
    "llama without padding": (llama_without_padding, (OPEN, "<s> $A <s> $B")),
}


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make, forms = KINDS[request.param]
    torch.manual_seed(0)
    return folder_of(make(), forms, tmp_path / "model")


@pytest.mark.parametrize(
    "model",
    cases([(kind,) for kind in KINDS], [("roberta",), ("llama without padding",)]),
    indirect=True,
)
def test_texts_are_tokenized_as_in_transformers(model: Path, tmp_path: Path) -> None:
    some = [*random_texts(40, seed=3), "w9 </s> w8", "w4 w5 <s>", "w7 " * 60]
    if json.loads((model / "config.json").read_text())["model_type"] != "roberta":
        some.append("w9 <pad> w8 <pad>")  # RoBERTa counts positions without padding
    options = ["--model", str(model), "--to", str(tmp_path / "artifact"), *EAGER]
    assert main(["export", *options, 'candidates.precisions=["fp32"]']) == 0
    outputs = regauge.load(tmp_path / "artifact", threads=1).predict(some)
    check_close(outputs, scores(model, some))
    alone = regauge.load(model, threads=1).predict(some[-2])
    check_close(alone, scores(model, some[-2:-1]))


def check_close(outputs: dict[str, Any], expected: np.ndarray) -> None:
    """Compare outputs with the functions that transformers' pipeline applies to the logits."""
    if expected.shape[1] == 1:
        np.testing.assert_allclose(outputs["value"], 1 / (1 + np.exp(-expected[:, 0])), atol=2e-5)
        return
    powers = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    np.testing.assert_allclose(outputs["probabilities"], powers, atol=2e-5)
    assert len(expected) == 1 or np.ptp(powers, axis=0).min() > 0.01


@pytest.mark.parametrize(
    "model",
    cases([(kind,) for kind in KINDS], [("bert",), ("distilbert",), ("llama",)]),
    indirect=True,
)
def test_pairs_are_tokenized_as_in_transformers(model: Path, tmp_path: Path) -> None:
    firsts, seconds = random_texts(60, seed=1), [*random_texts(57, seed=2), "", "w9 </s> w8", "w5"]
    firsts[-1] = ""
    assert max(len(first.split()) for first in firsts) > LONGEST - 3
    both = [len(f"{first} {second}".split()) for first, second in zip(firsts, seconds, strict=True)]
    assert sum(count > LONGEST for count in both) > 10
    options = ["--model", str(model), "--to", str(tmp_path / "artifact"), *EAGER]
    more = ['candidates.precisions=["fp32"]', 'text.pair_fields=["query","document"]']
    assert main(["export", *options, *more]) == 0
    expected = scores(model, firsts, seconds)
    outputs = regauge.load(tmp_path / "artifact", threads=1).predict(firsts, seconds)
    check_close(outputs, expected)
    records = (
        {"id": at, "document": second, "query": first}
        for at, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    )
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    paths = ["--source", str(source), "--to", str(tmp_path / "out")]
    inline = "execution.executor=inline"
    assert main(["predict", str(tmp_path / "artifact"), *paths, inline]) == 0
    written = read_table(tmp_path / "out")
    assert written["id"].to_pylist() == list(range(60))
    for name in ("value", "probabilities", "predicted_label"):
        if name in outputs:
            assert np.array_equal(written[name].to_pylist(), outputs[name])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make, forms = KINDS["bert"]
    return folder_of(make(), forms, tmp_path / "bert")


@pytest.mark.parametrize("key", ["text.pooling=['cls']", "text.normalize=true"])
def test_a_classifier_has_no_vector_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    options = ["--model", str(folder), "--to", str(tmp_path / "artifact"), *EAGER, key]
    assert main(["export", *options]) == 2
    assert (
        "is a classifier, which does not return vectors; remove text.pool"
        in capsys.readouterr().err
    )


def test_a_cross_encoder_folder_limits_the_length_of_pairs(folder: Path, tmp_path: Path) -> None:
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    settings = TextSettings(pair_fields=("query", "document"))
    spec = build_folder_spec(folder, settings)
    tokenization = spec.entry.required_tokenization
    assert spec.entry.output_kind == "values"
    assert (tokenization.max_length, tokenization.convention) == (12, "transformers")
    command = ["import", str(folder), "--to", str(tmp_path / "imported")]
    assert main(command) == 0
    assert "error" in import_.main(folder, to=tmp_path / "imported", dry_run=True)
    assert build_folder_spec(tmp_path / "imported", settings).entry.output_kind == "values"


def test_a_tokenizer_limits_the_length_of_texts(folder: Path) -> None:
    table = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**table, "model_max_length": 9}))
    assert regauge.load(folder).program.tokenization.max_length == 9


def test_truncated_weights_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:5000])
    options = ["--model", str(folder), "--to", str(tmp_path / "artifact"), *EAGER]
    assert main(["export", *options]) == 2
    message = capsys.readouterr().err
    assert f"{folder / 'model.safetensors'} cannot be read: " in message
    assert "copy it again" in message


def test_only_the_folder_of_a_classifier_reads_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_model(tmp_path)
    for origin in ([str(run)], ["--model", str(run / "model")]):
        options = [*origin, "--to", str(tmp_path / "artifact"), *EAGER]
        assert main(["export", *options, 'text.pair_fields=["a","b"]']) == 2
        error = capsys.readouterr().err
        assert "text.pair_fields is only for the folder of a classifier, without a run" in error
    assert main(["export", *options, 'text.pair_fields=["a","a"]']) == 2
    assert "pair_fields names 'a' twice" in capsys.readouterr().err
