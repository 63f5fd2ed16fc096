"""Several datasets as one: exact shares, every row of each pass once, and what does not go."""

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
from regauge.data.mixture import MixedOrder
from regauge.data.settings import Data
from regauge.errors import DataError, SettingsError

SIZES, SHARES = [50, 7, 31], [Fraction("0.1"), Fraction("0.37")]
BATCH, STEPS = 16, 60


def mixed(seed: int = 3) -> MixedOrder:
    return MixedOrder(SIZES, SHARES, batch_rows=BATCH, seed=seed, identity="0123456789abcdef")


def parts(batch: np.ndarray) -> np.ndarray:
    """Return which dataset each row is of."""
    return np.searchsorted(np.cumsum(SIZES), batch % sum(SIZES), side="right")


def test_shares_are_exact_over_every_stretch_of_steps() -> None:
    order = mixed()
    taken = np.zeros(3, np.int64)
    for step in range(STEPS):
        batch = order.batch(step)
        assert batch.shape == (BATCH,)
        taken += np.bincount(parts(batch), minlength=3)
        total = BATCH * (step + 1)
        assert taken[1:].tolist() == [int(total * share) for share in SHARES]


def test_each_pass_over_a_dataset_takes_every_row_once_in_an_order_of_its_own() -> None:
    order = mixed()
    numbers = np.concatenate([order.batch(step) for step in range(STEPS)])
    assert len(set(numbers.tolist())) == len(numbers)
    passes, rows = np.divmod(numbers, sum(SIZES))
    for part, size in enumerate(SIZES):
        mine = parts(numbers) == part
        whole = passes[mine] < passes[mine].max()
        counts = Counter(rows[mine][whole].tolist())
        assert len(counts) == size
        assert len(set(counts.values())) == 1
        first = rows[mine][:size]
        assert first.tolist() != rows[mine][size : 2 * size].tolist(), "a pass repeats the last one"
        assert sorted(passes[mine].tolist()) == passes[mine].tolist()


def test_the_order_depends_on_the_step_and_the_seed_alone() -> None:
    order = mixed()
    backwards = {step: order.batch(step) for step in reversed(range(STEPS))}
    for step in range(STEPS):
        assert backwards[step].tolist() == mixed().batch(step).tolist()
    assert mixed(4).batch(0).tolist() != order.batch(0).tolist()
    assert {order.epoch(step) for step in range(STEPS)} == {0}
    assert order.steps_per_epoch == 6  # 50 rows, 8.48 of them a step


def data(folder: Path, **part: Any) -> Data:
    mix = [{"path": str(folder / "old"), "share": 0.25, **part}]
    return build(Data, {"path": str(folder / "new"), "mix": mix})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    datasets.packed(root / "new", 21, 4)
    datasets.packed(root / "old", 13, 5, seed=9)
    datasets.pairs(root / "pairs")
    datasets.packed(root / "empty", 0)
    return root


def test_rows_are_those_of_the_datasets_one_behind_the_other(folder: Path) -> None:
    both = mixture.opened(data(folder))
    alone = [mixture.opened(Data(path=str(folder / name))) for name in ("new", "old")]
    rows = both.split("train")
    assert len(rows) == both.manifest.splits["train"].rows == 34
    expected = [
        row["tokens"].tolist()
        for one in alone
        for row in one.split("train").take(range(99)[: len(one.split("train"))])
    ]
    assert [row["tokens"].tolist() for row in rows.take(range(34))] == expected
    assert rows.take([34 + 20])[0]["tokens"].tolist() == expected[20]
    assert {name: len(part.split("heldout")) for name, part in both.heldout().items()} == {
        "": 4,
        "old": 5,
    }
    assert both.manifest.identity != alone[0].manifest.identity


def test_lengths_of_all_of_them_make_the_shapes(folder: Path) -> None:
    path = str(folder / "pairs")
    both = build(Data, {"path": path, "mix": [{"path": path, "share": 0.5, "name": "again"}]})
    alone, twice = (mixture.manifest_of(each) for each in (Data(path=path), both))
    for name in ("query", "document"):
        for split, counts in alone.fields[name].lengths.items():
            assert twice.fields[name].lengths[split] == tuple(2 * count for count in counts)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"path": "pairs"}, "layout is 'fields' there and 'packed' here; prepare it with"),
        ({"path": "empty"}, "has no training rows; leave it out of data.mix"),
        ({"path": "missing"}, "holds no prepared dataset; make it with 'regauge prepare'"),
    ],
)
def test_datasets_that_do_not_go_together(folder: Path, part: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as found:
        mixture.manifest_of(data(folder, **{**part, "path": str(folder / part["path"])}))
    assert said in str(found.value)


def test_another_tokenizer_does_not_go(folder: Path, tmp_path: Path) -> None:
    other = datasets.packed(tmp_path / "other")
    document = json.loads((other / "manifest.json").read_text())
    document["tokenizer"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"tokenizer.sha256 is .*; prepare it with tokenizer.path"):
        mixture.opened(data(folder, path=str(other)))


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([0.5, 0.5], "the shares of data.mix are 1: leave some for data.path"),
        ([0.7, 0.2, 0.1], "the shares of data.mix are 1: leave some for data.path"),
        ([1.5], "less than 1"),
        ([0.1, 0.2], "two parts of data.mix have one name"),
    ],
)
def test_shares_that_leave_no_room_are_refused(shares: list[float], said: str) -> None:
    mix = [{"path": f"{number}/old", "share": share} for number, share in enumerate(shares)]
    with pytest.raises(SettingsError, match=said):
        build(Data, {"path": "new", "mix": mix})


@pytest.mark.parametrize("part", [{"path": "."}, {"path": "old", "name": ""}])
def test_a_part_without_a_name_would_take_the_own_one_s_place(part: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"a part of data\.mix has no name: set its name"):
        build(Data, {"path": "new", "mix": [{"share": 0.5, **part}]})


def written(folder: Path, name: str, **update: Any) -> None:
    """Change what the manifest says of a column."""
    document = json.loads((folder / "manifest.json").read_text())
    document["fields"][name] |= update
    (folder / "manifest.json").write_text(json.dumps(document))


def test_rows_of_more_members_do_not_go(tmp_path: Path) -> None:
    datasets.groups(tmp_path / "new")
    written(datasets.groups(tmp_path / "old"), "document", members=9)
    with pytest.raises(DataError, match=r"fields.document.members is 9 there and 5 here"):
        mixture.manifest_of(data(tmp_path))


def test_labels_of_all_of_them_are_told(tmp_path: Path) -> None:
    ranges = {"train": [0, 1], "heldout": [0, 2]}
    written(datasets.pairs(tmp_path / "new"), "label", ranges=ranges, missing={"train": 1})
    written(datasets.pairs(tmp_path / "old"), "label", most=7, missing={"train": 2, "heldout": 3})
    label = mixture.manifest_of(data(tmp_path)).fields["label"]
    assert label.ranges == {"train": (0, 7), "heldout": (0, 2)}
    assert label.missing == {"train": 3, "heldout": 3}
    assert label.most == 2, "what values are normalised by is the first's"
