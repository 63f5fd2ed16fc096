"""Outlier channel splitting: which features are split, in which layers, and the accuracy gained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from regauge.inference.backends import Calibration
from regauge.inference.backends._int8 import quantize
from regauge.inference.backends._int8.linear import Int8Linear
from regauge.inference.backends._int8.quantize import SAMPLE_LOSS_SHARE, quantize_linear_layers
from regauge.inference.backends._int8.split import (
    COPIES_PER_GROUP,
    FEATURES_PER_GROUP,
    RepeatedOutputLinear,
    count_copies,
    find_producers,
    source_features,
)


def mlp(between: nn.Module, inner: int = FEATURES_PER_GROUP, scale: float = 1.0) -> nn.Sequential:
    """Return two linear layers; the last feature between them is larger than the others."""
    torch.manual_seed(0)
    program = nn.Sequential(nn.Linear(16, inner), between, nn.Linear(inner, 16))
    program.requires_grad_(False)[0].weight[-1] *= scale  # noqa: FBT003 - the API of torch
    return program.eval()


def random_inputs(seed: int, rows: int = 400) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def layers(program: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in program.named_modules() if type(layer) is nn.Linear}


class Alternating(nn.Module):
    """Doubles every other feature, so that the result depends on the index of the feature."""

    def forward(self, value: Tensor) -> Tensor:
        return value * (1 + torch.arange(value.shape[-1]) % 2)


@pytest.mark.parametrize("width", [FEATURES_PER_GROUP, 2 * FEATURES_PER_GROUP + 5])
def test_the_copies_minimize_the_largest_divided_peak(width: int) -> None:
    peaks = torch.rand(width, generator=torch.Generator().manual_seed(1)) ** 8 + 1e-3
    counts = count_copies(peaks)
    assert int(counts.sum()) == width + width // FEATURES_PER_GROUP * COPIES_PER_GROUP
    largest = float((peaks / counts).max())
    copied = counts > 1
    assert copied.any()
    assert float((peaks[copied] / (counts[copied] - 1)).min()) >= largest
    assert torch.equal(torch.bincount(source_features(counts)), counts)


def test_a_narrow_layer_has_no_copies() -> None:
    assert torch.equal(
        count_copies(torch.rand(FEATURES_PER_GROUP - 1) + 1),
        torch.ones(FEATURES_PER_GROUP - 1, dtype=torch.int64),
    )


@pytest.mark.parametrize("between", [nn.GELU(), nn.ReLU(), nn.Tanh(), nn.Identity()])
def test_the_producer_before_elementwise_functions_is_detected(between: nn.Module) -> None:
    program = mlp(between)
    modules = dict(program.named_modules())
    assert find_producers(program, layers(program), [(random_inputs(0),)]) == {"2": "0"}
    assert dict(program.named_modules()) == modules


@pytest.mark.parametrize(
    "between",
    [
        nn.LayerNorm(FEATURES_PER_GROUP),
        nn.LayerNorm(FEATURES_PER_GROUP, elementwise_affine=False),
        nn.Softmax(-1),
        Alternating(),
    ],
)
def test_a_layer_after_a_function_of_several_features_has_no_producer(between: nn.Module) -> None:
    program = mlp(between)
    assert find_producers(program, layers(program), [(random_inputs(0),)]) == {}


class TwoReaders(nn.Module):
    """The output of the first layer is read by the second layer and by a later sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.first(value)
        return hidden.mean(1, keepdim=True) + self.second(hidden.relu())


def test_a_layer_with_a_second_reader_is_no_producer() -> None:
    torch.manual_seed(0)
    program = TwoReaders().eval()
    with torch.no_grad():
        program.first.weight[0] *= 50
    assert find_producers(program, layers(program), [(random_inputs(0),)]) == {}


def test_bert_has_producers_in_its_feed_forward_blocks() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval()

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: Tensor) -> Tensor:
            hidden: Tensor = self.bert(input_ids=ids).last_hidden_state
            return hidden

    program = Hidden().eval()
    ids = torch.arange(40).reshape(4, 10)
    candidates = {name: layer for name, layer in layers(program).items() if "pooler" not in name}
    blocks = [f"bert.encoder.layer.{number}" for number in range(2)]
    expected = {f"{block}.output.dense": f"{block}.intermediate.dense" for block in blocks}
    assert find_producers(program, candidates, [(ids,)]) == expected


def relative_error(program: nn.Module, exact: nn.Module) -> float:
    inputs = random_inputs(7)
    return float((program(inputs) - exact(inputs)).norm() / exact(inputs).norm())


def test_splitting_a_large_feature_reduces_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = mlp(nn.GELU(), scale=30.0)
    quantized = quantize_linear_layers(plain, Calibration(plain, [(random_inputs(0),)], 1.0))
    first, _, second = quantized
    assert isinstance(first, Int8Linear)
    assert isinstance(second, Int8Linear)
    assert second.has_copies
    assert int(torch.bincount(second.feature_of_copy).argmax()) == FEATURES_PER_GROUP - 1
    assert quantized[0](random_inputs(1)).shape == (400, FEATURES_PER_GROUP + COPIES_PER_GROUP)
    monkeypatch.setattr(quantize, "find_producers", lambda *_: {})
    unsplit = quantize_linear_layers(plain, Calibration(plain, [(random_inputs(0),)], 1.0))
    assert relative_error(quantized, plain) < 0.8 * relative_error(unsplit, plain)


def test_an_unquantized_layer_also_produces_copies() -> None:
    """One row of its input is a million times as large as the others; a tanh limits its output."""
    plain, inputs = mlp(nn.Tanh()), random_inputs(0, 1000)
    inputs[0] *= 1e6
    first, _, second = quantize_linear_layers(plain, Calibration(plain, [(inputs,)], 1.0))
    assert isinstance(first, RepeatedOutputLinear)
    assert isinstance(second, Int8Linear)
    assert second.has_copies
    quantized = nn.Sequential(first, nn.Tanh(), second)
    assert float((quantized(random_inputs(1)) - plain(random_inputs(1))).abs().max()) < 0.03


def test_the_layers_with_the_largest_errors_stay_unquantized() -> None:
    plain = nn.Sequential(*(mlp(nn.GELU(), inner=64) for _ in range(3))).eval()
    inputs = random_inputs(0)

    def quantize_with(max_loss: float) -> tuple[nn.Module, float]:
        quantized = quantize_linear_layers(plain, Calibration(plain, [(inputs,)], max_loss))
        squares = (quantized(inputs) - plain(inputs)).square().sum(1)
        loss = squares / plain(inputs).square().sum(1)
        return quantized, float(loss.mean()) / 2

    fully_quantized, full_loss = quantize_with(1.0)
    assert not layers(fully_quantized)
    partly_quantized, loss = quantize_with(full_loss)
    assert loss <= SAMPLE_LOSS_SHARE * full_loss
    errors: dict[str, float] = {}

    def measure(name: str, value: Tensor, output: Tensor) -> None:
        difference = (fully_quantized.get_submodule(name)(value) - output).norm(dim=1)
        norms = (output - layers(plain)[name].bias).norm(dim=1)
        errors[name] = float((difference / norms).median())

    for name, layer in layers(plain).items():
        layer.register_forward_hook(
            lambda _, values, output, name=name: measure(name, values[0], output)
        )
    plain(inputs)
    unquantized = layers(partly_quantized).keys()
    quantized = errors.keys() - unquantized
    assert quantized
    assert min(errors[name] for name in unquantized) >= max(errors[name] for name in quantized)
    with pytest.raises(ValueError, match="no linear layer is accurate enough"):
        quantize_with(1e-12)
