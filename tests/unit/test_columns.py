"""Values beside texts, rows of groups, and what the manifest says of both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge.data.columns import MISSING, Summary, category, described, reach
from regauge.data.dataset import Dataset
from regauge.errors import DataError, SettingsError
from unit.preparing import WORDS, contents, prepared, settings

FIELDS = {
    "layout": "fields",
    "fields": {"title": 8},
    "numbers": ["label"],
    "reals": ["price"],
    "categories": ["brand"],
}
GROUPS = {
    "layout": "groups",
    "group": "query",
    "shared": ["query"],
    "fields": {"query": 8, "title": 12},
    "numbers": ["label"],
    "reals": ["price"],
    "categories": ["brand"],
    "members": 4,
}


BARE: dict[str, Any] = {"numbers": [], "reals": [], "categories": []}


def write(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def shown(number: int, sizes: tuple[int, ...] = (1, 3, 6)) -> list[dict[str, Any]]:
    """Return the records of one query: titles, each with a price, a brand and a label."""
    draw = np.random.default_rng(number)
    query = " ".join(draw.choice(WORDS, 3))
    return [
        {
            "query": query,
            "title": " ".join(draw.choice(WORDS, int(draw.integers(1, 9)))),
            "label": int(place == 0),
            "brand": f"brand {number % 5}",
            **({"price": float(number + place)} if place != 1 else {}),
        }
        for place in range(sizes[number % len(sizes)])
    ]


@pytest.fixture
def market(tmp_path: Path) -> Path:
    write(tmp_path, [record for number in range(60) for record in shown(number)])
    return tmp_path


def grouped(folder: Path, **changes: Any) -> Dataset:
    rows = {**GROUPS, **changes}
    return prepared(folder, rows=rows, split={"by": rows["group"], "heldout_share": 0.3})


def test_values_stand_beside_the_texts_of_a_record(tmp_path: Path) -> None:
    records = [
        {"title": f"{WORDS[number]} {WORDS[number + 7]} word", "label": number % 3}
        | ({"price": number / 4} if number % 2 else {})
        | ({"brand": number % 4} if number % 5 else {"brand": None})
        for number in range(40)
    ]
    write(tmp_path, records)
    data = prepared(tmp_path, rows=FIELDS, split={"heldout_share": 0.0})
    rows = data.split("train").take(range(40))
    for row, record in zip(rows, records, strict=True):
        assert row["label"] == record["label"]
        price, brand = record.get("price"), record["brand"]
        assert math.isnan(row["price"]) if price is None else row["price"] == price
        assert row["brand"] == (MISSING if brand is None else category(brand))
    fields = data.manifest.fields
    prices = [record["price"] for record in records if "price" in record]
    price = fields["price"]
    assert (price.kind, price.least, price.most) == ("real", min(prices), max(prices))
    assert price.ranges == {"train": (min(prices), max(prices))}
    assert price.mean == pytest.approx(np.mean(prices))
    assert price.deviation == pytest.approx(np.std(prices))
    assert price.missing == {"train": 20, "heldout": 0}
    assert (fields["label"].kind, fields["label"].least, fields["label"].most) == ("number", 0, 2)
    brand = fields["brand"]
    assert (brand.kind, brand.distinct, brand.unseen) == ("category", 4, 0)
    assert brand.missing["train"] == 8


def test_a_value_of_the_wrong_kind_is_rejected_with_its_place(tmp_path: Path) -> None:
    good = [{"title": f"{word} of it", "label": 1, "price": 2, "brand": "a"} for word in WORDS[:20]]
    bad = [
        {"title": "one of it", "label": 1, "price": "cheap"},
        {"title": "two of it", "label": 0.5},
        {"title": "three of it", "price": 1.0},
    ]
    write(tmp_path, [*good, *bad])
    data = prepared(tmp_path, rows=FIELDS)
    assert data.manifest.skipped == {"no integer field 'label'": 2, "no real field 'price'": 1}
    lines = (data.folder / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"] for line in lines] == ["line 21", "line 22", "line 23"]


@pytest.mark.parametrize("name", ["reals", "categories"])
def test_a_value_that_no_record_has_is_a_misspelt_one(market: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="no field 'prize'; did you mean 'price'"):
        prepared(market, rows={**FIELDS, name: ["prize"]})


def test_a_category_is_the_same_as_text_and_as_number() -> None:
    assert category(7) == category("7") != category("8")
    assert 0 <= category("") < 2**63


def test_moments_do_not_depend_on_how_values_come() -> None:
    values = np.random.default_rng(0).normal(1e6, 1e-2, 1000)
    whole, parts = Summary("real"), Summary("real")
    whole.add(values)
    for part in np.split(values, [1, 10, 500]):
        parts.add(part)
    for each in (whole, parts):
        assert each.mean == pytest.approx(values.mean(), rel=1e-12)
        assert each.deviation == pytest.approx(values.std(), rel=1e-4)


def test_categories_that_come_later_are_counted_by_rows() -> None:
    train, heldout = Summary("category"), Summary("category")
    train.add(np.array([1, 2, 2, MISSING]))
    heldout.add(np.array([2, 3, 3, 4, MISSING]))
    field = described("category", {"train": train, "heldout": heldout})
    assert (field.distinct, field.unseen) == (2, 3)
    assert field.missing == {"train": 1, "heldout": 1}


def test_values_of_every_split_have_their_range() -> None:
    train, heldout = Summary("number"), Summary("number")
    train.add(np.array([0, 1]))
    heldout.add(np.array([-3, 7]))
    field = described("number", {"train": train, "heldout": heldout})
    assert (field.least, field.most) == (0, 1)
    assert field.ranges == {"train": (0, 1), "heldout": (-3, 7)}
    only = described("number", {"train": Summary("number"), "heldout": heldout})
    assert (only.least, reach(only)) == (None, {"heldout": (-3, 7)})


def test_a_field_may_have_the_name_of_a_word_of_the_layout(tmp_path: Path) -> None:
    records = [record for number in range(30) for record in shown(number)]
    write(tmp_path, [{"group": each["query"], "title": each["title"]} for each in records])
    rows = {"layout": "groups", "group": "group", "shared": ["group"]}
    data = grouped(tmp_path, **rows, fields={"group": 8, "title": 12}, **BARE)
    assert sum(split.rows for split in data.manifest.splits.values()) == 30


def test_a_row_is_a_group_with_lists_of_what_its_records_have(market: Path) -> None:
    data = grouped(market)
    groups = {records[0]["query"]: records for records in map(shown, range(60))}
    seen = 0
    for split in ("train", "heldout"):
        for row in data.split(split).take(range(len(data.split(split)))):
            prices = row["price"].tolist()
            first = prices[0]
            records = next(each for each in groups.values() if each[0].get("price") == first)
            kept = records[:4]
            assert len(row["title"]) == len(kept)
            assert row["label"].tolist() == [record["label"] for record in kept]
            assert row["brand"].tolist() == [category(record["brand"]) for record in kept]
            assert [math.isnan(price) for price in prices] == ["price" not in each for each in kept]
            assert row["query"].ndim == 1
            seen += 1
    assert seen == 60
    assert data.manifest.skipped == {"beyond 4 of one 'query'": 40}


def test_the_manifest_counts_the_longest_text_of_a_group_and_the_tokens_of_all(
    market: Path,
) -> None:
    data = grouped(market)
    train = data.split("train").take(range(len(data.split("train"))))
    longest = [max(map(len, row["title"])) for row in train]
    counts = np.bincount(longest, minlength=13).tolist()
    assert list(data.manifest.fields["title"].lengths["train"]) == counts
    tokens = sum(len(row["query"]) + sum(map(len, row["title"])) for row in train)
    assert data.manifest.splits["train"].tokens == tokens


def test_a_group_is_held_out_whole_and_by_its_value_alone(market: Path) -> None:
    first = grouped(market)
    counts = {split: first.manifest.splits[split].rows for split in ("train", "heldout")}
    assert sum(counts.values()) == 60
    assert 8 <= counts["heldout"] <= 28
    again = prepared(market, "fields", rows=FIELDS, split={"by": "query", "heldout_share": 0.3})
    held = (
        sum(len(records) for records in map(shown, range(60))) - again.manifest.splits["train"].rows
    )
    assert again.manifest.splits["heldout"].rows == held
    brands = {row["brand"] for row in again.split("heldout").take(range(held))}
    assert brands == {
        each
        for row in first.split("heldout").take(range(counts["heldout"]))
        for each in row["brand"].tolist()
    }


def test_the_whole_texts_of_held_out_groups_are_kept_in_the_order_of_their_rows(
    market: Path,
) -> None:
    data = grouped(market, fields={"query": 4, "title": 4})
    groups = {records[0]["query"]: records for records in map(shown, range(60))}
    texts, rows = data.texts("heldout"), data.split("heldout")
    assert len(texts) == len(rows) > 0
    for text, row in zip(texts, rows.take(range(len(rows))), strict=True):
        records = groups[text["query"]][:4]
        assert text["title"] == [record["title"] for record in records]
        assert row["brand"].tolist() == [category(record["brand"]) for record in records]
        assert row["label"].tolist() == [record["label"] for record in records]
    assert data.texts("heldout", 2) == texts[:2]
    assert data.texts("train") == []
    data.verify()


@pytest.mark.full
def test_groups_are_the_same_from_any_pieces_and_processes(market: Path) -> None:
    records = [record for number in range(3000) for record in shown(number)]
    for record in records:
        record["padding"] = "x" * 200
    write(market, records)
    rows = {**GROUPS, "members": 16}
    split = {"by": "query", "heldout_share": 0.3}
    made = [
        prepared(market, f"out{count}", rows=rows, split=split, prepare={"processes": count})
        for count in (1, 2)
    ]
    assert contents(made[0].folder) == contents(made[1].folder)
    assert sum(split.rows for split in made[0].manifest.splits.values()) == 3000


def test_a_group_in_two_places_is_refused(tmp_path: Path) -> None:
    records = [record for number in (0, 1, 2, 1, *range(3, 20)) for record in shown(number)]
    write(tmp_path, records)
    with pytest.raises(DataError, match="'query' do not follow one another; sort the source"):
        grouped(tmp_path)


@pytest.mark.parametrize(
    ("rows", "split", "said"),
    [
        ({"group": None}, {"by": "query"}, "needs group, the field that records"),
        ({}, {}, 'a group must not be parted: set split.by = "query"'),
        ({"shared": ["titel"]}, {"by": "query"}, "'titel' is shared and has no limit in fields"),
        ({"reals": ["label"]}, {"by": "query"}, "'label' is named twice"),
        ({"layout": "fields"}, {"by": "query"}, "'group' is no part of rows of layout 'fields'"),
    ],
)
def test_rows_of_groups_that_cannot_be(
    market: Path, rows: dict[str, Any], split: dict[str, Any], said: str
) -> None:
    given = {name: value for name, value in {**GROUPS, **rows}.items() if value is not None}
    with pytest.raises(SettingsError) as found:
        settings(market, rows=given, split=split)
    assert said in str(found.value)
