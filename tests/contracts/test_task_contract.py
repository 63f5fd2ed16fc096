"""The contract of every task: static shapes, weights for real rows, randomness keyed by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed import datasets
from distributed.runs import TASKS
from regauge import config
from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
from regauge.data.dataset import Dataset, DatasetRows, ExtendedRows
from regauge.data.loader import BatchLoader, CollatorConfig, RankShare
from regauge.data.row_order import PADDING
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.modules import TextModule
from regauge.models.settings import Model
from regauge.system import choices
from regauge.system.processes import World
from regauge.tasks import GATHERED_COLUMNS, Task
from regauge.training.gradients import GradientComputer
from regauge.training.heldout import compute_means
from regauge.training.strategies import Placement, ShardedModel
from regauge.training.strategies.single import Single

SEED, ROWS, BATCH = 5, 20, 4
POSITION_DEPENDENT = {"slots"}
"""Arrays of a batch that depend on the position of a text in the batch."""
UNPADDED = {"teacher_vectors"}
"""Arrays of a batch that are never padded, although their width may be that of the tokens."""


@dataclass
class Case:
    """A task over a small dataset of its layout, and a tiny model."""

    task: Task
    data: Dataset
    model: Model

    @property
    def rows(self) -> DatasetRows:
        """The training rows; reference values are 0."""
        rows = self.data.rows("train")
        zeros = np.zeros(len(rows), np.float32)
        return ExtendedRows(rows, dict.fromkeys(self.task.reference_columns, zeros))

    @property
    def bucket_lengths(self) -> tuple[int, ...]:
        return self.task.bucket_lengths(self.data.manifest)

    @property
    def collator_config(self) -> CollatorConfig:
        tokenizer = self.data.manifest.tokenizer
        members = max(field.max_group_size for field in self.data.manifest.columns.values())
        return CollatorConfig(
            tokenizer.vocab_size,
            tokenizer.pad_token_id,
            tokenizer.mask_token_id,
            tokenizer.special_token_ids,
            members,
        )

    def build_loader(self) -> BatchLoader:
        return BatchLoader(
            self.task,
            self.rows,
            config=self.collator_config,
            microbatch_rows=BATCH,
            bucket_lengths=self.bucket_lengths,
            share=RankShare(0, 1),
            seed=SEED,
        )

    def split_batch(self, numbers: np.ndarray) -> list[MicrobatchPlan]:
        return self.task.split_batch(self.rows, numbers, BATCH, self.bucket_lengths)

    def build_batch(self, piece: MicrobatchPlan, epoch: int = 0, step: int = 0) -> Arrays:
        return self.task.build_batch(
            self.rows, piece, RandomKey(SEED, epoch, step), self.collator_config
        )

    def build_module(self) -> TextModule:
        with META:
            module = self.task.build_module(self.model, self.data.manifest, 0)
        materialize(module, build_initial_weights(module, self.model, 0))
        return module

    def prepare_model(self) -> ShardedModel:
        module = self.build_module()
        placement = Placement(World(), torch.device("cpu"), torch.float32, ())
        return Single().prepare(module, placement)


@pytest.fixture(params=[*choices.names("tasks"), "next-sentence", "negatives"], scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    run = TASKS[request.param]
    task: Task = config.parse_choice("tasks", run["task"])
    folder: Path = tmp_path_factory.mktemp(request.param) / "data"
    write = datasets.WRITERS[task.row_layout()]
    data = Dataset(write(folder, ROWS))
    return Case(task.resolve_defaults(data.manifest), data, build(Model, run["model"]))


def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def shapes(arrays: Arrays) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in arrays.items()}


def list_batches(case: Case) -> Iterator[tuple[MicrobatchPlan, Arrays]]:
    order = np.random.default_rng(0).permutation(ROWS)
    for numbers in order.reshape(-1, BATCH):
        for piece in case.split_batch(numbers):
            yield piece, case.build_batch(piece)


def test_every_batch_has_a_declared_shape(case: Case) -> None:
    texts = BATCH * case.task.sequences_per_row(case.data.manifest)
    slots = BATCH * case.task.slots_per_row()
    declared = {
        length: shapes(case.build_loader().build_empty_batch(slots, length))
        for length in case.bucket_lengths
    }
    num_batches = 0
    for piece, arrays in list_batches(case):
        assert arrays["tokens"].shape == (texts, piece.length)
        assert shapes(arrays) == declared[piece.length]
        assert arrays["segments"].shape == arrays["positions"].shape == arrays["tokens"].shape
        assert arrays["keys"].dtype == np.int32
        num_batches += 1
    assert num_batches == ROWS // BATCH


def test_microbatches_contain_every_text_once_and_fill_every_slot(case: Case) -> None:
    numbers = np.arange(2 * BATCH)
    numbers[-1] = PADDING
    pieces = case.split_batch(numbers)
    texts = [
        pair
        for piece in pieces
        for pair in zip(piece.row_numbers, piece.text_numbers, strict=True)
        if pair[0] >= 0
    ]
    parts = case.task.slots_per_row()
    assert sorted(texts) == [(row, part) for row in range(2 * BATCH - 1) for part in range(parts)]
    slots = np.concatenate([piece.slots for piece in pieces])
    assert sorted(slots) == list(range(2 * BATCH * parts))


def test_an_empty_batch_has_zero_weight_and_no_gradient(case: Case) -> None:
    slots = BATCH * case.task.slots_per_row()
    prepared = case.prepare_model()
    mark = Cpu().end_microbatch
    gradients = GradientComputer(case.task, prepared, mark, slots, mark)
    for length in case.bucket_lengths:
        batch = tensors(case.build_loader().build_empty_batch(slots, length))
        loss, weight = gradients.accumulate_gradients([batch], torch.ones(())).tolist()
        assert (loss, weight) == (0.0, 0.0)
        for name, master in prepared.masters().items():
            assert master.grad is not None
            assert not master.grad.any(), name


def test_padding_rows_change_neither_loss_nor_gradient(case: Case) -> None:
    """The last batch of an epoch is filled with padding rows."""
    numbers = np.array([3, 7, 11])
    padded = np.concatenate([numbers, np.full(5, PADDING)])
    results = []
    for rows, pieces in (
        (3, case.task.split_batch(case.rows, numbers, 3, case.bucket_lengths)),
        (8, case.task.split_batch(case.rows, padded, 4, case.bucket_lengths)),
    ):
        prepared = case.prepare_model()
        slots = rows * case.task.slots_per_row()
        mark = Cpu().end_microbatch
        gradients = GradientComputer(case.task, prepared, mark, slots, mark)
        batches = [tensors(case.build_batch(piece)) for piece in pieces]
        totals = gradients.accumulate_gradients(batches, torch.ones(()))
        results.append((totals, prepared.gradient_norm()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
    assert float(results[0][0][1]) > 0


def test_the_loss_and_every_metric_are_sums_with_weights(case: Case) -> None:
    module = case.build_module().eval()
    numbers = np.arange(BATCH)
    batch = tensors(case.build_batch(case.split_batch(numbers)[0]))
    with torch.no_grad():
        output = module(batch)
        order = batch["slots"].argsort() if case.task.metrics_need_all_rows else None
        outputs, targets = output, batch
        if order is not None:
            outputs = {"vectors": case.task.eval_outputs(output, batch)[order]}
            names = [name for name in ("real", *GATHERED_COLUMNS) if name in batch]
            targets = {name: batch[name][order] for name in names}
        loss, weight = case.task.loss(
            *((outputs, targets) if case.task.needs_global_batch else (output, batch))
        )
        sums = case.task.metric_sums(outputs, targets)
    assert loss.shape == weight.shape == ()
    assert float(weight) > 0
    assert compute_means(sums)["loss"] == pytest.approx(float(loss / weight), rel=1e-6)
    assert all(torch.as_tensor(value).ndim == 0 for pair in sums.values() for value in pair)
    assert len(sums) > 1
    metrics = case.task.derive_metrics(compute_means(sums))
    unordered = {name for name in metrics if case.task.find_direction(name) is None}
    assert unordered <= {"calibration", "items", "chosen_reward", "rejected_reward"}


def select_text(values: np.ndarray, index: int, piece: MicrobatchPlan) -> np.ndarray:
    """Return the values of one text, or of all texts of one row."""
    size = len(values) // len(piece.row_numbers)
    return values[index * size : (index + 1) * size]


def values_by_text(
    case: Case, pieces: list[MicrobatchPlan], **draw: int
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the values of each text without padding and without position-dependent arrays."""
    texts = {}
    for piece in pieces:
        arrays = case.build_batch(piece, **draw)
        for index, text in enumerate(
            zip(piece.row_numbers.tolist(), piece.text_numbers.tolist(), strict=True)
        ):
            values = {name: select_text(value, index, piece) for name, value in arrays.items()}
            longest = int(values["segments"].astype(bool).sum(-1).max())
            length = values["tokens"].shape[-1:]
            texts[text] = {
                name: np.nan_to_num(
                    value[..., :longest]
                    if value.shape[-1:] == length and name not in UNPADDED
                    else value
                ).tolist()
                for name, value in values.items()
                if name not in POSITION_DEPENDENT
            }
    return texts


def test_a_row_does_not_depend_on_its_batch_position_and_microbatch(case: Case) -> None:
    numbers = np.arange(2 * BATCH)
    whole = values_by_text(case, case.split_batch(numbers))
    others = [
        case.task.split_batch(case.rows, numbers[::-1].copy(), BATCH, case.bucket_lengths),
        case.task.split_batch(case.rows, numbers, 1, case.bucket_lengths),
        case.task.split_batch(case.rows, np.roll(numbers, 3), 2 * BATCH, case.bucket_lengths),
    ]
    for pieces in others:
        assert values_by_text(case, pieces) == whole


def test_dropout_changes_in_each_step_and_masks_in_each_epoch(case: Case) -> None:
    pieces = case.split_batch(np.arange(BATCH))
    first, later, again = (
        values_by_text(case, pieces, epoch=epoch, step=step)
        for epoch, step in ((0, 0), (0, 1), (1, 0))
    )
    for text, values in first.items():
        assert values["keys"] != later[text]["keys"]
        assert values["keys"] == again[text]["keys"]
        del values["keys"], later[text]["keys"]
    assert first == later, "the tokens of a row changed with the step"


def test_settings_survive_the_run_file(case: Case) -> None:
    saved = config.apply_overrides({"task": case.task.model_dump(mode="json")}, ())["task"]
    assert saved["kind"] in choices.names("tasks")
    assert config.parse_choice("tasks", saved) == case.task
