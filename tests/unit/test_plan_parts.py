"""Parts of a plan: lengths, sizes, search, curves to a target, and machines for inference."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from architecture.tree import ROOT
from regauge import config
from regauge.data.dataset import assume_manifest
from regauge.inference.export.bucket_times import BucketTime, BucketTimes
from regauge.machines.machine_rates import find_machine
from regauge.machines.settings import Price
from regauge.models.default_sizes import DEFAULT_SIZES
from regauge.planner import inference_plan
from regauge.planner.inference_plan import ArtifactRequest
from regauge.planner.model_shape import shape_from_config
from regauge.planner.run_plans import option_search
from regauge.planner.run_plans.planned_model import PlannedModel, read_model
from regauge.planner.run_plans.run_request import PlannedRun, read_request
from regauge.planner.run_plans.target_curve import combine, forecast_target
from regauge.planner.run_plans.task_plans import compute_step_seconds, judge_memory
from regauge.planner.training_job import Estimate
from regauge.system.errors import SettingsError
from regauge.training.settings import Target

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.planner.run_plans.run_request import TrainingRequest

pytestmark = pytest.mark.usefixtures("no_user_files")
LLAMA = ROOT / "runs" / "llama2-7b.toml"


def read_llama(**changes: Any) -> TrainingRequest:
    """Return the run of the Llama 2 7B run file with 1,000 steps and an open micro-batch."""
    request = read_request(config.read(LLAMA), LLAMA)
    return replace(request, **{"steps": 1000, "micro_batch": None} | changes)


@pytest.mark.parametrize("architecture", sorted(DEFAULT_SIZES))
def test_default_sizes_are_those_of_transformers(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoConfig.for_model(architecture).to_dict()
    sizes = DEFAULT_SIZES[architecture]
    assert sizes == {name: expected[name] for name in sizes}


SMALLER = {
    "distilbert": {"dim": 96, "n_heads": 4, "hidden_dim": 200, "n_layers": 7},
    "gpt2": {"n_embd": 96, "n_head": 4, "n_layer": 7},
}


@pytest.mark.parametrize("architecture", sorted(DEFAULT_SIZES))
def test_sizes_that_follow_from_others_are_no_defaults(architecture: str) -> None:
    """A model of other sizes has the shape that its configuration in transformers has."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 200}
    sizes |= {"num_hidden_layers": 7}
    changed = SMALLER.get(architecture, sizes) | {"vocab_size": 1000}
    expected = transformers.AutoConfig.for_model(architecture, **changed).to_dict()
    shape = read_planned({"architecture": architecture, "config": changed}).shape
    assert shape == shape_from_config(expected)


def read_planned(model: dict[str, Any]) -> PlannedModel:
    """Return the model of a run that trains vectors."""
    task = {"kind": "distill"}
    run = config.build(PlannedRun, {"task": task, "model": model, "batch": {"rows": 8}})
    return read_model(run, assume_manifest("fields", {}), None)


def test_lora_trains_the_parameters_of_its_adapters() -> None:
    sizes = {"architecture": "llama", "config": {"vocab_size": 32000}}
    model = read_planned({**sizes, "lora": {"rank": 16}})
    # 7 linear layers of Llama 2 7B: 4 x (4096 + 4096) + 3 x (4096 + 11008) inputs and outputs.
    adapters = 32 * 16 * (4 * 8192 + 3 * 15104)
    trained = model.trained_fraction * model.shape.parameters(model.head)
    assert trained == pytest.approx(adapters, rel=1e-9)


def test_the_change_that_makes_a_run_fit_costs_the_fewest_dollars() -> None:
    request = read_llama(micro_batch=64, batch_sequences=4096)
    machine = find_machine("p5.48xlarge")
    assert judge_memory(request, option_search.place_job(request, machine, 1), machine, 1) != "fits"
    change = option_search.find_cheapest_change(request, machine, 1)
    assert change is not None
    job = request.place(8)
    assert job is not None
    assert change.verdict == "fits"
    assert change.count == 1
    for size in (32, 16, 8, 4):
        variant = request.place(8, size)
        assert variant is not None
        if judge_memory(request, variant, machine, 1) == "fits":
            seconds = compute_step_seconds(request, variant, machine, 1)
            assert change.seconds <= seconds


def test_a_search_is_fast_and_finds_no_cheaper_option_than_it_lists() -> None:
    request = read_llama(batch_sequences=1024)
    began_at = time.process_time()
    machines = option_search.list_machines(Price())
    options = option_search.search_options(request, machines, None).options
    assert time.process_time() - began_at < 1
    best = min(option.usd.p50 for option in options if option.usd)
    for machine in machines:
        candidate = option_search.choose_settings(request, machine, 1)
        if candidate is not None and candidate.verdict == "fits":
            option = option_search.plan_option(request, candidate.job, machine, 1)
            assert option.usd is not None
            assert option.usd.p50 >= best * 0.999


def test_a_deadline_is_met_with_p90() -> None:
    request = read_llama(batch_sequences=1024)
    machines = option_search.list_machines(Price())
    free = option_search.search_options(request, machines, None).options
    slowest = max(option.hours.p90 for option in free if option.hours)
    limited = option_search.search_options(request, machines, slowest / 4).options
    assert all(option.hours.p90 <= slowest / 4 for option in limited if option.hours)


def test_ties_are_ordered_by_simplicity() -> None:
    request = read_llama(batch_sequences=1024)
    machine = find_machine("p5.48xlarge")
    options = []
    for count in (4, 2, 1):
        candidate = option_search.choose_settings(request, machine, count)
        assert candidate is not None
        options.append(option_search.plan_option(request, candidate.job, machine, count))
    costs = (Estimate(0.5, 1.0, 2.0), Estimate(0.5, 1.05, 2.0), Estimate(0.5, 1.1, 2.0))
    tied = [replace(option, usd=usd) for option, usd in zip(options, costs, strict=True)]
    apart = replace(options[0], usd=Estimate(9.0, 10.0, 11.0))
    ranked = option_search.rank_options([apart, *tied])
    assert [option.plan.count for option in ranked] == [1, 2, 4, 4]
    assert [option.rank for option in ranked] == [1, 1, 1, 4]


def write_metrics(folder: Path, values: list[tuple[int, float]], name: str) -> Path:
    """Write the evaluations of a run."""
    lines = [{"attempt": 1, "step": step, "seconds": 1.0, name: value} for step, value in values]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("exponent", [0.3, 0.7])
def test_a_power_law_is_continued(tmp_path: Path, exponent: float) -> None:
    values = [(step, 2 + 8 * step**-exponent) for step in range(50, 1001, 50)]
    goal = 2 + 8 * 3000**-exponent
    folder = write_metrics(tmp_path / "run", values, "heldout/loss")
    forecast = forecast_target(folder, Target(metric="heldout/loss", at_most=goal))
    assert forecast.steps.p50 == pytest.approx(3000, rel=0.2)
    assert forecast.steps.p10 <= 3000 <= forecast.steps.p90
    assert not forecast.is_reached


def test_noise_widens_the_interval(tmp_path: Path) -> None:
    def forecast(noise: float) -> float:
        values = [
            (step, 2 + 8 * step**-0.5 + noise * math.sin(step)) for step in range(50, 1001, 50)
        ]
        folder = write_metrics(tmp_path / f"run-{noise}", values, "heldout/loss")
        steps = forecast_target(folder, Target(metric="heldout/loss", at_most=2.15)).steps
        return math.log(steps.p90 / steps.p10)

    assert forecast(0.03) > 2 * forecast(0.0)


def test_a_rising_metric_and_a_target_out_of_reach(tmp_path: Path) -> None:
    values = [(step, 0.8 - 2 * step**-0.5) for step in range(50, 2001, 50)]
    folder = write_metrics(tmp_path / "run", values, "heldout/recall@10")
    near = forecast_target(folder, Target(metric="heldout/recall@10", at_least=0.77))
    assert near.steps.p10 <= (2 / 0.03) ** 2 <= near.steps.p90
    far = forecast_target(folder, Target(metric="heldout/recall@10", at_least=0.99))
    assert far.reach_probability < 0.5
    assert math.isinf(far.steps.p90)
    reached = forecast_target(folder, Target(metric="heldout/recall@10", at_least=0.5))
    assert reached.is_reached
    assert reached.steps.p50 == 50 * math.ceil((2 / 0.3) ** 2 / 50)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([(10, 3.0), (20, 2.9), (30, 2.8)], "has 3 values of heldout/loss; a curve needs 4"),
        ([(step, 3.0) for step in range(1, 9)], "did not improve"),
    ],
)
def test_a_run_without_a_curve_is_refused(
    tmp_path: Path, values: list[tuple[int, float]], message: str
) -> None:
    folder = write_metrics(tmp_path / "run", values, "heldout/loss")
    with pytest.raises(SettingsError, match=message):
        forecast_target(folder, Target(metric="heldout/loss", at_most=1.0))
    with pytest.raises(SettingsError, match="its metrics: heldout/loss"):
        forecast_target(folder, Target(metric="heldout/lss", at_most=1.0))


def test_intervals_of_a_product_add_in_quadrature() -> None:
    product = combine(Estimate(0.5, 1, 2), Estimate(1, 2, 4))
    assert product.p50 == 2
    assert product.p90 == pytest.approx(2 * math.exp(math.hypot(math.log(2), math.log(2))))
    assert product.p10 * product.p90 == pytest.approx(4)


def build_request(chip: str = "NVIDIA L4", histogram: tuple[int, ...] = ()) -> ArtifactRequest:
    """Return an artifact whose batches take 1 ms, and 0.01 ms more for each token."""
    times = BucketTimes(
        times=[
            BucketTime(length=length, rows=rows, milliseconds=1 + length * rows / 100)
            for length in (64, 256)
            for rows in (1, 8, 32)
        ],
        threads=4,
        chip=chip,
    )
    shapes = tuple((item.length, item.rows) for item in times.times)
    return ArtifactRequest(shapes, histogram or (*[0] * 64, 1), times, chip, 4)


def test_batch_inference_has_the_hours_and_dollars_of_the_best_batches() -> None:
    (option,) = inference_plan.plan_prediction(build_request(), 500_000_000, ["g6.xlarge"])
    milliseconds = (1 + 64 * 32 / 100) / 32
    hours = 500_000_000 * milliseconds / 1000 / inference_plan.HOST_SHARE / 3600
    assert option.rows == 32
    assert option.is_measured
    assert option.hours is not None
    assert option.usd is not None
    assert option.hours.p50 == pytest.approx(hours)
    assert option.usd.p50 == pytest.approx(hours * 0.8048)
    assert option.usd_per_million.p50 == pytest.approx(hours * 0.8048 / 500)


def test_long_texts_cost_more_than_short_ones() -> None:
    short, long = (
        inference_plan.plan_prediction(build_request(histogram=lengths), 1000, ["g6.xlarge"])[0]
        for lengths in ((*[0] * 60, 1), (*[0] * 200, 1))
    )
    assert long.usd_per_million.p50 > 3 * short.usd_per_million.p50


def test_a_server_meets_its_limit_with_the_largest_batch_and_enough_machines() -> None:
    slow = inference_plan.plan_serving(build_request(), 2000, 1000, ["g6.xlarge"])[0]
    fast = inference_plan.plan_serving(build_request(), 2000, 10, ["g6.xlarge"])[0]
    assert (slow.rows, fast.rows) == (32, 1)
    assert fast.latency_ms is not None
    assert fast.latency_ms.p10 < fast.latency_ms.p50 < fast.latency_ms.p90 <= 10
    assert fast.count > slow.count
    assert fast.usd_per_million.p90 == pytest.approx(fast.count * 0.8048 / 3600 / 2000 * 1e6)
    assert fast.rows_per_second.p10 >= 2000


def test_the_dollars_of_a_server_have_an_interval() -> None:
    """With 2 ms for one text, a machine serves 1000 / 1.64 x 70 % = 427 requests per second."""
    (option,) = inference_plan.plan_serving(build_request(), 20_000, 10, ["g6.xlarge"])
    capacity = 1000 / 1.64 * inference_plan.MAX_LOAD
    factor = math.exp(1.2815515655446004 * inference_plan.SAME_CHIP_SPREAD)
    counts = [
        math.ceil(20_000 / value) for value in (capacity * factor, capacity, capacity / factor)
    ]
    assert option.count == counts[-1]
    dollars = [count * 0.8048 / 3600 / 20_000 * 1e6 for count in counts]
    usd = option.usd_per_million
    assert [usd.p10, usd.p50, usd.p90] == pytest.approx(dollars)
    assert usd.p10 < usd.p50 < usd.p90


def test_another_chip_has_a_wider_interval_and_follows_its_data_sheet() -> None:
    options = {
        item.instance.name: item
        for item in inference_plan.plan_prediction(
            build_request(), 1000, ["g6.xlarge", "p5.4xlarge", "c7i.xlarge"]
        )
    }
    assert set(options) == {"g6.xlarge", "p5.4xlarge"}, "processors are not compared with GPUs"
    measured, other = options["g6.xlarge"].rows_per_second, options["p5.4xlarge"].rows_per_second
    # 2,048 tokens are bound by products on both chips: 0.8 of 121, and 794.5 TFLOP/s.
    assert other.p50 / measured.p50 == pytest.approx(794.5 / (0.8 * 121), rel=0.02)
    assert other.p90 / other.p10 > 2 * measured.p90 / measured.p10


def test_a_batch_bound_by_products_is_not_scaled_by_bandwidth() -> None:
    """An L4 has half of an A10G's bandwidth, and 1.7 times its products."""
    request = build_request(chip="NVIDIA A10G")
    cheapest, _ = inference_plan.plan_prediction(request, 1000, ["g5.xlarge", "g6.xlarge"])
    assert cheapest.instance.name == "g6.xlarge"


def test_a_text_is_not_planned_with_an_estimated_batch() -> None:
    """Batches of 64 were measured with short texts only; their estimate for long ones is low."""
    measured = {(8, 64): 2.0, (32, 1): 1.0, (32, 8): 7.2}
    times = BucketTimes(
        times=[
            BucketTime(length=length, rows=rows, milliseconds=milliseconds)
            for (length, rows), milliseconds in measured.items()
        ],
        threads=4,
        chip="NVIDIA L4",
    )
    histogram = (*[0] * 32, 1)
    request = ArtifactRequest(tuple(measured), histogram, times, times.chip, 4)
    (placed,) = inference_plan.list_placements(request, ["g6.xlarge"])
    milliseconds, rows = inference_plan.find_row_milliseconds(request, placed.placement)
    assert (milliseconds, rows) == (pytest.approx(0.9), 8)


@pytest.mark.parametrize(
    ("rows", "length", "inf1", "inf2"),
    [(1, 256, 35.7, 8.31), (10, 256, 343.7, 72.9), (1, 128, 28.2, 3.1), (10, 128, 121.1, 23.6)],
)
def test_published_times_of_inf2_are_within_the_interval_from_inf1(
    rows: int, length: int, inf1: float, inf2: float
) -> None:
    times = BucketTimes(
        times=[BucketTime(length=length, rows=rows, milliseconds=inf1)],
        threads=1,
        chip="Inferentia1",
    )
    request = ArtifactRequest(((length, rows),), (*[0] * length, 1), times, "Inferentia1", 1)
    (option,) = inference_plan.plan_prediction(request, 1000, ["inf2.xlarge"])
    published = 2 * rows * 1000 / inf2 * inference_plan.HOST_SHARE  # two cores
    assert option.replicas == 2
    assert option.rows_per_second.p10 <= published <= option.rows_per_second.p90


def test_inference_is_refused_without_a_usable_machine() -> None:
    with pytest.raises(SettingsError, match="name its machine type with --on"):
        inference_plan.plan_prediction(build_request(chip="Unknown 1"), 1000)
    assert inference_plan.plan_prediction(build_request(chip="Unknown 1"), 1000, ["g6.xlarge"])
    with pytest.raises(SettingsError, match=r"no machine type answers within 0\.01 ms; allow"):
        inference_plan.plan_serving(build_request(), 10, 0.01, ["g6.xlarge"])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("Intel(R) Xeon(R) Platinum 8488C", "Xeon 8488C Sapphire Rapids (c7i/m7i/r7i)"),
        ("AMD EPYC 9R14", "EPYC 9R14 Genoa (hpc7a/c7a)"),
        ("Intel(R) Xeon(R) CPU @ 2.80GHz", None),
    ],
)
def test_a_measured_chip_is_recognized(text: str, name: str | None) -> None:
    chip = inference_plan.find_measured_chip(text)
    assert (chip.name if chip else None) == name
