"""Classification and regression of texts or text pairs, such as the GLUE tasks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from regauge.data.batches import take_rows
from regauge.errors import DataError, SettingsError
from regauge.json_files import find_json
from regauge.log import logger
from regauge.models.io_spec import InputSpec, read_class_names
from regauge.tasks import MetricSums, _quality
from regauge.tasks._fields import (
    TEXT_TOKENS,
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
    from regauge.data.dataset import ColumnInfo, DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


MAX_LOGGED_NAMES = 10
MIN_CLASSES = 2


class Classify(FieldsTask):
    """Predict the class of a text or text pair, or a number (`problem_type = "regression"`)."""

    metrics_need_all_rows: ClassVar[bool] = True

    text_fields: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    """One text field, or two that are concatenated to a pair."""
    label: str = "label"
    """Field with the class, of `rows.labels`, or with the value to predict, of `rows.floats`."""
    problem_type: Literal["classification", "regression"] = "classification"
    """Classes are trained with cross-entropy, values with squared error."""
    classes: int | None = Field(default=None, ge=2, le=4096)
    """Number of classes; by default that of the dataset."""
    class_names: tuple[str, ...] = ()
    """Names of the classes 0, 1, … in config.json, exports and predictions; by default those of
    the dataset."""

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

    def default_rows(self) -> dict[str, Any]:
        fields = dict.fromkeys(self.text_fields, TEXT_TOKENS)
        rows = {**super().default_rows(), "fields": fields}
        if self._is_regression:
            return {**rows, "floats": [self.label]}
        return {**rows, "labels": {self.label: self.class_names}}

    def resolve_defaults(self, manifest: DatasetManifest) -> Self:
        """Return the task with the number and the names of the classes of a dataset."""
        column = manifest.columns.get(self.label)
        if self._is_regression or column is None:
            return self
        names = self.class_names or column.class_names or ()
        classes = self.classes or len(names) or max(MIN_CLASSES, column.num_classes or 0)
        return self.model_copy(update={"classes": classes, "class_names": names})

    def find_assumption(self, manifest: DatasetManifest) -> str | None:
        column = manifest.columns.get(self.label)
        if self._is_regression or self.classes or (column and column.num_classes):
            return None
        return f"{MIN_CLASSES} classes; those of '{self.label}' are not known before 'prepare'"

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        for name in self.text_fields:
            check_field(manifest, name)
        kinds = ("integer", "float") if self._is_regression else ("integer",)
        check_field(manifest, self.label, kinds)
        self._check_class_names_of_dataset(manifest.columns[self.label])
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
        resolved = self.resolve_defaults(manifest)
        outputs = 1 if self._is_regression else resolved.classes or MIN_CLASSES
        names = resolved.class_names
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
        classes = scores.shape[1]
        counts = _quality.ClassCounts.count(scores.argmax(1), labels.long(), real, classes)
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
        if self._is_regression:
            return
        classes = self.resolve_defaults(manifest).classes or MIN_CLASSES
        if lowest < 0 or highest >= classes:
            raise DataError(
                f"labels in '{self.label}' range from {lowest:g} to {highest:g}, but"
                f" task.classes = {classes} allows 0 to {classes - 1}",
                "set task.classes, or number the classes from 0",
            )

    def _check_class_names_of_dataset(self, column: ColumnInfo) -> None:
        """Raise SettingsError if the classes of the dataset are not those of the task."""
        names = column.class_names
        if names is None:
            return
        if self._is_regression:
            problem = f"'{self.label}' has classes, not numbers"
            raise SettingsError(problem, "list it in rows.floats instead of rows.labels")
        if self.class_names and self.class_names != names:
            problem = f"the class names of '{self.label}' are {', '.join(names[:MAX_LOGGED_NAMES])}"
            ours = json.dumps(self.class_names, ensure_ascii=False)
            remedy = f"remove task.class_names, or set rows.labels.{self.label} = {ours}"
            raise SettingsError(f"{problem}, and task.class_names differ", remedy)
        if self.classes and self.classes != len(names):
            problem = f"'{self.label}' has {len(names)} classes, and task.classes = {self.classes}"
            raise SettingsError(problem, "remove task.classes")
