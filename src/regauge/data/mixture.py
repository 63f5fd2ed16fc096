"""Several datasets as one, in exact shares of every stretch of steps.

The rows of the datasets are numbered one behind the other. A row that is taken again, in the next
pass over its dataset, has a higher number: what is keyed by the row is drawn anew. The rows of a
step depend on the step alone, whatever was trained before it and on how many processes.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.config import first_difference
from regauge.data.buckets import added
from regauge.data.columns import reach
from regauge.data.dataset import Dataset, Field, Manifest, Rows, Split, read_manifest
from regauge.data.randomness import Permutation
from regauge.data.row_order import Order
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regauge.data.settings import Data, Part

_FORM = {"kind", "limit", "members"}
"""What of a column decides the form of its cells."""


def manifest_of(data: Data) -> Manifest:
    """Return what a run trains on: a dataset's manifest, or one over all that are mixed."""
    own = read_manifest(Path(data.path))
    if not data.mix:
        return own
    others = [read_manifest(Path(part.path)) for part in data.mix]
    for part, other in zip(data.mix, others, strict=True):
        _check_alike(data, own, part, other)
    return _together(data, [own, *others])


def opened(data: Data) -> Dataset:
    """Return the rows that a run trains on; raises DataError where datasets do not go together."""
    return Mixture(data) if data.mix else Dataset(Path(data.path))


def order(data: Data, manifest: Manifest, batch_rows: int, seed: int) -> Order:
    """Return the rows of every global batch of a run."""
    rows = manifest.splits["train"].rows
    if not data.mix:
        return Order(rows, batch_rows, seed, manifest.identity)
    parts = [read_manifest(Path(part.path)).splits["train"].rows for part in data.mix]
    shares = [Fraction(str(part.share)) for part in data.mix]
    sizes = [rows - sum(parts), *parts]
    return MixedOrder(sizes, shares, batch_rows=batch_rows, seed=seed, identity=manifest.identity)


class Mixture(Dataset):
    """Datasets of one layout and one tokenizer; what is held out of each stays apart."""

    def __init__(self, data: Data) -> None:
        own = Dataset(Path(data.path))
        self.folder = own.folder
        self.manifest = manifest_of(data)
        self._parts = {"": own} | {part.name: Dataset(Path(part.path)) for part in data.mix}

    def split(self, name: str) -> Rows:
        """Return the rows of "train" of all of them, or of "heldout" of the first."""
        if name == "train":
            return _Behind([part.split(name) for part in self._parts.values()])
        return self._parts[""].split(name)

    def heldout(self) -> dict[str, Dataset]:
        return self._parts


class MixedOrder(Order):
    """The rows of every global batch: of each dataset behind the first its share, exactly.

    After s steps of B rows, floor(s B share) rows of a dataset were taken, each as often as any
    other of it or once more. An epoch is the steps in which the first gives each of its rows.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shares: Sequence[Fraction],
        *,
        batch_rows: int,
        seed: int,
        identity: str,
    ) -> None:
        super().__init__(sum(sizes), batch_rows, seed, identity)
        self._sizes, self._shares = tuple(sizes), tuple(shares)
        own = 1 - sum(shares, Fraction(0))
        self.steps_per_epoch = math.ceil(sizes[0] / (batch_rows * own))
        self._permuted = lru_cache(maxsize=4 * len(sizes))(self._pass)

    def epoch(self, step: int) -> int:
        """Return 0: how often a row was taken is in its number."""
        del step
        return 0

    def batch(self, step: int, shift: int = 0) -> np.ndarray:
        """Return the row numbers of a global batch, [batch_rows], one dataset after the other."""
        before, after = self._taken(step), self._taken(step + 1)
        first = np.cumsum([0, *self._sizes[:-1]])
        spans = zip(before, after, first, strict=True)
        return np.concatenate(
            [
                self._numbers(part, np.arange(start, stop) + shift, offset)
                for part, (start, stop, offset) in enumerate(spans)
            ]
        )

    def _taken(self, step: int) -> list[int]:
        """Return how many rows of each dataset the steps before one take."""
        total = step * self.batch_rows
        others = [int(total * share) for share in self._shares]
        return [total - sum(others), *others]

    def _numbers(self, part: int, places: np.ndarray, offset: np.int64) -> np.ndarray:
        passes, inside = np.divmod(places, self._sizes[part])
        found = passes * self.rows + offset
        for each in np.unique(passes).tolist():
            here = passes == each
            found[here] += self._permuted(part, each)(inside[here])
        return found

    def _pass(self, part: int, number: int) -> Permutation:
        return Permutation(self._sizes[part], *self._key, part, number)


class _Behind(Rows):
    """The rows of several datasets, one behind the other; numbers past the end begin anew."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        numbers = np.fromiter(ids, np.int64) % len(self)
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        inside = numbers - self._starts[owners]
        pairs = zip(owners.tolist(), inside.tolist(), strict=True)
        return [self._parts[owner].take([number])[0] for owner, number in pairs]


def _check_alike(data: Data, own: Manifest, part: Part, other: Manifest) -> None:
    for what in ("layout", "tokenizer"):
        ours, theirs = (each.model_dump()[what] for each in (own, other))
        if ours != theirs:
            raise DataError(
                f"{part.path} does not go together with {data.path}:"
                f" {first_difference(what, ours, theirs)}",
                f'prepare it with tokenizer.path = "{data.path}/tokenizer" and the same rows',
            )
    forms = [
        {name: field.model_dump(include=_FORM) for name, field in each.fields.items()}
        for each in (own, other)
    ]
    if forms[0] != forms[1]:
        difference = first_difference("fields", *forms)
        raise DataError(
            f"{part.path} does not go together with {data.path}: {difference}",
            "prepare it with the same rows",
        )
    if not other.splits["train"].rows:
        raise DataError(f"{part.path} has no training rows", "leave it out of data.mix")


def _together(data: Data, manifests: list[Manifest]) -> Manifest:
    """Return one manifest: counts and lengths are sums, hashes are one behind the other.

    What values are normalised by is the first's.
    """
    first = manifests[0]
    train = [each.splits["train"] for each in manifests]
    whole = Split(
        rows=sum(split.rows for split in train),
        tokens=sum(split.tokens for split in train),
        shards=tuple(shard for split in train for shard in split.shards),
    )
    fields = {name: _joined([each.fields[name] for each in manifests]) for name in first.fields}
    shares = {part.path: str(part.share) for part in data.mix}
    return first.model_copy(
        update={
            "fields": fields,
            "splits": {**first.splits, "train": whole},
            "settings": {**first.settings, "mix": shares},
        }
    )


def _joined(fields: list[Field]) -> Field:
    """Return one column of several datasets."""
    first = fields[0]
    missing: Counter[str] = Counter()
    ranges: dict[str, tuple[float, float]] = {}
    for field in fields:
        missing.update(field.missing)
        for split, (least, most) in reach(field).items():
            low, high = ranges.get(split, (least, most))
            ranges[split] = (min(low, least), max(high, most))
    lengths = {
        split: tuple(added([field.lengths.get(split, ()) for field in fields]).tolist())
        for split in first.lengths
    }
    return first.model_copy(update={"lengths": lengths, "missing": dict(missing), "ranges": ranges})
