"""Packed rows, attention masks, losses, and final models in plain transformers."""

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
from regauge.data.batches import build_position_ids
from regauge.models.architectures import build_model, find_blocks
from regauge.models.attention_masks import AttentionSpec
from regauge.models.modules import CausalLanguageModel, Encoder, MaskedLanguageModel, TextModule
from regauge.models.settings import Model
from regauge.system import hub
from regauge.system.errors import SettingsError

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
    position_ids = build_position_ids(np.array(segments))
    return {
        "tokens": torch.tensor(tokens),
        "segments": torch.tensor(segments),
        "positions": torch.from_numpy(position_ids),
        "keys": torch.zeros(len(tokens), dtype=torch.int32),
    }


def module(model: dict[str, Any], attention: str) -> TextModule:
    settings = Model(**{**model, "dropout": 0.0, "attention": attention})
    return TextModule(*build_model(settings, "none", VOCABULARY, 0)).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "chunked"])
@pytest.mark.parametrize(
    "model",
    [BERT, LLAMA, GPT, MODERN, MISTRAL, QWEN, ROBERTA, MPNET],
    ids=lambda model: model["architecture"],
)
def test_a_packed_document_has_the_same_hidden_states_as_alone(
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
        packed = text.hidden_states(row, packed=True)[0]
        begin = 0
        for document in documents:
            one = text.model.base_model(torch.tensor([document])).last_hidden_state[0]
            assert one.abs().max() > 0.1
            torch.testing.assert_close(
                packed[begin : begin + len(document)], one, rtol=1e-5, atol=1e-5
            )
            begin += len(document)


def test_masks_isolate_documents_and_are_causal() -> None:
    segments = torch.tensor([[1, 1, 2, 0]])
    lowest = torch.finfo(torch.float32).min
    bidirectional = AttentionSpec().build_bias(segments, torch.float32, None, packed=True)
    assert bidirectional.shape == (1, 1, 4, 4)
    assert set(bidirectional.unique().tolist()) == {0.0, lowest}
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert (bidirectional[0, 0] == 0).int().tolist() == expected
    causal = AttentionSpec(is_causal=True).build_bias(segments, torch.bfloat16, None, packed=True)
    assert causal.dtype == torch.bfloat16
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert (causal[0, 0] == 0).int().tolist() == expected
    padded = AttentionSpec().build_bias(segments, torch.float32, None, packed=False)
    assert padded.shape == (1, 1, 1, 4)
    assert (padded[0, 0] == 0).int().tolist() == [[1, 1, 1, 0]]


def test_masks_have_a_sliding_window() -> None:
    segments = torch.ones(1, 4, dtype=torch.int32)
    causal = AttentionSpec(is_causal=True).build_bias(segments, torch.float32, 2, packed=True)
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert (causal[0, 0] == 0).int().tolist() == expected
    bidirectional = AttentionSpec().build_bias(segments, torch.float32, 1, packed=True)
    expected = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert (bidirectional[0, 0] == 0).int().tolist() == expected


@pytest.mark.parametrize(
    ("architecture", "attention", "message"),
    [
        ("deberta-v2", "eager", "does not isolate the texts of a packed row"),
        ("llama4_text", "sdpa", "unsupported layers of type 'chunked_attention'"),
        ("mpnet", "sdpa", "does not support attention 'sdpa'; set model.attention = \"eager\""),
    ],
)
def test_an_architecture_with_unsupported_masks_is_refused(
    architecture: str, attention: Any, message: str
) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    settings = Model(architecture=architecture, config=shape, attention=attention)
    with pytest.raises(SettingsError, match=message):
        TextModule(*build_model(settings, "none", VOCABULARY, 0))


def test_a_causal_loss_needs_a_causal_architecture() -> None:
    fields = {**BERT, "config": {**BERT["config"], "is_decoder": False}}
    with pytest.raises(SettingsError, match="'bert' is not causal"):
        CausalLanguageModel(*build_model(Model(**fields), "causal", VOCABULARY, 0))


def test_the_first_position_reduces_the_maximum_text_length() -> None:
    roberta = TextModule(*build_model(Model(**ROBERTA), "none", VOCABULARY, 0, pad_id=3))
    assert roberta.attention_spec.first_position == 4
    assert roberta.max_tokens == 36


def test_padding_and_its_length_do_not_change_a_vector() -> None:
    encoder = Encoder(*build_model(Model(**{**BERT, "dropout": 0.0}), "none", VOCABULARY, 0)).eval()
    tokens = [[7, 8, 9, 10, 0, 0], [11, 12, 0, 0, 0, 0]]
    segments = [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    wide = encoder(batch(segments, tokens))["vectors"]
    assert torch.allclose(wide.norm(dim=-1), torch.ones(2))
    narrow = encoder(batch([row[:4] for row in segments], [row[:4] for row in tokens]))["vectors"]
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-5)
    inner = encoder.model(torch.tensor([tokens[1][:2]])).last_hidden_state.mean(1)
    torch.testing.assert_close(wide[1:], torch.nn.functional.normalize(inner), rtol=1e-5, atol=1e-5)


def test_chunked_losses_equal_unchunked_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLanguageModel(*build_model(Model(**LLAMA), "causal", VOCABULARY, 0)).eval()
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
def test_loss_and_gradients_equal_transformers(
    model: dict[str, Any],
    head: Any,
    kind: type[TextModule],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regauge.models.losses.CHUNK_TOKENS", 7)
    task_module = kind(*build_model(Model(**{**model, "dropout": 0.0}), head, VOCABULARY, 0))
    plain = copy.deepcopy(task_module.model)
    tokens = torch.randint(5, VOCABULARY, (3, ROW), generator=torch.Generator().manual_seed(0))
    row = batch([[1] * ROW] * 3, tokens.tolist())
    positions = torch.arange(0, ROW - 1, 3).expand(3, -1)
    labels = tokens.gather(1, positions + (head == "causal"))
    weights = torch.rand(labels.shape)
    if head == "masked":
        row |= {"masked": positions, "labels": labels, "weights": weights}
    else:
        row["labels"] = tokens.roll(-1, 1)
        row["weights"] = torch.zeros(tokens.shape).scatter(1, positions, weights)
    output = task_module(row)
    logits = plain(tokens).logits.gather(1, positions[..., None].expand(-1, -1, VOCABULARY))
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = (expected * weights).sum()
    assert output.keys() == {"loss"}
    torch.testing.assert_close(output["loss"], loss, rtol=1e-5, atol=1e-6)
    (output["loss"] * 0.3).backward()
    (loss * 0.3).backward()
    metrics = task_module.eval()(row)
    assert metrics.keys() == {"nll", "correct", "predicted"}
    metric_losses = metrics["nll"] if head == "masked" else metrics["nll"].gather(1, positions)
    torch.testing.assert_close(metric_losses, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(plain.named_parameters())
    for name, value in task_module.model.named_parameters():
        assert (value.grad is None) == (theirs[name].grad is None), name
        if value.grad is not None:
            torch.testing.assert_close(value.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_equal_settings_give_equal_weights_and_another_seed_different_ones() -> None:
    one, same, other = (
        build_model(Model(**BERT), "none", VOCABULARY, seed)[0] for seed in (3, 3, 4)
    )
    name = "encoder.layer.0.output.dense.weight"
    assert one.get_parameter(name).equal(same.get_parameter(name))
    assert not one.get_parameter(name).equal(other.get_parameter(name))
    assert len(find_blocks(one)) == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architecture": "bret"}, "no architecture 'bret'; did you mean 'bert'"),
        ({"config": {"hiden_size": 4}}, "model.config.hiden_size'; did you mean 'hidden_size'"),
        ({"config": {"vocab_size": 100}}, "300 entries, but the model's vocabulary has 100"),
        ({**LLAMA, "dropout": 0.1}, "'llama' has no hidden dropout; set model.dropout = 0"),
        ({"architecture": None, "config": {}, "path": "/nowhere"}, "no model at '/nowhere'"),
    ],
)
def test_invalid_model_settings_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        build_model(Model(**{**BERT, **changes}), "none", VOCABULARY, 0)


CLASSES = {
    "mlm": transformers.AutoModelForMaskedLM,
    "clm": transformers.AutoModelForCausalLM,
    "contrastive": transformers.AutoModel,
}


@pytest.mark.parametrize("task", list(CLASSES))
def test_the_final_model_is_the_same_in_plain_transformers(task: str, tmp_path: Path) -> None:
    data = datasets.write_pairs if task == "contrastive" else datasets.write_packed
    path, folder = data(tmp_path / "data", 8, 4), tmp_path / "run"
    saved = jobs.final_outputs(str(folder), str(path), task, {"stop": {"steps": 2}})
    plain = CLASSES[task].from_pretrained(folder / "model").eval()
    with torch.no_grad():
        plain_output = plain(saved["tokens"].long())
    expected = plain_output.last_hidden_state if task == "contrastive" else plain_output.logits
    torch.testing.assert_close(expected, saved["output"], rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.01


@pytest.mark.parametrize("architecture", ["trocr", "encoder-decoder"])
def test_an_architecture_without_a_plain_model_is_refused(architecture: str) -> None:
    with pytest.raises(SettingsError, match=f"cannot build '{architecture}': "):
        build_model(Model(architecture=architecture), "none", VOCABULARY, 0)


def test_a_model_folder_is_taken_before_its_subfolder(tmp_path: Path) -> None:
    """Only a folder that is not a model, such as a run, stands for the model inside."""
    inner = tmp_path / "model"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    assert hub.resolve_model(str(tmp_path)) == inner
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    assert hub.loadable_name(str(tmp_path)) == str(tmp_path)


def test_a_hub_model_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    def snapshot_download(name: str, **_: Any) -> str:
        requests.append(name)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model("team/once") == hub.resolve_model("team/once") == tmp_path
    assert requests == ["team/once"]
