"""A declaration of a folder is honoured as in the library that wrote it, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import reference
from peers.architectures import POSITIONS
from peers.comparison import check_equal, compute_in_batches
from peers.folders import save_classifier, save_encoder, save_generator, save_model
from peers.reference import NEW_TOKENS
from peers.texts import QUERIES, TEXTS
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

import regauge
from regauge.models.generation.text_generation import GenerationProgram
from regauge.system.errors import SettingsError

PAIRS = {"pair_fields": ("query", "document")}
MEAN = {"pooling": ["mean"]}
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
SHORT_TEXTS = [text for text in TEXTS if 0 < len(text.split()) < POSITIONS // 8]
WEIGHTS = "model.safetensors"
NAMES = (["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"])
"""Inputs that a tokenizer may return."""
RENAMES = {
    "gamma and beta": (
        ("LayerNorm.weight", "LayerNorm.gamma"),
        ("LayerNorm.bias", "LayerNorm.beta"),
    ),
    "DDP": (("", "module."),),
    "DDP in DDP": (("", "module.module."),),
    "torch.compile": (("", "_orig_mod."),),
    "DDP in torch.compile": (("", "_orig_mod.module."),),
    "torch.compile in DDP": (("", "module._orig_mod."),),
    "FSDP of layers": (("encoder.layer.", "encoder.layer._fsdp_wrapped_module."),),
    "activation checkpointing": ((".attention.", "._checkpoint_wrapped_module.attention."),),
}
"""Replacements in the names of weights, in order; an empty part stands for the start."""


def update_json(path: Path, **values: Any) -> None:
    """Set values of a JSON file; None removes a value. The file may not exist."""
    document = json.loads(path.read_text()) if path.exists() else {}
    document = {key: value for key, value in {**document, **values}.items() if value is not None}
    path.write_text(json.dumps(document))


def rename_weights(folder: Path, renames: tuple[tuple[str, str], ...]) -> None:
    """Rename the weights of a folder."""
    weights = load_file(folder / WEIGHTS)
    for old, new in renames:
        weights = {name.replace(old, new, 1): value for name, value in weights.items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("kind", RENAMES)
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_weights_with_old_or_wrapped_names_are_read(name: str, kind: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, name)
    expected = reference.encode(folder)
    before = set(load_file(folder / WEIGHTS))
    rename_weights(folder, RENAMES[kind])
    assert before != set(load_file(folder / WEIGHTS))
    check_equal(regauge.load(folder, threads=1).encode(TEXTS), expected)


def test_stored_buffers_are_ignored(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    expected = reference.encode(folder)
    weights = load_file(folder / WEIGHTS)
    positions = torch.arange(POSITIONS)[None]
    save_file({**weights, "embeddings.position_ids": positions}, folder / WEIGHTS, {"format": "pt"})
    check_equal(regauge.load(folder, threads=1).encode(TEXTS), expected)


@pytest.mark.parametrize("default", ["query", "passage", None])
def test_prompts_are_prepended(default: str | None, tmp_path: Path) -> None:
    prompts = {"query": "find the ", "passage": "text: "}
    folder = save_encoder(tmp_path, "bert", prompts=prompts, default_prompt_name=default)
    model = regauge.load(folder, threads=1)
    check_equal(model.encode(TEXTS), reference.encode(folder))
    expected = reference.encode(folder, prompt_name="passage")
    check_equal(model.encode(TEXTS, prompt="passage"), expected)


def test_an_undefined_default_prompt_is_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    update_json(folder / "config_sentence_transformers.json", default_prompt_name="find")
    with pytest.raises(SettingsError, match="has no prompt 'find', its default prompt; add it"):
        regauge.load(folder)


@pytest.mark.parametrize("options", [{}, {"is_normalized": False}, {"dense_width": 12}])
def test_vectors_are_truncated_to_the_declared_width(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path, "bert", truncate_dim=8, **options)
    expected = reference.encode(folder)
    assert expected.shape == (len(TEXTS), 8)
    check_equal(regauge.load(folder, threads=1).encode(TEXTS), expected)


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "albert", dense_width=12)
    expected = reference.encode(folder)
    assert expected.shape == (len(TEXTS), 12)
    check_equal(regauge.load(folder, threads=1).encode(TEXTS), expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transformer_task", "fill-mask"),
        ("module_output_name", "sentence_embedding"),
        ("modality_config", {"text": {"method": "forward", "method_output_name": "pooler_output"}}),
        ("processing_kwargs", {"text": {"max_length": 4}}),
        ("query_length", 8),
    ],
)
def test_other_hidden_states_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    update_json(folder / "sentence_bert_config.json", **{key: value})
    with pytest.raises(SettingsError, match=f"declares the unsupported .*{key}.*; choose a model"):
        regauge.load(folder)


@pytest.mark.parametrize("activation", [torch.nn.Sigmoid(), torch.nn.Identity(), None])
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_stored_activation_of_a_cross_encoder_is_applied(
    name: str, activation: torch.nn.Module | None, tmp_path: Path
) -> None:
    origin = save_classifier(tmp_path / "model", name, num_labels=1)
    peer = CrossEncoder(str(origin), device="cpu", activation_fn=activation, prompts={"q": "a "})
    peer.save_pretrained(str(tmp_path / "encoder"), create_model_card=False)
    expected = reference.score(tmp_path / "encoder", QUERIES, TEXTS)
    model = regauge.load(tmp_path / "encoder", threads=1, text=PAIRS)
    for size in (1, 16):
        values = compute_in_batches(
            lambda *pair: model.predict(*pair)["value"], size, QUERIES, TEXTS
        )
        check_equal(values[:, None], expected)


def test_the_default_activation_of_a_cross_encoder_is_applied(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "bert", num_labels=1)
    values = regauge.load(folder, threads=1, text=PAIRS).predict(QUERIES, TEXTS)["value"]
    pairs = list(zip(QUERIES, TEXTS, strict=True))
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    check_equal(values[:, None], np.asarray(expected)[:, None])
    assert 0 < values.min() < values.max() < 1


def test_a_prompt_of_a_cross_encoder_precedes_the_first_text(tmp_path: Path) -> None:
    origin = save_classifier(tmp_path / "model", "bert", num_labels=1)
    options: Any = {"prompts": {"q": "a lamp burns "}, "default_prompt_name": "q"}
    peer = CrossEncoder(str(origin), device="cpu", **options)
    peer.save_pretrained(str(tmp_path / "encoder"), create_model_card=False)
    model = regauge.load(tmp_path / "encoder", threads=1, text=PAIRS)
    values = model.predict(QUERIES, TEXTS)["value"]
    check_equal(values[:, None], reference.score(tmp_path / "encoder", QUERIES, TEXTS))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "sigmoid",
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "identity"),
        ({"sentence_transformers": {"version": "5.0.0"}}, "sigmoid"),
        ({}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
    ],
)
def test_old_files_of_a_cross_encoder_declare_the_activation(
    fields: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = save_classifier(tmp_path, "bert", num_labels=1, **fields)
    assert regauge.load(folder, threads=1, text=PAIRS).program.activation == expected


def test_another_activation_is_refused(tmp_path: Path) -> None:
    fields = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    folder = save_classifier(tmp_path, "bert", num_labels=1, **fields)
    with pytest.raises(SettingsError, match="declares the unsupported activation_fn 'torch"):
        regauge.load(folder)


def test_a_multi_label_classifier_has_independent_probabilities(tmp_path: Path) -> None:
    kind = "multi_label_classification"
    folder = save_classifier(tmp_path, "roberta", num_labels=3, problem_type=kind)
    logits = reference.compute_logits(folder, TEXTS)
    outputs = regauge.load(folder, threads=1).predict(TEXTS)
    check_equal(outputs["probabilities"], logits.sigmoid().numpy())


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": [5, *range(40, 90)]},
        {"repetition_penalty": 0.05},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 2},
        {"suppress_tokens": [*range(250, 300)]},
        {"min_length": 9, "eos_token_id": [*range(150)]},
        {"min_new_tokens": 8, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"return_dict_in_generate": True},
        {"num_return_sequences": 1, "max_length": 20},
    ],
    ids=min,
)
def test_the_generation_config_is_honoured(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_generator(tmp_path, "gpt2")
    update_json(folder / "generation_config.json", **options)
    tokens = reference.generate(folder, POSITIONS - NEW_TOKENS)
    expected = reference.decode(folder, tokens)
    model = regauge.load(folder, threads=1, text={"max_new_tokens": NEW_TOKENS})
    assert model.predict(TEXTS)["generated_text"] == expected
    assert [model.predict(text)["generated_text"][0] for text in TEXTS] == expected


def test_padding_counts_for_no_repetition_penalty(tmp_path: Path) -> None:
    """The padding token is the one that the model generates first."""
    folder = save_generator(tmp_path, "gpt2")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.repetition_penalty = 9.0
    prompt = torch.tensor([[5, 6, 7]])
    padding = int(model(prompt).logits[0, -1].argmax())
    program = GenerationProgram(model, NEW_TOKENS, padding, ())
    alone = program(prompt, torch.tensor([3]))
    padded = program(torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]]), torch.tensor([3, 5]))
    assert alone[0, 0] == padding
    assert torch.equal(padded[:1], alone)


def test_a_class_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bert", AutoModel, POSITIONS)
    update_json(folder / "config.json", architectures=["TheirBertModel"])
    with pytest.raises(SettingsError, match=r"declares the class 'TheirBertModel', which .*; name"):
        regauge.load(folder)


def test_an_unsupported_head_is_refused_unless_vectors_are_requested(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bert", AutoModelForQuestionAnswering, POSITIONS)
    with pytest.raises(SettingsError, match=r"a BertForQuestionAnswering, .*set text\.pooling"):
        regauge.load(folder)
    assert regauge.load(folder, threads=1, text=MEAN).encode(TEXTS).shape == (len(TEXTS), 32)


@pytest.mark.parametrize("prompt", ["", "find names: ", "Ünique:"])
def test_entities_of_a_token_classifier_equal_transformers(
    prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt has no characters of the text, and an entity in it is none of the text."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # a pipeline sets it
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: i for i, tag in enumerate(TAGS)}}
    folder = save_model(tmp_path, "bert", AutoModelForTokenClassification, POSITIONS, **names)
    tagger = pipeline("token-classification", str(folder), aggregation_strategy="first")
    size = len(prompt)
    first = {text: size + len(text) - len(text.lstrip()) for text in SHORT_TEXTS}
    expected = [
        [
            (entity["entity_group"], max(first[text], entity["start"]) - size, entity["end"] - size)
            for entity in tagger(prompt + text)
            if entity["end"] > size
        ]
        for text in SHORT_TEXTS
    ]
    model = regauge.load(folder, threads=1, text={"prompts": {"p": prompt}})
    tagged = model.predict(SHORT_TEXTS, prompt="p")["entities"]
    assert any(expected)
    assert [
        [(entity["label"], entity["start"], entity["end"]) for entity in entities]
        for entities in tagged
    ] == expected
    for text, entities in zip(SHORT_TEXTS, tagged, strict=True):
        assert all(entity["text"] == text[entity["start"] : entity["end"]] for entity in entities)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
    config.vocab_size = 300
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="is a T5Model, an encoder with a decoder; name"):
        regauge.load(tmp_path)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_token_types_are_passed_if_the_tokenizer_returns_them(
    name: str, names: list[str], tmp_path: Path
) -> None:
    """GPT-2 adds the embedding of token 0 for token types of 0."""
    folder = save_classifier(tmp_path, name, num_labels=1)
    update_json(folder / "tokenizer_config.json", model_input_names=names)
    columns = (QUERIES, TEXTS) if name == "bert" else (TEXTS,)
    expected = reference.compute_logits(folder, *columns).sigmoid().numpy()
    model = regauge.load(folder, threads=1, text=PAIRS if name == "bert" else None)
    check_equal(model.predict(*columns)["value"][:, None], expected)


@pytest.mark.parametrize("names", NAMES)
def test_generation_gets_token_types_if_the_tokenizer_returns_them(
    names: list[str], tmp_path: Path
) -> None:
    folder = save_generator(tmp_path, "gpt2")
    update_json(folder / "tokenizer_config.json", model_input_names=names)
    expected = reference.decode(folder, reference.generate(folder, POSITIONS - NEW_TOKENS))
    model = regauge.load(folder, threads=1, text={"max_new_tokens": NEW_TOKENS})
    assert model.predict(TEXTS)["generated_text"] == expected


def test_other_token_types_are_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "bert", num_labels=1)
    document = json.loads((folder / "tokenizer.json").read_text())
    for part in document["post_processor"]["single"]:
        next(iter(part.values()))["type_id"] = 1
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SettingsError, match=r"gives a text the token types \[1, 1, 1\]; choose"):
        regauge.load(folder)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_special_tokens_in_a_text(name: str, is_split: str, tmp_path: Path) -> None:
    """RoBERTa and MPNet give a literal padding token the position of padding."""
    folder = save_encoder(tmp_path, name)
    update_json(folder / "tokenizer_config.json", split_special_tokens=is_split)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"the {token} river {token}{token} of salt" for token in tokenizer.all_special_tokens]
    check_equal(regauge.load(folder, threads=1).encode(texts), reference.encode(folder, texts))


def test_added_tokens(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra", "quartz runs"])
    tokenizer.save_pretrained(folder)
    problem = "the tokenizer of '.*' has 148 entries, but its model has 146; copy"
    with pytest.raises(SettingsError, match=problem):
        regauge.load(folder)
    model: Any = AutoModel.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[-2:].normal_(std=0.2)
    model.save_pretrained(folder)
    texts = ["a zebra burns", "zebras Zebra", "the quartz runs", "salt"]
    check_equal(regauge.load(folder, threads=1).encode(texts), reference.encode(folder, texts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 77}, r"is \(146, 32\), but config.json implies \(77, 32\); name"),
        ({"hidden_size": 64}, r"is \(32,\), but config.json implies \(64,\); name"),
        ({"num_hidden_layers": 3}, r"lacks the weight 'encoder.layer.2.*; name a complete model"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"are quantized \(gptq\); name the model",
        ),
        ({"model_type": "none"}, "no model at .*; name"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path, "bert")
    update_json(folder / "config.json", **changes)
    with pytest.raises(SettingsError, match=message):
        regauge.load(folder)


def test_text_settings_are_for_folders(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bert", AutoModel, POSITIONS)
    with pytest.raises(SettingsError, match="unknown key 'poling'; did you mean 'pooling'"):
        regauge.load(folder, text={"poling": ["mean"]})
