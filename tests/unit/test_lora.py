"""LoRA adapters: target layers, initial values, dropout, merging, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distributed.runs import BERT, GPT, LLAMA
from regauge.models.architectures import HeadKind, build_model, find_blocks
from regauge.models.dropout import CounterDropout
from regauge.models.flops import count_parameters, flops_per_token
from regauge.models.init_weights import META, build_initial_weights
from regauge.models.lora import merge_adapters
from regauge.models.settings import Lora, Model
from regauge.models.weights import base_weight_name, is_adapter_weight
from regauge.system.errors import SettingsError

peft = pytest.importorskip("peft", reason="not proved here: adapters, which need peft")

VOCABULARY = 300
CASES: list[tuple[dict[str, Any], HeadKind]] = [
    (BERT, "masked"),
    (GPT, "causal"),
    (LLAMA, "causal"),
]
NAMED = [(*case, case[0]["architecture"]) for case in CASES]


def build(model: dict[str, Any], head: HeadKind, lora: dict[str, Any] | None = None) -> Any:
    fields = {**model, "dropout": 0.0, "lora": lora}
    return build_model(Model(**fields), head, VOCABULARY, 3)[0]


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if is_adapter_weight(name)}


@pytest.mark.parametrize(("model", "head"), CASES)
def test_new_adapters_do_not_change_the_outputs(model: dict[str, Any], head: HeadKind) -> None:
    plain, adapted = build(model, head).eval(), build(model, head, {}).eval()
    assert all(
        value.requires_grad == is_adapter_weight(name) for name, value in adapted.named_parameters()
    )
    expected = dict(plain.named_parameters())
    frozen = {
        base_weight_name(n): value
        for n, value in adapted.named_parameters()
        if not is_adapter_weight(n)
    }
    assert frozen.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in frozen.items())
    for name, value in adapters(adapted).items():
        assert (value.std() > 0.01) == ("lora_A" in name), name
    tokens = torch.arange(5, 29).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize(
    ("model", "head", "trained"),
    [
        (BERT, "classes", {"bert.pooler.dense", "classifier"}),
        (BERT, "tokens", {"classifier"}),
        (LLAMA, "classes", {"score"}),
        (LLAMA, "tokens", {"score"}),
    ],
)
def test_the_head_of_a_classifier_is_trained_besides_the_adapters(
    model: dict[str, Any], head: HeadKind, trained: set[str]
) -> None:
    values = build(model, head, {}).named_parameters()
    names = {name for name, value in values if value.requires_grad}
    assert {name.rpartition(".")[0] for name in names if not is_adapter_weight(name)} == trained
    targeted = build(model, head, {"targets": tuple(trained)}).named_parameters()
    assert all(value.requires_grad == is_adapter_weight(name) for name, value in targeted)


def test_an_adapter_depends_only_on_its_seed_and_name() -> None:
    query_adapters = adapters(build(LLAMA, "causal", {"targets": ("q_proj",)}))
    all_adapters = adapters(build(LLAMA, "causal", {}))
    assert query_adapters
    assert all(all_adapters[name].equal(value) for name, value in query_adapters.items())
    first, second, *_ = (value for name, value in query_adapters.items() if "lora_A" in name)
    assert not first.equal(second)


@pytest.mark.parametrize(("model", "head"), CASES)
def test_by_default_every_linear_layer_of_the_blocks_has_an_adapter(
    model: dict[str, Any], head: HeadKind
) -> None:
    adapted = build(model, head, {"rank": 3})
    inside = [name for block in find_blocks(adapted) for name, _ in block.named_parameters()]
    layers = {name.partition(".lora_")[0] for name in inside if is_adapter_weight(name)}
    matrices = {
        name
        for name in inside
        if name.endswith(".base_layer.weight") and not is_adapter_weight(name)
    }
    assert len(layers) == len(matrices) >= 4
    assert not any(
        name.endswith(("proj.weight", "dense.weight", "c_fc.weight", "attn.weight"))
        for name in inside
    )
    assert len(adapters(adapted)) == 2 * sum(map(len, map(_layers, find_blocks(adapted))))
    assert all(3 in value.shape for value in adapters(adapted).values())


def _layers(block: nn.Module) -> set[str]:
    return {n.partition(".lora_")[0] for n, _ in block.named_parameters() if is_adapter_weight(n)}


def test_targets_match_the_ends_of_paths() -> None:
    adapted = build(BERT, "masked", {"targets": ("attention.output.dense",)})
    holders = {name.partition(".lora_")[0] for name in adapters(adapted)}
    assert holders == {f"bert.encoder.layer.{n}.attention.output.dense" for n in (0, 1)}


@pytest.mark.parametrize(
    ("model", "head", "target", "remedy"),
    [
        (
            LLAMA,
            "causal",
            "q_porj",
            "llama has no linear layer 'q_porj'; did you mean ",
        ),
        (BERT, "masked", "q_proj", "bert has no linear layer 'q_proj'; known: "),
        (LLAMA, "causal", "embed_tokens", "llama has no linear layer 'embed_tokens'"),
    ],
)
def test_an_unknown_target_is_refused(
    model: dict[str, Any], head: HeadKind, target: str, remedy: str
) -> None:
    with pytest.raises(SettingsError, match=remedy):
        build(model, head, {"targets": (target,)})


def test_adapter_dropout_is_counter_based_and_separate() -> None:
    lora = Lora(dropout=0.25, targets=("query",))
    adapted, _ = build_model(
        Model(**{**BERT, "dropout": 0.1, "lora": lora}), "masked", VOCABULARY, 3
    )
    dropouts = [dropout for dropout in adapted.modules() if isinstance(dropout, CounterDropout)]
    plain, _ = build_model(Model(**{**BERT, "dropout": 0.1}), "masked", VOCABULARY, 3)
    plain_dropouts = [dropout for dropout in plain.modules() if isinstance(dropout, CounterDropout)]
    rates = sorted(dropout.rate for dropout in dropouts)
    assert rates == [0.1] * len(plain_dropouts) + [0.25] * 2
    salts = [int(dropout.salt) for dropout in dropouts]
    assert len(set(salts)) == len(salts)
    assert {int(dropout.salt) for dropout in plain_dropouts} < set(salts)


def test_a_model_without_hidden_dropout_can_have_adapter_dropout() -> None:
    adapted = build(LLAMA, "causal", {"dropout": 0.1})
    assert any(isinstance(module, CounterDropout) for module in adapted.modules())


def test_native_dropout_stays_native() -> None:
    settings = Model(**{**LLAMA, "dropout_kind": "native", "lora": Lora(dropout=0.1)})
    adapted, _ = build_model(settings, "causal", VOCABULARY, 3)
    assert any(isinstance(module, nn.Dropout) and module.p == 0.1 for module in adapted.modules())
    assert not any(isinstance(module, CounterDropout) for module in adapted.modules())


@pytest.mark.parametrize(("model", "head", "kind"), NAMED, ids=lambda value: str(value)[:10])
def test_a_merged_model_has_the_outputs_of_the_unmerged_one(
    model: dict[str, Any], head: HeadKind, kind: str
) -> None:
    """The merged weights also equal those of peft."""
    lora = {"rank": 4, "alpha": 10.0}
    adapted = build(model, head, lora).eval()
    with torch.no_grad():
        for value in adapters(adapted).values():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) / 5)
    with META:
        empty = build(model, head, lora)
    trained = {name: value.detach() for name, value in adapters(adapted).items()}
    weights = dict(merge_adapters(build_initial_weights(empty, Model(**model), 3), trained))
    plain = build(model, head).eval()
    tokens = torch.arange(5, 29).view(2, 12)
    with torch.no_grad():
        before = plain(tokens).logits
        plain.load_state_dict(weights, strict=False)
        after, unmerged = plain(tokens).logits, adapted(tokens).logits
    assert weights.keys() == dict(plain.named_parameters()).keys(), kind
    torch.testing.assert_close(after, unmerged, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after, before, rtol=1e-2, atol=1e-2)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    bases = {n: v for n, v in adapted.named_parameters() if n.endswith("base_layer.weight")}
    for name, value in bases.items():
        torch.testing.assert_close(weights[base_weight_name(name)], value, rtol=1e-6, atol=1e-6)


def test_parameters_and_flops_with_adapters() -> None:
    """The inputs of the first block have a gradient, as FLOPS_FORMULA assumes."""
    adapted = build(LLAMA, "causal", {"rank": 2})
    plain = build(LLAMA, "causal")
    counts = count_parameters(adapted)
    assert counts.all - counts.trained == count_parameters(plain).all
    assert 0 < counts.trained == sum(value.numel() for value in adapters(adapted).values())
    assert flops_per_token(adapted, 16) < flops_per_token(plain, 16)
    adapted.set_attn_implementation("eager")
    inputs = torch.randn(3, 16, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        adapted.model(inputs_embeds=inputs).last_hidden_state.sum().backward()
    assert flops_per_token(adapted, 16) == pytest.approx(counter.get_total_flops() / 48, rel=3e-3)
