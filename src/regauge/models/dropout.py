"""Dropout whose mask is a pure function of (seed, step, row, layer, element).

The framework's own generator depends on the device, the order of calls and the shape of the
microbatch. Here every element hashes its own address instead, in 32-bit integer operations that
give the same bits on every device and that a compiler fuses into the operation beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FIRST = 0x7FEB352D
SECOND = 0x846CA68B - (1 << 32)
"""Multipliers of `lowbias32` (C. Wellons, hash-prospector), as signed 32-bit integers."""
SALT_STEP = 0x9E3779B9 - (1 << 32)


class DropoutKeys:
    """The keys of the rows that are being computed; one object is shared by a model's layers."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [batch] int32, or None where nothing is dropped


def scramble(words: Tensor) -> Tensor:
    """Return int32 words hashed by `lowbias32`; equal words give equal words on any device."""
    words = (words ^ _shifted(words, 16)) * FIRST
    words = (words ^ _shifted(words, 15)) * SECOND
    return words ^ _shifted(words, 16)


class CounterDropout(nn.Module):
    """Drops hidden values, [batch, length, width] or [batch, width], by their addresses.

    What is left is scaled.
    """

    salt: Tensor  # () int32

    def __init__(self, rate: float, layer: int, keys: DropoutKeys) -> None:
        super().__init__()
        self.rate = rate
        self.keys = keys
        salt = torch.tensor((layer * SALT_STEP) % (1 << 32) - (1 << 31), dtype=torch.int32)
        self.register_buffer("salt", salt, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values with about `rate` of them set to zero."""
        rows = self.keys.rows
        if not self.training or rows is None:
            return hidden
        words = self._words(rows, hidden.shape)
        threshold = round(self.rate * (1 << 32)) - (1 << 31)
        left = (words >= threshold).to(hidden.dtype) * (1 / (1 - self.rate))
        return hidden * left.view(hidden.shape)

    def _words(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return one uniform int32 word per element, [batch, length, width].

        Products overflow, which C++ leaves open for signed words: a compiler that knew the range of
        a factor could use it. So nothing is multiplied but what was mixed with a word from memory.
        """
        length, width = shape[1:-1].numel(), shape[-1]
        places = torch.arange(length, dtype=torch.int32, device=rows.device)
        columns = torch.arange(width, dtype=torch.int32, device=rows.device)
        row_words = scramble(rows ^ self.salt)
        place_words = scramble(row_words[:, None] + places)
        words = (place_words[:, :, None] ^ scramble(columns ^ self.salt)) * FIRST
        return (words ^ _shifted(words, 15)) * SECOND

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"rate={self.rate}"


def install(model: nn.Module, rate: float, keys: DropoutKeys, first: int = 0) -> int:
    """Replace every nn.Dropout with a positive rate; return how many there were.

    They are numbered from `first`: equal numbers would drop the same.
    """
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Dropout) and child.p > 0
    ]
    for layer, (parent, name) in enumerate(found, start=first):
        setattr(parent, name, CounterDropout(rate, layer, keys))
    return len(found)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return int32 words shifted right with zeros moving in.

    The named operation with a tensor beside it: `>>` is a division that rounds towards zero in
    torch_xla 2.9, and a plain number makes it compute 64-bit words there.
    """
    shifted = torch.bitwise_right_shift(words, words.new_full((), bits))
    return shifted & ((1 << (32 - bits)) - 1)
