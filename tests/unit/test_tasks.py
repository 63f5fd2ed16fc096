"""What single tasks promise beyond the contract of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import datasets
from distributed.runs import BERT, GPT, LLAMA
from regauge.data.batches import Arrays, Draw, Piece
from regauge.data.dataset import Dataset
from regauge.data.loader import Facts
from regauge.errors import SettingsError
from regauge.models.settings import Model
from regauge.tasks import Task, _retrieval
from regauge.tasks._pairs import partners
from regauge.tasks.clm import Clm
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.mlm import Mlm
from regauge.tasks.sft import Sft

ROWS = 200
FACTS = Facts(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.packed(tmp_path_factory.mktemp("data") / "packed", ROWS))


def arrays(task: Task, data: Dataset, epoch: int = 0, rows: int = ROWS) -> Arrays:
    zeros = np.zeros(rows, np.int64)
    piece = Piece(np.arange(rows), zeros, zeros, datasets.LENGTH)
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


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.halves(tmp_path_factory.mktemp("data") / "halves", ROWS))


PAIRED = Mlm(next_sentence="yes")


def test_a_second_half_is_its_row_s_own_half_of_the_time(halves: Dataset) -> None:
    rows = halves.split("train").take(range(ROWS))
    found = [arrays(PAIRED, halves, epoch) for epoch in range(3)]
    seconds = {tuple(row["second"].tolist()) for row in rows}
    for each in found:
        shown = each["tokens"].copy()
        np.put_along_axis(shown, each["masked"], each["labels"], 1)
        for number, row in enumerate(rows):
            cut, real = len(row["first"]), int(each["segments"][number].sum())
            assert (shown[number, :cut] == row["first"]).all()
            second = shown[number, cut:real].tolist()
            assert (second == row["second"].tolist()) == (each["apart"][number] == 0)
            assert tuple(second) in seconds
            assert each["types"][number].tolist() == [0] * cut + [1] * (real - cut) + [0] * (
                datasets.LENGTH - real
            )
        assert abs(each["apart"].mean() - 0.5) < 4 * (0.25 / ROWS) ** 0.5
    assert (found[0]["apart"] != found[1]["apart"]).any(), "an epoch repeats the pairs"
    both = [(each["apart"] == 1) for each in found]
    again = both[0] & both[1]
    assert again.sum() > 10
    same = (found[0]["tokens"] == found[1]["tokens"]).all(1)
    assert same[again].sum() == 0


def test_a_partner_is_another_row_of_any_number() -> None:
    numbers = np.arange(7000)
    draws = [partners(numbers, 7, Draw(1, epoch, 0)) for epoch in range(2)]
    assert (draws[0] != draws[1]).any()
    for found in draws:
        steps = np.bincount((found - numbers) % 7, minlength=7) / len(numbers)
        assert abs(steps[0] - 1 / 2) < 0.03
        assert (abs(steps[1:] - 1 / 12) < 0.02).all()
    assert partners(numbers[:9], 1, Draw(1, 0, 0)).tolist() == [0] * 9


def test_a_pair_counts_as_often_as_tokens_are_predicted_in_it() -> None:
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
    sums = {name: (float(a), float(b)) for name, (a, b) in PAIRED.tally(output, batch).items()}
    assert sums == {
        "loss": (8.25, 3),
        "accuracy": (2, 3),
        "next_sentence_accuracy": (1, 2),
    }
    assert Mlm().loss(output, batch)[0] == 7


def test_a_row_has_the_loss_that_transformers_gives_it(halves: Dataset) -> None:
    module: Any = PAIRED.module(Model(**{**BERT, "dropout": 0.0}), halves.manifest, 0).eval()
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
                next_sentence_label=batch["apart"],
            ).loss
        torch.testing.assert_close(loss / weight, expected)
        both -= {int(batch["apart"])}
    assert not both, "one of the two cases was not looked at"


def test_an_architecture_without_the_head_is_refused(halves: Dataset) -> None:
    roberta = {**BERT, "architecture": "roberta", "dropout": 0.0}
    with pytest.raises(SettingsError, match=r"'roberta' has no head for the next sentence; use"):
        PAIRED.module(Model(**roberta), halves.manifest, 0)


@pytest.mark.parametrize(("task", "wanted"), [(Mlm(), "packed"), (PAIRED, "halves")])
def test_a_dataset_of_another_layout_is_refused(
    halves: Dataset, packed: Dataset, task: Mlm, wanted: str
) -> None:
    fitting, other = (packed, halves) if wanted == "packed" else (halves, packed)
    task.check(fitting.manifest)
    with pytest.raises(SettingsError, match=f'prepare it with rows.layout = "{wanted}"'):
        task.check(other.manifest)
    assert task.ladder(fitting.manifest) == (datasets.LENGTH,)
    assert 0.5 < task.real_share(fitting.manifest) <= 1


def test_only_tokens_of_an_answer_are_learnt(tmp_path: Path) -> None:
    data = Dataset(datasets.chats(tmp_path / "chats", ROWS))
    found, plain = arrays(Sft(), data), arrays(Clm(), data)
    rows = data.split("train").take(range(ROWS))
    followed = np.zeros((ROWS, datasets.LENGTH), np.float32)
    for number, row in enumerate(rows):
        followed[number, :-1] = row["answers"][1:]
    assert (found["weights"] == plain["weights"] * followed).all()
    assert 0 < found["weights"].sum() < plain["weights"].sum()
    del found["weights"], plain["weights"]
    assert found.keys() == plain.keys()
    assert all((found[name] == plain[name]).all() for name in found)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda model: model["architecture"])
def test_a_conversation_in_a_row_has_the_loss_that_it_has_alone(
    model: dict[str, Any], tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    data = Dataset(datasets.chats(tmp_path / "chats", 20))
    task = Sft()
    module = task.module(Model(**{**model, "dropout": 0.0}), data.manifest, 0).eval()
    batch = {name: torch.from_numpy(value) for name, value in arrays(task, data, rows=20).items()}
    with torch.no_grad():
        packed = module(batch)["nll"] * batch["weights"]
        for segment in (1, 2, 3):
            inside = batch["segments"] == segment
            first = inside.int().argmax(1, keepdim=True)
            # Each conversation moves to the beginning of a row that has no other.
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
