"""Token classification: tag the words in a sentence, such as named entities (NER)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from regauge.models.io_spec import ModelHead
from regauge.system.errors import SettingsError
from regauge.tasks import ITEMS, ClassReport, MetricSums, _quality
from regauge.tasks._classes import MIN_CLASSES, ClassesTask
from regauge.tasks._entities import TagScheme
from regauge.tasks._fields import TEXT_TOKENS, check_field

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.architectures import HeadKind
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model

NUM_SUMS = 3
"""Row sums before the entity counts: loss, correct words and words."""


class Tokens(ClassesTask):
    """Predict each word's tag at its first token (rows with layout "tagged")."""

    peer_names: ClassVar[tuple[str, ...]] = (
        "token_classification",
        "automodelfortokenclassification",
        "ner",
        "named_entity_recognition",
        "sequence_labeling",
        "pos_tagging",
    )

    metrics_need_all_rows: ClassVar[bool] = True
    maximized: ClassVar[tuple[str, ...]] = ("accuracy", "precision", "recall", "f1")
    layout: ClassVar[str] = "tagged"
    artifacts_have_metrics: ClassVar[bool] = False

    words: str = "tokens"
    """Field with a sentence's words."""
    tags: str = "tags"
    """Field with the word tags, from `rows.labels`; prefixes such as in `B-PER` mark entities."""

    @property
    def head(self) -> HeadKind:
        return "tokens"

    def text_columns(self) -> tuple[str, ...]:
        return (self.words,)

    @property
    def class_field(self) -> str:
        return self.tags

    def default_rows(self) -> dict[str, Any]:
        fields, labels = {self.words: TEXT_TOKENS}, {self.tags: self.class_names}
        return {**super().default_rows(), "fields": fields, "labels": labels}

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        check_field(manifest, self.tags, ("integers",))
        column = manifest.columns[self.tags]
        self.check_named_classes(column)
        num_classes = column.num_classes or 0
        if self.classes is not None and num_classes > self.classes:
            problem = f"'{self.tags}' has {num_classes} classes, and task.classes = {self.classes}"
            raise SettingsError(problem, "remove task.classes")

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays with `labels` and `weights`, [batch, length].

        Weights are 1 at a word's first token, and 0 elsewhere.
        """
        import numpy as np

        from regauge.data.batches import pad_sequences, take_rows
        from regauge.tasks import _arrays

        records = take_rows(rows, plan.row_numbers)
        texts = [None if row is None else row[self.words] for row in records]
        tags = [None if row is None else row[self.tags] for row in records]
        labels = pad_sequences(tags, plan.length, -1)
        return {
            **_arrays.build_slot_arrays(texts, plan, key, config),
            "labels": np.maximum(labels, 0).astype(np.int64),
            "weights": (labels >= 0).astype(np.float32),
        }

    def output_kind(self) -> OutputKind:
        return "entities"

    def find_head(self, manifest: DatasetManifest) -> ModelHead | None:
        return ModelHead(self.head, self.resolve_defaults(manifest).classes or MIN_CLASSES)

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.architectures import ClassHead
        from regauge.models.modules import TokenClassifier

        resolved = self.resolve_defaults(manifest)
        head = ClassHead(resolved.classes or MIN_CLASSES, resolved.class_names)
        return TokenClassifier(*self.build_model(model, manifest, seed, class_head=head))

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights = batch["weights"]
        return (self._losses(output, batch) * weights).sum(), weights.sum()

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return sums per sentence, [batch, 3 + 3 x types].

        They are the loss, the correct words and the words, followed by entity counts per type:
        correct, predicted and actual.
        """
        import torch

        weights, predicted = batch["weights"], output["scores"].argmax(2)
        correct = (predicted == batch["labels"]) * weights
        losses = self._losses(output, batch) * weights
        sums = torch.stack([values.sum(1) for values in (losses, correct, weights)], 1)
        counts = self._count_entities(batch["labels"], predicted, weights)
        return torch.cat([sums, torch.from_numpy(counts).to(sums)], 1)

    def metric_arrays(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sums per sentence.

        `loss`, `correct` and `words` are [rows]. `correct_entities`, `predicted_entities` and
        `actual_entities` are [rows, types].
        """
        vectors = outputs["vectors"]
        names = ("correct_entities", "predicted_entities", "actual_entities")
        counts = zip(names, vectors[:, NUM_SUMS:].chunk(3, 1), strict=True)
        loss, correct, words = vectors[:, :NUM_SUMS].unbind(1)
        return {"loss": loss, "correct": correct, "words": words, **dict(counts)}

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return loss and word accuracy, and entity precision, recall and F1."""
        del batch
        sums = output["vectors"].cpu().double().sum(0)
        loss, correct, words = sums[:NUM_SUMS]
        counts = _quality.ClassCounts(*sums[NUM_SUMS:].chunk(3))
        return {
            "loss": (loss, words),
            "accuracy": (correct, words),
            "precision": (counts.correct.sum(), counts.predicted.sum()),
            "recall": (counts.correct.sum(), counts.actual.sum()),
            "f1": counts.micro_f1(),
            ITEMS: (words, words.new_ones(())),
        }

    def fit_baselines(
        self, train: list[dict[str, Any]], heldout: list[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Return the metrics of each first token's most frequent tag, or of all tokens'."""
        import numpy as np
        import torch

        ids = [row[self.words] for row in (*train, *heldout)]
        num_tokens = 1 + max(int(row.max(initial=0)) for row in ids)
        counts = np.zeros((num_tokens, self.classes or MIN_CLASSES), np.float32)
        for row in train:
            is_word = row[self.tags] >= 0
            np.add.at(counts, (row[self.words][is_word], row[self.tags][is_word]), 1)
        shares = counts.sum(0) / max(1, counts.sum())
        table = torch.from_numpy((counts + shares) / (counts.sum(1, keepdims=True) + 1))
        scores = table.clamp_min(1e-6).log()
        vectors = []
        for row in heldout:
            tags = torch.from_numpy(row[self.tags].astype(np.int64))[None]
            batch = {"labels": tags.clamp_min(0), "weights": (tags >= 0).float()}
            output = {"scores": scores[row[self.words].astype(np.int64)][None]}
            vectors.append(self.eval_outputs(output, batch))
        return {"most frequent tag": self.metric_sums({"vectors": torch.cat(vectors)}, {})}

    def class_report(self, outputs: dict[str, Tensor]) -> ClassReport | None:
        """Return metrics per entity type."""
        sums = outputs["vectors"].double().sum(0)
        counts = _quality.ClassCounts(*sums[NUM_SUMS:].chunk(3))
        return ClassReport(classes=counts.describe(self._scheme.types))

    @property
    def _scheme(self) -> TagScheme:
        names = self.class_names or tuple(map(str, range(self.classes or MIN_CLASSES)))
        return TagScheme(names)

    def _losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the cross-entropy per token, [batch, length]."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(output["scores"].transpose(1, 2), batch["labels"], reduction="none")

    def _count_entities(self, labels: Tensor, predicted: Tensor, weights: Tensor) -> np.ndarray:
        """Count correct, predicted and actual entities per sentence, [batch, 3 x types].

        All arguments are [batch, length].
        """
        import numpy as np

        scheme = self._scheme
        counts = np.zeros((len(labels), 3, len(scheme.types)), np.float32)
        is_word = weights.cpu().numpy() > 0
        tags = zip(labels.cpu().numpy(), predicted.cpu().numpy(), is_word, strict=True)
        for cells, (actual, guessed, mask) in zip(counts, tags, strict=True):
            actual_entities, predicted_entities = (
                set(scheme.find_entities(values[mask].tolist())) for values in (actual, guessed)
            )
            groups = (actual_entities & predicted_entities, predicted_entities, actual_entities)
            for row, entities in zip(cells, groups, strict=True):
                for entity in entities:
                    row[entity.type] += 1
        return counts.reshape(len(labels), -1)
