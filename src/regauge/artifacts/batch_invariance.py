"""Which batch sizes give a text the same bits as any other: found by computing, and written down.

A library may compute a product in another order where it has other sizes. So of every rung those
numbers of rows are kept in which each text, wherever it stands and beside whichever others, comes
out as it does in the largest batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from regauge.artifacts.buckets import BucketBatch
from regauge.artifacts.manifest import Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regauge.artifacts.rows import Records
    from regauge.backends import Runner

    Made = Callable[[int, int, int], Records]


TELLING = 256
"""Numbers of answers of which some would differ if any did: one score alone may agree by chance."""


class Shown(NamedTuple):
    """The rungs with the rows that may be chosen from, and how many texts showed it."""

    rungs: tuple[Rung, ...]
    texts: int


def shown(runner: Runner, rungs: Sequence[Rung], made: Made) -> Shown | None:
    """Return what was found of a runner, or None where not even one size keeps a text's bits.

    `made` gives so many records whose longest texts have from so many tokens to so many.
    """
    found, count, shortest = [], 0, 1
    for rung in rungs:
        most = rung.rows[0]
        records = made(most, shortest, rung.length)
        order = np.arange(most)
        whole = _computed(runner, rung.length, most, records, order)
        turned = _computed(runner, rung.length, most, records, order[::-1])[::-1]
        half = order[: -(-most // 2)]
        beside_none = _computed(runner, rung.length, most, records, half)
        if not np.array_equal(whole, turned) or not np.array_equal(whole[half], beside_none):
            return None
        rows = [size for size in rung.rows if _same(runner, rung.length, size, records, whole)]
        found.append(Rung(length=rung.length, rows=tuple(rows)))
        count += most
        shortest = rung.length + 1
    return Shown(tuple(found), count)


def _same(runner: Runner, length: int, size: int, records: Records, whole: np.ndarray) -> bool:
    """Return whether records come out of batches of a size as they do out of the largest.

    They are some from the middle, the last of a batch first: each stands elsewhere than there. As
    many are tried as have enough numbers that rounding would show in one of them.
    """
    batches = max(1, min(len(records), -(-TELLING // whole.shape[1])) // size)
    first = (len(records) - batches * size) // 2
    for at in range(first, first + batches * size, size):
        part = _computed(runner, length, size, records, np.arange(at, at + size)[::-1])
        if not np.array_equal(part[::-1], whole[at : at + size]):
            return False
    return True


def _computed(
    runner: Runner, length: int, rows: int, records: Records, members: np.ndarray
) -> np.ndarray:
    with torch.no_grad():
        output = runner(*records.inputs(BucketBatch(length, rows, members)))
    found: np.ndarray = output.cpu().float().numpy()[: len(members)].copy()
    return found
