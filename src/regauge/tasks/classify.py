"""Classification and regression of texts or text pairs, such as the GLUE tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, model_validator

from regauge.data.batches import take_rows
from regauge.errors import DataError
from regauge.json_files import find_json
from regauge.log import logger
from regauge.models.io_spec import InputSpec, read_class_names
from regauge.tasks import ITEMS, ClassReport, MetricSums, _quality
from regauge.tasks._fields import (
    FieldsTask,
    Texts,
    build_slot_arrays,
    build_token_types,
    check_field,
    field_histogram,
    label_range,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, OptionalRows, RandomKey
    from regauge.data.dataset import Dataset, DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


MAX_LOGGED_NAMES = 10
MAX_MATRIX_CLASSES = 100
"""Classes up to which a confusion matrix is written."""


class Classify(FieldsTask):
    """Predict the class of a text or text pair, or a number (`problem_type = "regression"`)."""

    metrics_need_all_rows: ClassVar[bool] = True

    text_fields: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    """One text field, or two that are concatenated to a pair."""
    label: str = "label"
    """Field with the class, 0 … classes - 1, or with the value to predict."""
    problem_type: Literal["classification", "regression"] = "classification"
    """Classes are trained with cross-entropy, values with squared error."""
    classes: int = Field(default=2, ge=2, le=4096)
    """Number of classes; by default that of the class names."""
    class_names: tuple[str, ...] = ()
    """Names of the classes 0, 1, …, for config.json, exports and predictions."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Probability that is moved from the label to all classes equally (Szegedy et al., 2016)."""
    class_weights: Literal["none", "balanced"] | tuple[PositiveFloat, ...] = "none"
    """Weight of each class in the loss; `balanced`: inversely proportional to its number of
    training rows."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_classes(cls, table: Any) -> Any:
        if isinstance(table, dict) and (names := table.get("class_names")):
            return {"classes": len(names), **table}
        return table

    @model_validator(mode="after")
    def _check_class_names(self) -> Classify:
        names = self.class_names
        if names and len(names) != self.classes:
            raise ValueError(
                f"class_names has {len(names)} names and classes is {self.classes}; remove classes"
            )
        if len(set(names)) < len(names):
            raise ValueError("class_names has a name twice; give each class its own name")
        if names and self._is_regression:
            raise ValueError("a regression has no classes; remove class_names")
        return self

    @model_validator(mode="after")
    def _check_class_weights(self) -> Classify:
        if self._is_regression and (self.label_smoothing or self.class_weights != "none"):
            raise ValueError(
                "a regression has no classes; remove label_smoothing and class_weights"
            )
        weights = self.class_weights
        if isinstance(weights, tuple) and len(weights) != self.classes:
            raise ValueError(
                f"class_weights has {len(weights)} values and classes is {self.classes};"
                " give each class one weight"
            )
        return self

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        for name in self.text_fields:
            check_field(manifest, name)
        kinds = ("integer", "float") if self._is_regression else ("integer",)
        check_field(manifest, self.label, kinds)
        self._check_labels(manifest)

    def fill_defaults(self, dataset: Dataset) -> Self:
        """Return the task with the balanced class weights of the training rows.

        The weight of a class is n / (classes x n_class), as in scikit-learn (King and Zeng, 2001).
        Raises DataError if a class has no training row.
        """
        if self.class_weights != "balanced":
            return self
        labels = dataset.rows("train").read_column(self.label)
        counts = np.bincount(labels, minlength=self.classes)
        if not counts.all():
            raise DataError(
                f"class {self._names[counts.argmin()]} has no training row, so it has no weight",
                "give task.class_weights as a list, or remove the class",
            )
        weights = len(labels) / (self.classes * counts)
        return self.model_copy(update={"class_weights": tuple(weights.tolist())})

    def check_weights(self, folder: Path) -> None:
        from regauge.models.hub import CONFIG
        from regauge.models.tokenizer_convention import COPY_REMEDY

        config = find_json(folder / CONFIG, COPY_REMEDY) or {}
        names = read_class_names(config.get("id2label"))
        if self.class_names or self._is_regression or not names:
            return
        logger.warning(
            "%s: its class names are not used: %s; name the classes with task.class_names",
            folder,
            ", ".join(names[:MAX_LOGGED_NAMES]),
        )

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the number of texts by length; halves of pairs are assumed independent."""
        total, *others = (field_histogram(manifest, name) for name in self.text_fields)
        for counts in others:
            expected = np.convolve(total / max(total.sum(), 1), counts)
            total = np.where(expected > 0, np.maximum(np.rint(expected), 1), 0).astype(np.int64)
        return tuple(total.tolist())

    def read_texts(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,
        text_numbers: np.ndarray,
        special: tuple[int, ...] = (),
    ) -> Texts:
        """Return the text of each row; a pair is one text with one start token."""
        del text_numbers
        return self._join_all_texts(take_rows(rows, row_numbers), special)

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays with `labels`, [batch], and `types`, which are 1 in second halves."""
        records = take_rows(rows, plan.row_numbers)
        texts = self._join_all_texts(records, config.special_ids)
        arrays = build_slot_arrays(texts, plan, key, config)
        starts = [len(row[self.text_fields[0]]) if row else 0 for row in records]
        labels = np.array(
            [row[self.label] if row else 0 for row in records],
            np.float32 if self._is_regression else np.int64,
        )
        return {**arrays, "types": build_token_types(arrays, starts), "labels": labels}

    def output_kind(self) -> OutputKind:
        return "values" if self._is_regression else "classes"

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        """Return the text fields; two are joined to a pair."""
        limits = tuple(manifest.columns[name].max_length for name in self.text_fields)
        return InputSpec(
            text_fields=self.text_fields, max_lengths=limits, is_pair=len(self.text_fields) > 1
        )

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.architectures import build_model
        from regauge.models.modules import Classifier

        tokenizer = manifest.tokenizer
        vocab_size, pad_id = tokenizer.vocab_size, tokenizer.pad_token_id
        outputs = 1 if self._is_regression else self.classes
        names = self.class_names
        return Classifier(
            *build_model(
                model, "classes", vocab_size, seed, pad_id, outputs=outputs, class_names=names
            )
        )

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses, weights = self._losses(output["scores"], batch["labels"])
        return (losses * batch["real"]).sum(), (weights * batch["real"]).sum()

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the scores and the label, [batch, classes + 1]."""
        import torch

        return torch.cat([output["scores"], batch["labels"].float()[:, None]], 1)

    def metric_arrays(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `scores`, [rows, classes], and `labels`, [rows]."""
        scores, labels = outputs["vectors"][:, :-1], outputs["vectors"][:, -1]
        return {"scores": scores, "labels": labels if self._is_regression else labels.long()}

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return loss, accuracy, F1 and Matthews correlation; for regression loss and Pearson's."""
        real = batch["real"].cpu()
        arrays = self.metric_arrays({"vectors": output["vectors"].cpu()})
        scores, labels = arrays["scores"], arrays["labels"]
        losses, weights = self._losses(scores, labels)
        sums: MetricSums = {"loss": ((losses * real).sum(), (weights * real).sum())}
        if self._is_regression:
            return {**sums, "pearson": _quality.pearson(scores[:, 0], labels, real)}
        counts = _quality.ClassCounts.count(scores.argmax(1), labels, real, self.classes)
        return {
            **sums,
            "accuracy": counts.accuracy(),
            "f1": counts.f1(),
            "matthews_correlation": counts.matthews(),
            ITEMS: (real.sum(), real.new_ones(())),
        }

    def class_report(self, outputs: dict[str, Tensor]) -> ClassReport | None:
        """Return the metrics of each class, and the confusion matrix of up to 100 classes."""
        if self._is_regression:
            return None
        arrays = self.metric_arrays(outputs)
        predicted, labels = arrays["scores"].argmax(1), arrays["labels"]
        real = arrays["scores"].new_ones(len(labels))
        counts = _quality.ClassCounts.count(predicted, labels, real, self.classes)
        report = ClassReport(classes=counts.describe(self._names))
        if self.classes <= MAX_MATRIX_CLASSES:
            report["confusion_matrix"] = _quality.confusion_matrix(predicted, labels, self.classes)
        return report

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the classes; their numbers if they have no names."""
        return self.class_names or tuple(map(str, range(self.classes)))

    @property
    def _is_regression(self) -> bool:
        return self.problem_type == "regression"

    def _losses(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted losses and their weights, both [rows]."""
        import torch
        from torch.nn.functional import cross_entropy

        if self._is_regression:
            losses = (scores[:, 0] - labels).square()
            return losses, torch.ones_like(losses)
        weights = torch.ones(self.classes)
        if isinstance(self.class_weights, tuple):
            weights = torch.tensor(self.class_weights)
        weights = weights.to(scores.device)
        smoothing = self.label_smoothing
        losses = cross_entropy(scores, labels, weights, reduction="none", label_smoothing=smoothing)
        return losses, weights[labels]

    def _join_all_texts(self, records: OptionalRows, special: tuple[int, ...]) -> Texts:
        return [None if row is None else self._join_texts(row, special) for row in records]

    def _join_texts(self, row: dict[str, np.ndarray], special: tuple[int, ...]) -> np.ndarray:
        """Return a text or the concatenation of two, without the second one's start token."""
        if len(self.text_fields) == 1:
            return row[self.text_fields[0]]
        left, right = (row[name] for name in self.text_fields)
        has_start_token = left[0] == right[0] and int(left[0]) in special
        return np.concatenate([left, right[1:] if has_start_token else right])

    def _check_labels(self, manifest: DatasetManifest) -> None:
        lowest, highest = label_range(manifest, self.label)
        if not self._is_regression and (lowest < 0 or highest >= self.classes):
            raise DataError(
                f"labels in '{self.label}' range from {lowest:g} to {highest:g}, but"
                f" task.classes = {self.classes} allows 0 to {self.classes - 1}",
                "set task.classes, or number the classes from 0",
            )
