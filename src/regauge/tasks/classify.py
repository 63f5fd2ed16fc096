"""Classification and regression of texts, or of pairs of them, such as the tasks of GLUE."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from regauge.data.batches import taken
from regauge.errors import DataError
from regauge.models.io_spec import Fields
from regauge.tasks import Sums, _quality
from regauge.tasks._fields import (
    FieldsTask,
    Texts,
    check_field,
    check_label,
    histogram,
    second,
    slotted,
)

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.batches import Arrays, Draw, Found, Piece
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts
    from regauge.models.io_spec import Answers
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class Classify(FieldsTask):
    """Say the class of a text or of a pair, or a number about it (`predict = "value"`)."""

    whole: ClassVar[bool] = True

    texts_of: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    """One field, or two that are read one behind the other."""
    label: str = "label"
    """Field with the class, 0 … classes - 1, or with the value."""
    predict: Literal["class", "value"] = "class"
    """A class by cross-entropy, or a number by its squared error."""
    classes: int = Field(default=2, ge=2, le=4096)
    """How many classes there are."""

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        for name in self.texts_of:
            check_field(manifest, name)
        check_field(manifest, self.label, ("number", "real") if self._of_value else ("number",))
        self._check_labels(manifest)

    def lengths(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the lengths of whole texts; of pairs as if their halves met at random."""
        total, *others = (histogram(manifest, name) for name in self.texts_of)
        for counts in others:
            met = np.convolve(total / max(total.sum(), 1), counts)
            total = np.where(met > 0, np.maximum(np.rint(met), 1), 0).astype(np.int64)
        return tuple(total.tolist())

    def texts(
        self, rows: Rows, numbers: np.ndarray, parts: np.ndarray, special: tuple[int, ...] = ()
    ) -> Texts:
        """Return each row's text; the second of a pair without what every text begins with."""
        del parts
        return self._texts(taken(rows, numbers), special)

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Return texts with their labels, and `types`: 1 in the second half of a pair."""
        found = taken(rows, piece.rows)
        arrays = slotted(self._texts(found, facts.special), piece, draw, facts)
        starts = [len(row[self.texts_of[0]]) if row else 0 for row in found]
        labels = np.array(
            [row[self.label] if row else 0 for row in found],
            np.float32 if self._of_value else np.int64,
        )
        return {**arrays, "types": second(arrays, starts), "labels": labels}

    def answers(self) -> Answers:
        return "values" if self._of_value else "classes"

    def fields(self, manifest: Manifest) -> Fields:
        """Return the texts, of which two are read as one."""
        limits = tuple(manifest.fields[name].limit for name in self.texts_of)
        return Fields(texts=self.texts_of, limits=limits, joined=len(self.texts_of) > 1)

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.architectures import build
        from regauge.models.modules import Classifier

        facts, count = manifest.tokenizer, 1 if self._of_value else self.classes
        made = build(model, "classes", facts.vocabulary, seed, facts.pad, outputs=count)
        return Classifier(*made)

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = self._losses(output["scores"], batch["labels"])
        return (losses * batch["real"]).sum(), batch["real"].sum()

    def kept(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the scores with the label behind them, [batch, classes + 1]."""
        import torch

        return torch.cat([output["scores"], batch["labels"].float()[:, None]], 1)

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        """Return loss, accuracy, F1 and Matthews' correlation; of values the loss and Pearson's."""
        kept, real = output["vectors"].cpu(), batch["real"].cpu()
        scores, labels = kept[:, :-1], kept[:, -1]
        losses = self._losses(scores, labels if self._of_value else labels.long())
        found: Sums = {"loss": ((losses * real).sum(), real.sum())}
        if self._of_value:
            return {**found, "pearson": _quality.pearson(scores[:, 0], labels, real)}
        counts = _quality.Counts.of(scores.argmax(1), labels.long(), real, self.classes)
        return {
            **found,
            "accuracy": counts.accuracy(),
            "f1": counts.f1(),
            "matthews": counts.matthews(),
        }

    @property
    def _of_value(self) -> bool:
        return self.predict == "value"

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        if self._of_value:
            return (scores[:, 0] - labels).square()
        return cross_entropy(scores, labels, reduction="none")

    def _texts(self, found: Found, special: tuple[int, ...]) -> Texts:
        return [None if row is None else self._text(row, special) for row in found]

    def _text(self, row: dict[str, np.ndarray], special: tuple[int, ...]) -> np.ndarray:
        first, *others = (row[name] for name in self.texts_of)
        if not others:
            return first
        (second,) = others
        again = first[0] == second[0] and int(first[0]) in special
        return np.concatenate([first, second[1:] if again else second])

    def _check_labels(self, manifest: Manifest) -> None:
        least, most = check_label(manifest, self.label)
        if not self._of_value and (least < 0 or most >= self.classes):
            raise DataError(
                f"labels in '{self.label}' go from {least:g} to {most:g}, and"
                f" task.classes = {self.classes} are 0 to {self.classes - 1}",
                "set task.classes, or number the classes from 0",
            )
