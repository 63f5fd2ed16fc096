"""Summary of an inference benchmark: medians and formulas computed by hand, unknown values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from regauge.config import FORMAT, build
from regauge.evaluation.benchmark import inference_summary
from regauge.evaluation.benchmark.settings import BenchmarkSettings
from regauge.evaluation.report import benchmarks
from regauge.evaluation.report.benchmark_section import (
    BenchmarkSection,
    ReportTable,
    format_milliseconds,
)
from regauge.inference.export.manifest import ArtifactManifest
from regauge.machines.catalog import load_instances

Repeat = list[dict[str, Any]]


def build_settings(*names: str, **tables: Any) -> BenchmarkSettings:
    """Return the settings of a benchmark of 4 x 16, with one arrival rate."""
    artifacts = {name: f"out/{name}" for name in names}
    inference = {"artifacts": artifacts, "batch_sizes": [4], "input_lengths": [16]}
    merged = {
        "output": {"folder": "out/bench"},
        "inference": {**inference, **tables.pop("inference", {})},
        "open_loop": {"load_fractions": [0.5]},
        **tables,
    }
    return build(BenchmarkSettings, merged)


def build_priced_settings(
    inference: dict[str, Any] | None = None, **price: Any
) -> BenchmarkSettings:
    """Return the settings of one artifact on a machine with a price."""
    return build_settings("a", inference=inference or {}, execution={"price": price})


def build_manifest(model: str = "runs/bert/model", **compiled: Any) -> ArtifactManifest:
    compilation = {"precision": "fp32", "backend": {"kind": "eager"}, "versions": {"torch": "2"}}
    tokens = {"name": "tokens", "shape": ["rows", "length"], "dtype": "int32"}
    return build(
        ArtifactManifest,
        {
            "format": FORMAT,
            "program": {"output_kind": "vectors", "output_size": 8, "inputs": [tokens]},
            "compiled": {**compilation, **compiled},
            "target": {"accelerator": "cpu", "chip": "a chip", "threads": 2},
            "buckets": [{"length": 16, "batch_sizes": [4]}],
            "origin": {"path": model, "sha256": "0"},
            "files": {},
        },
    )


def build_lines(milliseconds: list[float], *, flops: float | None = 8e6, **changes: Any) -> Repeat:
    """Return the lines of a worker that computed 4 x 16 with these latencies."""
    shape = {"batch_size": 4, "input_length": 16}
    seconds = sum(milliseconds) / 1e3
    latencies = changes.pop("open_loop", [2.0 * value for value in milliseconds])
    end = {
        "peak_memory_bytes": 100,
        "chip": "a chip",
        "peak_flops_per_second": 1e9,
        "peak_source": "s",
    }
    startup = {
        "start_seconds": 3.0,
        "load_seconds": 1.0,
        "warmup_seconds": 0.5,
        "total_seconds": 4.5,
    }
    return [
        {"startup": changes.pop("startup", startup), "machine": {"threads": 2}},
        {
            "closed_loop": shape,
            "latencies_ms": milliseconds,
            "duration_seconds": seconds,
            "joules": changes.pop("joules", None),
            "buckets": [[4, 16]],
            "tokens": 64,
            "flops": flops,
        },
        {
            "open_loop": shape,
            "load_fraction": 0.5,
            "requests_per_second": 0.5 * len(milliseconds) / seconds,
            "arrival_seconds": [0.0] * len(latencies),
            "latencies_ms": latencies,
        },
        {**end, **changes},
    ]


def build_document(
    settings: BenchmarkSettings, *repeats: list[Repeat], **manifests: ArtifactManifest
) -> dict[str, Any]:
    names = list(settings.inference.artifacts)
    by_name = {name: manifests.get(name, build_manifest()) for name in names}
    lines = dict(zip(names, repeats, strict=True))
    return inference_summary.build_document(settings, by_name, lines, {})


def build_section(document: dict[str, Any], name: str = "") -> BenchmarkSection:
    section = benchmarks.build_section(document, name)
    assert section is not None
    return section


def test_figures_are_medians_over_repeats_and_consistent() -> None:
    settings = build_priced_settings(usd_per_hour=3.6)
    repeats = [
        build_lines([10.0] * 100),
        build_lines([40.0] * 100),
        build_lines([20.0] * 98 + [25.0] * 2),
    ]
    document = build_document(settings, repeats)
    closed = document["rows"][0]["closed_loop"]
    assert closed["num_requests"] == [100, 100, 100]
    assert [closed[f"p{percent}_ms"] for percent in (50, 90, 95, 99)] == [20.0, 20.0, 20.0, 25.0]
    assert closed["p50_range_ms"] == [10.0, 40.0]
    per_second = 100 / (98 * 0.020 + 2 * 0.025)
    assert closed["requests_per_second"] == pytest.approx(per_second)
    assert closed["inferences_per_second"] == pytest.approx(4 * per_second)
    assert closed["tokens_per_second"] == pytest.approx(64 * per_second)
    assert closed["flops_per_inference"] == 2e6
    assert closed["peak_fraction"] == pytest.approx(2e6 * 4 * per_second / 1e9)
    usd = 3.6 / 3600 / (4 * per_second) * 1e6
    assert closed["usd_per_million_inferences"] == pytest.approx(usd)
    load = document["rows"][0]["open_loop"][0]
    assert load["requests_per_second"] == pytest.approx(per_second / 2)
    assert load["p50_ms"] == 40.0
    assert load["dropped_fraction"] == 0.0
    assert load["usd_per_million_inferences"] == pytest.approx(2 * usd)


def test_a_percentile_needs_enough_requests_in_every_repeat() -> None:
    closed = build_document(
        build_settings("a"), [build_lines([1.0] * 20), build_lines([1.0] * 19)]
    )["rows"][0]["closed_loop"]
    assert [closed[f"p{percent}_ms"] for percent in (50, 90, 95, 99)] == [1.0, 1.0, None, None]


@pytest.mark.parametrize(
    ("kind", "batch_size", "milliseconds", "usd"),
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
def test_the_cost_formula_gives_published_costs(
    kind: str, batch_size: int, milliseconds: float, usd: float
) -> None:
    """AWS, April 2023, of ELECTRA-large x 256 and BERT-large x 128; USD per million inferences."""
    settings = build_priced_settings(instance=kind, inference={"batch_sizes": [batch_size]})
    lines = build_lines([milliseconds] * 3)
    for line in lines:
        for load in ("closed_loop", "open_loop"):
            if load in line:
                line[load] = {"batch_size": batch_size, "input_length": 16}
    document = build_document(settings, [lines])
    assert document["rows"][0]["closed_loop"]["usd_per_million_inferences"] == pytest.approx(
        usd, abs=0.06
    )
    price = document["artifacts"][0]["price"]
    assert price["usd_per_hour"] == load_instances()[kind].usd_per_hour
    assert price["as_of"] == "2026-07-20"
    assert price["instance"] == kind
    assert price["source"] == "catalog, on-demand in us-east-1"


def test_unknown_values_are_none() -> None:
    unknown = {"peak_flops_per_second": None, "peak_memory_bytes": None, "open_loop": []}
    document = build_document(build_settings("a"), [build_lines([5.0] * 3, flops=None, **unknown)])
    row, artifact = document["rows"][0], document["artifacts"][0]
    for name in ("flops_per_inference", "peak_fraction", "joules_per_inference", "joules_method"):
        assert row["closed_loop"][name] is None
    assert row["closed_loop"]["usd_per_million_inferences"] is None
    assert row["open_loop"][0]["p50_ms"] is None
    assert row["open_loop"][0]["dropped_fraction"] is None
    for name in ("price", "tdp_watts", "peak_memory_bytes", "peak_flops_per_second"):
        assert artifact[name] is None
    section = build_section(document)
    *_, closed, load, artifacts = section.tables
    for name in ("p99 ms", "% of peak", "joules", "$ per 1M"):
        assert closed.rows[0][name] == "unknown"
    assert load.rows[0]["p50 ms"] == load.rows[0]["dropped"] == "unknown"
    assert artifacts.rows[0]["memory"] == artifacts.rows[0]["$ per hour"] == "unknown"
    assert "price of a unknown" not in " ".join(section.sentences)
    assert "Price: unknown for a, set execution.price" in str(section.sentences)


def test_a_terminal_table_has_no_wide_columns_and_no_redundant_name() -> None:
    first, second = ({"batch": batch, "artifact": "a", "memory": "1 MB"} for batch in ("1", "2"))
    wide = ("memory",)
    assert ReportTable("", (first, second), wide).terminal_rows == [
        {"batch": "1"},
        {"batch": "2"},
    ]
    other = {**second, "artifact": "b"}
    terminal_rows = ReportTable("", (first, other), wide).terminal_rows
    assert [row["artifact"] for row in terminal_rows] == ["a", "b"]
    assert ReportTable("", (first,), wide).terminal_rows == [{"batch": "1", "artifact": "a"}]


def test_a_machine_type_without_a_catalog_price_has_no_price() -> None:
    settings = build_priced_settings(instance="trn2.48xlarge")
    document = build_document(settings, [build_lines([5.0] * 3)])
    assert document["artifacts"][0]["price"] is None


def test_energy_is_bounded_by_the_power_of_the_catalog_chip() -> None:
    document = build_document(
        build_priced_settings(instance="g4dn.xlarge"), [build_lines([10.0] * 100)]
    )
    closed = document["rows"][0]["closed_loop"]
    assert document["artifacts"][0]["tdp_watts"] == 70.0
    assert closed["joules_per_inference"] == pytest.approx(70 * 0.010 / 4)
    assert closed["joules_method"] == "upper_bound"
    section = build_section(document)
    (closed_table,) = (table for table in section.tables if table.title.startswith("Closed loop"))
    assert closed_table.rows[0]["joules"] == "at most 0.175"


def test_measured_energy_replaces_the_bound() -> None:
    settings = build_priced_settings(instance="g4dn.xlarge")
    repeats = [build_lines([10.0] * 100, joules=joules) for joules in (80.0, 40.0, 44.0)]
    closed = build_document(settings, repeats)["rows"][0]["closed_loop"]
    assert (closed["joules_per_inference"], closed["joules_method"]) == (0.11, "measured")


def test_dropped_requests_are_not_reported_as_unknown() -> None:
    lines = build_lines([1.0] * 100, open_loop=[*[5.0] * 90, *[None] * 10])
    document = build_document(build_priced_settings(usd_per_hour=1.0), [lines])
    load = document["rows"][0]["open_loop"][0]
    assert load["dropped_fraction"] == pytest.approx(0.1)
    assert [load[f"p{percent}_ms"] for percent in (50, 90, 95)] == [5.0, 5.0, None]
    assert load["usd_per_million_inferences"] is None
    section = build_section(document)
    row = section.tables[1].rows[0]
    latencies = [row[f"p{percent} ms"] for percent in (50, 90, 95, 99)]
    assert latencies == ["5.00", "5.00", "dropped", "dropped"]


def test_the_second_artifact_is_compared_with_the_first() -> None:
    settings = build_settings("a", "b", execution={"price": {"usd_per_hour": 3.6}})
    document = build_document(settings, [build_lines([20.0] * 4)], [build_lines([5.0] * 4)])
    (pair,) = document["ratios"]
    assert (pair["baseline"], pair["candidate"]) == ("a", "b")
    assert (pair["batch_size"], pair["input_length"]) == (4, 16)
    assert pair["latency_ratio"] == 0.25
    assert pair["throughput_ratio"] == pytest.approx(4.0)
    assert pair["cost_ratio"] == pytest.approx(0.25)
    section = build_section(document, "bench")
    assert section.summary == ("b has 0.25 times the median latency of a at one batch x length.",)
    row = section.tables[0].rows[0]
    assert row == {
        "batch x length": "4 x 16",
        "p50 ms": "20.0 / 5.00",
        "latency ratio": "x 0.25",
        "inferences/s": "200 / 800",
        "throughput ratio": "x 4.00",
        "$ per 1M": "$5.00 / $1.25",
        "cost ratio": "x 0.25",
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
def test_overlapping_repeats_are_marked(
    first: tuple[float, ...], second: tuple[float, ...], *, overlap: bool | None
) -> None:
    both = [[build_lines([value] * 4) for value in repeats] for repeats in (first, second)]
    document = build_document(build_settings("a", "b"), *both)
    assert document["ratios"][0]["ranges_overlap"] is overlap
    section = build_section(document)
    assert section.tables[0].rows[0]["latency ratio"].endswith(" *") == bool(overlap)
    assert any("may be noise" in sentence for sentence in section.sentences) == bool(overlap)
    assert ("the repeats overlap at 1 of 1" in section.summary[0]) == bool(overlap)


def test_pairs_are_selected_and_unknown_costs_have_no_ratio() -> None:
    settings = build_settings("a", "b", "c", inference={"compare": [["c", "b"]]})
    repeats = [[build_lines([value] * 4)] for value in (20.0, 5.0, 10.0)]
    document = build_document(settings, *repeats)
    assert [(pair["baseline"], pair["candidate"]) for pair in document["ratios"]] == [("c", "b")]
    assert document["ratios"][0]["latency_ratio"] == 0.5
    assert document["ratios"][0]["cost_ratio"] is None


def test_rows_name_their_model_if_there_are_several() -> None:
    other = build_manifest("out/electra", precision="bf16")
    document = build_document(
        build_settings("a", "b"), [build_lines([4.0] * 4)], [build_lines([4.0] * 4)], b=other
    )
    section = build_section(document)
    rows = section.tables[1].rows
    assert [row["model, batch x length"] for row in rows] == ["bert, 4 x 16", "electra, 4 x 16"]
    assert document["artifacts"][1]["backend_description"] == "eager bf16"


def test_artifacts_of_equal_computation_share_the_best_peak() -> None:
    slow = build_lines([10.0] * 4, peak_flops_per_second=1e9)
    fast = build_lines([10.0] * 4, peak_flops_per_second=4e9, peak_source="t")
    document = build_document(build_settings("a", "b"), [slow], [fast])
    assert [artifact["peak_flops_per_second"] for artifact in document["artifacts"]] == [4e9, 4e9]
    assert [artifact["peak_source"] for artifact in document["artifacts"]] == ["t", "t"]
    shares = [row["closed_loop"]["peak_fraction"] for row in document["rows"]]
    assert shares == [pytest.approx(2e6 * 400 / 4e9)] * 2
    half = build_document(
        build_settings("a", "b"), [slow], [fast], b=build_manifest(precision="bf16")
    )
    assert [artifact["peak_flops_per_second"] for artifact in half["artifacts"]] == [1e9, 4e9]


def test_another_job_adds_the_artifacts_of_another_machine() -> None:
    first = build_priced_settings(usd_per_hour=1.0)
    first_document = build_document(first, [build_lines([20.0] * 4)])
    second = build_settings("b", execution={"price": {"usd_per_hour": 2.0}})
    second_document = inference_summary.build_document(
        second, {"b": build_manifest()}, {"b": [build_lines([5.0] * 4)]}, first_document
    )
    shared = inference_summary.shared_settings(first)
    assert shared == inference_summary.shared_settings(second)
    assert [artifact["name"] for artifact in second_document["artifacts"]] == ["a", "b"]
    prices = [artifact["price"]["usd_per_hour"] for artifact in second_document["artifacts"]]
    assert prices == [1.0, 2.0]
    (ratios,) = second_document["ratios"]
    assert (ratios["latency_ratio"], ratios["cost_ratio"]) == (0.25, pytest.approx(0.5))
    third_document = inference_summary.build_document(
        first, {"a": build_manifest()}, {"a": [build_lines([10.0] * 4)]}, second_document
    )
    assert [row["artifact"] for row in third_document["rows"]] == ["b", "a"]
    assert third_document["rows"][1]["closed_loop"]["p50_ms"] == 10.0
    assert shared != inference_summary.shared_settings(build_settings("a", seed=1))


def test_an_old_price_has_a_warning() -> None:
    price = {"usd_per_hour": 1.0, "as_of": "2020-01-01"}
    document = build_document(
        build_settings("a", execution={"price": price}), [build_lines([5.0] * 3)]
    )
    warning = document["artifacts"][0]["price"]["staleness_warning"]
    assert "days old; set execution.price.usd_per_hour" in warning
    section = build_section(document)
    assert warning in " ".join(section.sentences)


def test_the_csv_file_has_one_line_per_load(tmp_path: Path) -> None:
    document = build_document(
        build_settings("a", "b"), [build_lines([20.0] * 4)], [build_lines([5.0] * 4)]
    )
    benchmarks.write_table(tmp_path / "benchmark.csv", document)
    with (tmp_path / "benchmark.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["artifact"], line["load"], line["load_fraction"]) for line in lines] == [
        ("a", "closed_loop", ""),
        ("a", "open_loop", "0.5"),
        ("b", "closed_loop", ""),
        ("b", "open_loop", "0.5"),
    ]
    assert float(lines[2]["p50_ms"]) == 5.0
    assert lines[2]["p99_ms"] == lines[2]["usd_per_million_inferences"] == "unknown"
    assert lines[2]["dropped_fraction"] == lines[3]["peak_fraction"] == ""
    names = ("batch_size", "input_length", "model")
    assert [lines[0][name] for name in names] == ["4", "16", "bert"]


def test_charts_show_throughput_and_latency() -> None:
    settings = build_settings("a", "b", open_loop={"load_fractions": [0.5, 0.8]})
    repeats = []
    for value in (20.0, 5.0):
        lines = build_lines([value] * 100)
        rate = lines[2]["requests_per_second"]
        lines.insert(3, {**lines[2], "load_fraction": 0.8, "requests_per_second": 1.6 * rate})
        repeats.append([lines])
    section = build_section(build_document(settings, *repeats))
    throughput, latency = section.charts
    assert throughput.title == "Inferences per second, closed loop"
    assert latency.title == "Latency at 4 x 16 by request rate"
    assert "4 x 16: b 800 inferences/s" in throughput.text
    assert "a p99" in latency.text


@pytest.mark.parametrize("document", [{}, {"rows": [{}]}, {"kind": "training", "rows": []}])
def test_documents_without_results_have_no_section(document: dict[str, Any]) -> None:
    assert benchmarks.build_section(document) is None


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
    assert format_milliseconds(value) == text
