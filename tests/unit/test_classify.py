"""Classification and regression: batches, metrics, and refused settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.class_weight import compute_class_weight

from distributed import datasets
from distributed.datasets import read_first_batch
from distributed.runs import BERT
from regauge.config import merge
from regauge.data.dataset import Dataset
from regauge.data.loader import CollatorConfig
from regauge.models.settings import Model
from regauge.system.errors import DataError, RegaugeError, SettingsError
from regauge.tasks import _quality
from regauge.tasks._classes import ClassesTask
from regauge.tasks.classify import Classify
from regauge.tasks.tokens import Tokens
from regauge.training.heldout import compute_means

CONFIG = CollatorConfig(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))
MODEL = Model(**merge(BERT, {"config": {"max_position_embeddings": 48}, "dropout": 0.0}))
PAIR = Classify(text_fields=("query", "document"), classes=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_pairs(tmp_path_factory.mktemp("data") / "pairs"))


def test_a_pair_is_encoded_as_in_bert(data: Dataset) -> None:
    batch = read_first_batch(PAIR, data, CONFIG)
    for index, slot in enumerate(batch["slots"].tolist()):
        (row,) = data.rows("train").take([slot])
        pair_ids = [*row["query"].tolist(), *row["document"].tolist()]
        assert batch["tokens"][index, : len(pair_ids)].tolist() == pair_ids
        types = [0] * len(row["query"]) + [1] * len(row["document"])
        assert batch["types"][index].tolist() == types + [0] * (
            len(batch["types"][index]) - len(pair_ids)
        )
        assert int(batch["labels"][index]) == row["label"]


def test_the_second_half_of_a_pair_has_no_start_token() -> None:
    row = {"a": np.array([1, 7, 2]), "b": np.array([1, 8, 9, 2]), "c": np.array([8, 9, 2])}
    joined = [
        Classify(text_fields=("a", other))._join_texts(row, (1, 2)).tolist() for other in ("b", "c")
    ]
    assert joined == [[1, 7, 2, 8, 9, 2]] * 2
    alike = {"a": np.array([7, 8]), "b": np.array([7, 9])}
    assert Classify(text_fields=("a", "b"))._join_texts(alike, (1, 2)).tolist() == [7, 8, 7, 9]


def test_scores_and_parameters_equal_transformers(data: Dataset) -> None:
    module = PAIR.build_module(MODEL, data.manifest, 0).eval()
    inner = module.model
    assert type(inner) is transformers.BertForSequenceClassification
    assert inner.config.num_labels == 3
    alone = transformers.BertForSequenceClassification(inner.config)
    assert alone.num_parameters() == inner.num_parameters()
    alone.load_state_dict(inner.state_dict())
    batch = read_first_batch(PAIR, data, CONFIG)
    with torch.no_grad():
        expected = alone.eval()(
            input_ids=batch["tokens"],
            attention_mask=(batch["segments"] > 0).long(),
            token_type_ids=batch["types"],
        ).logits
        scores = module(batch)["scores"]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


def compute_metrics(task: Classify, scores: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return the metrics of rows, with two padding rows added."""
    outputs = task.eval_outputs({"scores": scores}, {"labels": labels})
    padding = torch.full((2, outputs.shape[1]), 0.0)
    real = torch.tensor([1.0] * len(outputs) + [0.0, 0.0])
    return compute_means(
        task.metric_sums({"vectors": torch.cat([outputs, padding])}, {"real": real})
    )


def test_binary_metrics_equal_hand_computed_values() -> None:
    """TP 3, FN 1, FP 2, TN 4: F1 = 6 / 9, Matthews = (12 - 2) / sqrt(5 4 6 5)."""
    predicted = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    labels = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    scores = torch.nn.functional.one_hot(predicted, 2).float()
    metrics = compute_metrics(Classify(), scores, labels)
    assert metrics["accuracy"] == pytest.approx(0.7)
    assert metrics["f1"] == pytest.approx(6 / 9)
    assert metrics["matthews_correlation"] == pytest.approx(10 / (5 * 4 * 6 * 5) ** 0.5)
    right, wrong = np.log1p(np.e) - 1, np.log1p(np.e)
    assert metrics["loss"] == pytest.approx(0.7 * right + 0.3 * wrong)
    assert metrics["items"] == 10


def test_metrics_of_several_classes() -> None:
    """F1 averages the classes that occur; Matthews is 1 if all is right, 0 for one class."""
    labels = torch.tensor([0, 2, 2, 0, 2])
    right = torch.nn.functional.one_hot(labels, 4).float()
    perfect = compute_metrics(Classify(classes=4), right, labels)
    assert (perfect["f1"], perfect["matthews_correlation"]) == pytest.approx((1, 1))
    constant = torch.nn.functional.one_hot(torch.full((5,), 2), 4).float()
    metrics = compute_metrics(Classify(classes=4), constant, labels)
    assert metrics["matthews_correlation"] == 0
    assert metrics["f1"] == pytest.approx((0 + 6 / 8) / 2)


def test_regression_metrics_are_squared_error_and_pearson() -> None:
    draw = np.random.default_rng(0)
    predicted, values = draw.normal(1000, 1, 200), draw.normal(size=200)
    values = (predicted + values).astype(np.float32)
    task = Classify(problem_type="regression")
    scores = torch.from_numpy(predicted.astype(np.float32))[:, None]
    metrics = compute_metrics(task, scores, torch.from_numpy(values))
    assert metrics["pearson"] == pytest.approx(np.corrcoef(scores[:, 0], values)[0, 1], abs=1e-6)
    assert metrics["loss"] == pytest.approx(
        np.square(scores[:, 0].numpy() - values).mean(), rel=1e-5
    )


SMOOTHED = {"label_smoothing": 0.1}
WEIGHTED = {"class_weights": (0.5, 2.0, 1.0, 3.0)}


@pytest.mark.parametrize("changes", [{}, SMOOTHED, WEIGHTED, {**SMOOTHED, **WEIGHTED}])
def test_the_loss_equals_the_loss_of_torch(changes: dict[str, Any]) -> None:
    """Padding rows and the division of the batch into microbatches change nothing."""
    task = Classify(classes=4, **changes)
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(9, 4, generator=draw), torch.arange(9) % 4
    weights = torch.tensor(task.class_weights) if "class_weights" in changes else None
    peer = torch.nn.CrossEntropyLoss(weights, label_smoothing=task.label_smoothing)
    sums = [
        task.loss(
            {"scores": torch.cat([part, torch.randn(2, 4)])},
            {
                "labels": torch.cat([part_labels, torch.zeros(2, dtype=torch.int64)]),
                "real": torch.tensor([1.0] * len(part) + [0.0, 0.0]),
            },
        )
        for part, part_labels in ((scores[:5], labels[:5]), (scores[5:], labels[5:]))
    ]
    loss = sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)
    torch.testing.assert_close(loss, peer(scores, labels), rtol=1e-5, atol=1e-6)
    metrics = compute_metrics(task, scores, labels)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["items"] == 9


def test_label_smoothing_equals_the_trainer_of_transformers() -> None:
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.2)
    scores, labels = (
        torch.randn(7, 3, generator=torch.Generator().manual_seed(1)),
        torch.arange(7) % 3,
    )
    task = Classify(classes=3, label_smoothing=0.2)
    loss, weight = task.loss({"scores": scores}, {"labels": labels, "real": torch.ones(7)})
    expected = smoother({"logits": scores}, labels)
    torch.testing.assert_close(loss / weight, expected, rtol=1e-5, atol=1e-6)


def test_balanced_weights_equal_scikit_learn(data: Dataset) -> None:
    task = PAIR.model_copy(update={"class_weights": "balanced"}).resolve_defaults(data.manifest)
    labels = data.rows("train").read_column("label")
    assert len(labels) == 40
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert task.class_weights == pytest.approx(expected.tolist(), rel=1e-12)
    unseen = Classify(text_fields=("query",), classes=4, class_weights="balanced")
    with pytest.raises(DataError, match=r"class 3 has no training row; give task.class_weights"):
        unseen.resolve_defaults(data.manifest)
    columns = data.manifest.columns
    uncounted = columns["label"].model_copy(update={"class_counts": {}})
    manifest = data.manifest.model_copy(update={"columns": {**columns, "label": uncounted}})
    with pytest.raises(SettingsError, match=r"list it in rows.labels, or give task.class_weights"):
        unseen.resolve_defaults(manifest)
    few = Classify(text_fields=("query",), class_weights=(1.0, 2.0))
    with pytest.raises(SettingsError, match="has 2 values for 3 classes; give each class one"):
        few.resolve_defaults(data.manifest)


TOPICS = Classify(text_fields=("query",), label="topics", problem_type="multi-label")


@pytest.mark.parametrize("weights", ["none", (0.5, 2.0, 1.0, 3.0)])
def test_the_loss_of_several_labels_equals_the_loss_of_torch(weights: Any) -> None:
    """The mean over rows and classes is that of transformers."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 4, generator=draw)
    labels = (torch.rand(9, 4, generator=draw) > 0.5).float()
    task = TOPICS.model_copy(update={"class_weights": weights})
    pos_weight = None if weights == "none" else torch.tensor(weights)
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=pos_weight)(scores, labels)
    padded = torch.cat([scores, torch.randn(2, 4)]), torch.cat([labels, torch.zeros(2, 4)])
    real = torch.tensor([1.0] * 9 + [0.0] * 2)
    loss, weight = task.loss({"scores": padded[0]}, {"labels": padded[1], "real": real})
    torch.testing.assert_close(loss / weight, expected, rtol=1e-5, atol=1e-6)
    assert compute_metrics(task, scores, labels)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_the_loss_of_several_labels_equals_transformers(data: Dataset) -> None:
    task = TOPICS.resolve_defaults(data.manifest)
    module = task.build_module(MODEL, data.manifest, 0).eval()
    inner = module.model
    assert inner.config.problem_type == "multi_label_classification"
    assert inner.config.id2label == dict(enumerate(("even", "third", "late", "long")))
    batch = read_first_batch(task, data, CONFIG)
    with torch.no_grad():
        expected = inner(
            input_ids=batch["tokens"],
            attention_mask=(batch["segments"] > 0).long(),
            labels=batch["labels"],
        ).loss
        loss, weight = task.loss(module(batch), batch)
    torch.testing.assert_close(loss / weight, expected, rtol=1e-5, atol=1e-6)
    for index, slot in enumerate(batch["slots"].tolist()):
        (row,) = data.rows("train").take([slot])
        assert batch["labels"][index].nonzero().flatten().tolist() == row["topics"].tolist()


def test_balanced_weights_of_several_labels_are_ratios(data: Dataset) -> None:
    task = TOPICS.model_copy(update={"class_weights": "balanced"}).resolve_defaults(data.manifest)
    rows = data.rows("train").take(range(40))
    held = [sum(topic in row["topics"] for row in rows) for topic in range(4)]
    assert task.class_weights == pytest.approx([(40 - count) / count for count in held])
    columns = data.manifest.columns
    column = columns["topics"].model_copy(update={"class_counts": {"train": (1, 40, 2, 3)}})
    manifest = data.manifest.model_copy(update={"columns": {**columns, "topics": column}})
    task = TOPICS.model_copy(update={"class_weights": "balanced"})
    with pytest.raises(DataError, match="every training row has the class third; give task"):
        task.resolve_defaults(manifest)


def test_metrics_of_several_labels_equal_scikit_learn() -> None:
    """The last class has neither labels nor predictions."""
    draw = np.random.default_rng(0)
    labels = draw.random((60, 5)) > 0.6
    labels[:, 4] = False
    scores = draw.normal(size=(60, 5)).astype(np.float32) + labels
    scores[:, 4] = -1
    tensors = torch.from_numpy(scores.astype(np.float32)), torch.from_numpy(labels).float()
    metrics = compute_metrics(TOPICS, *tensors)
    predicted = scores > 0
    expected = {
        "accuracy": accuracy_score(labels, predicted),
        "f1_micro": f1_score(labels, predicted, average="micro"),
        "f1_macro": f1_score(labels, predicted, average="macro", zero_division=0),
        "items": 60,
    }
    assert metrics == pytest.approx({**expected, "loss": metrics["loss"]}, rel=1e-6)
    vectors = TOPICS.eval_outputs({"scores": tensors[0]}, {"labels": tensors[1]})
    report = TOPICS.class_report({"vectors": vectors})
    assert report is not None
    assert "confusion_matrix" not in report
    by_class = precision_recall_fscore_support(labels, predicted, zero_division=0)
    for row, *values in zip(report["classes"], *by_class, strict=True):
        columns = [row["precision"], row["recall"], row["f1"], row["support"]]
        assert columns == pytest.approx([float(value) for value in values], abs=1e-12)


def test_one_class_needs_one_label(data: Dataset) -> None:
    task = Classify(text_fields=("query",), label="topics")
    with pytest.raises(SettingsError, match=r"lists of classes; set task.problem_type"):
        task.check_dataset(data.manifest)
    TOPICS.check_dataset(data.manifest)
    single = TOPICS.model_copy(update={"label": "label", "classes": 3})
    single.check_dataset(data.manifest)
    batch = read_first_batch(single, data, CONFIG)
    assert batch["labels"].sum(1).tolist() == [1.0] * 6


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_metrics_of_each_class_equal_scikit_learn(classes: int) -> None:
    """Of five classes, the last one occurs neither as a label nor as a prediction."""
    draw = np.random.default_rng(classes)
    labels = draw.integers(0, min(classes, 4), 50)
    scores = torch.from_numpy(draw.normal(size=(50, classes)).astype(np.float32))
    scores[:, min(classes, 4) :] = -9
    scores[np.arange(50), labels] += 1
    names = tuple(f"class {index}" for index in range(classes))
    task = Classify(class_names=names)
    vectors = task.eval_outputs({"scores": scores}, {"labels": torch.from_numpy(labels)})
    report = task.class_report({"vectors": vectors})
    assert report is not None
    predicted, present = scores.argmax(1).numpy(), range(classes)
    expected = precision_recall_fscore_support(labels, predicted, labels=present, zero_division=0)
    for row, name, *values in zip(report["classes"], names, *expected, strict=True):
        assert row["name"] == name
        columns = [row["precision"], row["recall"], row["f1"], row["support"]]
        assert columns == pytest.approx([float(value) for value in values], abs=1e-12)
    matrix = confusion_matrix(labels, predicted, labels=present)
    assert report["confusion_matrix"] == matrix.tolist()
    metrics = compute_metrics(task, scores, torch.from_numpy(labels))
    average = "binary" if classes == 2 else "macro"
    assert metrics["f1"] == pytest.approx(f1_score(labels, predicted, average=average), rel=1e-6)


def test_a_regression_has_no_classes_to_report() -> None:
    outputs = {"vectors": torch.zeros(3, 2)}
    assert Classify(problem_type="regression").class_report(outputs) is None


def test_the_matrix_of_many_classes_is_left_out() -> None:
    task = Classify(classes=101)
    vectors = torch.cat([torch.eye(101), torch.arange(101.0)[:, None]], 1)
    report = task.class_report({"vectors": vectors})
    assert report is not None
    assert "confusion_matrix" not in report
    assert [row["f1"] for row in report["classes"]] == [1.0] * 101


def test_constant_predictions_have_no_correlation() -> None:
    top, under = _quality.pearson(torch.ones(4), torch.arange(4.0), torch.ones(4))
    assert (float(top), float(under)) == (0, 0)


@pytest.mark.parametrize(
    ("update", "changes", "message"),
    [
        (
            {"ranges": {"train": (0, 2), "heldout": (0, 3)}},
            {},
            "labels in 'label' range from 0 to 3",
        ),
        (
            {"kind": "float", "num_missing": {"train": 1, "heldout": 2}},
            {"problem_type": "regression"},
            "label 'label' is missing in 3 records; remove these records",
        ),
    ],
)
def test_labels_of_every_split_are_checked(
    data: Dataset, update: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    fields = data.manifest.columns
    label = fields["label"].model_copy(update=update)
    manifest = data.manifest.model_copy(update={"columns": {**fields, "label": label}})
    with pytest.raises(DataError, match=message):
        PAIR.model_copy(update=changes).check_dataset(manifest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_fields": ("queri",)}, "no field 'queri'; did you mean 'query'?"),
        ({"label": "lable"}, "no field 'lable'; did you mean 'label'?"),
        ({"text_fields": ("label",)}, "'label' is not of type text; choose from: query, document"),
        ({"label": "query"}, "'query' is not of type integer; choose from: label"),
        ({"classes": 2}, "range from 0 to 2, but task.classes = 2 allows 0 to 1; set task.classes"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(
    data: Dataset, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegaugeError, match=re.escape(message)):
        PAIR.model_copy(update=changes).check_dataset(data.manifest)


def test_packed_rows_are_refused(tmp_path: Path) -> None:
    packed = Dataset(datasets.write_packed(tmp_path / "packed"))
    with pytest.raises(RegaugeError, match=r"prepare it with rows\.layout = .fields."):
        PAIR.check_dataset(packed.manifest)


def build_config(task: Classify, data: Dataset, **model: Any) -> transformers.PretrainedConfig:
    settings = Model(**{**MODEL.model_dump(exclude_unset=True), **model})
    return task.build_module(settings, data.manifest, 0).model.config


def save_start_model(folder: Path, **config: Any) -> Path:
    sizes = {**MODEL.config, "vocab_size": datasets.VOCABULARY}
    start = transformers.BertConfig(**sizes, **config)
    transformers.BertForSequenceClassification(start).save_pretrained(folder)
    return folder


def test_class_names_are_in_the_configuration(data: Dataset) -> None:
    task = Classify(text_fields=("query",), class_names=("sport", "cooking", "finance"))
    assert task.classes == 3
    config = build_config(task, data)
    assert config.id2label == {0: "sport", 1: "cooking", 2: "finance"}
    assert config.label2id == {"sport": 0, "cooking": 1, "finance": 2}
    assert config.problem_type == "single_label_classification"


@pytest.mark.parametrize("names", [{0: "NEGATIVE", 1: "POSITIVE"}, {0: "a", 1: "b", 2: "c"}])
def test_class_names_of_the_start_model_are_dropped_with_a_warning(
    data: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, names: dict[int, str]
) -> None:
    folder = save_start_model(tmp_path / "start", id2label=names)
    task = Classify(text_fields=("query",), classes=2)
    task.check_weights(folder)
    remedy = ' = ["NEGATIVE", "POSITIVE"]' if len(names) == 2 else ""
    warning = f"{folder}: its class names are not used: {', '.join(names.values())}; name"
    assert caplog.messages == [f"{warning} the classes with task.class_names{remedy}"]
    settings = Model(path=str(folder), dropout=0.0)
    config = task.build_module(settings, data.manifest, 0).model.config
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert config.label2id == {"LABEL_0": 0, "LABEL_1": 1}
    caplog.clear()
    named = Classify(text_fields=("query",), class_names=("no", "yes"))
    named.check_weights(folder)
    assert not caplog.text
    config = named.build_module(settings, data.manifest, 0).model.config
    assert config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize("task", [Classify, Tokens])
@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"class_names": ("a", "b", "c")}, ""),
        ({"class_names": ("a", "b"), "classes": 3}, "2 names and classes is 3; remove classes"),
        ({"class_names": ("a", "b", "a")}, "has a name twice; give each class its own name"),
        ({"classes": 1}, "greater than or equal to 2"),
    ],
)
def test_tasks_of_classes_check_them_alike(
    task: type[ClassesTask], table: dict[str, Any], problem: str
) -> None:
    if problem:
        with pytest.raises(ValueError, match=problem):
            task.model_validate(table)
    else:
        assert task.model_validate(table).classes == 3


def test_a_start_model_without_class_names_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Classify(classes=2).check_weights(save_start_model(tmp_path / "start"))
    assert not caplog.text


def test_a_regression_has_no_names_and_says_so(data: Dataset, tmp_path: Path) -> None:
    folder = save_start_model(
        tmp_path / "start", id2label={0: "a", 1: "b"}, problem_type="multi_label_classification"
    )
    task = Classify(text_fields=("query",), problem_type="regression")
    config = task.build_module(Model(path=str(folder), dropout=0.0), data.manifest, 0).model.config
    assert (config.num_labels, config.id2label) == (1, {0: "LABEL_0"})
    assert config.problem_type == "regression"


def test_names_in_the_configuration_of_a_model_from_scratch_are_used(data: Dataset) -> None:
    names = {0: "x", 1: "y", 2: "z"}
    config = build_config(PAIR, data, config={**MODEL.config, "id2label": names})
    assert config.id2label == names
    assert config.label2id == {"x": 0, "y": 1, "z": 2}


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"class_names": ("a", "b"), "problem_type": "regression"}, "a regression has no classes"),
        ({"label_smoothing": 0.1, "problem_type": "regression"}, "remove label_smoothing"),
        ({"class_weights": "balanced", "problem_type": "regression"}, "class_weights"),
        ({"class_weights": (1.0, 2.0), "classes": 3}, "2 values and classes is 3; give each class"),
        ({"class_weights": (1.0, 0.0)}, "greater than 0"),
        ({"class_weights": "equal"}, "'none' or 'balanced'"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"label_smoothing": 0.1, "problem_type": "multi-label"}, "needs one class per text"),
    ],
)
def test_invalid_class_names_are_refused(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Classify.model_validate(table)


def draw_rows(count: int, seed: int, *, num_classes: int = 0) -> list[dict[str, Any]]:
    """Return rows whose label is a class of the first token, classes of the tokens, or a number."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(5, 40, draw.integers(2, 9)).astype(np.int32) for _ in range(count)]
    if not num_classes:
        return [{"text": text, "label": float(text.mean())} for text in texts]
    return [
        {"text": text, "label": np.unique(text[text < 5 + 3 * num_classes] % num_classes)}
        for text in texts
    ]


def test_the_baselines_of_several_classes_equal_scikit_learn() -> None:
    train, heldout = draw_rows(80, 1, num_classes=4), draw_rows(40, 2, num_classes=4)
    task = Classify(text_fields=("text",), problem_type="multi-label", classes=4)
    measured = task.fit_baselines(train, heldout)
    model = make_pipeline(
        TfidfVectorizer(analyzer=list), OneVsRestClassifier(LogisticRegression(tol=1e-8))
    )
    targets = task._build_labels(train), task._build_labels(heldout)
    model.fit([row["text"].tolist() for row in train], targets[0])
    predicted = model.predict([row["text"].tolist() for row in heldout])
    means = compute_means(measured["tf-idf + logistic regression"])
    assert means["f1_micro"] == pytest.approx(f1_score(targets[1], predicted, average="micro"))
    majority = np.tile(targets[0].mean(0) > 0.5, (40, 1))
    expected = f1_score(targets[1], majority, average="micro", zero_division=0)
    assert compute_means(measured["majority"])["f1_micro"] == pytest.approx(expected)


def test_the_baseline_of_a_regression_is_the_mean() -> None:
    train, heldout = draw_rows(80, 1), draw_rows(40, 2)
    task = Classify(text_fields=("text",), problem_type="regression")
    (name, sums) = task.fit_baselines(train, heldout).popitem()
    assert name == "mean"
    mean = np.mean([row["label"] for row in train])
    expected = np.mean([(row["label"] - mean) ** 2 for row in heldout])
    assert compute_means(sums)["loss"] == pytest.approx(expected, rel=1e-5)
