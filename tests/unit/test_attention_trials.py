"""Attention properties are detected with any weights; an architecture without them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from regauge.models.attention_masks import AttentionSpec, detect_attention_spec
from regauge.models.dropout import DropoutKeys
from regauge.models.modules import Classifier, Encoder
from regauge.system.errors import SettingsError

BIDIRECTIONAL = ("bert", "roberta", "electra", "albert", "modernbert", "mpnet")
CAUSAL = ("gpt2", "llama", "gpt_neox", "qwen3")


def build(architecture: str, width: int = 16, auto_class: Any = AutoModel, **fields: Any) -> Any:
    """Return a model of one layer with the default initial weights of transformers."""
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 40,
        "vocab_size": 60,
        "pad_token_id": 1,
    }
    if architecture == "llama" or architecture.startswith("qwen"):
        sizes["num_key_value_heads"] = 1
    config = CONFIG_MAPPING[architecture](**{**sizes, **fields})
    model: PreTrainedModel = auto_class.from_config(config).eval()
    return model


def compute_rows(module: Any, lengths: tuple[int, ...], name: str) -> torch.Tensor:
    """Return the outputs of a module for rows of these lengths with padding."""
    longest = max(lengths)
    tokens = torch.arange(2, 2 + longest).expand(len(lengths), -1)
    positions = torch.arange(longest).expand(len(lengths), -1)
    segments = (positions < torch.tensor(lengths)[:, None]).int()
    with torch.no_grad():
        output: torch.Tensor = module.eval()(
            {"tokens": tokens * segments, "segments": segments, "positions": positions}
        )[name]
    return output


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("width", [4, 8, 32])
@pytest.mark.parametrize("architecture", [*BIDIRECTIONAL, *CAUSAL])
def test_small_initial_weights_show_the_attention(architecture: str, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    spec = detect_attention_spec(build(architecture, width))
    assert (spec.is_causal, spec.isolates_texts) == (architecture in CAUSAL, True)
    assert spec.first_position == (2 if architecture in {"roberta", "mpnet"} else 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("architecture", ["deberta-v2", "bloom"])
def test_rows_of_one_text_need_only_a_padding_mask(architecture: str, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = build(architecture)
    spec = detect_attention_spec(model, packs_texts=False)
    assert spec == AttentionSpec(is_causal=architecture == "bloom", isolates_texts=False)
    with pytest.raises(SettingsError, match="does not isolate the texts of a packed row; choose"):
        detect_attention_spec(model)


@pytest.mark.parametrize("architecture", ["fnet", "convbert"])
def test_an_encoder_whose_outputs_depend_on_padding_is_refused(architecture: str) -> None:
    message = f"padding changes the outputs of architecture '{architecture}'; choose another one"
    with pytest.raises(SettingsError, match=message):
        Encoder(build(architecture, num_attention_heads=2), DropoutKeys())


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_head_that_reads_the_mask_gets_one_that_it_understands(pooling: str) -> None:
    torch.manual_seed(0)
    classes = AutoModelForSequenceClassification
    model = build("modernbert", 16, classes, classifier_pooling=pooling, num_labels=3)
    module = Classifier(model, DropoutKeys())
    assert module.attention_spec.isolates_texts == (pooling == "cls")
    outputs = compute_rows(module, (5, 9, 2), "scores")
    for row, length in enumerate((5, 9, 2)):
        tokens = torch.arange(2, 2 + length)[None]
        torch.testing.assert_close(outputs[row], model(tokens).logits[0], rtol=1e-4, atol=1e-5)


def test_a_head_that_reads_padding_is_refused() -> None:
    """XLNet classifies by the last token of a row, even if it is padding."""
    config = XLNetConfig(vocab_size=60, d_model=16, n_layer=1, n_head=2, d_inner=32)
    model = XLNetForSequenceClassification(config)
    with pytest.raises(SettingsError, match="padding changes the outputs of architecture 'xlnet'"):
        Classifier(model, DropoutKeys())
