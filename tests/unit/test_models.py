"""Packed rows, attention masks, and models that leave Regauge for plain transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from distributed import datasets, jobs
from distributed.runs import BERT, GPT, LLAMA
from regauge.data.batches import positions
from regauge.errors import SettingsError
from regauge.models import hub
from regauge.models.architectures import blocks, build
from regauge.models.attention_masks import Reading
from regauge.models.modules import CausalLanguageModel, Encoder, MaskedLanguageModel, TextModule
from regauge.models.settings import Model

VOCABULARY = 300
WINDOW = 4
SMALL = {**LLAMA["config"], "max_position_embeddings": 64}
MODERN = {"architecture": "modernbert", "config": {**BERT["config"], "local_attention": 2 * WINDOW}}
MISTRAL = {"architecture": "mistral", "config": {**SMALL, "sliding_window": WINDOW}}
ROBERTA = {"architecture": "roberta", "config": {**BERT["config"], "max_position_embeddings": 40}}
MPNET = {"architecture": "mpnet", "config": {**BERT["config"], "max_position_embeddings": 40}}
QWEN = {
    "architecture": "qwen3",
    "config": {
        **SMALL,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}
LENGTHS = (9, 5, 13)
ROW = 32


def batch(segments: list[list[int]], tokens: list[list[int]]) -> dict[str, Tensor]:
    places = positions(np.array(segments))
    return {
        "tokens": torch.tensor(tokens),
        "segments": torch.tensor(segments),
        "positions": torch.from_numpy(places),
        "keys": torch.zeros(len(tokens), dtype=torch.int32),
    }


def module(model: dict[str, Any], attention: str) -> TextModule:
    settings = Model(**{**model, "dropout": 0.0, "attention": attention})
    return TextModule(*build(settings, "none", VOCABULARY, 0)).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "chunked"])
@pytest.mark.parametrize(
    "model",
    [BERT, LLAMA, GPT, MODERN, MISTRAL, QWEN, ROBERTA, MPNET],
    ids=lambda model: model["architecture"],
)
def test_a_document_in_a_packed_row_is_as_it_is_alone(
    model: dict[str, Any], attention: str
) -> None:
    if model["architecture"] == "mpnet":
        attention = "eager"
    draw = np.random.default_rng(0)
    documents = [draw.integers(5, VOCABULARY, length).tolist() for length in LENGTHS]
    padding = ROW - sum(LENGTHS)
    segments = [n for n, length in enumerate(LENGTHS, start=1) for _ in range(length)]
    tokens = [token for document in documents for token in document]
    text = module(model, attention)
    row = batch([segments + [0] * padding], [tokens + [0] * padding])
    with torch.no_grad():
        packed = text.hidden(row, packed=True)[0]
        begin = 0
        for document in documents:
            one = text.model.base_model(torch.tensor([document])).last_hidden_state[0]
            assert one.abs().max() > 0.1
            torch.testing.assert_close(
                packed[begin : begin + len(document)], one, rtol=1e-5, atol=1e-5
            )
            begin += len(document)


def test_tokens_see_their_own_document_and_none_after_them() -> None:
    segments = torch.tensor([[1, 1, 2, 0]])
    lowest = torch.finfo(torch.float32).min
    both = Reading().bias(segments, torch.float32, None, packed=True)
    assert both.shape == (1, 1, 4, 4)
    assert set(both.unique().tolist()) == {0.0, lowest}
    seen = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert (both[0, 0] == 0).int().tolist() == seen
    causal = Reading(causal=True).bias(segments, torch.bfloat16, None, packed=True)
    assert causal.dtype == torch.bfloat16
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert (causal[0, 0] == 0).int().tolist() == seen
    padded = Reading().bias(segments, torch.float32, None, packed=False)
    assert padded.shape == (1, 1, 1, 4)
    assert (padded[0, 0] == 0).int().tolist() == [[1, 1, 1, 0]]


def test_tokens_see_no_farther_than_their_window() -> None:
    segments = torch.ones(1, 4, dtype=torch.int32)
    causal = Reading(causal=True).bias(segments, torch.float32, 2, packed=True)
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert (causal[0, 0] == 0).int().tolist() == seen
    both = Reading().bias(segments, torch.float32, 1, packed=True)
    seen = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert (both[0, 0] == 0).int().tolist() == seen


@pytest.mark.parametrize(
    ("architecture", "attention", "said"),
    [
        ("deberta-v2", "eager", "does not keep the texts of a row apart"),
        ("llama4_text", "sdpa", "layers of kind 'chunked_attention'"),
        ("mpnet", "sdpa", "no attention of kind 'sdpa'; set model.attention = \"eager\""),
    ],
)
def test_an_architecture_whose_masks_would_be_misread_is_refused(
    architecture: str, attention: Any, said: str
) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    own = Model(architecture=architecture, config=shape, attention=attention)
    with pytest.raises(SettingsError, match=said):
        TextModule(*build(own, "none", VOCABULARY, 0))


def test_a_causal_loss_needs_a_causal_architecture() -> None:
    own = {**BERT, "config": {**BERT["config"], "is_decoder": False}}
    with pytest.raises(SettingsError, match="'bert' sees the tokens that it should predict"):
        CausalLanguageModel(*build(Model(**own), "causal", VOCABULARY, 0))


def test_positions_before_the_first_leave_less_room_for_text() -> None:
    roberta = TextModule(*build(Model(**ROBERTA), "none", VOCABULARY, 0, pad=3))
    assert roberta.reading.first_position == 4
    assert roberta.longest == 36


def test_padding_and_its_length_do_not_change_a_vector() -> None:
    encoder = Encoder(*build(Model(**{**BERT, "dropout": 0.0}), "none", VOCABULARY, 0)).eval()
    tokens = [[7, 8, 9, 10, 0, 0], [11, 12, 0, 0, 0, 0]]
    segments = [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    wide = encoder(batch(segments, tokens))["vectors"]
    assert torch.allclose(wide.norm(dim=-1), torch.ones(2))
    narrow = encoder(batch([row[:4] for row in segments], [row[:4] for row in tokens]))["vectors"]
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-5)
    inner = encoder.model(torch.tensor([tokens[1][:2]])).last_hidden_state.mean(1)
    torch.testing.assert_close(wide[1:], torch.nn.functional.normalize(inner), rtol=1e-5, atol=1e-5)


def test_losses_in_chunks_are_the_losses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLanguageModel(*build(Model(**LLAMA), "causal", VOCABULARY, 0)).eval()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (3, ROW), generator=draw).tolist()
    row = batch([[1] * ROW] * 3, tokens)
    row["labels"] = torch.tensor(tokens).roll(-1, 1)
    whole = model(row)["nll"]
    monkeypatch.setattr("regauge.models.losses.CHUNK_TOKENS", 7)
    assert whole.shape == (3, ROW)
    torch.testing.assert_close(model(row)["nll"], whole, rtol=1e-6, atol=1e-6)
    logits = model.model(torch.tensor(tokens)).logits
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), row["labels"], reduction="none"
    )
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "head", "kind"),
    [(BERT, "masked", MaskedLanguageModel), (LLAMA, "causal", CausalLanguageModel)],
    ids=["bert", "llama"],
)
def test_a_forward_and_a_backward_pass_are_those_of_transformers_own_class(
    model: dict[str, Any],
    head: Any,
    kind: type[TextModule],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regauge.models.losses.CHUNK_TOKENS", 7)
    own = kind(*build(Model(**{**model, "dropout": 0.0}), head, VOCABULARY, 0))
    plain = copy.deepcopy(own.model)
    tokens = torch.randint(5, VOCABULARY, (3, ROW), generator=torch.Generator().manual_seed(0))
    row = batch([[1] * ROW] * 3, tokens.tolist())
    places = torch.arange(0, ROW - 1, 3).expand(3, -1)
    wanted = tokens.gather(1, places + (head == "causal"))
    weights = torch.rand(wanted.shape)
    if head == "masked":
        row |= {"masked": places, "labels": wanted, "weights": weights}
    else:
        row["labels"] = tokens.roll(-1, 1)
        row["weights"] = torch.zeros(tokens.shape).scatter(1, places, weights)
    found = own(row)
    logits = plain(tokens).logits.gather(1, places[..., None].expand(-1, -1, VOCABULARY))
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
    loss = (expected * weights).sum()
    assert found.keys() == {"loss"}
    torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=1e-6)
    (found["loss"] * 0.3).backward()
    (loss * 0.3).backward()
    judged = own.eval()(row)
    assert judged.keys() == {"nll", "correct", "predicted"}
    each = judged["nll"] if head == "masked" else judged["nll"].gather(1, places)
    torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(plain.named_parameters())
    for name, value in own.model.named_parameters():
        assert (value.grad is None) == (theirs[name].grad is None), name
        if value.grad is not None:
            torch.testing.assert_close(value.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_equal_settings_give_equal_weights_and_another_seed_others() -> None:
    one, same, other = (build(Model(**BERT), "none", VOCABULARY, seed)[0] for seed in (3, 3, 4))
    name = "encoder.layer.0.output.dense.weight"
    assert one.get_parameter(name).equal(same.get_parameter(name))
    assert not one.get_parameter(name).equal(other.get_parameter(name))
    assert len(blocks(one)) == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architecture": "bret"}, "no architecture 'bret'; did you mean 'bert'"),
        ({"config": {"hiden_size": 4}}, "model.config.hiden_size'; did you mean 'hidden_size'"),
        ({"config": {"vocab_size": 100}}, "300 entries, the model's vocabulary 100"),
        ({**LLAMA, "dropout": 0.1}, "'llama' has no hidden dropout; set model.dropout = 0"),
        ({"architecture": None, "config": {}, "path": "/nowhere"}, "no model at '/nowhere'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        build(Model(**{**BERT, **changes}), "none", VOCABULARY, 0)


CLASSES = {
    "mlm": transformers.AutoModelForMaskedLM,
    "clm": transformers.AutoModelForCausalLM,
    "contrastive": transformers.AutoModel,
}


@pytest.mark.parametrize("task", list(CLASSES))
def test_the_final_model_is_the_same_in_plain_transformers(task: str, tmp_path: Path) -> None:
    data = datasets.pairs if task == "contrastive" else datasets.packed
    path, folder = data(tmp_path / "data", 8, 4), tmp_path / "run"
    found = jobs.final_outputs(str(folder), str(path), task, {"stop": {"steps": 2}})
    plain = CLASSES[task].from_pretrained(folder / "model").eval()
    with torch.no_grad():
        output = plain(found["tokens"].long())
    whole = output.last_hidden_state if task == "contrastive" else output.logits
    torch.testing.assert_close(whole, found["output"], rtol=1e-5, atol=1e-5)
    assert whole.std() > 0.01


@pytest.mark.parametrize("architecture", ["trocr", "encoder-decoder"])
def test_an_architecture_that_has_no_plain_model_is_answered(architecture: str) -> None:
    with pytest.raises(SettingsError, match=f"no model of '{architecture}': "):
        build(Model(architecture=architecture), "none", VOCABULARY, 0)


def test_a_hub_is_asked_once_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answered(name: str, **_: Any) -> str:
        asked.append(name)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answered)
    monkeypatch.chdir(tmp_path)
    assert hub.at("team/once") == hub.at("team/once") == tmp_path
    assert asked == ["team/once"]
