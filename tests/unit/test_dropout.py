"""Counter-based dropout: its rate, its independence, and equal bits in any microbatch.

The tests of compilation check that compiled and eager masks have the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distributed.runs import BERT
from regauge.config import merge
from regauge.data.batches import MicrobatchPlan, RandomKey, build_dropout_keys
from regauge.models.architectures import ClassHead, build_model, restore_dropout
from regauge.models.dropout import CounterDropout, DropoutKeys, RowKeys, replace_dropout
from regauge.models.settings import Model

BATCH, LENGTH, WIDTH = 64, 48, 64

HEAD = ClassHead(2)


def build_keys(step: int = 0, rows: range = range(BATCH)) -> Tensor:
    numbers = np.array(rows)
    plan = MicrobatchPlan(numbers, np.zeros_like(numbers), np.zeros_like(numbers), 8)
    return torch.from_numpy(build_dropout_keys(plan, RandomKey(3, 0, step)))


def dropped_mask(rate: float, keys: Tensor, layer: int = 0, length: int = LENGTH) -> Tensor:
    """Return a mask of the values that become 0, [batch, length, width] bool."""
    holder = DropoutKeys()
    holder.current = RowKeys(keys)
    module = CounterDropout(rate, layer, holder).train()
    return module(torch.ones(len(keys), length, WIDTH)) == 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_dropout_rate(rate: float) -> None:
    mask = dropped_mask(rate, build_keys()).float()
    deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - rate) < 4 * deviation
    for axes in ((0, 1), (0, 2), (1, 2)):
        lines = mask.mean(axes)
        size = mask.numel() / len(lines)
        assert float((lines - rate).abs().max()) < 5 * (rate * (1 - rate) / size) ** 0.5


def test_remaining_values_are_scaled() -> None:
    holder = DropoutKeys()
    module = CounterDropout(0.25, 0, holder)
    hidden = torch.full((4, 8, WIDTH), 3.0)
    holder.current = RowKeys(build_keys(rows=range(4)))
    assert set(module(hidden).unique().tolist()) == {0.0, 4.0}
    assert module.eval()(hidden).equal(hidden)
    holder.current = None
    assert module.train()(hidden).equal(hidden)


def test_masks_of_neighbours_rows_layers_and_steps_are_independent() -> None:
    base = dropped_mask(0.5, build_keys()).float() - 0.5
    others = {
        "next position": (base[:, 1:], base[:, :-1]),
        "next column": (base[:, :, 1:], base[:, :, :-1]),
        "next row": (base[1:], base[:-1]),
        "next but one position": (base[:, 2:], base[:, :-2]),
        "diagonal": (base[:, 1:, 1:], base[:, :-1, :-1]),
        "next layer": (base, dropped_mask(0.5, build_keys(), layer=1).float() - 0.5),
        "next step": (base, dropped_mask(0.5, build_keys(step=1)).float() - 0.5),
    }
    for name, (one, other) in others.items():
        correlation = float((one * other).mean()) / 0.25
        assert abs(correlation) < 4.5 / one.numel() ** 0.5, name


def test_masks_do_not_depend_on_microbatch_or_length() -> None:
    keys = build_keys()
    full_mask = dropped_mask(0.1, keys)
    parts = [dropped_mask(0.1, microbatch) for microbatch in keys.split(5)]
    assert torch.cat(parts).equal(full_mask)
    assert dropped_mask(0.1, keys.flip(0)).equal(full_mask.flip(0))
    assert dropped_mask(0.1, keys, length=2 * LENGTH)[:, :LENGTH].equal(full_mask)


def test_every_layer_has_a_separate_mask() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.0), nn.Dropout(0.2))
    assert replace_dropout(model, 0.1, DropoutKeys()) == 2
    layers = [module for module in model if isinstance(module, CounterDropout)]
    assert len({int(layer.salt) for layer in layers}) == 2
    assert isinstance(model[2], nn.Dropout)
    assert not model.state_dict().keys() - {"1.weight", "1.bias"}


def test_bf16_drops_the_same_elements_as_fp32() -> None:
    holder = DropoutKeys()
    holder.current = RowKeys(build_keys())
    module = CounterDropout(0.1, 0, holder)
    ones = torch.ones(BATCH, LENGTH, WIDTH)
    assert (module(ones.bfloat16()) == 0).equal(module(ones) == 0)


def read_rates(model: nn.Module) -> set[float]:
    return {child.rate for child in model.modules() if isinstance(child, CounterDropout)}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Return a folder whose configuration has four dropout rates."""
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    table = merge(BERT, {"config": {**rates, "classifier_dropout": 0.4}})
    model, _ = build_model(Model(**{**table, "dropout": None}), "classes", 300, 0, class_head=HEAD)
    for name, value in {**rates, "classifier_dropout": 0.4}.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, {0.2, 0.4}), ({"dropout": 0.5}, {0.5}), ({"dropout": 0.0}, set())],
)
def test_the_default_rates_are_those_of_the_folder(
    start: Path, settings: dict[str, Any], expected: set[float]
) -> None:
    model, _ = build_model(Model(path=str(start), **settings), "classes", 300, 0, class_head=HEAD)
    assert read_rates(model) == expected
    config: Any = model.config
    assert config.attention_probs_dropout_prob == 0
    restore_dropout(config, start)
    rates = (config.hidden_dropout_prob, config.attention_probs_dropout_prob)
    assert (*rates, config.classifier_dropout) == (0.2, 0.3, 0.4)


def test_a_model_from_scratch_has_no_dropout_by_default() -> None:
    table = {key: value for key, value in BERT.items() if key != "dropout"}
    settings = Model(**table)
    assert settings.dropout == 0
    assert not read_rates(build_model(settings, "none", 300, 0)[0])
