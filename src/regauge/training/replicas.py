"""Weights that every process should hold alike: compared bit by bit, from time to time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from regauge.errors import DeviceError
from regauge.models.placing import INTEGERS, bits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from regauge.processes import World


def check_replicas(values: Iterable[Tensor], world: World, step: int) -> None:
    """Raise DeviceError where what every process should hold alike has other bits on some of them.

    From three processes on the smaller side is named.
    """
    if world.size == 1:
        return
    own = digest(values)
    if own is None:
        return
    everywhere = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(everywhere, own)
    found = [int(each) for each in everywhere]
    if len(set(found)) == 1:
        return
    usual = max(set(found), key=found.count)
    others = [rank for rank, each in enumerate(found) if each != usual]
    named = f"process {', '.join(map(str, others))} differs from the others"
    if 2 * len(others) >= world.size:
        named = "which of them is wrong cannot be told"
    raise DeviceError(
        f"the processes hold other weights after step {step}: {named}",
        "the run goes on from its last checkpoint; look at that device if it comes again",
    )


def digest(values: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of the bits of tensors, read as integers; None of no tensor."""
    sums = [bits(value) for value in values]
    return torch.stack(sums).sum() if sums else None


def flip(value: Tensor) -> None:
    """Turn one bit of a weight, as a faulty memory would."""
    first = value.detach().view(-1)[:1]
    words = first.view(INTEGERS[value.element_size()])
    words.bitwise_xor_(torch.ones_like(words) << 20)
