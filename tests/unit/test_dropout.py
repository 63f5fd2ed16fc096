"""Dropout by address: the right share, no pattern, and the same bits however it is computed.

That compiled and eager have the same bits is a test beside the other compiled ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regauge.data.batches import Draw, Piece, dropout_keys
from regauge.models.dropout import CounterDropout, DropoutKeys, install

BATCH, LENGTH, WIDTH = 64, 48, 64


def keys_of(step: int = 0, rows: range = range(BATCH)) -> Tensor:
    numbers = np.array(rows)
    zeros = np.zeros_like(numbers)
    return torch.from_numpy(dropout_keys(Piece(numbers, zeros, zeros, 8), Draw(3, 0, step)))


def dropped(rate: float, keys: Tensor, layer: int = 0, length: int = LENGTH) -> Tensor:
    """Return which values are dropped, [batch, length, width] bool."""
    holder = DropoutKeys()
    holder.rows = keys
    part = CounterDropout(rate, layer, holder).train()
    return part(torch.ones(len(keys), length, WIDTH)) == 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(rate: float) -> None:
    found = dropped(rate, keys_of()).float()
    deviation = (rate * (1 - rate) / found.numel()) ** 0.5
    assert abs(float(found.mean()) - rate) < 4 * deviation
    for axes in ((0, 1), (0, 2), (1, 2)):
        lines = found.mean(axes)
        size = found.numel() / len(lines)
        assert float((lines - rate).abs().max()) < 5 * (rate * (1 - rate) / size) ** 0.5


def test_what_is_left_is_scaled() -> None:
    holder = DropoutKeys()
    part = CounterDropout(0.25, 0, holder)
    hidden = torch.full((4, 8, WIDTH), 3.0)
    holder.rows = keys_of(rows=range(4))
    assert set(part(hidden).unique().tolist()) == {0.0, 4.0}
    assert part.eval()(hidden).equal(hidden)
    holder.rows = None
    assert part.train()(hidden).equal(hidden)


def test_neighbours_rows_layers_and_steps_have_nothing_in_common() -> None:
    base = dropped(0.5, keys_of()).float() - 0.5
    others = {
        "next place": (base[:, 1:], base[:, :-1]),
        "next column": (base[:, :, 1:], base[:, :, :-1]),
        "next row": (base[1:], base[:-1]),
        "next but one place": (base[:, 2:], base[:, :-2]),
        "diagonal": (base[:, 1:, 1:], base[:, :-1, :-1]),
        "next layer": (base, dropped(0.5, keys_of(), layer=1).float() - 0.5),
        "next step": (base, dropped(0.5, keys_of(step=1)).float() - 0.5),
    }
    for name, (one, other) in others.items():
        correlation = float((one * other).mean()) / 0.25
        assert abs(correlation) < 4.5 / one.numel() ** 0.5, name


def test_microbatch_and_length_do_not_enter() -> None:
    keys = keys_of()
    whole = dropped(0.1, keys)
    assert torch.cat([dropped(0.1, part) for part in keys.split(5)]).equal(whole)
    assert dropped(0.1, keys.flip(0)).equal(whole.flip(0))
    assert dropped(0.1, keys, length=2 * LENGTH)[:, :LENGTH].equal(whole)


def test_every_layer_of_a_model_has_its_own() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.0), nn.Dropout(0.2))
    assert install(model, 0.1, DropoutKeys()) == 2
    layers = [part for part in model if isinstance(part, CounterDropout)]
    assert len({int(layer.salt) for layer in layers}) == 2
    assert isinstance(model[2], nn.Dropout)
    assert not model.state_dict().keys() - {"1.weight", "1.bias"}


def test_bf16_drops_the_same_places_as_fp32() -> None:
    holder = DropoutKeys()
    holder.rows = keys_of()
    part = CounterDropout(0.1, 0, holder)
    ones = torch.ones(BATCH, LENGTH, WIDTH)
    assert (part(ones.bfloat16()) == 0).equal(part(ones) == 0)
