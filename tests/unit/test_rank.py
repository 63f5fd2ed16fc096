"""Ranking: what a batch holds, the losses and metrics in numbers, crosses, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from distributed import datasets
from distributed.datasets import first_batch
from distributed.runs import BERT
from regauge.config import choose
from regauge.data.columns import buckets
from regauge.data.dataset import Dataset, Field
from regauge.data.loader import Facts
from regauge.errors import RegaugeError, SettingsError
from regauge.models.architectures import blocks as layers_of
from regauge.models.heads import freeze
from regauge.models.ranker import Cross, Form, Head, LowRankCross
from regauge.models.settings import Interactions, Model
from regauge.tasks import _objectives, _quality, _ranking
from regauge.tasks.rank import Rank
from regauge.training.heldout import compute_means

FACTS = Facts(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4), datasets.MEMBERS)
TASK = Rank(numbers=("price",), categories=("brand",), interactions=Interactions(buckets=50))
MODEL = Model(**{**BERT, "dropout": 0.0})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.groups(tmp_path_factory.mktemp("data") / "groups"))


def test_a_batch_holds_the_texts_and_features_of_every_candidate(data: Dataset) -> None:
    batch = first_batch(TASK, data, FACTS)
    texts = batch["tokens"].view(6, 1 + datasets.MEMBERS, -1)
    lengths = batch["segments"].view(6, 1 + datasets.MEMBERS, -1).sum(-1)
    for place, slot in enumerate(batch["slots"].tolist()):
        (row,) = data.split("train").take([slot])
        count = len(row["document"])
        assert batch["present"][place].tolist() == [1.0] * count + [0.0] * (5 - count)
        for number, text in enumerate([row["query"], *row["document"]]):
            assert texts[place, number, : len(text)].tolist() == text.tolist()
            assert lengths[place, number] == len(text)
        assert not lengths[place, 1 + count :].any()
        assert batch["labels"][place].tolist() == [*row["label"].tolist(), *[0.0] * (5 - count)]
        prices = batch["numbers"][place, :, 0]
        assert prices.isnan().tolist() == [*np.isnan(row["price"]).tolist(), *[True] * (5 - count)]
        brands = batch["categories"][place, :count, 0]
        assert (brands == 0).tolist() == (row["brand"] < 0).tolist()
        assert int(brands.max()) <= 50


def test_a_candidate_s_score_depends_on_no_other_candidate(data: Dataset) -> None:
    torch.manual_seed(0)
    module = TASK.module(MODEL, data.manifest, 0).eval()
    batch = first_batch(TASK, data, FACTS)
    with torch.no_grad():
        whole = module(batch)["scores"]
        for name in ("numbers", "categories"):
            batch[name][:, 1:] = batch[name][:, 1:] * 0 + 1
        tokens = batch["tokens"].view(6, 6, -1)
        tokens[:, 2:] = tokens[:, 2:].roll(1, 0)
        found = module(batch)["scores"]
    torch.testing.assert_close(found[:, 0], whole[:, 0])
    assert (found[:, 1] != whole[:, 1]).all()


SCORES = torch.tensor([[2.0, 1.0, 0.0, 9.0], [1.0, 3.0, 2.0, 0.5]])
LABELS = torch.tensor([[0.0, 1.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
PRESENT = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])


def test_the_listwise_loss_is_the_cross_entropy_of_a_row_s_softmax() -> None:
    losses, weights = _objectives.listwise(SCORES, LABELS, PRESENT)
    told = np.array([2.0, 1.0, 0.0]) - np.log(np.exp([2.0, 1.0, 0.0]).sum())
    assert losses[0].item() == pytest.approx(-(told[1] / 3 + 2 * told[2] / 3))
    assert (losses[1].item(), weights.tolist()) == (0.0, [1.0, 0.0])


def test_the_pairwise_loss_is_the_mean_over_the_pairs_of_a_row() -> None:
    losses, weights = _objectives.pairwise(SCORES, LABELS, PRESENT)
    pairs = [(1, 0), (2, 0), (2, 1)]
    expected = np.mean([math.log1p(math.exp(SCORES[0, b] - SCORES[0, a])) for a, b in pairs])
    assert losses[0].item() == pytest.approx(float(expected))
    assert weights.tolist() == [1.0, 0.0]


def test_the_pointwise_loss_counts_each_candidate_that_is_there() -> None:
    losses, weights = _objectives.pointwise(SCORES, LABELS, PRESENT)
    signs = torch.tensor([-1.0, 1.0, 1.0, 0.0])
    expected = -logsigmoid(SCORES[0] * signs)
    assert losses[0, :3].tolist() == pytest.approx(expected[:3].tolist())
    assert float(weights.sum()) == 7
    assert float(losses[0, 3]) == 0


def test_ndcg_and_mrr_in_numbers() -> None:
    """Order 0, 1, 2 of labels 0, 1, 2: DCG = 1 / log2 3 + 3 / 2, the best is 3 + 1 / log2 3."""
    top, count = _quality.ndcg(SCORES, LABELS, PRESENT, 10)
    log3 = math.log2(3)
    assert float(top) == pytest.approx((1 / log3 + 3 / 2) / (3 + 1 / log3))
    assert int(count) == 1, "a query without a relevant candidate has no NDCG"
    first, _ = _quality.ndcg(SCORES, LABELS, PRESENT, 1)
    assert float(first) == 0
    top, count = _quality.mrr(SCORES, LABELS, PRESENT)
    assert (float(top), int(count)) == (0.5, 1)


def test_equal_scores_are_no_merit() -> None:
    """A model that says nothing must not profit from where the relevant one stands."""
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    scores, present = torch.zeros(2, 3), torch.ones(2, 3)
    top, _ = _quality.mrr(scores, labels, present)
    assert float(top) == pytest.approx(2 / 3)
    top, pairs = _quality.auc(scores.flatten(), labels.flatten() > 0)
    assert float(top / pairs) == 0.5


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    draw = np.random.default_rng(0)
    scores, relevant = draw.integers(0, 9, 80) / 3, draw.random(80) < 0.3
    better = scores[relevant][:, None] - scores[~relevant][None]
    expected = ((better > 0) + (better == 0) / 2).mean()
    top, pairs = _quality.auc(torch.from_numpy(scores), torch.from_numpy(relevant))
    assert float(top / pairs) == pytest.approx(expected)


def test_the_calibration_of_pointwise_scores_is_what_was_told_over_what_was_so() -> None:
    task = Rank(numbers=("price",), objective="pointwise")
    scores = torch.tensor([[0.0, math.log(3.0), 5.0]])
    kept = torch.cat([scores, torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0, 0.0]])], 1)
    found = compute_means(task.tally({"vectors": kept}, {"real": torch.ones(1)}))
    assert found["calibration"] == pytest.approx(0.5 + 0.75)
    assert "calibration" not in compute_means(
        TASK.tally({"vectors": kept}, {"real": torch.ones(1)})
    )


def test_a_cross_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    first, here = torch.randn(4, 6), torch.randn(4, 6)
    cross = Cross(6)
    expected = first * (here @ cross.weight.weight.T + cross.weight.bias) + here
    torch.testing.assert_close(cross(first, here), expected)


def test_a_cross_of_low_rank_mixes_its_experts() -> None:
    torch.manual_seed(0)
    first, here = torch.randn(4, 6), torch.randn(4, 6)
    cross = LowRankCross(6, 2, 3)
    cross.bias.data.normal_()
    gates = (here @ cross.gate.weight.T).softmax(-1)
    expected = here.clone()
    for expert in range(3):
        low = torch.tanh(torch.tanh(here @ cross.down[expert]) @ cross.inner[expert])
        expected += gates[:, [expert]] * first * (low @ cross.up[expert] + cross.bias)
    torch.testing.assert_close(cross(first, here), expected)


def learnt(settings: Interactions) -> tuple[float, int]:
    """Train on whether a sum of twelve products is positive; return what is right, and weights."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(6144, 1, 24, generator=draw)
    labels = ((features[..., 0::2] * features[..., 1::2]).sum(-1) > 0).float()
    none = torch.zeros(6144, 1, 0, dtype=torch.int64)
    head = Head(Form(0, 0, 1, 24, 0, calibrated=True), 0, settings, [(0.0, 1.0)] * 24)
    weights = [value for value in head.parameters() if value.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for step in range(600):
        some = torch.arange(128) + 128 * (step % 32)
        optimizer.zero_grad()
        scores = head([], features[some], none[some])
        nn.functional.binary_cross_entropy_with_logits(scores, labels[some]).backward()
        optimizer.step()
    with torch.no_grad():
        told = head([], features[4096:], none[4096:]) > 0
    return float((told == (labels[4096:] > 0)).float().mean()), sum(v.numel() for v in weights)


def test_crosses_learn_products_that_a_plain_network_of_equal_size_does_not() -> None:
    """Seen with seeds 0, 1 and 2: 0.964, 0.965 and 0.965 against 0.887, 0.873 and 0.871."""
    crossed, many = learnt(Interactions(crosses=1, hidden=()))
    plain, as_many = learnt(Interactions(crosses=0, hidden=(49,)))
    assert as_many >= many
    assert crossed > 0.94
    assert plain < 0.91


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize(("crosses", "hidden"), [(0, (8,)), (2, (8, 4)), (2, ())])
def test_every_structure_scores_every_candidate(
    structure: Any, crosses: int, hidden: tuple[int, ...]
) -> None:
    settings = Interactions(crosses=crosses, hidden=hidden, structure=structure, width=4, buckets=9)
    head = Head(Form(0, 0, 3, 2, 2, calibrated=False), 0, settings, [(1.0, 2.0), (0.0, 1.0)])
    numbers = torch.tensor([[[1.0, math.nan]] * 3] * 2)
    scores = head([], numbers, torch.ones(2, 3, 2, dtype=torch.int64))
    assert scores.shape == (2, 3)
    assert scores.isfinite().all()
    scores.sum().backward()
    used = {name for name, value in head.named_parameters() if value.grad is not None}
    assert used == {name for name, value in head.named_parameters() if value.requires_grad}


def test_numbers_are_normalised_and_a_missing_one_says_so() -> None:
    head = Head(Form(0, 0, 1, 2, 0, calibrated=False), 0, Interactions(), [(10.0, 2.0), (0.0, 1.0)])
    known, missing = head._numbers(torch.tensor([[[14.0, math.nan]]]))
    assert known.tolist() == [[[2.0, 0.0]]]
    assert missing.tolist() == [[[0.0, 1.0]]]


def test_hashes_fall_into_every_bucket_and_what_is_missing_into_none() -> None:
    found = buckets(np.arange(5000), 50)
    assert sorted(set(found.tolist())) == list(range(1, 51))
    assert buckets(np.array([-1]), 50).tolist() == [0]


@pytest.mark.parametrize(("blocks", "trained"), [(0, set()), (1, {"1"}), (2, {"0", "1"})])
def test_the_last_blocks_of_the_encoder_are_trained(
    data: Dataset, blocks: int, trained: set[str]
) -> None:
    task = TASK.model_copy(update={"encoder": blocks})
    module = task.module(MODEL, data.manifest, 0)
    names = [name for name, value in module.named_parameters() if value.requires_grad]
    layers = {name.split("layer.")[1][0] for name in names if name.startswith("model.")}
    assert layers == trained
    assert any(name.startswith("head.") for name in names)
    with pytest.raises(SettingsError, match=r"has 2 blocks, and task.encoder = 3"):
        freeze(module.model, layers_of(module.model), 3)


def changed(data: Dataset, name: str, **update: Any) -> Any:
    fields = data.manifest.fields
    other = fields[name].model_copy(update=update)
    return data.manifest.model_copy(update={"fields": {**fields, name: other}})


@pytest.mark.parametrize(
    ("name", "update", "said"),
    [
        ("price", {"deviation": 0.0}, "feature 'price' has one value everywhere; leave it out"),
        ("brand", {"distinct": 1}, "feature 'brand' has one value everywhere"),
        ("price", {"mean": None, "missing": {"train": 9}}, "feature 'price' is missing everywhere"),
        ("price", {"kind": "category"}, "field 'price' is no number or real; fields that are"),
        ("brand", {"kind": "number"}, "field 'brand' is no category; fields that are: none"),
        ("label", {"least": -1.0}, "labels in 'label' go down to -1; say relevance"),
        ("label", {"ranges": {"heldout": (-2.0, 1.0)}}, "labels in 'label' go down to -2; say"),
        ("label", {"missing": {"heldout": 2}}, "label 'label' is missing in 2 records; leave"),
        ("label", {"most": 0.0}, "no candidate is relevant: 'label' is 0 everywhere"),
        ("query", {"members": 5}, "'query' is a text of each candidate"),
        ("document", {"members": 1}, "'document' is shared by the candidates; name it in"),
    ],
)
def test_features_that_say_nothing_or_the_wrong_thing_are_refused(
    data: Dataset, name: str, update: dict[str, Any], said: str
) -> None:
    with pytest.raises(RegaugeError) as found:
        TASK.check(changed(data, name, **update))
    assert said.replace("; name it in", " of a query; name it in") in str(found.value)


def test_values_that_are_new_in_the_held_out_rows_are_said(
    data: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="regauge"):
        TASK.check(changed(data, "brand", unseen=7))
    assert "7 held-out values of 'brand' are new there" in caplog.text


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"query": (), "numbers": ("price",)}, "set both, or neither"),
        ({"query": (), "document": ()}, "a candidate has no feature"),
        ({"interactions": {"crosses": 0, "hidden": ()}}, "nothing is left of the interactions"),
        ({"interactions": {"experts": 2}}, "set rank"),
        ({"interactions": {"hidden": (8, 0)}}, "'interactions.hidden.1': Input should be greater"),
        ({"encoder": -1}, "'encoder': Input should be greater than or equal to 0, got -1"),
        ({"encoder": "half"}, "'encoder': Input should be 'whole' or 'frozen' or a valid integer"),
        ({"numbers": ("prize",)}, "no field 'prize'; did you mean 'price'"),
    ],
)
def test_a_ranker_that_cannot_be(data: Dataset, table: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        choose("tasks", {"kind": "rank", **table}).check(data.manifest)


def test_another_layout_has_no_candidates(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rows.layout = .groups."):
        TASK.check(Dataset(datasets.pairs(tmp_path / "pairs")).manifest)


def test_a_scale_of_a_feature_without_values_changes_nothing() -> None:
    assert _ranking.scale(Field(limit=1, kind="real")) == (0.0, 1.0)
