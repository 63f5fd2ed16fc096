"""Columns of values, rows of groups, and their entries in the manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge.data.columns import MISSING, ValueStats, describe_column, hash_category, value_ranges
from regauge.data.dataset import Dataset
from regauge.system.errors import DataError, SettingsError
from unit.preparing import WORDS, build_settings, prepare_dataset, read_contents

FIELDS = {
    "layout": "fields",
    "fields": {"title": 8},
    "integers": ["label"],
    "floats": ["price"],
    "categories": ["brand"],
}
GROUPS = {
    "layout": "groups",
    "group_by": "query",
    "shared": ["query"],
    "fields": {"query": 8, "title": 12},
    "integers": ["label"],
    "floats": ["price"],
    "categories": ["brand"],
    "max_group_size": 4,
}


BARE: dict[str, Any] = {"integers": [], "floats": [], "categories": []}


def write(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def build_query_records(number: int, sizes: tuple[int, ...] = (1, 3, 6)) -> list[dict[str, Any]]:
    """Return the records of one query: titles, each with a price, a brand and a label."""
    draw = np.random.default_rng(number)
    query = " ".join(draw.choice(WORDS, 3))
    return [
        {
            "query": query,
            "title": " ".join(draw.choice(WORDS, int(draw.integers(1, 9)))),
            "label": int(index == 0),
            "brand": f"brand {number % 5}",
            **({"price": float(number + index)} if index != 1 else {}),
        }
        for index in range(sizes[number % len(sizes)])
    ]


@pytest.fixture
def market(tmp_path: Path) -> Path:
    write(tmp_path, [record for number in range(60) for record in build_query_records(number)])
    return tmp_path


def prepare_groups(folder: Path, **changes: Any) -> Dataset:
    rows = {**GROUPS, **changes}
    return prepare_dataset(
        folder, rows=rows, split={"group_by": rows["group_by"], "heldout_fraction": 0.3}
    )


def test_rows_have_the_values_of_their_records(tmp_path: Path) -> None:
    records = [
        {"title": f"{WORDS[number]} {WORDS[number + 7]} word", "label": number % 3}
        | ({"price": number / 4} if number % 2 else {})
        | ({"brand": number % 4} if number % 5 else {"brand": None})
        for number in range(40)
    ]
    write(tmp_path, records)
    data = prepare_dataset(tmp_path, rows=FIELDS, split={"heldout_fraction": 0.0})
    rows = data.rows("train").take(range(40))
    for row, record in zip(rows, records, strict=True):
        assert row["label"] == record["label"]
        price, brand = record.get("price"), record["brand"]
        assert math.isnan(row["price"]) if price is None else row["price"] == price
        assert row["brand"] == (MISSING if brand is None else hash_category(brand))
    fields = data.manifest.columns
    prices = [record["price"] for record in records if "price" in record]
    price = fields["price"]
    assert (price.kind, price.min, price.max) == ("float", min(prices), max(prices))
    assert price.ranges == {"train": (min(prices), max(prices))}
    assert price.mean == pytest.approx(np.mean(prices))
    assert price.std == pytest.approx(np.std(prices))
    assert price.num_missing == {"train": 20, "heldout": 0}
    assert (fields["label"].kind, fields["label"].min, fields["label"].max) == ("integer", 0, 2)
    brand = fields["brand"]
    assert (brand.kind, brand.num_distinct, brand.num_unseen) == ("category", 4, 0)
    assert brand.num_missing["train"] == 8


def test_a_value_of_the_wrong_kind_is_rejected_with_its_location(tmp_path: Path) -> None:
    good = [{"title": f"{word} of it", "label": 1, "price": 2, "brand": "a"} for word in WORDS[:20]]
    bad = [
        {"title": "one of it", "label": 1, "price": "cheap"},
        {"title": "two of it", "label": 0.5},
        {"title": "three of it", "price": 1.0},
    ]
    write(tmp_path, [*good, *bad])
    data = prepare_dataset(tmp_path, rows=FIELDS)
    assert data.manifest.skipped == {"no integer field 'label'": 2, "no float field 'price'": 1}
    lines = (data.folder / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["location"] for line in lines] == ["line 21", "line 22", "line 23"]


@pytest.mark.parametrize("name", ["floats", "categories"])
def test_an_unknown_value_field_gets_a_suggestion(market: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="no field 'prize' with a value; did you mean 'price'"):
        prepare_dataset(market, rows={**FIELDS, name: ["prize"]})


def test_a_category_may_be_a_text_or_a_number() -> None:
    assert hash_category(7) == hash_category("7") != hash_category("8")
    assert 0 <= hash_category("") < 2**63


def test_moments_do_not_depend_on_the_batches() -> None:
    values = np.random.default_rng(0).normal(1e6, 1e-2, 1000)
    single_batch, several_batches = ValueStats("float"), ValueStats("float")
    single_batch.add(values)
    for batch in np.split(values, [1, 10, 500]):
        several_batches.add(batch)
    for stats in (single_batch, several_batches):
        assert stats.mean == pytest.approx(values.mean(), rel=1e-12)
        assert stats.std == pytest.approx(values.std(), rel=1e-4)


def test_rows_with_unseen_categories_are_counted() -> None:
    train, heldout = ValueStats("category"), ValueStats("category")
    train.add(np.array([1, 2, 2, MISSING]))
    heldout.add(np.array([2, 3, 3, 4, MISSING]))
    field = describe_column("category", {"train": train, "heldout": heldout})
    assert (field.num_distinct, field.num_unseen) == (2, 3)
    assert field.num_missing == {"train": 1, "heldout": 1}


def test_every_split_has_its_value_range() -> None:
    train, heldout = ValueStats("integer"), ValueStats("integer")
    train.add(np.array([0, 1]))
    heldout.add(np.array([-3, 7]))
    field = describe_column("integer", {"train": train, "heldout": heldout})
    assert (field.min, field.max) == (0, 1)
    assert field.ranges == {"train": (0, 1), "heldout": (-3, 7)}
    heldout_only = describe_column("integer", {"train": ValueStats("integer"), "heldout": heldout})
    assert (heldout_only.min, value_ranges(heldout_only)) == (None, {"heldout": (-3, 7)})


def test_a_field_may_have_the_name_of_a_setting(tmp_path: Path) -> None:
    records = [record for number in range(30) for record in build_query_records(number)]
    write(tmp_path, [{"group": record["query"], "title": record["title"]} for record in records])
    rows = {"layout": "groups", "group_by": "group", "shared": ["group"]}
    data = prepare_groups(tmp_path, **rows, fields={"group": 8, "title": 12}, **BARE)
    assert sum(split.rows for split in data.manifest.splits.values()) == 30


def test_a_row_of_a_group_has_lists_of_the_values_of_its_records(market: Path) -> None:
    data = prepare_groups(market)
    groups = {records[0]["query"]: records for records in map(build_query_records, range(60))}
    num_rows = 0
    for split in ("train", "heldout"):
        for row in data.rows(split).take(range(len(data.rows(split)))):
            prices = row["price"].tolist()
            first = prices[0]
            records = next(group for group in groups.values() if group[0].get("price") == first)
            expected = records[:4]
            assert len(row["title"]) == len(expected)
            assert row["label"].tolist() == [record["label"] for record in expected]
            assert row["brand"].tolist() == [hash_category(record["brand"]) for record in expected]
            assert [math.isnan(price) for price in prices] == [
                "price" not in record for record in expected
            ]
            assert row["query"].ndim == 1
            num_rows += 1
    assert num_rows == 60
    assert data.manifest.skipped == {"more than 4 records of one 'query'": 40}


def test_the_manifest_has_maximum_lengths_and_all_tokens_of_groups(
    market: Path,
) -> None:
    data = prepare_groups(market)
    train = data.rows("train").take(range(len(data.rows("train"))))
    longest = [max(map(len, row["title"])) for row in train]
    counts = np.bincount(longest, minlength=13).tolist()
    assert list(data.manifest.columns["title"].lengths["train"]) == counts
    tokens = sum(len(row["query"]) + sum(map(len, row["title"])) for row in train)
    assert data.manifest.splits["train"].tokens == tokens


def test_whole_groups_are_held_out_by_their_value(market: Path) -> None:
    first = prepare_groups(market)
    counts = {split: first.manifest.splits[split].rows for split in ("train", "heldout")}
    assert sum(counts.values()) == 60
    assert 8 <= counts["heldout"] <= 28
    fields_dataset = prepare_dataset(
        market, "fields", rows=FIELDS, split={"group_by": "query", "heldout_fraction": 0.3}
    )
    num_heldout = (
        sum(len(records) for records in map(build_query_records, range(60)))
        - fields_dataset.manifest.splits["train"].rows
    )
    assert fields_dataset.manifest.splits["heldout"].rows == num_heldout
    brands = {row["brand"] for row in fields_dataset.rows("heldout").take(range(num_heldout))}
    assert brands == {
        brand
        for row in first.rows("heldout").take(range(counts["heldout"]))
        for brand in row["brand"].tolist()
    }


def test_texts_of_heldout_groups_are_stored_in_the_order_of_their_rows(
    market: Path,
) -> None:
    data = prepare_groups(market, fields={"query": 4, "title": 4})
    groups = {records[0]["query"]: records for records in map(build_query_records, range(60))}
    texts, rows = data.read_texts("heldout"), data.rows("heldout")
    assert len(texts) == len(rows) > 0
    for text, row in zip(texts, rows.take(range(len(rows))), strict=True):
        records = groups[text["query"]][:4]
        assert text["title"] == [record["title"] for record in records]
        assert row["brand"].tolist() == [hash_category(record["brand"]) for record in records]
        assert row["label"].tolist() == [record["label"] for record in records]
    assert data.read_texts("heldout", 2) == texts[:2]
    assert data.read_texts("train") == []
    data.verify()


@pytest.mark.full
def test_groups_do_not_depend_on_pieces_and_processes(market: Path) -> None:
    records = [record for number in range(3000) for record in build_query_records(number)]
    for record in records:
        record["padding"] = "x" * 200
    write(market, records)
    rows = {**GROUPS, "max_group_size": 16}
    split = {"group_by": "query", "heldout_fraction": 0.3}
    prepared = [
        prepare_dataset(market, f"out{count}", rows=rows, split=split, prepare={"processes": count})
        for count in (1, 2)
    ]
    assert read_contents(prepared[0].folder) == read_contents(prepared[1].folder)
    assert sum(split.rows for split in prepared[0].manifest.splits.values()) == 3000


def test_a_group_that_is_not_consecutive_is_refused(tmp_path: Path) -> None:
    records = [
        record for number in (0, 1, 2, 1, *range(3, 20)) for record in build_query_records(number)
    ]
    write(tmp_path, records)
    with pytest.raises(
        DataError, match="the records of one 'query' are not consecutive; sort the source"
    ):
        prepare_groups(tmp_path)


@pytest.mark.parametrize(
    ("rows", "split", "message"),
    [
        ({"group_by": None}, {"group_by": "query"}, "needs group_by, the field that the records"),
        ({}, {"group_by": "other"}, 'must stay in one split; set split.group_by = "query"'),
        (
            {"shared": ["titel"]},
            {"group_by": "query"},
            "'titel' is shared and has no limit in fields",
        ),
        ({"floats": ["label"]}, {"group_by": "query"}, "'label' is listed twice in rows"),
        (
            {"layout": "fields"},
            {"group_by": "query"},
            "layout 'fields' does not use 'group_by'; remove it",
        ),
    ],
)
def test_invalid_settings_of_groups_are_refused(
    market: Path, rows: dict[str, Any], split: dict[str, Any], message: str
) -> None:
    options = {name: value for name, value in {**GROUPS, **rows}.items() if value is not None}
    with pytest.raises(SettingsError) as caught:
        build_settings(market, rows=options, split=split)
    assert message in str(caught.value)
