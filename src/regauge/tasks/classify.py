"""Text or text pair classification and regression, such as the GLUE tasks."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from regauge.data.buckets import joined_text_histogram
from regauge.models.io_spec import InputSpec, ModelHead
from regauge.system.errors import DataError, SettingsError
from regauge.tasks import ITEMS, ClassReport, MetricSums, _quality
from regauge.tasks._classes import MIN_CLASSES, ClassesTask
from regauge.tasks._fields import TEXT_TOKENS, check_field, field_histogram, label_range

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, OptionalRows, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.architectures import HeadKind, ProblemType
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model
    from regauge.tasks._arrays import Texts


LABEL_KINDS = {
    "classification": ("integer",),
    "multi-label": ("integer", "integers"),
    "regression": ("integer", "float"),
}
"""Problem type -> label column kinds."""
PROBLEM_TYPES: dict[str, ProblemType] = {
    "classification": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
"""Problem type -> its name in transformers."""
MAX_MATRIX_CLASSES = 100
"""A confusion matrix is written for up to this many classes."""


class Classify(ClassesTask):
    """Predict the class of a text or text pair, or a number (`problem_type = "regression"`)."""

    peer_names: ClassVar[tuple[str, ...]] = (
        "classification",
        "regression",
        "text_classification",
        "sequence_classification",
        "sequenceclassification",
        "automodelforsequenceclassification",
        "sentiment_analysis",
        "multi_label",
    )

    metrics_need_all_rows: ClassVar[bool] = True
    maximized: ClassVar[tuple[str, ...]] = (
        "accuracy",
        "f1",
        "f1_micro",
        "f1_macro",
        "matthews_correlation",
        "pearson",
    )

    text_fields: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    """One text field, or two to concatenate as a pair."""
    label: str = "label"
    """Field with the class, from `rows.labels`, or the value to predict, from `rows.floats`."""
    problem_type: Literal["classification", "multi-label", "regression"] = "classification"
    """`classification`: one class (cross-entropy); `multi-label`: any number of classes (binary
    cross-entropy for each); `regression`: a value (squared error)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Probability moved from the label to all classes equally (Szegedy et al., 2016)."""
    class_weights: Literal["none", "balanced"] | tuple[PositiveFloat, ...] = "none"
    """Loss weight per class, or per class's positive rows for multi-label; `balanced`: inversely
    proportional to the number of training rows."""

    @model_validator(mode="after")
    def _check_problem_type(self) -> Classify:
        if self._is_regression and self.class_names:
            raise ValueError("a regression has no classes; remove class_names")
        if self._is_regression and (self.label_smoothing or self.class_weights != "none"):
            raise ValueError("a regression has no classes; remove label_smoothing, class_weights")
        if self._is_multi_label and self.label_smoothing:
            raise ValueError("label_smoothing needs one class per text; remove label_smoothing")
        weights = self.class_weights
        if isinstance(weights, tuple) and self.classes and len(weights) != self.classes:
            raise ValueError(
                f"class_weights has {len(weights)} values and classes is {self.classes};"
                " give each class one weight"
            )
        return self

    @property
    def head(self) -> HeadKind:
        return "classes"

    def text_columns(self) -> tuple[str, ...]:
        return self.text_fields

    @property
    def class_field(self) -> str:
        return "" if self._is_regression else self.label

    def default_rows(self) -> dict[str, Any]:
        fields = dict.fromkeys(self.text_fields, TEXT_TOKENS)
        rows = {**super().default_rows(), "fields": fields}
        if self._is_regression:
            return {**rows, "floats": [self.label]}
        return {**rows, "labels": {self.label: self.class_names}}

    def resolve_defaults(self, manifest: DatasetManifest) -> Self:
        """Take the number of classes, their names and weights from the dataset.

        Raises SettingsError if the dataset does not fit the class weights, and DataError if a class
        without training rows is to be balanced.
        """
        task = super().resolve_defaults(manifest)
        column = manifest.columns.get(self.class_field)
        if column is None:
            return task
        classes, weights = task.classes or MIN_CLASSES, self.class_weights
        if weights == "balanced" and manifest.splits:
            import numpy as np

            counts = np.zeros(classes)
            given = column.class_counts.get("train", ())[:classes]
            counts[: len(given)] = given
            weights = self._balance_weights(counts, task.class_names, manifest.splits["train"].rows)
        if isinstance(weights, tuple) and len(weights) != classes:
            problem = f"task.class_weights has {len(weights)} values for {classes} classes"
            raise SettingsError(problem, "give each class one weight")
        return task.model_copy(update={"class_weights": weights})

    def _balance_weights(
        self, counts: np.ndarray, names: tuple[str, ...], num_rows: int
    ) -> tuple[float, ...]:
        """Return balanced class weights from the numbers of training rows, [classes].

        The weight is n / (classes x n_class), as in scikit-learn (King and Zeng, 2001). If
        problem_type is multi-label, it is the number of rows without the class over the number of
        rows with it.
        """
        if not counts.any():
            problem = f"the dataset has no counts of the classes of '{self.label}'"
            raise SettingsError(problem, "list it in rows.labels, or give task.class_weights")
        if not counts.all():
            number = int(counts.argmin())
            problem = f"class {names[number] if names else number} has no training row"
            raise DataError(problem, "give task.class_weights as a list, or remove the class")
        if not self._is_multi_label:
            weights = num_rows / (len(counts) * counts)
        elif (counts == num_rows).any():
            number = int(counts.argmax())
            problem = f"every training row has the class {names[number] if names else number}"
            raise DataError(problem, "give task.class_weights as a list, or remove the class")
        else:
            weights = (num_rows - counts) / counts
        return tuple(weights.tolist())

    def find_assumption(self, manifest: DatasetManifest) -> str | None:
        column = manifest.columns.get(self.label)
        if self._is_regression or self.classes or (column and column.num_classes):
            return None
        return f"{MIN_CLASSES} classes; those of '{self.label}' are not known before 'prepare'"

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        column = manifest.columns.get(self.label)
        if column is not None and column.kind == "integers" and not self._is_multi_label:
            problem = f"'{self.label}' has lists of classes"
            raise SettingsError(problem, 'set task.problem_type = "multi-label"')
        check_field(manifest, self.label, LABEL_KINDS[self.problem_type])
        column = manifest.columns[self.label]
        if self._is_regression and column.class_names is not None:
            problem = f"'{self.label}' has classes, not numbers"
            raise SettingsError(problem, "list it in rows.floats instead of rows.labels")
        self.check_named_classes(column)
        self._check_labels(manifest)

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Count texts by length; halves of pairs are assumed independent."""
        return reduce(
            joined_text_histogram, (field_histogram(manifest, name) for name in self.text_fields)
        )

    def select_texts(
        self, records: OptionalRows, text_numbers: np.ndarray, special: tuple[int, ...]
    ) -> Texts:
        """Return each row's only text; a pair is one text with one start token."""
        if len(self.text_fields) == 1:
            return super().select_texts(records, text_numbers, special)
        return [None if row is None else self._join_texts(row, special) for row in records]

    def _join_texts(self, row: dict[str, np.ndarray], special: tuple[int, ...]) -> np.ndarray:
        import numpy as np

        left, right = (row[name] for name in self.text_fields)
        has_start_token = left[0] == right[0] and int(left[0]) in special
        return np.concatenate([left, right[1:] if has_start_token else right])

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays with `labels`, and `types`, which are 1 in second halves.

        Labels are [batch]; if problem_type is multi-label, [batch, classes] with 1 for each class.
        """
        from regauge.data.batches import take_rows
        from regauge.tasks import _arrays

        records = take_rows(rows, plan.row_numbers)
        texts = self.select_texts(records, plan.text_numbers, config.special_ids)
        arrays = _arrays.build_slot_arrays(texts, plan, key, config)
        starts = [len(row[self.text_fields[0]]) if row else 0 for row in records]
        labels = self._build_labels(records)
        return {**arrays, "types": _arrays.build_token_types(arrays, starts), "labels": labels}

    def _build_labels(self, records: OptionalRows) -> np.ndarray:
        import numpy as np

        if self._is_multi_label:
            labels = np.zeros((len(records), self.classes or MIN_CLASSES), np.float32)
            for cells, row in zip(labels, records, strict=True):
                cells[[] if row is None else row[self.label]] = 1
            return labels
        dtype = np.float32 if self._is_regression else np.int64
        return np.array([row[self.label] if row else 0 for row in records], dtype)

    def output_kind(self) -> OutputKind:
        return "values" if self._is_regression else "classes"

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        """Return the text fields; two are joined to a pair."""
        limits = tuple(manifest.columns[name].max_length for name in self.text_fields)
        return InputSpec(
            text_fields=self.text_fields, max_lengths=limits, is_pair=len(self.text_fields) > 1
        )

    def find_head(self, manifest: DatasetManifest) -> ModelHead | None:
        return ModelHead(self.head, self._count_outputs(self.resolve_defaults(manifest).classes))

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.architectures import ClassHead
        from regauge.models.modules import Classifier

        resolved = self.resolve_defaults(manifest)
        outputs = self._count_outputs(resolved.classes)
        head = ClassHead(outputs, resolved.class_names, PROBLEM_TYPES[self.problem_type])
        return Classifier(*self.build_model(model, manifest, seed, class_head=head))

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses, weights = self._losses(output["scores"], batch["labels"])
        return (losses * batch["real"]).sum(), (weights * batch["real"]).sum()

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return scores and labels, [batch, classes + 1].

        If problem_type is multi-label, [batch, 2 x classes].
        """
        import torch

        return torch.cat(
            [output["scores"], batch["labels"].float().view(len(batch["labels"]), -1)], 1
        )

    def metric_arrays(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `scores`, [rows, classes], and `labels`, [rows] or [rows, classes]."""
        vectors = outputs["vectors"]
        if self._is_multi_label:
            scores, labels = vectors.chunk(2, 1)
            return {"scores": scores, "labels": labels}
        scores, labels = vectors[:, :-1], vectors[:, -1]
        return {"scores": scores, "labels": labels if self._is_regression else labels.long()}

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return the loss, and the problem type's metrics.

        They are accuracy, F1 and Matthews correlation; accuracy, micro F1 and macro F1 for several
        classes; or Pearson's correlation.
        """
        real = batch["real"].cpu()
        arrays = self.metric_arrays({"vectors": output["vectors"].cpu()})
        scores, labels = arrays["scores"], arrays["labels"]
        losses, weights = self._losses(scores, labels)
        sums: MetricSums = {"loss": ((losses * real).sum(), (weights * real).sum())}
        if self._is_regression:
            return {**sums, "pearson": _quality.pearson(scores[:, 0], labels, real)}
        counts = self._count_classes(scores, labels, real)
        if self._is_multi_label:
            is_exact = ((scores > 0) == (labels > 0)).all(1)
            accuracy = (is_exact * real).sum(), real.sum()
            f1 = {"f1_micro": counts.micro_f1(), "f1_macro": counts.macro_f1()}
            return {**sums, "accuracy": accuracy, **f1}
        return {
            **sums,
            "accuracy": counts.accuracy(),
            "f1": counts.f1(),
            "matthews_correlation": counts.matthews(),
            ITEMS: (real.sum(), real.new_ones(())),
        }

    def fit_baselines(
        self, train: list[dict[str, Any]], heldout: list[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Return the metrics of the majority, or the mean, and of a linear model on tf-idf."""
        import numpy as np
        import torch
        from torch.nn.functional import one_hot

        from regauge.tasks._baselines import score_by_counts

        labels, targets = (torch.from_numpy(self._build_labels(rows)) for rows in (heldout, train))

        def measure(scores: Tensor) -> MetricSums:
            columns = [scores.expand(len(labels), -1), labels.float().view(len(labels), -1)]
            real = torch.ones(len(labels))
            return self.metric_sums({"vectors": torch.cat(columns, 1)}, {"real": real})

        if self._is_regression:
            return {"mean": measure(targets.mean().view(1, 1))}
        if not self._is_multi_label:
            targets = one_hot(targets, self._count_outputs(self.classes)).float()
        shares = targets.mean(0, keepdim=True)
        prior = shares.logit(1e-6) if self._is_multi_label else shares.clamp_min(1e-6).log()
        fit_texts, texts = (
            [np.concatenate([row[name] for name in self.text_fields]) for row in rows]
            for rows in (train, heldout)
        )
        scores = score_by_counts(fit_texts, texts, targets, several=self._is_multi_label)
        linear = {} if scores is None else {"tf-idf + logistic regression": measure(scores)}
        return {"majority": measure(prior), **linear}

    def class_report(self, outputs: dict[str, Tensor]) -> ClassReport | None:
        """Return per-class metrics, and the confusion matrix for up to 100 classes.

        Texts with several classes do not have a confusion matrix.
        """
        if self._is_regression:
            return None
        arrays = self.metric_arrays(outputs)
        scores, labels = arrays["scores"], arrays["labels"]
        counts = self._count_classes(scores, labels, scores.new_ones(len(scores)))
        classes = scores.shape[1]
        names = self.class_names or tuple(map(str, range(classes)))
        report = ClassReport(classes=counts.describe(names))
        if not self._is_multi_label and classes <= MAX_MATRIX_CLASSES:
            matrix = _quality.confusion_matrix(scores.argmax(1), labels, classes)
            report["confusion_matrix"] = matrix
        return report

    def _count_classes(self, scores: Tensor, labels: Tensor, real: Tensor) -> _quality.ClassCounts:
        if self._is_multi_label:
            return _quality.ClassCounts.count_sets(scores > 0, labels > 0, real)
        return _quality.ClassCounts.count(scores.argmax(1), labels, real, scores.shape[1])

    def _count_outputs(self, classes: int | None) -> int:
        return 1 if self._is_regression else classes or MIN_CLASSES

    @property
    def _is_regression(self) -> bool:
        return self.problem_type == "regression"

    @property
    def _is_multi_label(self) -> bool:
        return self.problem_type == "multi-label"

    def _losses(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return weighted losses and their weights, both [rows].

        With several classes per text, the loss is the mean over all classes, as in transformers.
        """
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

        ones = torch.ones_like(scores[:, 0])
        if self._is_regression:
            return (scores[:, 0] - labels).square(), ones
        weights = None
        if isinstance(self.class_weights, tuple):
            weights = torch.tensor(self.class_weights, device=scores.device)
        if self._is_multi_label:
            losses = binary_cross_entropy_with_logits(
                scores, labels, reduction="none", pos_weight=weights
            )
            return losses.mean(1), ones
        losses = cross_entropy(
            scores, labels, weights, reduction="none", label_smoothing=self.label_smoothing
        )
        return losses, ones if weights is None else weights[labels]

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
