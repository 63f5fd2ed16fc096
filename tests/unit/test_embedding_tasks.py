"""Losses and metrics of embeddings equal those of sentence-transformers on the same vectors."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.nn.functional import normalize

from libraries import import_sentence_transformers
from regauge.tasks import PAIR_LABELS, TEXT_HASHES, Task
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.distill import Distill
from regauge.tasks.similarity import Similarity
from regauge.tasks.triplet import Triplet
from regauge.training.heldout import compute_means

ROWS, WIDTH = 12, 16
TOLERANCE = 1e-5
SYMMETRIC: dict[str, Any] = {
    "directions": ("query_to_doc", "doc_to_query"),
    "partition_mode": "per_direction",
}
"""Options of the loss of sentence-transformers that ranks queries, too."""


@pytest.fixture(scope="module")
def losses() -> Any:
    import_sentence_transformers()
    return import_module("sentence_transformers.sentence_transformer.losses")


@pytest.fixture(scope="module")
def evaluation() -> Any:
    import_sentence_transformers()
    return import_module("sentence_transformers.sentence_transformer.evaluation")


class StoredVectors(nn.Module):
    """A model whose inputs are the vectors themselves."""

    similarity_fn_name = "cosine"
    model_card_data = None

    def get_embedding_dimension(self) -> int:
        return WIDTH

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}

    def encode(self, texts: list[Tensor], **options: Any) -> np.ndarray:
        del options
        return torch.stack(texts).numpy()

    encode_query = encode_document = encode


def draw_vectors(count: int, seed: int = 0, *, is_normalized: bool = True) -> list[Tensor]:
    """Return the vectors of `count` texts of each row, [ROWS, WIDTH] each."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(ROWS, WIDTH, generator=draw)
    columns = [shared + torch.randn(ROWS, WIDTH, generator=draw) for _ in range(count)]
    return [normalize(column, dim=-1) if is_normalized else column for column in columns]


def build_hashes(columns: list[list[int]]) -> Tensor:
    """Return the hashes of texts that are numbers, from the numbers by column."""
    numbers = torch.tensor(columns).flatten()
    return torch.stack([numbers, numbers * 7, numbers % 2, numbers % 3], 1).float()


def build_batch(num_columns: int, *, padding: int = 0) -> dict[str, Tensor]:
    """Return the batch of different texts; each column ends with padding rows."""
    real = torch.cat([torch.ones(ROWS), torch.zeros(padding)]).repeat(num_columns)
    count = ROWS + padding
    columns = [[number * count + row + 1 for row in range(count)] for number in range(num_columns)]
    return {"real": real, TEXT_HASHES: build_hashes(columns) * real[:, None]}


def compute_loss(task: Task, columns: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    loss, weight = task.loss({"vectors": torch.cat(columns)}, batch)
    return loss / weight


def compare_with_gradients(
    task: Task, batch: Any, reference: Any, labels: Any = None, *, is_normalized: bool = True
) -> None:
    """Assert that a loss equals that of a class of sentence-transformers on the same vectors.

    The gradients are those of the hidden states before the normalization.
    """
    count = len(batch["real"]) // ROWS

    def compute_gradients(function: Any) -> tuple[Tensor, ...]:
        leaves = [column.requires_grad_() for column in draw_vectors(count, is_normalized=False)]
        columns = [normalize(leaf, dim=-1) if is_normalized else leaf for leaf in leaves]
        loss = function(columns)
        return (loss, *torch.autograd.grad(loss, leaves))

    values = compute_gradients(lambda columns: compute_loss(task, columns, batch))
    expected_values = compute_gradients(
        lambda columns: reference([{"vectors": column} for column in columns], labels)
    )
    for value, expected in zip(values, expected_values, strict=True):
        torch.testing.assert_close(value, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert value.abs().max() > 0


@pytest.mark.parametrize("num_negatives", [0, 1, 3])
@pytest.mark.parametrize("symmetric", [False, True])
def test_hard_negatives_equal_multiple_negatives_ranking(
    losses: Any,
    num_negatives: int,
    symmetric: bool,  # noqa: FBT001 - a case
) -> None:
    names = tuple(f"negative{number}" for number in range(num_negatives))
    task = Contrastive(negatives=names, temperature=0.1, symmetric=symmetric)
    options = SYMMETRIC if symmetric else {}
    loss = losses.MultipleNegativesRankingLoss(StoredVectors(), scale=10, **options)
    compare_with_gradients(task, build_batch(2 + num_negatives), loss)


@pytest.mark.parametrize("symmetric", [False, True])
def test_matryoshka_dimensions_equal_the_matryoshka_loss(
    losses: Any,
    symmetric: bool,  # noqa: FBT001 - a case
) -> None:
    dims = (WIDTH, 8, 4)
    task = Contrastive(negatives=("wrong",), matryoshka_dims=dims, symmetric=symmetric)
    model = StoredVectors()
    inner = losses.MultipleNegativesRankingLoss(model, **(SYMMETRIC if symmetric else {}))
    loss = losses.MatryoshkaLoss(model, inner, dims)
    compare_with_gradients(task, build_batch(3), loss)


def test_several_documents_equal_the_formula() -> None:
    """Each document is compared with all texts of other rows and with all hard negatives."""
    task = Contrastive(document=("a", "b"), negatives=("wrong",), symmetric=False, temperature=0.2)
    query, *texts = draw_vectors(4)
    total = 0.0
    for row in range(ROWS):
        scores = [(text @ query[row] / 0.2).double() for text in texts]
        others = torch.arange(ROWS) != row
        negatives = torch.cat([scores[0][others], scores[1][others], scores[2]])
        for number in range(2):
            logits = torch.cat([scores[number][row : row + 1], negatives])
            total -= float(logits.log_softmax(0)[0]) / 2
    loss = compute_loss(task, [query, *texts], build_batch(4))
    assert float(loss) == pytest.approx(total / ROWS, rel=TOLERANCE)


def test_several_documents_equal_several_rows_with_one_query() -> None:
    task = Contrastive(document=("a", "b"), symmetric=False)
    query, first, second = draw_vectors(3)
    pairs = [torch.cat([query, query]), torch.cat([first, second])]
    rows = list(range(1, ROWS + 1))
    hashes = build_hashes([[*rows, *rows], list(range(100, 100 + 2 * ROWS))])
    expected = compute_loss(
        Contrastive(symmetric=False),
        pairs,
        {"real": torch.ones(4 * ROWS), TEXT_HASHES: hashes},
    )
    loss = compute_loss(task, [query, first, second], build_batch(3))
    assert float(loss) == pytest.approx(float(expected), rel=TOLERANCE)


def test_documents_of_several_fields_are_ranked_for_all_queries() -> None:
    task = Contrastive(document=("a", "b"), symmetric=True)
    columns = draw_vectors(3)
    backward = [
        compute_loss(Contrastive(symmetric=False), [columns[number], columns[0]], build_batch(2))
        for number in (1, 2)
    ]
    forward = compute_loss(
        Contrastive(document=("a", "b"), symmetric=False), columns, build_batch(3)
    )
    expected = (float(forward) + float(sum(backward)) / 2) / 2
    assert float(compute_loss(task, columns, build_batch(3))) == pytest.approx(
        expected, rel=TOLERANCE
    )


@pytest.mark.parametrize(
    "negatives",
    [
        (31, 11, 33, 34),  # the negative of row 1 is the document of row 0
        (11, 32, 33, 34),  # the negative of row 0 is its own document
        (14, 32, 33, 34),  # the document of another row with its query
    ],
)
def test_hard_negatives_that_equal_a_document_of_the_query_are_no_negatives(
    negatives: tuple[int, ...],
) -> None:
    queries, documents = [1, 2, 3, 1], [11, 12, 13, 14]
    task = Contrastive(negatives=("wrong",), symmetric=False, temperature=0.5)
    query, document, wrong = (column[:4] for column in draw_vectors(3))
    expected = 0.0
    for row in range(4):
        others = [other for other in range(4) if queries[other] != queries[row]]
        relevant = {documents[other] for other in range(4) if queries[other] == queries[row]}
        wrongs = [other for other in range(4) if negatives[other] not in relevant]
        texts = torch.cat([document[[row, *others]], wrong[wrongs]])
        expected -= float((texts @ query[row] / 0.5).double().log_softmax(0)[0])
    batch = {
        "real": torch.ones(12),
        TEXT_HASHES: build_hashes([queries, documents, list(negatives)]),
    }
    loss, _ = task.loss({"vectors": torch.cat([query, document, wrong])}, batch)
    assert float(loss) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("margin", [0.05, 0.5])
def test_triplets_equal_the_triplet_loss(losses: Any, distance: str, margin: float) -> None:
    metric = getattr(losses.TripletDistanceMetric, distance.upper())
    loss = losses.TripletLoss(StoredVectors(), distance_metric=metric, triplet_margin=margin)
    task = Triplet.model_validate({"distance": distance, "margin": margin})
    compare_with_gradients(task, build_batch(3), loss, is_normalized=False)


LABELS = torch.tensor([0.0, 1.0, 0.25, 0.5, 0.5, 0.75, 1.0, 0.0, 0.25, 0.9, 0.1, 0.5])


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_graded_pairs_equal_cosent(losses: Any, scale: float) -> None:
    loss = losses.CoSENTLoss(StoredVectors(), scale=scale)
    batch = {**build_batch(2), PAIR_LABELS: LABELS.repeat(2)[:, None]}
    compare_with_gradients(Similarity(temperature=1 / scale), batch, loss, LABELS)


def test_pairs_with_equal_labels_have_no_loss() -> None:
    batch = {**build_batch(2), PAIR_LABELS: torch.ones(2 * ROWS, 1)}
    assert float(compute_loss(Similarity(), draw_vectors(2), batch)) == 0


def test_graded_pairs_equal_the_cosine_similarity_loss(losses: Any) -> None:
    loss = losses.CosineSimilarityLoss(StoredVectors())
    batch = {**build_batch(2), PAIR_LABELS: LABELS.repeat(2)[:, None]}
    compare_with_gradients(Similarity(objective="mse"), batch, loss, LABELS)


@pytest.mark.parametrize("objective", ["mse", "cosine"])
def test_distillation_equals_the_losses_of_vectors(losses: Any, objective: str) -> None:
    (teacher,) = draw_vectors(1, seed=1)
    model = StoredVectors()
    loss = (
        losses.MSELoss(model)
        if objective == "mse"
        else losses.EmbedDistillLoss(model, distance_metric="cosine")
    )
    task = Distill.model_validate({"objective": objective, "text_fields": ("a", "b")})
    batch = {"real": torch.ones(2 * ROWS), "teacher_vectors": teacher.repeat(2, 1)}
    compare_with_gradients(task, batch, loss, teacher)


@pytest.mark.parametrize(
    ("task", "num_columns"),
    [
        (Contrastive(document=("a", "b"), negatives=("wrong",), matryoshka_dims=(WIDTH, 4)), 4),
        (Triplet(), 3),
        (Similarity(), 2),
        (Similarity(objective="mse"), 2),
    ],
)
def test_padding_rows_change_neither_loss_nor_metrics(task: Task, num_columns: int) -> None:
    columns = draw_vectors(num_columns)
    values = []
    for padding in (0, 5):
        padded = [torch.cat([column, torch.zeros(padding, WIDTH)]) for column in columns]
        labels = torch.cat([LABELS, torch.zeros(padding)]).repeat(num_columns)[:, None]
        batch = {**build_batch(num_columns, padding=padding), PAIR_LABELS: labels}
        vectors = torch.cat(padded).requires_grad_()
        loss, weight = task.loss({"vectors": vectors}, batch)
        (gradient,) = torch.autograd.grad(loss, vectors)
        assert gradient.isfinite().all()
        assert not gradient[batch["real"] == 0].any()
        sums = task.metric_sums({"vectors": vectors.detach()}, batch)
        values.append({**compute_means(sums), "weight": float(weight)})
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    assert values[0]["weight"] == values[0]["items"] == ROWS


def test_correlations_equal_the_evaluator(evaluation: Any) -> None:
    columns = draw_vectors(2)
    columns[1][3] = columns[0][3]
    columns[1][4] = columns[0][4]  # two pairs with equal cosines
    evaluator = evaluation.EmbeddingSimilarityEvaluator(
        list(columns[0]), list(columns[1]), LABELS.tolist(), write_csv=False
    )
    evaluator.store_metrics_in_model_card_data = Mock()
    expected = evaluator(StoredVectors())
    batch = {**build_batch(2), PAIR_LABELS: LABELS.repeat(2)[:, None]}
    metrics = compute_means(Similarity().metric_sums({"vectors": torch.cat(columns)}, batch))
    for name in ("pearson", "spearman"):
        assert metrics[name] == pytest.approx(expected[f"{name}_cosine"], abs=TOLERANCE)


def test_the_accuracy_of_triplets_equals_the_evaluator(evaluation: Any) -> None:
    columns = draw_vectors(3)
    evaluator = evaluation.TripletEvaluator(*map(list, columns), write_csv=False)
    evaluator.store_metrics_in_model_card_data = Mock()
    expected = evaluator(StoredVectors())["cosine_accuracy"]
    output = {"vectors": torch.cat(columns)}
    metrics = compute_means(Triplet().metric_sums(output, build_batch(3)))
    assert 0 < expected < 1
    assert metrics["accuracy"] == pytest.approx(expected)


def test_documents_are_ranked_among_all_documents_and_hard_negatives() -> None:
    """The query of row 0 finds its documents at ranks 1 and 2: its hard negative is between."""
    task = Contrastive(document=("a", "b"), negatives=("wrong",))
    basis = torch.eye(WIDTH)
    query = basis[[0, 1]]
    first = torch.stack([basis[0], basis[1]])
    second = normalize(torch.stack([basis[0] + basis[5], basis[1]]), dim=-1)
    wrong = normalize(torch.stack([basis[0] + 0.1 * basis[6], basis[7]]), dim=-1)
    batch = {
        "real": torch.ones(8),
        TEXT_HASHES: build_hashes([[1, 2], [3, 4], [5, 6], [7, 8]]),
    }
    output = {"vectors": torch.cat([query, first, second, wrong])}
    metrics = compute_means(task.metric_sums(output, batch))
    # Row 0: ranks 1 and 2. Row 1: rank 1 twice.
    assert metrics["recall@1"] == pytest.approx((0.5 + 1) / 2)
    assert metrics["mrr"] == pytest.approx(((1 + 0.5) / 2 + 1) / 2)
    assert metrics["items"] == 2
    records = [
        {"query": "red", "a": "red", "b": "red car", "wrong": "red red red blue"},
        {"query": "green", "a": "green", "b": "green tree", "wrong": "blue"},
    ]
    baselines = task.baselines(output, batch, records)
    assert baselines.keys() == {"BM25", "reciprocal rank fusion"}
    assert 0 < compute_means(baselines["BM25"])["mrr"] < 1


def test_truncated_vectors_have_their_own_metrics() -> None:
    task = Contrastive(matryoshka_dims=(WIDTH, 4))
    query, document = draw_vectors(2)
    document = document.clone()
    document[:, :4] = document[:, :4].roll(1, 0)  # the leading dimensions find the wrong document
    output = {"vectors": torch.cat([query, document])}
    metrics = compute_means(task.metric_sums(output, build_batch(2)))
    truncated = torch.cat([normalize(part[:, :4], dim=-1) for part in (query, document)])
    alone = compute_means(Contrastive().metric_sums({"vectors": truncated}, build_batch(2)))
    for name in ("recall@1", "recall@10", "mrr"):
        assert metrics[f"{name}_dim4"] == pytest.approx(alone[name])
    assert metrics["mrr_dim4"] < metrics["mrr"]


def test_a_text_number_selects_the_column_of_the_text() -> None:
    task = Contrastive(negatives=("negative",))
    row = {name: np.array([index]) for index, name in enumerate(task.text_columns())}
    texts = task.select_texts([row, row, None, row], np.array([1, 0, 1, 2]), ())
    assert [text if text is None else text.tolist() for text in texts] == [[1], [0], None, [2]]


def test_the_baseline_of_similarity_equals_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    train, heldout = (
        [
            {
                "sentence1": draw.integers(2, 40, int(draw.integers(1, 12))),
                "sentence2": draw.integers(2, 40, int(draw.integers(1, 12))),
                "score": float(draw.normal()),
            }
            for _ in range(count)
        ]
        for count in (30, 20)
    )
    vectors = TfidfVectorizer(analyzer=list)
    vectors.fit([row[name] for row in train for name in ("sentence1", "sentence2")])
    first, second = (
        vectors.transform([row[name] for row in heldout]).toarray()
        for name in ("sentence1", "sentence2")
    )
    cosines, scores = (first * second).sum(1), [row["score"] for row in heldout]
    metrics = compute_means(Similarity().fit_baselines(train, heldout)["tf-idf cosine"])
    assert metrics == pytest.approx(
        {
            "pearson": pearsonr(cosines, scores).statistic,
            "spearman": spearmanr(cosines, scores).statistic,
            "items": 20,
        },
        rel=1e-5,
    )
