"""Batches, losses and metrics of single tasks, beyond the task contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import datasets
from distributed.runs import BERT, GPT, LLAMA
from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
from regauge.data.dataset import Dataset
from regauge.data.loader import CollatorConfig
from regauge.errors import SettingsError
from regauge.models.settings import Model
from regauge.tasks import Task, _retrieval
from regauge.tasks._pairs import choose_partners
from regauge.tasks.clm import Clm
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.mlm import Mlm
from regauge.tasks.sft import Sft

ROWS = 200
CONFIG = CollatorConfig(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_packed(tmp_path_factory.mktemp("data") / "packed", ROWS))


def arrays(task: Task, data: Dataset, epoch: int = 0, rows: int = ROWS) -> Arrays:
    zeros = np.zeros(rows, np.int64)
    plan = MicrobatchPlan(np.arange(rows), zeros, zeros, datasets.LENGTH)
    return task.build_batch(data.rows("train"), plan, RandomKey(1, epoch, 0), CONFIG)


def test_each_row_masks_k_positions_and_weights_the_eligible_share(packed: Dataset) -> None:
    found = arrays(Mlm(mlm_probability=0.15), packed)
    assert found["masked"].shape == found["labels"].shape == (ROWS, 5)
    rows = packed.rows("train").take(range(ROWS))
    for number, row in enumerate(rows):
        places = found["masked"][number]
        assert len(set(places.tolist())) == 5
        eligible = (row["segments"] > 0) & ~np.isin(row["tokens"], CONFIG.special_ids)
        wanted = min(5, round(0.15 * int(eligible.sum())))
        weights = found["weights"][number]
        assert weights.tolist() == [1.0] * wanted + [0.0] * (5 - wanted)
        counted = places[:wanted]
        assert eligible[counted].all()
        assert (found["labels"][number][:wanted] == row["tokens"][counted]).all()
        untouched = np.ones(datasets.LENGTH, bool)
        untouched[counted] = False
        assert (found["tokens"][number] == row["tokens"])[untouched].all()


def test_80_percent_are_masked_and_10_percent_are_unchanged(packed: Dataset) -> None:
    found = [arrays(Mlm(mlm_probability=0.5), packed, epoch) for epoch in range(4)]
    shown, labels = [], []
    for each in found:
        counted = each["weights"] > 0
        shown.append(np.take_along_axis(each["tokens"], each["masked"], 1)[counted])
        labels.append(each["labels"][counted])
    now, then = np.concatenate(shown), np.concatenate(labels)
    count = len(now)
    for share, expected in (((now == 4).mean(), 0.8), ((now == then).mean(), 0.1)):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5 + 1 / 300
    assert (found[0]["masked"] != found[1]["masked"]).any(), "an epoch repeats the masks"


def test_the_last_token_of_a_document_has_weight_0(packed: Dataset) -> None:
    found = arrays(Clm(), packed)
    segments, weights = found["segments"], found["weights"]
    for row in range(ROWS):
        for place in range(datasets.LENGTH):
            inside = place + 1 < datasets.LENGTH and segments[row, place] > 0
            follows = inside and segments[row, place + 1] == segments[row, place]
            assert weights[row, place] == follows
            if follows:
                assert found["labels"][row, place] == found["tokens"][row, place + 1]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_halves(tmp_path_factory.mktemp("data") / "halves", ROWS))


PAIRED = Mlm(next_sentence=True)


def test_half_of_the_pairs_have_the_second_half_of_their_row(halves: Dataset) -> None:
    rows = halves.rows("train").take(range(ROWS))
    found = [arrays(PAIRED, halves, epoch) for epoch in range(3)]
    seconds = {tuple(row["second"].tolist()) for row in rows}
    for each in found:
        shown = each["tokens"].copy()
        np.put_along_axis(shown, each["masked"], each["labels"], 1)
        for number, row in enumerate(rows):
            cut, real = len(row["first"]), int(each["segments"][number].sum())
            assert (shown[number, :cut] == row["first"]).all()
            second = shown[number, cut:real].tolist()
            assert (second == row["second"].tolist()) == (each["next_sentence_label"][number] == 0)
            assert tuple(second) in seconds
            assert each["types"][number].tolist() == [0] * cut + [1] * (real - cut) + [0] * (
                datasets.LENGTH - real
            )
        assert abs(each["next_sentence_label"].mean() - 0.5) < 4 * (0.25 / ROWS) ** 0.5
    assert (found[0]["next_sentence_label"] != found[1]["next_sentence_label"]).any(), (
        "an epoch repeats the pairs"
    )
    both = [(each["next_sentence_label"] == 1) for each in found]
    again = both[0] & both[1]
    assert again.sum() > 10
    same = (found[0]["tokens"] == found[1]["tokens"]).all(1)
    assert same[again].sum() == 0


def test_partners_are_uniform_over_all_other_rows() -> None:
    numbers = np.arange(7000)
    draws = [choose_partners(numbers, 7, RandomKey(1, epoch, 0)) for epoch in range(2)]
    assert (draws[0] != draws[1]).any()
    for found in draws:
        steps = np.bincount((found - numbers) % 7, minlength=7) / len(numbers)
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
        "accuracy": (2, 3),
        "next_sentence_accuracy": (1, 2),
    }
    assert Mlm().loss(output, batch)[0] == 7


def test_the_pair_loss_equals_transformers(halves: Dataset) -> None:
    module: Any = PAIRED.build_module(Model(**{**BERT, "dropout": 0.0}), halves.manifest, 0).eval()
    found = arrays(PAIRED, halves, rows=12)
    both = {0, 1}
    for row in range(12):
        batch = {name: torch.from_numpy(value[row : row + 1]) for name, value in found.items()}
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
        both -= {int(batch["next_sentence_label"])}
    assert not both, "one of the two labels did not occur"


def test_an_architecture_without_next_sentence_head_is_refused(halves: Dataset) -> None:
    roberta = {**BERT, "architecture": "roberta", "dropout": 0.0}
    with pytest.raises(SettingsError, match=r"'roberta' has no next-sentence head; use bert"):
        PAIRED.build_module(Model(**roberta), halves.manifest, 0)


@pytest.mark.parametrize(("task", "wanted"), [(Mlm(), "packed"), (PAIRED, "sentence-pairs")])
def test_a_dataset_of_another_layout_is_refused(
    halves: Dataset, packed: Dataset, task: Mlm, wanted: str
) -> None:
    fitting, other = (packed, halves) if wanted == "packed" else (halves, packed)
    task.check_dataset(fitting.manifest)
    with pytest.raises(SettingsError, match=f'prepare it with rows.layout = "{wanted}"'):
        task.check_dataset(other.manifest)
    assert task.bucket_lengths(fitting.manifest) == (datasets.LENGTH,)
    assert 0.5 < task.real_token_share(fitting.manifest) <= 1


def test_only_answer_tokens_have_weight(tmp_path: Path) -> None:
    data = Dataset(datasets.write_chats(tmp_path / "chats", ROWS))
    found, plain = arrays(Sft(), data), arrays(Clm(), data)
    rows = data.rows("train").take(range(ROWS))
    followed = np.zeros((ROWS, datasets.LENGTH), np.float32)
    for number, row in enumerate(rows):
        followed[number, :-1] = row["answers"][1:]
    assert (found["weights"] == plain["weights"] * followed).all()
    assert 0 < found["weights"].sum() < plain["weights"].sum()
    del found["weights"], plain["weights"]
    assert found.keys() == plain.keys()
    assert all((found[name] == plain[name]).all() for name in found)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda model: model["architecture"])
def test_a_packed_conversation_has_the_same_loss_as_alone(
    model: dict[str, Any], tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    data = Dataset(datasets.write_chats(tmp_path / "chats", 20))
    task = Sft()
    module = task.build_module(Model(**{**model, "dropout": 0.0}), data.manifest, 0).eval()
    batch = {name: torch.from_numpy(value) for name, value in arrays(task, data, rows=20).items()}
    with torch.no_grad():
        packed = module(batch)["nll"] * batch["weights"]
        for segment in (1, 2, 3):
            inside = batch["segments"] == segment
            first = inside.int().argmax(1, keepdim=True)
            # Each conversation is moved to the start of a row without other conversations.
            places = (torch.arange(datasets.LENGTH) + first) % datasets.LENGTH
            kept = {name: value for name, value in batch.items() if name != "keys"}
            moved = {name: value.gather(1, places) for name, value in kept.items()}
            own = moved["segments"] == segment
            alone = {name: value * own for name, value in moved.items()}
            found = module({**alone, "keys": batch["keys"]})["nll"] * alone["weights"]
            expected = (packed * inside).sum(1)
            answered = expected > 0
            assert answered.sum() > 10
            error = float((found.sum(1) / expected - 1)[answered].abs().max())
            figure("a conversation packed and alone", error)
            assert error < 3e-6


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
    own = torch.arange(5)
    expected = torch.nn.functional.cross_entropy(scores, own, reduction="sum")
    if symmetric:
        back = torch.nn.functional.cross_entropy(scores.T, own, reduction="sum")
        expected = (expected + back) / 2
    output = {"vectors": torch.cat([queries, documents])}
    loss, weight = task.loss(output, {"real": torch.ones(10)})
    torch.testing.assert_close(loss, expected)
    assert float(weight) == 5


@pytest.mark.parametrize("symmetric", [False, True])
def test_padding_rows_are_no_negatives(
    symmetric: bool,  # noqa: FBT001 - a case
) -> None:
    task = Contrastive.model_validate({"symmetric": symmetric})
    queries, documents = unit_vectors(5, 1), unit_vectors(5, 2)
    full = task.loss({"vectors": torch.cat([queries, documents])}, {"real": torch.ones(10)})
    absent = torch.zeros(2, 8)
    vectors = torch.cat([queries, absent, documents, absent]).requires_grad_()
    real = torch.tensor([1.0] * 5 + [0.0] * 2).repeat(2)
    loss, weight = task.loss({"vectors": vectors}, {"real": real})
    torch.testing.assert_close((loss.detach(), weight), full)
    (gradient,) = torch.autograd.grad(loss, vectors)
    assert not gradient[real == 0].any()
    assert gradient[real == 1].any(1).all()


def test_negatives_groups_are_separate_batches() -> None:
    whole, grouped = Contrastive(), Contrastive(negatives_group_size=4)
    queries, documents = unit_vectors(10, 1), unit_vectors(10, 2)
    losses = []
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        part = {"vectors": torch.cat([queries[rows], documents[rows]])}
        losses.append(whole.loss(part, {"real": torch.ones(2 * len(queries[rows]))})[0])
    loss, weight = grouped.loss(
        {"vectors": torch.cat([queries, documents])}, {"real": torch.ones(20)}
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
    batch = {"real": torch.ones(20)}
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
    sums = task.metric_sums(output, {"real": torch.ones(40)})
    values = {name: float(top) / float(weight) for name, (top, weight) in sums.items()}
    assert values["recall@1"] == pytest.approx(0.75)
