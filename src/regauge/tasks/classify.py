"""Classification and regression of texts or text pairs, such as the GLUE tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from regauge.data.batches import take_rows
from regauge.errors import DataError
from regauge.json_files import find_json
from regauge.log import logger
from regauge.models.io_spec import InputSpec, read_class_names
from regauge.tasks import MetricSums, _quality
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
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


MAX_LOGGED_NAMES = 10


class Classify(FieldsTask):
    """Predict the class of a text or text pair, or a number (`problem_type = "regression"`)."""

    peer_names: ClassVar[tuple[str, ...]] = (
        "classification",
        "regression",
        "text_classification",
        "sequence_classification",
    )

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

    @model_validator(mode="before")
    @classmethod
    def _set_default_classes(cls, table: Any) -> Any:
        names = table.get("class_names") if isinstance(table, dict) else None
        return {"classes": len(names), **table} if names and isinstance(names, tuple) else table

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

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        for name in self.text_fields:
            check_field(manifest, name)
        kinds = ("integer", "float") if self._is_regression else ("integer",)
        check_field(manifest, self.label, kinds)
        self._check_labels(manifest)

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
        losses = self._losses(output["scores"], batch["labels"])
        return (losses * batch["real"]).sum(), batch["real"].sum()

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the scores and the label, [batch, classes + 1]."""
        import torch

        return torch.cat([output["scores"], batch["labels"].float()[:, None]], 1)

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return loss, accuracy, F1 and Matthews correlation; for regression loss and Pearson's."""
        outputs, real = output["vectors"].cpu(), batch["real"].cpu()
        scores, labels = outputs[:, :-1], outputs[:, -1]
        losses = self._losses(scores, labels if self._is_regression else labels.long())
        sums: MetricSums = {"loss": ((losses * real).sum(), real.sum())}
        if self._is_regression:
            return {**sums, "pearson": _quality.pearson(scores[:, 0], labels, real)}
        counts = _quality.ClassCounts.count(scores.argmax(1), labels.long(), real, self.classes)
        return {
            **sums,
            "accuracy": counts.accuracy(),
            "f1": counts.f1(),
            "matthews_correlation": counts.matthews(),
        }

    @property
    def _is_regression(self) -> bool:
        return self.problem_type == "regression"

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        if self._is_regression:
            return (scores[:, 0] - labels).square()
        return cross_entropy(scores, labels, reduction="none")

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
