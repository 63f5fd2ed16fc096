"""Batches, losses and metrics of single tasks, beyond the task contract."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import datasets
from distributed.runs import BERT, GPT, LLAMA
from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey, hash_texts
from regauge.data.buckets import BatchForm
from regauge.data.dataset import Dataset
from regauge.data.loader import CollatorConfig
from regauge.data.settings import DataSettings
from regauge.models.settings import Model
from regauge.system.errors import SettingsError
from regauge.tasks import MAX_SAMPLED_ROWS, Task, _retrieval
from regauge.tasks.clm import Clm
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.mlm import Mlm, choose_partners
from regauge.tasks.sft import Sft

ROWS = 200
CONFIG = CollatorConfig(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))


@pytest.fixture(scope="module")
def packed_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_packed(tmp_path_factory.mktemp("data") / "packed", ROWS))


def arrays(task: Task, data: Dataset, epoch: int = 0, rows: int = ROWS) -> Arrays:
    zeros = np.zeros(rows, np.int64)
    plan = MicrobatchPlan(np.arange(rows), zeros, zeros, datasets.LENGTH)
    return task.build_batch(data.rows("train"), plan, RandomKey(1, epoch, 0), CONFIG)


def test_each_row_masks_k_positions_and_weights_the_eligible_share(packed_data: Dataset) -> None:
    batch = arrays(Mlm(mlm_probability=0.15), packed_data)
    assert batch["masked"].shape == batch["labels"].shape == (ROWS, 5)
    rows = packed_data.rows("train").take(range(ROWS))
    for number, row in enumerate(rows):
        positions = batch["masked"][number]
        assert len(set(positions.tolist())) == 5
        eligible = (row["segments"] > 0) & ~np.isin(row["tokens"], CONFIG.special_ids)
        num_masked = min(5, round(0.15 * int(eligible.sum())))
        weights = batch["weights"][number]
        assert weights.tolist() == [1.0] * num_masked + [0.0] * (5 - num_masked)
        counted = positions[:num_masked]
        assert eligible[counted].all()
        assert (batch["labels"][number][:num_masked] == row["tokens"][counted]).all()
        untouched = np.ones(datasets.LENGTH, bool)
        untouched[counted] = False
        assert (batch["tokens"][number] == row["tokens"])[untouched].all()


def test_80_percent_are_masked_and_10_percent_are_unchanged(packed_data: Dataset) -> None:
    epochs = [arrays(Mlm(mlm_probability=0.5), packed_data, epoch) for epoch in range(4)]
    inputs, labels = [], []
    for batch in epochs:
        counted = batch["weights"] > 0
        inputs.append(np.take_along_axis(batch["tokens"], batch["masked"], 1)[counted])
        labels.append(batch["labels"][counted])
    input_tokens, label_tokens = np.concatenate(inputs), np.concatenate(labels)
    count = len(input_tokens)
    for share, expected in (
        ((input_tokens == 4).mean(), 0.8),
        ((input_tokens == label_tokens).mean(), 0.1),
    ):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5 + 1 / 300
    assert (epochs[0]["masked"] != epochs[1]["masked"]).any(), "an epoch repeats the masks"


def test_the_last_token_of_a_document_has_weight_0(packed_data: Dataset) -> None:
    batch = arrays(Clm(), packed_data)
    segments, weights = batch["segments"], batch["weights"]
    for row in range(ROWS):
        for position in range(datasets.LENGTH):
            inside = position + 1 < datasets.LENGTH and segments[row, position] > 0
            follows = inside and segments[row, position + 1] == segments[row, position]
            assert weights[row, position] == follows
            if follows:
                assert batch["labels"][row, position] == batch["tokens"][row, position + 1]


@pytest.fixture(scope="module")
def pair_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_halves(tmp_path_factory.mktemp("data") / "halves", ROWS))


PAIRED = Mlm(next_sentence=True)


def test_half_of_the_pairs_have_the_second_half_of_their_row(pair_data: Dataset) -> None:
    rows = pair_data.rows("train").take(range(ROWS))
    epochs = [arrays(PAIRED, pair_data, epoch) for epoch in range(3)]
    seconds = {tuple(row["second"].tolist()) for row in rows}
    for batch in epochs:
        unmasked = batch["tokens"].copy()
        np.put_along_axis(unmasked, batch["masked"], batch["labels"], 1)
        for number, row in enumerate(rows):
            cut, real = len(row["first"]), int(batch["segments"][number].sum())
            assert (unmasked[number, :cut] == row["first"]).all()
            second = unmasked[number, cut:real].tolist()
            assert (second == row["second"].tolist()) == (batch["next_sentence_label"][number] == 0)
            assert tuple(second) in seconds
            assert batch["types"][number].tolist() == [0] * cut + [1] * (real - cut) + [0] * (
                datasets.LENGTH - real
            )
        assert abs(batch["next_sentence_label"].mean() - 0.5) < 4 * (0.25 / ROWS) ** 0.5
    assert (epochs[0]["next_sentence_label"] != epochs[1]["next_sentence_label"]).any(), (
        "an epoch repeats the pairs"
    )
    replaced = [(batch["next_sentence_label"] == 1) for batch in epochs]
    twice_replaced = replaced[0] & replaced[1]
    assert twice_replaced.sum() > 10
    equal_tokens = (epochs[0]["tokens"] == epochs[1]["tokens"]).all(1)
    assert equal_tokens[twice_replaced].sum() == 0


def test_partners_are_uniform_over_all_other_rows() -> None:
    numbers = np.arange(7000)
    draws = [choose_partners(numbers, 7, RandomKey(1, epoch, 0)) for epoch in range(2)]
    assert (draws[0] != draws[1]).any()
    for partners in draws:
        steps = np.bincount((partners - numbers) % 7, minlength=7) / len(numbers)
        assert abs(steps[0] - 1 / 2) < 0.03
        assert (abs(steps[1:] - 1 / 12) < 0.02).all()
    assert choose_partners(numbers[:9], 1, RandomKey(1, 0, 0)).tolist() == [0] * 9


def test_the_pair_loss_is_weighted_by_predicted_tokens() -> None:
    output = {
        "nll": torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]),
        "correct": torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]),
        "pair_nll": torch.tensor([0.5, 0.25]),
        "pair_correct": torch.tensor([1.0, 0.0]),
    }
    batch = {
        "weights": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        "segments": torch.tensor([[1, 1], [1, 0]]),
    }
    loss, weight = PAIRED.loss(output, batch)
    assert (float(loss), float(weight)) == (1 + 2 + 4 + 2 * 0.5 + 0.25, 3)
    sums = {
        name: (float(a), float(b)) for name, (a, b) in PAIRED.metric_sums(output, batch).items()
    }
    assert sums == {
        "loss": (8.25, 3),
        "token_loss": (7, 3),
        "accuracy": (2, 3),
        "next_sentence_accuracy": (1, 2),
    }
    assert Mlm().loss(output, batch)[0] == 7


@pytest.mark.parametrize(
    ("means", "perplexity"),
    [
        ({"loss": 2.0}, math.exp(2)),
        ({"loss": 2.5, "token_loss": 2.0}, math.exp(2)),
        ({"loss": 1000.0}, math.inf),
    ],
)
def test_perplexity_is_the_exponential_of_the_token_loss(
    means: dict[str, float], perplexity: float
) -> None:
    assert Mlm().derive_metrics(means) == {**means, "perplexity": perplexity}


def test_the_pair_loss_equals_transformers(pair_data: Dataset) -> None:
    module: Any = PAIRED.build_module(
        Model(**{**BERT, "dropout": 0.0}), pair_data.manifest, 0
    ).eval()
    inputs = arrays(PAIRED, pair_data, rows=12)
    remaining_labels = {0, 1}
    for row in range(12):
        batch = {name: torch.from_numpy(value[row : row + 1]) for name, value in inputs.items()}
        real = int(batch["segments"].sum())
        counted = batch["masked"][0, : int(batch["weights"].sum())]
        labels = torch.full((1, datasets.LENGTH), -100)
        labels[0, counted] = batch["labels"][0, : len(counted)].long()
        with torch.no_grad():
            loss, weight = PAIRED.loss(module(batch), batch)
            expected = module.model(
                input_ids=batch["tokens"][:, :real],
                token_type_ids=batch["types"][:, :real],
                labels=labels[:, :real],
                next_sentence_label=batch["next_sentence_label"],
            ).loss
        torch.testing.assert_close(loss / weight, expected)
        remaining_labels -= {int(batch["next_sentence_label"])}
    assert not remaining_labels, "one of the two labels did not occur"


def test_an_architecture_without_next_sentence_head_is_refused(pair_data: Dataset) -> None:
    roberta = {**BERT, "architecture": "roberta", "dropout": 0.0}
    with pytest.raises(SettingsError, match=r"'roberta' has no next-sentence head; use bert"):
        PAIRED.build_module(Model(**roberta), pair_data.manifest, 0)


@pytest.mark.parametrize(("task", "layout"), [(Mlm(), "packed"), (PAIRED, "sentence-pairs")])
def test_a_dataset_of_another_layout_is_refused(
    pair_data: Dataset, packed_data: Dataset, task: Mlm, layout: str
) -> None:
    fitting, other = (packed_data, pair_data) if layout == "packed" else (pair_data, packed_data)
    task.check_dataset(fitting.manifest)
    with pytest.raises(SettingsError, match=f'prepare it with rows.layout = "{layout}"'):
        task.check_dataset(other.manifest)
    assert task.bucket_lengths(fitting.manifest) == (datasets.LENGTH,)
    form = BatchForm(rows=8, microbatch_rows=4, has_any_shape=True)
    counts = task.sample_tokens(DataSettings(path=str(fitting.folder)), fitting.manifest, form)
    assert 0.5 < counts.real_fraction <= 1


def test_the_tokens_of_a_huge_batch_are_counted_in_a_part_of_it(packed_data: Dataset) -> None:
    data = DataSettings(path=str(packed_data.folder))
    forms = [BatchForm(rows, rows, has_any_shape=False) for rows in (MAX_SAMPLED_ROWS, 2**24)]
    whole, part = (Mlm().sample_tokens(data, packed_data.manifest, form) for form in forms)
    assert whole.rows == part.rows == MAX_SAMPLED_ROWS
    assert whole.computed == part.computed


def test_only_answer_tokens_have_weight(tmp_path: Path) -> None:
    data = Dataset(datasets.write_chats(tmp_path / "chats", ROWS))
    sft_batch, clm_batch = arrays(Sft(), data), arrays(Clm(), data)
    rows = data.rows("train").take(range(ROWS))
    followed = np.zeros((ROWS, datasets.LENGTH), np.float32)
    for number, row in enumerate(rows):
        followed[number, :-1] = row["loss_mask"][1:]
    assert (sft_batch["weights"] == clm_batch["weights"] * followed).all()
    assert 0 < sft_batch["weights"].sum() < clm_batch["weights"].sum()
    del sft_batch["weights"], clm_batch["weights"]
    assert sft_batch.keys() == clm_batch.keys()
    assert all((sft_batch[name] == clm_batch[name]).all() for name in sft_batch)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda model: model["architecture"])
def test_a_packed_conversation_has_the_same_loss_as_alone(
    model: dict[str, Any], tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    data = Dataset(datasets.write_chats(tmp_path / "chats", 20))
    task = Sft()
    module = task.build_module(Model(**{**model, "dropout": 0.0}), data.manifest, 0).eval()
    batch = {name: torch.from_numpy(value) for name, value in arrays(task, data, rows=20).items()}
    with torch.no_grad():
        packed_losses = module(batch)["nll"] * batch["weights"]
        for segment in (1, 2, 3):
            inside = batch["segments"] == segment
            first = inside.int().argmax(1, keepdim=True)
            # Each conversation is moved to the start of a row without other conversations.
            positions = (torch.arange(datasets.LENGTH) + first) % datasets.LENGTH
            tensors = {name: value for name, value in batch.items() if name != "keys"}
            moved = {name: value.gather(1, positions) for name, value in tensors.items()}
            is_segment = moved["segments"] == segment
            alone = {name: value * is_segment for name, value in moved.items()}
            losses = module({**alone, "keys": batch["keys"]})["nll"] * alone["weights"]
            expected = (packed_losses * inside).sum(1)
            answered = expected > 0
            assert answered.sum() > 10
            error = float((losses.sum(1) / expected - 1)[answered].abs().max())
            figure("a conversation packed and alone", error)
            assert error < 3e-6


def build_targets(*real: float, queries: Sequence[int] = (), documents: Sequence[int] = ()) -> Any:
    """Return the arrays of pairs; the numbers of queries and documents are their hashes."""
    count = len(real)
    numbers = torch.tensor([*(queries or range(1, count + 1)), *(documents or range(count, 0, -1))])
    hashes = torch.stack([numbers, numbers * 7, numbers % 2, numbers % 3], 1).float()
    return {"real": torch.tensor(real).repeat(2), "text_hashes": hashes}


def unit_vectors(rows: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, 8, generator=draw), dim=-1)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_contrastive_loss_is_the_cross_entropy_of_the_batch(
    symmetric: bool,  # noqa: FBT001 - a case
) -> None:
    task = Contrastive.model_validate({"symmetric": symmetric, "temperature": 0.2})
    queries, documents = unit_vectors(5, 1), unit_vectors(5, 2)
    scores = queries @ documents.T / 0.2
    targets = torch.arange(5)
    expected = torch.nn.functional.cross_entropy(scores, targets, reduction="sum")
    if symmetric:
        back = torch.nn.functional.cross_entropy(scores.T, targets, reduction="sum")
        expected = (expected + back) / 2
    output = {"vectors": torch.cat([queries, documents])}
    loss, weight = task.loss(output, build_targets(*[1.0] * 5))
    torch.testing.assert_close(loss, expected)
    assert float(weight) == 5


@pytest.mark.parametrize("symmetric", [False, True])
def test_padding_rows_are_no_negatives(
    symmetric: bool,  # noqa: FBT001 - a case
) -> None:
    task = Contrastive.model_validate({"symmetric": symmetric})
    queries, documents = unit_vectors(5, 1), unit_vectors(5, 2)
    full = task.loss({"vectors": torch.cat([queries, documents])}, build_targets(*[1.0] * 5))
    absent = torch.zeros(2, 8)
    vectors = torch.cat([queries, absent, documents, absent]).requires_grad_()
    targets = build_targets(*[1.0] * 5, 0.0, 0.0)
    real = targets["real"]
    loss, weight = task.loss({"vectors": vectors}, targets)
    torch.testing.assert_close((loss.detach(), weight), full)
    (gradient,) = torch.autograd.grad(loss, vectors)
    assert not gradient[real == 0].any()
    assert gradient[real == 1].any(1).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [None, 4])
def test_rows_with_an_equal_query_or_document_are_no_negatives(
    symmetric: bool,  # noqa: FBT001 - a case
    group: int | None,
) -> None:
    task = Contrastive(symmetric=symmetric, temperature=0.3, negatives_group_size=group)
    queries, documents = [1, 2, 3, 1, 5, 6, 7, 8], [11, 12, 11, 14, 15, 16, 16, 18]
    query_vectors, document_vectors = unit_vectors(8, 1), unit_vectors(8, 2)
    scores = (query_vectors @ document_vectors.T / 0.3).double()

    def sum_losses(scores: torch.Tensor) -> float:
        total = 0.0
        for row in range(8):
            same_group = [other for other in range(8) if group is None or other // 4 == row // 4]
            negatives = [
                other
                for other in same_group
                if queries[other] != queries[row] and documents[other] != documents[row]
            ]
            total -= float(scores[row, [row, *negatives]].log_softmax(0)[0])
        return total

    expected = sum_losses(scores)
    if symmetric:
        expected = (expected + sum_losses(scores.T)) / 2
    targets = build_targets(*[1.0] * 8, queries=queries, documents=documents)
    output = {"vectors": torch.cat([query_vectors, document_vectors])}
    loss, weight = task.loss(output, targets)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(weight) == 8


def test_equal_documents_count_once_in_metrics_and_relevant_ones_not_at_all() -> None:
    # Queries 1 to 4; query 1 has the documents 10 and 12, and 10 is the document of three rows.
    queries, documents = [1, 2, 3, 1, 4], [10, 10, 10, 12, 14]
    scores = {1: {10: 0.9, 12: 0.8, 14: 0.1}, 2: {10: 0.5, 12: 0.6, 14: 0.7}}
    scores |= {3: {10: 1.0, 12: 0.0, 14: 0.0}, 4: {10: 0.9, 12: 0.2, 14: 0.3}}
    table = torch.tensor([[scores[query][document] for document in documents] for query in queries])
    targets = build_targets(*[1.0] * 5, queries=queries, documents=documents)
    corpus = _retrieval.PairedCorpus(*targets["text_hashes"].chunk(2), torch.ones(5))
    assert corpus.is_document.tolist() == [True, False, False, True, True]
    assert corpus.rank(table, slice(0, 5)).tolist() == [1.0, 3.0, 1.0, 1.0, 2.0]
    assert corpus.rank(table[3:], slice(3, 5)).tolist() == [1.0, 2.0]


def test_a_model_that_finds_every_shared_document_has_recall_1() -> None:
    task, texts = Contrastive(), [f"answer {number % 4}" for number in range(24)]
    numbers = [number % 4 for number in range(24)]
    vectors = torch.eye(4)[numbers]
    targets = build_targets(*[1.0] * 24, documents=[100 + number for number in numbers])
    output = {"vectors": torch.cat([vectors, vectors])}
    records = [{"query": text, "document": text} for text in texts]
    for sums in (
        task.metric_sums(output, targets),
        *task.baselines(output, targets, records).values(),
    ):
        for name in ("recall@1", "mrr"):
            assert float(sums[name][0] / sums[name][1]) == 1.0


def test_equal_texts_have_equal_hashes() -> None:
    texts = [np.array([5, 6], np.int32), np.array([5, 6], np.int64), np.array([6, 5]), None]
    hashes = hash_texts(texts)
    assert hashes.shape == (4, 4)
    assert (hashes[0] == hashes[1]).all()
    assert (hashes[0] != hashes[2]).any()
    assert not hashes[3].any()
    assert (hashes == hashes.astype(np.uint16)).all()  # sums over processes are exact


def test_negatives_groups_are_separate_batches() -> None:
    whole, grouped = Contrastive(), Contrastive(negatives_group_size=4)
    queries, documents = unit_vectors(10, 1), unit_vectors(10, 2)
    losses = []
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        part = {"vectors": torch.cat([queries[rows], documents[rows]])}
        losses.append(whole.loss(part, build_targets(*[1.0] * len(queries[rows])))[0])
    loss, weight = grouped.loss(
        {"vectors": torch.cat([queries, documents])}, build_targets(*[1.0] * 10)
    )
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    assert float(weight) == 10


@pytest.mark.parametrize(("rows", "negatives", "divisors"), [(96, 40, "32, 48"), (5, 4, "5")])
def test_the_group_size_must_divide_the_batch(rows: int, negatives: int, divisors: str) -> None:
    Contrastive(negatives_group_size=negatives).check_global_batch(negatives * 3)
    with pytest.raises(SettingsError, match=f"nearest divisors: {divisors}$"):
        Contrastive(negatives_group_size=negatives).check_global_batch(rows)


def test_metrics_do_not_depend_on_query_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Contrastive()
    output = {"vectors": torch.cat([unit_vectors(10, 1), unit_vectors(10, 2)])}
    batch = build_targets(*[1.0] * 10)
    texts = [{"query": f"word {n % 7}", "document": f"text word {n}"} for n in range(10)]
    at_once = (task.metric_sums(output, batch), task.baselines(output, batch, texts))
    monkeypatch.setattr(_retrieval, "QUERIES_PER_SLICE", 3)
    torch.testing.assert_close(
        (task.metric_sums(output, batch), task.baselines(output, batch, texts)), at_once
    )


def test_recall_at_1() -> None:
    task = Contrastive()
    queries, documents = torch.eye(20), torch.eye(20)
    documents[15:] = queries[15:].roll(1, 0)
    output = {"vectors": torch.cat([queries, documents])}
    sums = task.metric_sums(output, build_targets(*[1.0] * 20))
    values = {name: float(top) / float(weight) for name, (top, weight) in sums.items()}
    assert values["recall@1"] == pytest.approx(0.75)


def test_the_next_command_applies_to_the_output() -> None:
    """Artifacts make nothing faster for text."""
    assert Sft().find_next_command("out/my run") == "regauge generate 'out/my run'"
    assert Clm().find_next_command("out/a") == "regauge generate out/a"
    assert Mlm().find_next_command("out/a") == "regauge export out/a"
    assert Contrastive().find_next_command("out/a") == "regauge export out/a"
