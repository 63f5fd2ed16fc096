"""What single tasks promise beyond the contract of all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distributed import datasets
from regauge.data.batches import Arrays, Draw, Piece
from regauge.data.loader import Facts
from regauge.data.shards import Dataset
from regauge.errors import SettingsError
from regauge.tasks import _retrieval
from regauge.tasks.clm import Clm
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.mlm import Mlm

ROWS = 200
FACTS = Facts(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.packed(tmp_path_factory.mktemp("data") / "packed", ROWS))


def arrays(task: Mlm | Clm, data: Dataset, epoch: int = 0) -> Arrays:
    zeros = np.zeros(ROWS, np.int64)
    piece = Piece(np.arange(ROWS), zeros, zeros, datasets.LENGTH)
    return task.batch(data.split("train"), piece, Draw(1, epoch, 0), FACTS)


def test_each_row_has_exactly_k_places_and_the_right_share_of_them_counts(packed: Dataset) -> None:
    found = arrays(Mlm(mask_share=0.15), packed)
    assert found["masked"].shape == found["labels"].shape == (ROWS, 5)
    rows = packed.split("train").take(range(ROWS))
    for number, row in enumerate(rows):
        places = found["masked"][number]
        assert len(set(places.tolist())) == 5
        eligible = (row["segments"] > 0) & ~np.isin(row["tokens"], FACTS.special)
        wanted = min(5, round(0.15 * int(eligible.sum())))
        weights = found["weights"][number]
        assert weights.tolist() == [1.0] * wanted + [0.0] * (5 - wanted)
        counted = places[:wanted]
        assert eligible[counted].all()
        assert (found["labels"][number][:wanted] == row["tokens"][counted]).all()
        untouched = np.ones(datasets.LENGTH, bool)
        untouched[counted] = False
        assert (found["tokens"][number] == row["tokens"])[untouched].all()


def test_eight_in_ten_are_hidden_and_one_in_ten_is_another(packed: Dataset) -> None:
    found = [arrays(Mlm(mask_share=0.5), packed, epoch) for epoch in range(4)]
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


def test_a_document_s_last_token_predicts_nothing(packed: Dataset) -> None:
    found = arrays(Clm(), packed)
    segments, weights = found["segments"], found["weights"]
    for row in range(ROWS):
        for place in range(datasets.LENGTH):
            inside = place + 1 < datasets.LENGTH and segments[row, place] > 0
            follows = inside and segments[row, place + 1] == segments[row, place]
            assert weights[row, place] == follows
            if follows:
                assert found["labels"][row, place] == found["tokens"][row, place + 1]


def unit(rows: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, 8, generator=draw), dim=-1)


@pytest.mark.parametrize("directions", ["documents", "both"])
def test_the_contrastive_loss_is_the_cross_entropy_of_the_batch(directions: str) -> None:
    task = Contrastive.model_validate({"directions": directions, "temperature": 0.2})
    queries, documents = unit(5, 1), unit(5, 2)
    scores = queries @ documents.T / 0.2
    own = torch.arange(5)
    expected = torch.nn.functional.cross_entropy(scores, own, reduction="sum")
    if directions == "both":
        back = torch.nn.functional.cross_entropy(scores.T, own, reduction="sum")
        expected = (expected + back) / 2
    output = {"vectors": torch.cat([queries, documents])}
    loss, weight = task.loss(output, {"real": torch.ones(10)})
    torch.testing.assert_close(loss, expected)
    assert float(weight) == 5


@pytest.mark.parametrize("directions", ["documents", "both"])
def test_a_row_that_is_not_there_is_no_negative(directions: str) -> None:
    task = Contrastive.model_validate({"directions": directions})
    queries, documents = unit(5, 1), unit(5, 2)
    full = task.loss({"vectors": torch.cat([queries, documents])}, {"real": torch.ones(10)})
    absent = torch.zeros(2, 8)
    vectors = torch.cat([queries, absent, documents, absent]).requires_grad_()
    real = torch.tensor([1.0] * 5 + [0.0] * 2).repeat(2)
    loss, weight = task.loss({"vectors": vectors}, {"real": real})
    torch.testing.assert_close((loss.detach(), weight), full)
    (slope,) = torch.autograd.grad(loss, vectors)
    assert not slope[real == 0].any()
    assert slope[real == 1].any(1).all()


def test_a_group_of_negatives_is_a_batch_of_its_own() -> None:
    whole, grouped = Contrastive(), Contrastive(negatives=4)
    queries, documents = unit(10, 1), unit(10, 2)
    losses = []
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        part = {"vectors": torch.cat([queries[rows], documents[rows]])}
        losses.append(whole.loss(part, {"real": torch.ones(2 * len(queries[rows]))})[0])
    loss, weight = grouped.loss(
        {"vectors": torch.cat([queries, documents])}, {"real": torch.ones(20)}
    )
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    assert float(weight) == 10


@pytest.mark.parametrize(("rows", "negatives", "said"), [(96, 40, "32, 48"), (5, 4, "5")])
def test_groups_of_negatives_fill_the_batch(rows: int, negatives: int, said: str) -> None:
    Contrastive(negatives=negatives).check_rows(negatives * 3)
    with pytest.raises(SettingsError, match=f"nearest that do: {said}$"):
        Contrastive(negatives=negatives).check_rows(rows)


def test_scores_in_parts_are_the_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Contrastive()
    output = {"vectors": torch.cat([unit(10, 1), unit(10, 2)])}
    batch = {"real": torch.ones(20)}
    texts = [{"query": f"word {n % 7}", "document": f"text word {n}"} for n in range(10)]
    at_once = (task.tally(output, batch), task.rivals(output, batch, texts))
    monkeypatch.setattr(_retrieval, "QUERIES", 3)
    torch.testing.assert_close(
        (task.tally(output, batch), task.rivals(output, batch, texts)), at_once
    )


def test_recall_counts_what_is_found() -> None:
    task = Contrastive()
    queries, documents = torch.eye(20), torch.eye(20)
    documents[15:] = queries[15:].roll(1, 0)
    output = {"vectors": torch.cat([queries, documents])}
    sums = task.tally(output, {"real": torch.ones(40)})
    values = {name: float(top) / float(weight) for name, (top, weight) in sums.items()}
    assert values["recall@1"] == pytest.approx(0.75)
