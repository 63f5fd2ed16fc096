"""What the tasks over named fields share: texts padded to the lengths of a ladder."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from regauge.choices import did_you_mean
from regauge.data.batches import Piece, dropout_keys, padded
from regauge.data.buckets import added, fit, ladder, real_share
from regauge.data.columns import reach
from regauge.errors import DataError, SettingsError
from regauge.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.data.batches import Arrays, Draw
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts

Texts = list[np.ndarray | None]


class FieldsTask(Task):
    """A task whose rows are records; a text of it is told by its row and its part in that."""

    layout: ClassVar[str] = "fields"

    shapes: int = Field(default=4, ge=1)
    """Most lengths that texts are padded to."""

    def lengths(self, manifest: Manifest) -> tuple[int, ...]:
        """Return how many texts have each length, as the model reads them."""
        raise NotImplementedError

    def texts(
        self, rows: Rows, numbers: np.ndarray, parts: np.ndarray, special: tuple[int, ...] = ()
    ) -> Texts:
        """Return the tokens of texts, or None where the row's number is PADDING.

        Where the tokenizer's `special` tokens are not given, a text may come out longer.
        """
        raise NotImplementedError

    def ladder(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the lengths with the least padding over all texts together."""
        return ladder(self.lengths(manifest), self.shapes)

    def real_share(self, manifest: Manifest) -> float:
        """Return the share where every text has its own rung: that of batches of one length."""
        return real_share(self.lengths(manifest), self.ladder(manifest))

    def cut(
        self, rows: Rows, numbers: np.ndarray, microbatch_rows: int, ladder: tuple[int, ...]
    ) -> list[Piece]:
        """Sort all texts of a global batch by length, and cut; slots are parts, then rows."""
        count = self.slots_per_row()
        every = np.resize(numbers, count * len(numbers))
        lengths = _lengths(self.texts(rows, every, np.repeat(np.arange(count), len(numbers))))
        longest_first = np.argsort(-lengths, kind="stable")
        pieces = []
        for slots in longest_first.reshape(-1, count * microbatch_rows):
            parts, places = np.divmod(slots, len(numbers))
            length = fit(int(lengths[slots].max()), ladder)
            pieces.append(Piece(numbers[places], parts, slots, length))
        return pieces

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Return texts, [batch, length], with their slots in the global batch."""
        texts = self.texts(rows, piece.rows, piece.parts, facts.special)
        return slotted(texts, piece, draw, facts)


def slotted(texts: Texts, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
    """Return what a model reads of texts, with their slots and which of them are there, [batch]."""
    return {
        **text_arrays(texts, piece, draw, facts),
        "slots": piece.slots,
        "real": (piece.rows >= 0).astype(np.float32),
    }


def text_arrays(texts: Texts, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
    """Return what a model reads of texts, all [batch, length], and the keys of their dropout."""
    places = np.arange(piece.length, dtype=np.int32)
    return {
        "tokens": padded(texts, piece.length, facts.pad),
        "segments": (places < _lengths(texts)[:, None]).astype(np.int32),
        "positions": np.broadcast_to(places, (len(texts), piece.length)).copy(),
        "keys": dropout_keys(piece, draw),
    }


def check_field(manifest: Manifest, name: str, kinds: tuple[str, ...] = ("tokens",)) -> None:
    """Raise SettingsError where a dataset has no field of this name and one of these kinds."""
    if name not in manifest.fields:
        remedy = did_you_mean(name, tuple(manifest.fields))
        raise SettingsError(f"the dataset has no field '{name}'", remedy)
    if manifest.fields[name].kind not in kinds:
        fitting = [other for other, field in manifest.fields.items() if field.kind in kinds]
        known = ", ".join(fitting) or "none: prepare the data with one"
        wanted = " or ".join("text" if kind == "tokens" else kind for kind in kinds)
        raise SettingsError(f"field '{name}' is no {wanted}", f"fields that are: {known}")


def check_label(manifest: Manifest, name: str) -> tuple[float, float]:
    """Return the smallest and the largest label of all splits, 0 and 0 where there is none.

    Raises DataError where a record has no label.
    """
    field = manifest.fields[name]
    if missing := sum(field.missing.values()):
        raise DataError(f"label '{name}' is missing in {missing} records", "leave them out")
    found = list(reach(field).values()) or [(0.0, 0.0)]
    return min(least for least, _ in found), max(most for _, most in found)


def second(arrays: Arrays, starts: Sequence[int]) -> np.ndarray:
    """Return 1 for each token of a text from where its second half starts, [batch, length]."""
    behind = arrays["positions"] >= np.array(starts)[:, None]
    return (behind & (arrays["segments"] > 0)).astype(np.int32)


def histogram(manifest: Manifest, name: str) -> np.ndarray:
    """Return how many texts of a field have each length, in all splits; raises SettingsError."""
    check_field(manifest, name)
    return added(list(manifest.fields[name].lengths.values()))


def _lengths(texts: Texts) -> np.ndarray:
    """Return the tokens of each text; one that is not there has none."""
    return np.array([0 if text is None else len(text) for text in texts])
