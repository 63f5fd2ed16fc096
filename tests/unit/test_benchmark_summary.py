"""What turns come to: medians and formulas by hand, and what nobody knows stays unknown."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from regauge.artifacts.manifest import Manifest
from regauge.benchmarking import summary
from regauge.benchmarking.settings import Measuring
from regauge.config import build
from regauge.planning.catalog import instances
from regauge.reporting import benchmarks, inference_section
from regauge.reporting.drawing import Place
from regauge.reporting.inference_charts import charts

Turn = list[dict[str, Any]]


def asked(*names: str, **tables: Any) -> Measuring:
    """Return a benchmark of one batch and length, 4 x 16, with arrivals at one rate."""
    own = {"artifacts": {name: f"out/{name}" for name in names}, "rows": [4], "lengths": [16]}
    whole = {
        "output": {"folder": "out/bench"},
        "inference": {**own, **tables.pop("inference", {})},
        "arrivals": {"shares": [0.5]},
        **tables,
    }
    return build(Measuring, whole)


def priced(inference: dict[str, Any] | None = None, **price: Any) -> Measuring:
    """Return the same of one artifact, on a machine with a price."""
    return asked("a", inference=inference or {}, execution={"price": price})


def manifest(model: str = "runs/bert/model", **compiled: Any) -> Manifest:
    how = {"precision": "fp32", "backend": {"kind": "eager"}, "versions": {"torch": "2"}}
    tokens = {"name": "tokens", "shape": ["rows", "length"], "dtype": "int32"}
    return build(
        Manifest,
        {
            "format": 1,
            "program": {"answers": "vectors", "width": 8, "inputs": [tokens]},
            "compiled": {**how, **compiled},
            "target": {"accelerator": "cpu", "chip": "a chip", "threads": 2},
            "shapes": [{"length": 16, "rows": [4]}],
            "origin": {"path": model, "sha256": "0"},
            "files": {},
        },
    )


def turn(milliseconds: list[float], *, flops: float | None = 8e6, **changes: Any) -> Turn:
    """Return what a process wrote down that answered 4 x 16 in these milliseconds."""
    where = {"rows": 4, "length": 16}
    seconds = sum(milliseconds) / 1e3
    came = changes.pop("came", [2.0 * each for each in milliseconds])
    end = {"memory_bytes": 100, "chip": "a chip", "peak_flops_per_second": 1e9, "peak_source": "s"}
    ready = {"start_seconds": 3.0, "load_seconds": 1.0, "warmup_seconds": 0.5, "seconds": 4.5}
    return [
        {"ready": changes.pop("ready", ready), "machine": {"threads": 2}},
        {
            "closed": where,
            "milliseconds": milliseconds,
            "seconds": seconds,
            "joules": changes.pop("joules", None),
            "shapes": [[4, 16]],
            "tokens": 64,
            "flops": flops,
        },
        {
            "open": where,
            "share": 0.5,
            "rate": 0.5 * len(milliseconds) / seconds,
            "arrivals": [0.0] * len(came),
            "milliseconds": came,
        },
        {**end, **changes},
    ]


def found(settings: Measuring, *turns: list[Turn], **manifests: Manifest) -> dict[str, Any]:
    names = list(settings.inference.artifacts)
    every = {name: manifests.get(name, manifest()) for name in names}
    return summary.document(settings, every, dict(zip(names, turns, strict=True)), {})


def test_figures_are_medians_over_turns_and_follow_from_each_other() -> None:
    settings = priced(usd_per_hour=3.6)
    turns = [turn([10.0] * 100), turn([40.0] * 100), turn([20.0] * 98 + [25.0] * 2)]
    document = found(settings, turns)
    closed = document["rows"][0]["closed"]
    assert closed["requests"] == [100, 100, 100]
    assert [closed[f"p{each}_ms"] for each in (50, 90, 95, 99)] == [20.0, 20.0, 20.0, 25.0]
    assert closed["spread_p50_ms"] == [10.0, 40.0]
    per_second = 100 / (98 * 0.020 + 2 * 0.025)
    assert closed["requests_per_second"] == pytest.approx(per_second)
    assert closed["inferences_per_second"] == pytest.approx(4 * per_second)
    assert closed["tokens_per_second"] == pytest.approx(64 * per_second)
    assert closed["flops_per_inference"] == 2e6
    assert closed["peak_share"] == pytest.approx(2e6 * 4 * per_second / 1e9)
    usd = 3.6 / 3600 / (4 * per_second) * 1e6
    assert closed["usd_per_million_inferences"] == pytest.approx(usd)
    came = document["rows"][0]["open"][0]
    assert came["requests_per_second"] == pytest.approx(per_second / 2)
    assert came["p50_ms"] == 40.0
    assert came["not_served"] == 0.0
    assert came["usd_per_million_inferences"] == pytest.approx(2 * usd)


def test_a_percentile_needs_enough_requests_in_every_turn() -> None:
    closed = found(asked("a"), [turn([1.0] * 20), turn([1.0] * 19)])["rows"][0]["closed"]
    assert [closed[f"p{each}_ms"] for each in (50, 90, 95, 99)] == [1.0, 1.0, None, None]


@pytest.mark.parametrize(
    ("kind", "rows", "milliseconds", "usd"),
    [
        ("inf1.xlarge", 1, 35.7, 2.3),
        ("inf2.xlarge", 1, 8.31, 1.8),
        ("inf1.xlarge", 10, 343.7, 2.2),
        ("inf2.xlarge", 10, 72.9, 1.5),
        ("inf1.xlarge", 1, 28.2, 1.8),
        ("inf2.xlarge", 1, 3.1, 0.7),
        ("inf1.xlarge", 10, 121.1, 0.8),
        ("inf2.xlarge", 10, 23.6, 0.5),
    ],
)
def test_published_dollars_are_those_of_the_formula(
    kind: str, rows: int, milliseconds: float, usd: float
) -> None:
    """AWS, April 2023, of ELECTRA-large x 256 and BERT-large x 128; USD per million inferences."""
    settings = priced(instance=kind, inference={"rows": [rows]})
    one = turn([milliseconds] * 3)
    for told in one:
        for load in ("closed", "open"):
            if load in told:
                told[load] = {"rows": rows, "length": 16}
    document = found(settings, [one])
    assert document["rows"][0]["closed"]["usd_per_million_inferences"] == pytest.approx(
        usd, abs=0.06
    )
    price = document["artifacts"][0]["price"]
    assert price["usd_per_hour"] == instances()[kind].usd_per_hour
    assert price["as_of"] == "2026-07-20"
    assert price["instance"] == kind
    assert "the catalog" in price["source"]


def test_what_nobody_says_is_unknown() -> None:
    unknown = {"peak_flops_per_second": None, "memory_bytes": None, "came": []}
    document = found(asked("a"), [turn([5.0] * 3, flops=None, **unknown)])
    row, artifact = document["rows"][0], document["artifacts"][0]
    for name in ("flops_per_inference", "peak_share", "joules_per_inference", "joules_are"):
        assert row["closed"][name] is None
    assert row["closed"]["usd_per_million_inferences"] is None
    assert row["open"][0]["p50_ms"] is None
    assert row["open"][0]["not_served"] is None
    for name in ("price", "tdp_watts", "memory_bytes", "peak_flops_per_second"):
        assert artifact[name] is None
    told = inference_section.told(document)
    assert told is not None
    *_, closed, came, whole = told.tables
    for name in ("p99 ms", "of peak", "joules", "$ per 1M"):
        assert closed.rows[0][name] == "unknown"
    assert came.rows[0]["p50 ms"] == came.rows[0]["not served"] == "unknown"
    assert whole.rows[0]["memory"] == whole.rows[0]["$ an hour"] == "unknown"
    assert "price of a unknown" not in " ".join(told.sentences)
    assert "Price: of a unknown, set execution.price" in str(told.sentences)


def test_a_terminal_has_no_wide_columns_and_no_name_of_the_only_artifact() -> None:
    one, two = ({"batch": batch, "artifact": "a", "memory": "1 MB"} for batch in ("1", "2"))
    wide = ("memory",)
    assert inference_section.Told("", (one, two), wide).narrow == [{"batch": "1"}, {"batch": "2"}]
    other = {**two, "artifact": "b"}
    shown = inference_section.Told("", (one, other), wide).narrow
    assert [row["artifact"] for row in shown] == ["a", "b"]
    assert inference_section.Told("", (one,), wide).narrow == [{"batch": "1", "artifact": "a"}]


def test_a_machine_that_is_in_the_catalog_without_a_price_has_none() -> None:
    document = found(
        priced(instance="trn2.48xlarge"),
        [turn([5.0] * 3)],
    )
    assert document["artifacts"][0]["price"] is None


def test_joules_are_bounded_by_the_chip_of_the_catalog_and_said_to_be() -> None:
    document = found(priced(instance="g4dn.xlarge"), [turn([10.0] * 100)])
    closed = document["rows"][0]["closed"]
    assert document["artifacts"][0]["tdp_watts"] == 70.0
    assert closed["joules_per_inference"] == pytest.approx(70 * 0.010 / 4)
    assert closed["joules_are"] == "at most"
    told = inference_section.told(document)
    assert told is not None
    (closed_table,) = (each for each in told.tables if each.title.startswith("One request"))
    assert closed_table.rows[0]["joules"] == "at most 0.175"


def test_joules_that_were_measured_go_before_a_bound() -> None:
    settings = priced(instance="g4dn.xlarge")
    turns = [turn([10.0] * 100, joules=joules) for joules in (80.0, 40.0, 44.0)]
    closed = found(settings, turns)["rows"][0]["closed"]
    assert (closed["joules_per_inference"], closed["joules_are"]) == (0.11, "measured")


def test_arrivals_that_were_not_served_are_told_from_what_is_unknown() -> None:
    came: list[float | None] = [*[5.0] * 90, *[None] * 10]
    document = found(priced(usd_per_hour=1.0), [turn([1.0] * 100, came=came)])
    figures_of = document["rows"][0]["open"][0]
    assert figures_of["not_served"] == pytest.approx(0.1)
    assert [figures_of[f"p{each}_ms"] for each in (50, 90, 95)] == [5.0, 5.0, None]
    assert figures_of["usd_per_million_inferences"] is None
    told = inference_section.told(document)
    assert told is not None
    row = told.tables[1].rows[0]
    assert [row[f"p{each} ms"] for each in (50, 90, 95, 99)] == [
        "5.00",
        "5.00",
        "not served",
        "not served",
    ]


def test_two_artifacts_are_set_side_by_side_the_second_by_the_first() -> None:
    settings = asked("a", "b", execution={"price": {"usd_per_hour": 3.6}})
    document = found(settings, [turn([20.0] * 4)], [turn([5.0] * 4)])
    (pair,) = document["beside"]
    assert (pair["first"], pair["second"], pair["rows"], pair["length"]) == ("a", "b", 4, 16)
    assert pair["latency"] == 0.25
    assert pair["inferences_per_second"] == pytest.approx(4.0)
    assert pair["usd"] == pytest.approx(0.25)
    told = inference_section.told(document, "bench")
    assert told is not None
    assert told.verdict == (
        "b takes 0.25 times as long as a for a request, over one batch and length.",
    )
    row = told.tables[0].rows[0]
    assert row == {
        "batch x length": "4 x 16",
        "p50 ms": "20.0 / 5.00",
        "latency": "x 0.25",
        "inferences/s": "200 / 800",
        "rate": "x 4.00",
        "$ per 1M": "$5.00 / $1.25",
        "cost": "x 0.25",
    }


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ((10.0, 20.0), (15.0, 30.0), True),
        ((10.0, 20.0), (12.0, 14.0), True),
        ((10.0, 20.0), (21.0, 30.0), False),
        ((10.0,), (10.0,), None),
    ],
)
def test_turns_that_overlap_are_marked(
    first: tuple[float, ...], second: tuple[float, ...], *, overlap: bool | None
) -> None:
    both = [[turn([each] * 4) for each in turns] for turns in (first, second)]
    document = found(asked("a", "b"), *both)
    assert document["beside"][0]["overlap"] is overlap
    told = inference_section.told(document)
    assert told is not None
    assert told.tables[0].rows[0]["latency"].endswith(" *") == bool(overlap)
    assert any("may be noise" in each for each in told.sentences) == bool(overlap)
    assert ("of 1 the turns of both overlap" in told.verdict[0]) == bool(overlap)


def test_pairs_are_chosen_and_dollars_nobody_knows_have_no_ratio() -> None:
    settings = asked("a", "b", "c", inference={"beside": [["c", "b"]]})
    every = [[turn([each] * 4)] for each in (20.0, 5.0, 10.0)]
    document = found(settings, *every)
    assert [(each["first"], each["second"]) for each in document["beside"]] == [("c", "b")]
    assert document["beside"][0]["latency"] == 0.5
    assert document["beside"][0]["usd"] is None


def test_rows_name_their_model_where_there_are_several() -> None:
    other = manifest("out/electra", precision="bf16")
    document = found(asked("a", "b"), [turn([4.0] * 4)], [turn([4.0] * 4)], b=other)
    told = inference_section.told(document)
    assert told is not None
    rows = told.tables[1].rows
    assert [row["model, batch x length"] for row in rows] == ["bert, 4 x 16", "electra, 4 x 16"]
    assert document["artifacts"][1]["computed_by"] == "eager bf16"


def test_artifacts_that_compute_alike_share_the_best_peak() -> None:
    slow = turn([10.0] * 4, peak_flops_per_second=1e9)
    fast = turn([10.0] * 4, peak_flops_per_second=4e9, peak_source="t")
    document = found(asked("a", "b"), [slow], [fast])
    assert [each["peak_flops_per_second"] for each in document["artifacts"]] == [4e9, 4e9]
    assert [each["peak_source"] for each in document["artifacts"]] == ["t", "t"]
    shares = [row["closed"]["peak_share"] for row in document["rows"]]
    assert shares == [pytest.approx(2e6 * 400 / 4e9)] * 2
    half = found(asked("a", "b"), [slow], [fast], b=manifest(precision="bf16"))
    assert [each["peak_flops_per_second"] for each in half["artifacts"]] == [1e9, 4e9]


def test_another_job_adds_artifacts_of_another_machine() -> None:
    first = priced(usd_per_hour=1.0)
    before = found(first, [turn([20.0] * 4)])
    second = asked("b", execution={"price": {"usd_per_hour": 2.0}})
    now = summary.document(second, {"b": manifest()}, {"b": [turn([5.0] * 4)]}, before)
    assert summary.alike(first) == summary.alike(second)
    assert [each["name"] for each in now["artifacts"]] == ["a", "b"]
    assert [each["price"]["usd_per_hour"] for each in now["artifacts"]] == [1.0, 2.0]
    assert (now["beside"][0]["latency"], now["beside"][0]["usd"]) == (0.25, pytest.approx(0.5))
    again = summary.document(first, {"a": manifest()}, {"a": [turn([10.0] * 4)]}, now)
    assert [row["artifact"] for row in again["rows"]] == ["b", "a"]
    assert again["rows"][1]["closed"]["p50_ms"] == 10.0
    assert summary.alike(asked("a", seed=1)) != summary.alike(first)


def test_an_old_price_is_said_to_be_old() -> None:
    price = {"usd_per_hour": 1.0, "as_of": "2020-01-01"}
    document = found(asked("a", execution={"price": price}), [turn([5.0] * 3)])
    remark = document["artifacts"][0]["price"]["remark"]
    assert "days old; set execution.price.usd_per_hour" in remark
    told = inference_section.told(document)
    assert told is not None
    assert remark in " ".join(told.sentences)


def test_the_table_of_a_file_has_a_line_for_each_load(tmp_path: Path) -> None:
    document = found(asked("a", "b"), [turn([20.0] * 4)], [turn([5.0] * 4)])
    benchmarks.write_table(tmp_path / "benchmark.csv", document)
    with (tmp_path / "benchmark.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(each["artifact"], each["load"], each["share"]) for each in lines] == [
        ("a", "closed", ""),
        ("a", "open", "0.5"),
        ("b", "closed", ""),
        ("b", "open", "0.5"),
    ]
    assert float(lines[2]["p50_ms"]) == 5.0
    assert lines[2]["p99_ms"] == lines[2]["usd_per_million_inferences"] == "unknown"
    assert lines[2]["not_served"] == lines[3]["peak_share"] == ""
    assert (lines[0]["batch"], lines[0]["length"], lines[0]["model"]) == ("4", "16", "bert")


def test_charts_draw_rates_and_waiting() -> None:
    settings = asked("a", "b", arrivals={"shares": [0.5, 0.8]})
    turns = []
    for each in (20.0, 5.0):
        one = turn([each] * 100)
        one.insert(3, {**one[2], "share": 0.8, "rate": 1.6 * one[2]["rate"]})
        turns.append([one])
    told = inference_section.told(found(settings, *turns))
    assert told is not None
    drawn = charts(told, Place("x", "a test"))
    assert [each.title for each in drawn] == [
        "Inferences per second, one request after the other",
        "Latency of 4 x 16 by arrivals",
    ]
    assert "4 x 16: b 800.000 inferences/s" in drawn[0].text
    assert "a p99" in drawn[1].text


@pytest.mark.parametrize("document", [{}, {"rows": [{}]}, {"scaling": "weak", "rows": [{}]}])
def test_other_documents_are_no_benchmark_of_inference(document: dict[str, Any]) -> None:
    assert inference_section.told(document) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.4, "0.40"),
        (8.314, "8.31"),
        (9.996, "10.0"),
        (72.94, "72.9"),
        (99.96, "100"),
        (343.7, "344"),
        (1204.4, "1,204"),
        (None, "unknown"),
    ],
)
def test_milliseconds_have_three_digits(value: float | None, text: str) -> None:
    assert inference_section.milliseconds(value) == text
