"""Mixtures: exact shares, every row once per pass, and refusal of incompatible datasets."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed import datasets
from regauge.config import build
from regauge.data import mixture
from regauge.data.mixture import MixedRowOrder
from regauge.data.settings import DataSettings
from regauge.system.errors import DataError, SettingsError

SIZES, SHARES = [50, 7, 31], [Fraction("0.1"), Fraction("0.37")]
BATCH, STEPS = 16, 60


def build_order(seed: int = 3) -> MixedRowOrder:
    return MixedRowOrder(SIZES, SHARES, batch_rows=BATCH, seed=seed, fingerprint="0123456789abcdef")


def find_datasets(batch: np.ndarray) -> np.ndarray:
    """Return the index of the dataset of each row."""
    return np.searchsorted(np.cumsum(SIZES), batch % sum(SIZES), side="right")


def test_shares_are_exact_after_every_step() -> None:
    order = build_order()
    counts = np.zeros(3, np.int64)
    for step in range(STEPS):
        batch = order.batch(step)
        assert batch.shape == (BATCH,)
        counts += np.bincount(find_datasets(batch), minlength=3)
        total = BATCH * (step + 1)
        assert counts[1:].tolist() == [int(total * share) for share in SHARES]


def test_each_pass_has_every_row_once_in_another_order() -> None:
    order = build_order()
    numbers = np.concatenate([order.batch(step) for step in range(STEPS)])
    assert len(set(numbers.tolist())) == len(numbers)
    passes, rows = np.divmod(numbers, sum(SIZES))
    for entry, size in enumerate(SIZES):
        mine = find_datasets(numbers) == entry
        whole = passes[mine] < passes[mine].max()
        counts = Counter(rows[mine][whole].tolist())
        assert len(counts) == size
        assert len(set(counts.values())) == 1
        first = rows[mine][:size]
        assert first.tolist() != rows[mine][size : 2 * size].tolist(), "a pass repeats the last one"
        assert sorted(passes[mine].tolist()) == passes[mine].tolist()


def test_the_order_depends_on_the_step_and_the_seed_alone() -> None:
    order = build_order()
    backwards = {step: order.batch(step) for step in reversed(range(STEPS))}
    for step in range(STEPS):
        assert backwards[step].tolist() == build_order().batch(step).tolist()
    assert build_order(4).batch(0).tolist() != order.batch(0).tolist()
    assert {order.epoch(step) for step in range(STEPS)} == {0}
    assert order.steps_per_epoch == 6  # 50 rows, 8.48 of them a step


def build_data_settings(folder: Path, **entry: Any) -> DataSettings:
    mix = [{"path": str(folder / "old"), "fraction": 0.25, **entry}]
    return build(DataSettings, {"path": str(folder / "new"), "mix": mix})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    datasets.write_packed(root / "new", 21, 4)
    datasets.write_packed(root / "old", 13, 5, seed=9)
    datasets.write_pairs(root / "pairs")
    datasets.write_packed(root / "empty", 0)
    return root


def test_the_rows_of_the_datasets_are_concatenated(folder: Path) -> None:
    combined = mixture.open_data(build_data_settings(folder))
    datasets_alone = [
        mixture.open_data(DataSettings(path=str(folder / name))) for name in ("new", "old")
    ]
    rows = combined.rows("train")
    assert len(rows) == combined.manifest.splits["train"].rows == 34
    expected = [
        row["tokens"].tolist()
        for one in datasets_alone
        for row in one.rows("train").take(range(99)[: len(one.rows("train"))])
    ]
    assert [row["tokens"].tolist() for row in rows.take(range(34))] == expected
    assert rows.take([34 + 20])[0]["tokens"].tolist() == expected[20]
    assert {
        name: len(entry.rows("heldout")) for name, entry in combined.heldout_sets().items()
    } == {
        "": 4,
        "old": 5,
    }
    assert combined.manifest.fingerprint != datasets_alone[0].manifest.fingerprint


def test_length_histograms_are_summed(folder: Path) -> None:
    path = str(folder / "pairs")
    mixed = build(
        DataSettings, {"path": path, "mix": [{"path": path, "fraction": 0.5, "name": "again"}]}
    )
    single, double = (
        mixture.read_data_manifest(settings) for settings in (DataSettings(path=path), mixed)
    )
    for name in ("query", "document"):
        for split, counts in single.columns[name].lengths.items():
            assert double.columns[name].lengths[split] == tuple(2 * count for count in counts)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "pairs"}, "layout is 'fields', not 'packed'; prepare it with"),
        ({"path": "empty"}, "has no training rows; remove it from data.mix"),
        ({"path": "missing"}, "has no prepared dataset; create it with 'regauge prepare'"),
    ],
)
def test_incompatible_datasets_are_refused(
    folder: Path, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        mixture.read_data_manifest(
            build_data_settings(folder, **{**entry, "path": str(folder / entry["path"])})
        )
    assert message in str(caught.value)


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = datasets.write_packed(tmp_path / "other")
    document = json.loads((other / "manifest.json").read_text())
    document["tokenizer"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"tokenizer.sha256 is .*; prepare it with tokenizer.path"):
        mixture.open_data(build_data_settings(folder, path=str(other)))


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ([0.5, 0.5], "the fractions of data.mix sum to 1; reduce them"),
        ([0.7, 0.2, 0.1], "the fractions of data.mix sum to 1; reduce them"),
        ([1.5], "less than 1"),
        ([0.1, 0.2], "two entries of data.mix have the same name"),
    ],
)
def test_invalid_fractions_and_names_are_refused(fractions: list[float], message: str) -> None:
    mix = [
        {"path": f"{number}/old", "fraction": fraction} for number, fraction in enumerate(fractions)
    ]
    with pytest.raises(SettingsError, match=message):
        build(DataSettings, {"path": "new", "mix": mix})


@pytest.mark.parametrize("entry", [{"path": "."}, {"path": "old", "name": ""}])
def test_an_entry_needs_a_name(entry: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"an entry of data\.mix has no name; set its name"):
        build(DataSettings, {"path": "new", "mix": [{"fraction": 0.5, **entry}]})


def change_column(folder: Path, name: str, **update: Any) -> None:
    """Change the entry of a column in the manifest."""
    document = json.loads((folder / "manifest.json").read_text())
    document["columns"][name] |= update
    (folder / "manifest.json").write_text(json.dumps(document))


def test_rows_with_larger_groups_are_refused(tmp_path: Path) -> None:
    datasets.write_groups(tmp_path / "new")
    change_column(datasets.write_groups(tmp_path / "old"), "document", max_group_size=9)
    with pytest.raises(DataError, match=r"columns.document.max_group_size is 9, not 5"):
        mixture.read_data_manifest(build_data_settings(tmp_path))


def test_value_ranges_are_merged(tmp_path: Path) -> None:
    ranges = {"train": [0, 1], "heldout": [0, 2]}
    change_column(
        datasets.write_pairs(tmp_path / "new"), "label", ranges=ranges, num_missing={"train": 1}
    )
    change_column(
        datasets.write_pairs(tmp_path / "old"),
        "label",
        ranges={"train": [0, 7]},
        num_missing={"train": 2, "heldout": 3},
    )
    label = mixture.read_data_manifest(build_data_settings(tmp_path)).columns["label"]
    assert label.ranges == {"train": (0, 7), "heldout": (0, 2)}
    assert label.num_missing == {"train": 3, "heldout": 3}
    assert label.max == 2, "values are normalized with the statistics of the first dataset"
