"""Dropout whose mask is a pure function of (seed, step, row, layer, element).

torch's generators depend on the device, the call order and the microbatch shape. Here an element's
mask is a hash of its address. The hash uses 32-bit integer operations, which give the same bits on
every device; a compiler fuses them into neighbouring operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

FIRST_MULTIPLIER = 0x7FEB352D
SECOND_MULTIPLIER = 0x846CA68B - (1 << 32)
"""`lowbias32` multipliers (C. Wellons, hash-prospector), as signed 32-bit integers."""
SALT_STEP = 0x9E3779B9 - (1 << 32)


class PackedKeys(NamedTuple):
    """Token addresses in rows with several texts, both [batch, length] int32."""

    keys: Tensor
    """Key of each token's text."""
    positions: Tensor
    """Each token's position in its text."""


class RowKeys(NamedTuple):
    """Dropout keys of the texts in a batch."""

    rows: Tensor  # [batch] int32
    packed: PackedKeys | None = None
    """The keys of the tokens, if the model computes these texts in packed rows."""


class DropoutKeys:
    """Dropout keys of the current batch; all layers in a model share one object."""

    def __init__(self) -> None:
        self.current: RowKeys | None = None
        """None for no dropout."""


def hash_words(words: Tensor) -> Tensor:
    """Hash int32 words with `lowbias32`; the result is the same on any device."""
    words = (words ^ _shift_right(words, 16)) * FIRST_MULTIPLIER
    words = (words ^ _shift_right(words, 15)) * SECOND_MULTIPLIER
    return words ^ _shift_right(words, 16)


class CounterDropout(nn.Module):
    """Dropout of hidden values, [batch, length, width] or [batch, width], by their addresses.

    Remaining values are scaled by 1 / (1 - rate).
    """

    salt: Tensor  # () int32

    def __init__(self, rate: float, layer: int, keys: DropoutKeys) -> None:
        super().__init__()
        self.rate = rate
        self.keys = keys
        salt = torch.tensor((layer * SALT_STEP) % (1 << 32) - (1 << 31), dtype=torch.int32)
        self.register_buffer("salt", salt, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Set about `rate` of the values to zero."""
        keys = self.keys.current
        if not self.training or keys is None:
            return hidden
        words = self._random_words(keys, hidden.shape)
        threshold = round(self.rate * (1 << 32)) - (1 << 31)
        mask = (words >= threshold).to(hidden.dtype) * (1 / (1 - self.rate))
        return hidden * mask.view(hidden.shape)

    def _random_words(self, keys: RowKeys, shape: torch.Size) -> Tensor:
        """Return one uniform int32 word per element, [batch, length, width].

        A token gets the same words in a packed row as in its own row. Packed rows have another
        shape than the texts; a head behind the encoder reads texts again.

        Products overflow, which is undefined for signed words in C++: a compiler that knows a
        factor's range may exploit that. So each factor depends on a word from memory.
        """
        length, width, device = shape[1:-1].numel(), shape[-1], keys.rows.device
        columns = torch.arange(width, dtype=torch.int32, device=device)
        if keys.packed is not None and keys.packed.keys.shape == shape[:-1]:
            row_words = hash_words(keys.packed.keys ^ self.salt)
            positions = keys.packed.positions
        else:
            row_words = hash_words(keys.rows ^ self.salt)[:, None]
            positions = torch.arange(length, dtype=torch.int32, device=device)
        token_words = hash_words(row_words + positions)
        words = (token_words[:, :, None] ^ hash_words(columns ^ self.salt)) * FIRST_MULTIPLIER
        return (words ^ _shift_right(words, 15)) * SECOND_MULTIPLIER

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def replace_dropout(
    model: nn.Module, rate: float | None, keys: DropoutKeys, first_layer: int = 0
) -> int:
    """Replace every nn.Dropout with a positive rate by CounterDropout; return their number.

    If `rate` is None, each layer keeps its rate. They are numbered from `first_layer`, because
    equal numbers would drop the same elements.
    """
    layers = [
        (parent, name, child.p if rate is None else rate)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Dropout) and child.p > 0
    ]
    for layer, (parent, name, layer_rate) in enumerate(layers, start=first_layer):
        setattr(parent, name, CounterDropout(layer_rate, layer, keys))
    return len(layers)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Return int32 words after a logical right shift, which fills in zeros.

    Uses the named operation with a tensor operand: in torch_xla 2.9, `>>` is a division that rounds
    towards zero, and a Python number operand makes it compute 64-bit words.
    """
    shifted = torch.bitwise_right_shift(words, words.new_full((), bits))
    return shifted & ((1 << (32 - bits)) - 1)
