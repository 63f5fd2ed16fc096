"""Direct preference optimization: the loss of the paper, its gradients, metrics and prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distributed import datasets
from distributed.runs import GPT, LLAMA
from regauge.config import build, merge
from regauge.data.dataset import Dataset, ExtendedRows
from regauge.data.loader import CollatorConfig
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.modules import TextModule
from regauge.models.settings import Model
from regauge.tasks.dpo import Dpo
from regauge.training.heldout import compute_means

CONFIG = CollatorConfig(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))
ROWS = 5
NAMES = ("chosen", "rejected")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_preferences(tmp_path_factory.mktemp("data") / "preferences"))


def build_module(task: Dpo, data: Dataset, table: dict[str, Any], seed: int = 0) -> TextModule:
    model = build(Model, merge(table, {"dropout": 0.0}))
    with META:
        module = task.build_module(model, data.manifest, seed)
    materialize(module, build_initial_weights(module, model, seed))
    return module


def compute_paper_loss(
    policy: list[Tensor], reference: list[Tensor], beta: float, smoothing: float = 0.0
) -> Tensor:
    """Return the mean of equation 7 of Rafailov et al. (2023) over rows.

    Each list has the log-probabilities of the chosen and of the rejected answers. With smoothing
    it is the conservative loss of Mitchell (2023).
    """
    ratio = beta * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
    wins, losses = torch.log(torch.sigmoid(ratio)), torch.log(torch.sigmoid(-ratio))
    return -((1 - smoothing) * wins + smoothing * losses).mean()


def sum_answer_log_probabilities(model: Any, rows: list[dict[str, Any]], name: str) -> Tensor:
    """Return log p(answer | prompt) of each row, with transformers, one row at a time."""
    sums = []
    for row in rows:
        tokens = torch.from_numpy(row[name].astype(np.int64))[None]
        log_probabilities = torch.log_softmax(model(tokens).logits[0].double(), -1)
        first = int(row[f"{name}_mask"].argmax())
        positions = range(first, tokens.shape[1])
        sums.append(torch.stack([log_probabilities[i - 1, tokens[0, i]] for i in positions]).sum())
    return torch.stack(sums)


@pytest.mark.parametrize("table", [GPT, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_and_its_gradients_are_those_of_the_paper(
    data: Dataset, table: dict[str, Any], smoothing: float
) -> None:
    task = Dpo(beta=0.3, label_smoothing=smoothing)
    start, module = (build_module(task, data, table, seed).train() for seed in (0, 1))
    rows = data.rows("train").take(range(ROWS))
    batch = datasets.read_first_batch(task, data, CONFIG, ROWS)
    with torch.no_grad():
        references = task.reference_values(start(batch))
        expected = [sum_answer_log_probabilities(start.model, rows, n) for n in NAMES]
    in_order = references[batch["slots"].argsort()]
    torch.testing.assert_close(in_order.double(), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)
    loss, weight = task.loss(module(batch), {**batch, "references": references})
    mean = loss / weight
    mean.backward()
    gradients = {name: value.grad for name, value in module.named_parameters()}
    module.zero_grad()
    policy = [sum_answer_log_probabilities(module.model, rows, name) for name in NAMES]
    reference_loss = compute_paper_loss(policy, expected, 0.3, smoothing)
    reference_loss.backward()
    assert float(weight) == ROWS
    assert mean.item() == pytest.approx(reference_loss.item(), rel=1e-5)
    assert (policy[0] - expected[0]).abs().min() > 1e-3, "policy and reference are equal"
    for name, value in module.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-6)


def test_rows_with_reference_values_have_the_columns_of_the_dataset(data: Dataset) -> None:
    rows = data.rows("heldout")
    values = np.arange(len(rows), dtype=np.float32)
    mixed = ExtendedRows(rows, {"reference_chosen": values})
    extended = ExtendedRows(mixed, {"reference_rejected": -values})
    assert extended.read_column("reference_rejected").tolist() == (-values).tolist()
    assert extended.read_column("reference_chosen").tolist() == values.tolist()
    assert extended.read_column("chosen").tolist() == rows.read_column("chosen").tolist()
    last = len(rows) - 1
    (row,) = extended.take([last])
    assert (row["reference_chosen"], row["reference_rejected"]) == (last, -last)
    assert row["chosen"].tolist() == rows.take([last])[0]["chosen"].tolist()


def test_training_and_evaluation_compute_the_same_log_probabilities(data: Dataset) -> None:
    task = Dpo()
    module = build_module(task, data, LLAMA)
    batch = datasets.read_first_batch(task, data, CONFIG, ROWS)
    trained = module.train()(batch)
    with torch.no_grad():
        evaluated = module.eval()(batch)
    assert trained.keys() == {"log_probabilities"}
    assert evaluated["predicted"].shape == batch["tokens"].shape
    assert trained["log_probabilities"].equal(evaluated["log_probabilities"])


def test_rewards_and_accuracy() -> None:
    task = Dpo(beta=0.5)
    output = {"log_probabilities": torch.tensor([-1.0, -4.0, -6.0, -2.0, -9.0, -9.0])}
    batch = {
        "references": torch.tensor([[-3.0, -2.0], [-4.0, -4.0], [0.0, 0.0]]),
        "real": torch.tensor([1.0, 1.0, 0.0]),
    }
    means = compute_means(task.metric_sums(output, batch))
    policy = [torch.tensor([-1.0, -6.0]), torch.tensor([-4.0, -2.0])]
    reference = [torch.tensor([-3.0, -4.0]), torch.tensor([-2.0, -4.0])]
    assert means == {
        "loss": pytest.approx(float(compute_paper_loss(policy, reference, 0.5)), rel=1e-6),
        "accuracy": 0.5,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
        "reward_margin": 0.0,
        "items": 2.0,
    }
    output["log_probabilities"][1] = -8.0
    changed = compute_means(task.metric_sums(output, batch))
    assert (changed["rejected_reward"], changed["reward_margin"]) == (-1.0, 1.0)


def test_only_answer_tokens_have_a_weight(data: Dataset) -> None:
    task = Dpo()
    batch = datasets.read_first_batch(task, data, CONFIG, ROWS)
    rows = [data.rows("train").take([number])[0] for number in batch["slots"].tolist()]
    texts = [(row[name], row[f"{name}_mask"]) for row in rows for name in NAMES]
    for index, (tokens, mask) in enumerate(texts):
        real = len(tokens)
        assert batch["tokens"][index, :real].tolist() == tokens.tolist()
        assert batch["weights"][index, : real - 1].tolist() == mask[1:].tolist()
        assert not batch["weights"][index, real - 1 :].any()
        assert batch["labels"][index, : real - 1].tolist() == tokens[1:].tolist()
    assert batch["references"].isnan().all(), "values of the start weights are never assumed"


def test_a_sample_continues_the_prompt_of_a_row(data: Dataset) -> None:
    row = data.rows("heldout").take([0])[0]
    texts = Dpo().prompt_and_reference(row, 1)
    assert texts is not None
    assert np.concatenate(texts).tolist() == row["chosen"].tolist()
    assert texts[1].tolist() == row["chosen"][row["chosen_mask"] > 0].tolist()
    mask = np.ones_like(row["chosen_mask"])
    assert Dpo().prompt_and_reference({**row, "chosen_mask": mask}, 1) is None
